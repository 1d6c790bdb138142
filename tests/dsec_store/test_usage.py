"""What takes how much room, and who shares it: counted by hand over stores made of known chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec_store import keys
from dsec_store.backends.memory import MemoryBlobs
from dsec_store.chunkmap import ChunkLocation, ChunkMap
from dsec_store.descriptor import Blob, Image
from dsec_store.digest import Digest
from dsec_store.errors import NotFound
from dsec_store.meter import MeteredBlobs
from dsec_store.objects import Objects
from dsec_store.usage import Amount, ImageUse, LayerUse, amount_of, survey_store
from tests.dsec_store.gcmaker import build, chunk, known_chunks, put_pack

SIZE = 4096
"""Of each chunk of `gcmaker`, plain and stored: they do not compress."""


@pytest.fixture
def objects() -> Objects:
    return Objects(MemoryBlobs())


def amount(chunks: int) -> Amount:
    return Amount(chunks, chunks * SIZE, chunks * SIZE)


def without_documents(use: ImageUse) -> ImageUse:
    return replace(use, documents=0)


def test_unique_and_shared(objects: Objects) -> None:
    build(objects, "a", [(1, 2), (3, 4)])
    build(objects, "b", [(1, 2), (4, 5)])
    build(objects, "alone", [(9,)])
    images = {name: without_documents(use) for name, use in survey_store(objects).images.items()}
    assert images == {
        "a": ImageUse(2, amount(4), unique=SIZE, shared_with=1),
        "b": ImageUse(2, amount(4), unique=SIZE, shared_with=1),
        "alone": ImageUse(1, amount(1), unique=SIZE, shared_with=0),
    }
    assert (images["a"].stored, images["a"].shared) == (4 * SIZE, 3 * SIZE)


def test_names_of_one_image_count_as_one(objects: Objects) -> None:
    image = build(objects, "a", [(1, 2)])
    objects.references.set("again", image)
    survey = survey_store(objects)
    assert survey.images["a"] == survey.images["again"]
    assert survey.images["a"].unique == 2 * SIZE


def test_a_chunk_that_is_there_several_times_counts_once(objects: Objects) -> None:
    build(objects, "a", [(1, 1, 2), (2, 1)])
    assert survey_store(objects).images["a"].contents == amount(2)


LAYERS = st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=5).map(tuple), min_size=1, max_size=3, unique=True)


@given(st.lists(LAYERS, min_size=1, max_size=4))
def test_the_sums_are_those_of_sets(images: Sequence[Sequence[tuple[int, ...]]]) -> None:
    objects = Objects(MemoryBlobs())
    for number, layers in enumerate(images):
        build(objects, f"i{number}", layers)
    sets = [{chunk for layer in layers for chunk in layer} for layers in images]
    distinct = {tuple(layers): chunks for layers, chunks in zip(images, sets, strict=True)}
    survey = survey_store(objects, watch="i0")
    for number, layers in enumerate(images):
        others = [chunks for key, chunks in distinct.items() if key != tuple(layers)]
        use = survey.images[f"i{number}"]
        assert use.contents == amount(len(sets[number]))
        assert use.unique == SIZE * len(sets[number].difference(*others))
        assert use.shared_with == sum(bool(chunks & sets[number]) for chunks in others)
    assert survey.store.unused == survey.store.dead == 0
    others = [chunks for key, chunks in distinct.items() if key != tuple(images[0])]
    elsewhere = set().union(*others) if others else set()
    for part, layer in zip(survey.layers, images[0], strict=True):
        beside = {chunk for other in images[0] if other != layer for chunk in other}
        own = set(layer)
        assert part == LayerUse(SIZE * len(own), SIZE * len(own & elsewhere), SIZE * len(own & beside))


def test_recipes_are_told_apart_and_contents_come_first(objects: Objects) -> None:
    """Chunk 2 is content of one layer and lies in the recipe of the other."""
    image = objects.image(build(objects, "a", [(1, 2), (3,)]))
    build(objects, "recipe", [(2, 7, 8)])
    (source,) = objects.image(objects.references.get("recipe")).layers
    upper = replace(objects.layer(image.layers[1]), recipe=objects.layer(source).blobs[0])
    objects.references.set("a", objects.put_image(replace(image, layers=(image.layers[0], objects.put_layer(upper)))))
    objects.references.remove("recipe")
    use = survey_store(objects).images["a"]
    assert (use.contents, use.recipes) == (amount(3), amount(2))
    assert (use.stored, use.unique) == (5 * SIZE, 5 * SIZE)


def test_what_is_mounted_counts_too(objects: Objects) -> None:
    image = objects.image(build(objects, "a", [(1,)]))
    (other,) = objects.image(build(objects, "b", [(2,)])).layers
    objects.references.set("a", objects.put_image(replace(image, lowers=(other,))))
    assert survey_store(objects).images["a"].contents == amount(2)


def test_a_chunk_that_lies_twice_is_two(objects: Objects) -> None:
    """Two images that read the same bytes from two places share none of them."""
    build(objects, "a", [(1,)])
    pack, packed = put_pack(objects, [chunk(5), chunk(1)])
    chunk_map = ChunkMap([Digest.of(chunk(5)).raw, Digest.of(chunk(1)).raw], [SIZE, SIZE])
    blob = Blob(objects.put_chunk_map(chunk_map), 2 * SIZE)
    places = {each.digest: ChunkLocation(pack, each.offset, each.stored, each.encoding) for each in packed}
    objects.put_locator(blob.chunk_map, [places[digest] for digest in chunk_map.digests])
    (layer,) = objects.image(objects.references.get("a")).layers
    other = objects.put_layer(replace(objects.layer(layer), blobs=(blob,)))
    objects.references.set("b", objects.put_image(Image("base", (other,))))
    images = survey_store(objects).images
    assert (images["a"].unique, images["b"].unique, images["a"].shared_with) == (SIZE, 2 * SIZE, 0)


def test_what_no_name_uses(objects: Objects) -> None:
    build(objects, "a", [(1, 2), (3, 4)])
    build(objects, "b", [(4, 5)])
    survey = survey_store(objects)
    assert (survey.store.unused, survey.store.dead) == (0, 0)
    assert survey.store.bytes == sum(stat.size for stat in objects.blobs.list("") if not stat.key.startswith("refs/"))
    before = {stat.key: stat.size for stat in objects.blobs.list("")}
    image, origin = objects.references.get("b"), objects.references.read("b").origin
    (layer,) = objects.image(image).layers
    objects.references.remove("b")
    descriptor = objects.layer(layer)
    (blob,) = descriptor.blobs
    freed = [keys.image(image), keys.layer(layer), keys.metadata(descriptor.metadata.digest)]
    freed += [keys.chunk_map(blob.name), keys.locator(blob.name), keys.pack(objects.locator(blob.name)[1].pack)]
    freed += map(keys.oci, origin.oci)
    survey = survey_store(objects)
    assert survey.store.unused == sum(before[key] for key in freed)
    assert survey.store.dead == 0


def test_dead_bytes_inside_of_packs(objects: Objects) -> None:
    build(objects, "both", [(1, 2, 3)])
    build(objects, "one", [(1,)])
    objects.references.remove("both")
    assert survey_store(objects).store.dead == 2 * (SIZE + 45)


def test_what_cannot_be_read_is_told_and_does_not_hide_the_rest(objects: Objects) -> None:
    build(objects, "a", [(1,), (2,)])
    build(objects, "b", [(3,)])
    layer = objects.image(objects.references.get("a")).layers[0]
    (blob,) = objects.layer(layer).blobs
    objects.blobs.delete(keys.locator(blob.name))
    survey = survey_store(objects)
    (problem,) = survey.problems
    assert str(blob.name) in problem
    assert (survey.images["a"].contents, survey.images["b"].contents) == (amount(1), amount(1))
    assert (survey.store.unused, survey.store.dead) == (None, None)
    with pytest.raises(NotFound, match="no image named 'gone'"):
        survey_store(objects, watch="gone")


def test_each_blob_is_read_once(objects: Objects) -> None:
    for number in range(5):
        build(objects, f"i{number}", [(1, 2), (3, number)])
    metered = MeteredBlobs(objects.blobs)
    survey_store(Objects(metered))
    blobs = {blob.name for name in objects.references.names() for blob in blobs_of(objects, name)}
    reads = sum(
        traffic.requests for operation, traffic in metered.snapshot().by_operation.items() if operation == "get"
    )
    documents = 5 + 5 + 6  # references, images, layers
    assert reads == documents + 2 * len(blobs)


def blobs_of(objects: Objects, name: str) -> list[Blob]:
    image = objects.image(objects.references.get(name))
    return [blob for layer in image.layers for blob in objects.layer(layer).blobs]


def test_the_amount_of_some_blobs(objects: Objects) -> None:
    build(objects, "a", [(1, 2, 2), (2, 3)])
    total = amount_of(objects, blobs_of(objects, "a"))
    assert (total, total.average) == (amount(3), SIZE)
    assert amount_of(objects, []).average == 0
    assert len(known_chunks(objects)) == 3
