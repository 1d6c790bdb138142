"""Checking a store of converted images: whatever is damaged is found and named, for the names that it concerns."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

import pytest

from dsec_registry.convert import convert
from dsec_registry.layouts import OciLayout
from dsec_registry.manifest import host_platform
from dsec_store import compression, keys, pack
from dsec_store.around import AroundBlobs
from dsec_store.backends.memory import MemoryBlobs
from dsec_store.check import StoreReport, check_image, check_store
from dsec_store.checkparts import lookup_keys
from dsec_store.chunkmap import ChunkLocation, ChunkMap
from dsec_store.chunks import ChunkSource, NoCache
from dsec_store.descriptor import Blob, Image, LayerDescriptor
from dsec_store.digest import Digest
from dsec_store.errors import NotFound
from dsec_store.layer.collapse import collapse
from dsec_store.meter import MeteredBlobs
from dsec_store.objects import Objects
from dsec_store.pack import PackBuilder
from dsec_store.references import Origin, Reference
from dsec_store.storedblob import StoredBlob
from tests.dsec_snapshotter.making import put_layer
from tests.dsec_store.blobmaker import flipped, noise, store_blob
from tests.ocimaker import tar_of, write_layout

BASE = tar_of({"etc/base": b"base\n" * 2000, "bin/large": noise(200_000, "large"), "small": b"small"})
UPPER = {"one": tar_of({"one": noise(90_000, "one")}), "two": tar_of({"two": noise(90_000, "two"), "empty": b""})}


@dataclass
class Stored:
    """The images `one` and `two` of a common layer and one more; `one` is mounted as one run."""

    blobs: MemoryBlobs
    objects: Objects

    def reference(self, name: str) -> Reference:
        return self.objects.references.read(name)

    def image(self, name: str) -> Image:
        return self.objects.image(self.reference(name).image)

    def layer(self, name: str, number: int = -1) -> LayerDescriptor:
        return self.objects.layer(self.image(name).layers[number])

    def check(self, *, deep: bool = False) -> StoreReport:
        return check_store(self.objects, deep=deep)

    def problems(self, name: str, *, deep: bool = False) -> list[str]:
        """The same from both checks."""
        problems = check_image(self.objects, self.reference(name), deep=deep).problems
        assert self.check(deep=deep).names[name] == problems
        return problems

    def with_image(self, name: str, **changes: object) -> None:
        """`name` leads to another image from now on."""
        digest = self.objects.put_image(replace(self.image(name), **changes))  # type: ignore[arg-type]
        self.objects.references.set(name, digest, self.reference(name).origin)

    def with_layer(self, name: str, **changes: object) -> None:
        """The topmost layer is another one from now on."""
        layer = self.objects.put_layer(replace(self.layer(name), **changes))  # type: ignore[arg-type]
        self.with_image(name, layers=(*self.image(name).layers[:-1], layer), lowers=())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Every object of the store, by key."""
    blobs = MemoryBlobs()
    objects = Objects(blobs)
    folder = tmp_path_factory.mktemp("layouts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack, "PACK_SIZE", 100_000)
        for name, upper in UPPER.items():
            layout = write_layout(folder / name, [BASE, upper]).path
            with OciLayout(layout) as source:
                convert(objects, source, "t", host_platform(), name)
    stored = Stored(blobs, objects)
    layers = stored.image("one").layers
    stored.with_image("one", lowers=collapse(objects, layers, [range(2)]))
    for name in set(stored_keys(blobs)) - reachable(stored):
        blobs.delete(name)
    return {key: blobs.get(key) for key in stored_keys(blobs)}


def stored_keys(blobs: MemoryBlobs) -> list[str]:
    return sorted(each.key for each in blobs.list(""))


def reachable(stored: Stored) -> set[str]:
    """All but what the image had before its layers were collapsed, and leases."""
    images = {keys.image(stored.reference(name).image) for name in UPPER}
    return {
        key
        for key in stored_keys(stored.blobs)
        if key in images or keys.family(key) not in ("images", "leases", "condemned")
    }


@pytest.fixture
def stored(made: dict[str, bytes]) -> Stored:
    blobs = MemoryBlobs()
    for key, data in made.items():
        blobs.put(key, data)
    return Stored(blobs, Objects(blobs))


@pytest.mark.parametrize("deep", [False, True])
def test_a_whole_store_has_no_problems(stored: Stored, deep: bool) -> None:
    report = stored.check(deep=deep)
    assert report.names == {"one": [], "two": []}
    assert (report.total.layers, report.total.problems) == (4, [])
    assert (report.total.chunks > 5) == (report.total.bytes > 400_000) == deep


def test_the_store_has_all_kinds_of_objects(made: dict[str, bytes]) -> None:
    families = {keys.family(key) for key in made}
    assert families == {*keys.COLLECTED, "refs"}
    assert {key.split("/")[1] for key in made if key.startswith("lookup/")} == {"build", "chain", "diff", "digest"}


def test_every_damaged_object_is_found_and_named(stored: Stored, made: dict[str, bytes]) -> None:
    """A byte in the middle. Names and locators have no digest: of those it is the name that has a problem, of these the
    blob, the chunk or the pack."""
    for key, data in made.items():
        stored.blobs.put(key, flipped(data, len(data) // 2))
        report = stored.check(deep=True)
        found = report.total.problems
        assert found, key
        name = key.rpartition("/")[2]
        told = {name for name, problems in report.names.items() if problems} == {name}
        named = any(name in problem for problem in found)
        assert told if keys.family(key) == "refs" else named or keys.family(key) == "locators", (key, found)
        stored.blobs.put(key, data)
    assert not stored.check(deep=True).total.problems


def test_every_lost_object_is_found_and_named(stored: Stored, made: dict[str, bytes]) -> None:
    """But names, lookups and indexes, which nothing leads to: without them there is less to be found."""
    for key, data in made.items():
        if keys.family(key) in ("refs", "lookup", "indexes"):
            continue
        stored.blobs.delete(key)
        for deep in (False, True):
            found = stored.check(deep=deep).total.problems
            named = [problem for problem in found if key.rpartition("/")[2] in problem]
            assert named, (key, found)
            assert keys.family(key) in ("layers", "packs") or found == named, (key, found)
        stored.blobs.put(key, data)


def test_damage_concerns_those_names_that_need_it(stored: Stored) -> None:
    for number, expected in ((0, {"one", "two"}), (1, {"two"})):
        (blob,) = stored.layer("two", number).blobs
        at = stored.objects.locator(blob.name)[0]
        key = keys.pack(at.pack)
        data = stored.blobs.get(key)
        stored.blobs.put(key, flipped(data, at.offset + at.stored // 2))
        report = stored.check(deep=True)
        assert {name for name, problems in report.names.items() if problems} == expected
        (problem,) = report.total.problems
        assert problem.startswith("chunk blake3:")
        assert stored.problems("two", deep=True) == [problem]
        stored.blobs.put(key, data)


def test_a_chunk_that_lies_twice_is_read_twice(stored: Stored) -> None:
    """The tar of `one` needs a sound copy; the damaged one is another image's."""
    (blob,) = stored.layer("one", 0).blobs
    source = ChunkSource(stored.blobs, NoCache())
    opened = StoredBlob(stored.objects, blob, source)
    data = opened.lazy.read(0, opened.chunk_map[0].size)
    layer = put_layer(stored.objects, {"copy": data})
    builder = PackBuilder()
    builder.add(opened.chunk_map[0].digest, len(data), compression.PLAIN, flipped(data, 7))
    damaged = stored.objects.put_pack(builder.seal())
    (copy,) = stored.objects.layer(layer).blobs
    stored.objects.put_locator(copy.chunk_map, [ChunkLocation(damaged, 0, len(data), compression.PLAIN)])
    stored.objects.references.set("copy", stored.objects.put_image(Image("workspace", (layer,))))
    report = stored.check(deep=True)
    assert {name: len(problems) for name, problems in report.names.items()} == {"copy": 1, "one": 0, "two": 0}
    assert str(damaged) in report.names["copy"][0]


def test_what_images_share_is_read_once(stored: Stored) -> None:
    metered = MeteredBlobs(stored.blobs)
    check_store(Objects(metered), deep=True)
    size = sum(each.size for each in stored.blobs.list(""))
    assert metered.snapshot().total.bytes_received < size * 1.5
    assert metered.snapshot().total.bytes_sent == 0


def test_objects_are_fetched_side_by_side(stored: Stored) -> None:
    """Two requests for packs are under way at once: each waits for the other."""
    both = threading.Barrier(2)

    class Together(AroundBlobs):
        waited = 0

        def stat(self, key: str):  # type: ignore[no-untyped-def]
            if key.startswith("packs/") and self.waited < 2:
                self.waited += 1
                both.wait(30)
            return super().stat(key)

    assert check_store(Objects(Together(stored.blobs)), deep=False).total.problems == []


# -- parts that do not agree -------------------------------------------------------------------------------------------


def test_a_config_of_other_layers(stored: Stored) -> None:
    other = stored.reference("two").origin
    reference = stored.reference("one")
    stored.objects.references.set("one", reference.image, Origin(reference.origin.manifest, other.config))
    assert stored.problems("one") == [f"config {other.config}: its diff_ids are not those of the image's layers"]
    nonsense = stored.objects.put_oci(b"[]")
    stored.objects.references.set("one", reference.image, Origin(None, nonsense))
    assert stored.problems("one") == [f"config {nonsense}: it is no image configuration with diff_ids"]


def test_a_run_that_is_not_its_layers(stored: Stored) -> None:
    (lower,) = stored.image("one").lowers
    run = stored.objects.layer(lower)
    base = stored.layer("one", 0)
    wrong: list[tuple[LayerDescriptor, str]] = [
        (replace(run, run=run.run[:1]), "what is mounted for it does not stand for its layers"),
        (replace(run, run=run.run[::-1]), "what is mounted for it does not stand for its layers"),
        (replace(run, has_root=True), "its tree is not that of its layers"),
        (replace(run, metadata=base.metadata, blobs=base.blobs), "its blob devices are not those of its layers"),
    ]
    for descriptor, text in wrong:
        stored.with_image("one", lowers=(stored.objects.put_layer(descriptor),))
        (problem,) = stored.problems("one")
        assert text in problem
    stored.with_image("one", lowers=(lower,))
    assert stored.problems("one") == []


def test_a_run_is_checked_with_what_lies_below(stored: Stored) -> None:
    """Three layers of which the upper two are one."""
    one, two = stored.image("one").layers, stored.image("two").layers
    layers = (*one, two[1])
    lowers = collapse(stored.objects, layers, [range(1, 3)])
    image = stored.objects.put_image(Image("base", layers, lowers))
    assert check_image(stored.objects, Reference(image), deep=True).problems == []


def put_recipe(stored: Stored, data: bytes) -> Blob:
    recipe = store_blob(stored.objects, data)
    blob = Blob(stored.objects.put_chunk_map(recipe.chunk_map), len(data))
    stored.objects.put_locator(blob.chunk_map, recipe.locations)
    return blob


def test_a_recipe_that_asks_for_what_is_not_there(stored: Stored) -> None:
    end = stored.layer("two").blobs[0].size
    # A record without literal bytes, then a content at that address, of one byte (docs/format/recipe.md).
    folded = end << 1
    number = bytearray()
    while folded >= 0x80:
        number.append(folded & 0x7F | 0x80)
        folded >>= 7
    number.append(folded)
    recipe = put_recipe(stored, b"DSECRCP1" + b"\x02" + bytes(number) + b"\x01")
    stored.with_layer("two", recipe=recipe)
    (problem,) = stored.problems("two")
    assert problem == f"recipe {recipe.name}: a content at bytes {end} to {end + 1}, of a blob of {end} bytes"


def test_a_recipe_of_another_tar_is_found_deep(stored: Stored) -> None:
    recipe = put_recipe(stored, b"DSECRCP1" + bytes([5 << 2]) + b"a tar")
    stored.with_layer("two", recipe=recipe)
    assert stored.problems("two") == []
    (problem,) = stored.problems("two", deep=True)
    assert "its tar, made again, is" in problem
    assert str(stored.image("two").layers[-1]) in problem


def test_a_lookup_that_leads_elsewhere(stored: Stored) -> None:
    layers = [stored.layer("two", number) for number in range(2)]
    base = stored.image("two").layers[0]
    for key, number in lookup_keys(layers):
        if number == 1 and (before := stored.blobs.stat(key)):
            data = stored.blobs.get(key)
            stored.blobs.put(key, str(base).encode())
            (problem,) = stored.problems("two")
            assert problem == f"lookup {key.removeprefix('lookup/')}: it leads to layer {base}, which is of another tar"
            stored.blobs.put(key, str(Digest.of(b"gone")).encode())
            (problem,) = stored.problems("two")
            assert str(Digest.of(b"gone")) in problem
            stored.blobs.put(key, data)
            assert before == stored.blobs.stat(key)


def test_there_are_lookups_to_be_followed(stored: Stored) -> None:
    wanted = lookup_keys([stored.layer("two", number) for number in range(2)])
    assert {key.split("/")[1] for key, _ in wanted if stored.blobs.stat(key)} == {"chain", "diff"}


def test_an_index_that_names_a_lost_pack(stored: Stored) -> None:
    lost = Digest.of(b"a pack")
    index = stored.objects.put_index([(lost, [])])
    report = stored.check()
    assert report.total.problems == [f"index {index}: it names pack {lost}, which is missing"]
    assert report.names == {"one": [], "two": []}


def test_a_damaged_name_does_not_hide_the_others(stored: Stored) -> None:
    stored.blobs.put(keys.reference("one"), b"{}")
    stored.blobs.delete(keys.image(stored.reference("two").image))
    report = stored.check()
    assert [len(problems) for problems in report.names.values()] == [1, 1]
    assert "'one'" in report.names["one"][0]
    with pytest.raises(NotFound):
        check_image(stored.objects, stored.reference("two"), deep=False)


def test_a_locator_of_another_place(stored: Stored) -> None:
    """It names chunks that the pack does not have there."""
    (blob,) = stored.layer("two").blobs
    locations = stored.objects.locator(blob.name)
    stored.objects.put_locator(blob.chunk_map, [replace(at, offset=at.offset + 1) for at in locations])
    problems = stored.problems("two")
    assert len(problems) == len(locations)
    assert all("the locator and the pack's own section do not agree" in problem for problem in problems)
    assert stored.problems("one") == []


def test_a_chunk_map_that_does_not_cover_the_blob(stored: Stored) -> None:
    (blob,) = stored.layer("two").blobs
    whole = stored.objects.chunk_map(blob.chunk_map)
    short = ChunkMap(whole.digests[:-1], whole.sizes[:-1])
    sized = stored.objects.put_chunk_map(short)
    stored.objects.put_locator(sized, stored.objects.locator(blob.name)[:-1])
    stored.with_layer("two", blobs=(Blob(sized, blob.size),))
    problems = stored.problems("two")
    assert any(problem == f"blob {sized.digest}: its chunk map has another size" for problem in problems)
