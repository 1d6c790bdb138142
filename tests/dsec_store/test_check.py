"""Checking an image: one flipped byte in any object is found and named."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from dsec_store import keys, pack
from dsec_store.backends.folder import FolderBlobs
from dsec_store.check import Report, check_image, describe
from dsec_store.descriptor import Blob, Image, LayerDescriptor
from dsec_store.digest import Digest
from dsec_store.errors import Corrupt, NotFound, Unavailable
from dsec_store.fault import Fault, FaultBlobs, scripted
from dsec_store.layer.erofs import Device, read_image, write_image
from dsec_store.layer.local import LocalBuild, build_local
from dsec_store.meter import MeteredBlobs
from dsec_store.objects import Objects
from dsec_store.pack import FOOTER_SIZE, section_span
from dsec_store.references import Origin, Reference
from tests.dsec_store.blobmaker import flipped, noise, store_blob

FILES = {"large": noise(700_000, "large"), "text": b"line\n" * 5000, "small": b"small", "zeros": bytes(100_000)}


@dataclass
class Stored:
    """An image of one layer in a folder store, with an OCI config and manifest."""

    root: Path
    objects: Objects
    reference: Reference

    @property
    def image(self) -> Digest:
        return self.reference.image

    @property
    def layer(self) -> tuple[Digest, LayerDescriptor]:
        (digest,) = self.objects.image(self.image).layers
        return digest, self.objects.layer(digest)

    def check(self, *, deep: bool = False) -> Report:
        return check_image(self.objects, self.reference, deep=deep)

    def problems(self, *, deep: bool = False) -> list[str]:
        return self.check(deep=deep).problems

    def flip(self, key: str, at: int) -> None:
        path = self.root / key
        path.write_bytes(flipped(path.read_bytes(), at))


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stored:
    monkeypatch.setattr(pack, "PACK_SIZE", 300_000)
    source, root = tmp_path / "source", tmp_path / "store"
    source.mkdir()
    for name, data in FILES.items():
        (source / name).write_bytes(data)
    objects = Objects(FolderBlobs(root, create=True))
    built = build_local(objects, source, "demo", LocalBuild("workspace", prefix="/src"))
    config, manifest = objects.put_oci(b'{"config": 1}'), objects.put_oci(b'{"manifest": 1}')
    return Stored(root, objects, Reference(built.image, Origin(manifest, config, 5)))


def places(data: bytes) -> Iterator[int]:
    """Some bytes of an object: the ends, and a few between."""
    yield from {0, len(data) - 1, *range(1, len(data), max(1, len(data) // 12))}


def config(stored: Stored) -> str:
    digest = stored.reference.origin.config
    assert digest is not None
    return keys.oci(digest)


def manifest(stored: Stored) -> str:
    digest = stored.reference.origin.manifest
    assert digest is not None
    return keys.oci(digest)


def layer(stored: Stored) -> str:
    return keys.layer(stored.layer[0])


def metadata(stored: Stored) -> str:
    return keys.metadata(stored.layer[1].metadata.digest)


def chunk_map(stored: Stored) -> str:
    return keys.chunk_map(stored.layer[1].blobs[0].name)


def locator(stored: Stored) -> str:
    return keys.locator(stored.layer[1].blobs[0].name)


def a_pack(stored: Stored) -> str:
    return keys.pack(stored.objects.locator(stored.layer[1].blobs[0].name)[0].pack)


OBJECTS = [config, manifest, layer, metadata, chunk_map, locator]
KeyOf = Callable[[Stored], str]


@pytest.mark.parametrize("deep", [False, True])
def test_a_whole_image_has_no_problems(stored: Stored, deep: bool) -> None:
    report = stored.check(deep=deep)
    assert (report.layers, report.problems) == (1, [])
    size = stored.layer[1].blobs[0].size
    assert report.bytes == (size if deep else 0)
    assert (report.chunks > 5) == deep


@pytest.mark.parametrize("key_of", OBJECTS)
def test_a_flipped_byte_is_found_and_named(stored: Stored, key_of: KeyOf) -> None:
    """Shallow finds it already; of a locator, it is the chunk or the pack that gets the name."""
    key = key_of(stored)
    for at in places((stored.root / key).read_bytes()):
        stored.flip(key, at)
        problems = stored.problems()
        assert problems, f"byte {at} of {key}"
        assert key_of is locator or all(key[-64:] in problem for problem in problems)
        stored.flip(key, at)
    assert not stored.problems()


@pytest.mark.parametrize("key_of", [*OBJECTS, a_pack])
def test_an_absent_object_is_named_once(stored: Stored, key_of: KeyOf) -> None:
    key = key_of(stored)
    (stored.root / key).unlink()
    for deep in (False, True):
        (problem,) = stored.problems(deep=deep)
        assert key[-64:] in problem
        assert "missing" in problem


def test_a_flipped_byte_in_a_chunk_is_found_deep(stored: Stored) -> None:
    key = a_pack(stored)
    data = (stored.root / key).read_bytes()
    start, length = section_span(len(data), data[-FOOTER_SIZE:], "pack")
    for at in places(data[:start]):
        stored.flip(key, at)
        assert not stored.problems()
        (problem,) = stored.problems(deep=True)
        assert problem.startswith("chunk blake3:")
        assert key[-64:] in problem
        stored.flip(key, at)
    for at in range(start, start + length):
        stored.flip(key, at)
        assert any(key[-64:] in problem for problem in stored.problems())
        stored.flip(key, at)


def test_a_pack_that_was_cut_short_is_found_shallow(stored: Stored) -> None:
    path = stored.root / a_pack(stored)
    path.write_bytes(path.read_bytes()[:-100])
    for deep in (False, True):
        assert any(path.name in problem for problem in stored.problems(deep=deep))


def test_every_damage_is_reported_not_only_the_first(stored: Stored) -> None:
    for key_of in (config, metadata, a_pack):
        stored.flip(key_of(stored), 30 if key_of is a_pack else 3)
    assert len(stored.problems(deep=True)) == 3


def test_a_damaged_image_is_the_callers_affair(stored: Stored) -> None:
    stored.flip(keys.image(stored.image), 3)
    with pytest.raises(Corrupt, match=stored.image.hex):
        stored.check()
    (stored.root / keys.image(stored.image)).unlink()
    with pytest.raises(NotFound, match=stored.image.hex):
        stored.check()


def test_an_outage_is_no_damage(stored: Stored) -> None:
    away = Objects(FaultBlobs(stored.objects.blobs, scripted(*[None] * 5, Fault.UNAVAILABLE)))
    with pytest.raises(Unavailable):
        check_image(away, stored.reference, deep=True)


def test_a_layer_of_another_release_is_a_problem_with_a_way_out(stored: Stored) -> None:
    newer = stored.layer[1].encode().replace(b'"format":2', b'"format":3')
    digest = Digest.of(newer)
    stored.objects.blobs.put(keys.layer(digest), newer)
    image = stored.objects.put_image(replace(stored.objects.image(stored.image), layers=(digest,)))
    (problem,) = check_image(stored.objects, Reference(image), deep=True).problems
    assert problem.endswith("upgrade dsec")


def test_a_blob_of_another_size_is_a_problem(stored: Stored) -> None:
    (blob,) = stored.layer[1].blobs
    shorter = stored.objects.put_layer(replace(stored.layer[1], blobs=(replace(blob, size=4096),)))
    image = stored.objects.put_image(replace(stored.objects.image(stored.image), layers=(shorter,)))
    problems = check_image(stored.objects, Reference(image), deep=False).problems
    assert len(problems) == 2  # a file reaches beyond it, too
    assert str(shorter) in problems[0]
    assert problems[1].startswith(f"blob {blob.name}: ")


def with_layer(stored: Stored, layer: LayerDescriptor) -> Reference:
    """An image of this layer alone."""
    digest = stored.objects.put_layer(layer)
    return Reference(stored.objects.put_image(replace(stored.objects.image(stored.image), layers=(digest,))))


def test_a_recipe_is_checked_like_a_device(stored: Stored) -> None:
    recipe = store_blob(stored.objects, noise(5_000, "recipe"))
    blob = Blob(stored.objects.put_chunk_map(recipe.chunk_map), len(recipe.data))
    reference = with_layer(stored, replace(stored.layer[1], recipe=blob))
    (problem,) = check_image(stored.objects, reference, deep=False).problems
    assert str(blob.name) in problem, "it has no locator yet"
    stored.objects.put_locator(blob.chunk_map, recipe.locations)
    report = check_image(stored.objects, reference, deep=True)
    assert report.bytes == stored.layer[1].blobs[0].size + len(recipe.data)
    assert report.problems == [f"recipe {blob.name}: not a recipe, or written by another release"]


def test_the_order_of_blobs_is_that_of_the_metadata_image(stored: Stored) -> None:
    other = store_blob(stored.objects, noise(4096, "other"))
    blob = Blob(stored.objects.put_chunk_map(other.chunk_map), len(other.data))
    stored.objects.put_locator(blob.chunk_map, other.locations)
    layer = stored.layer[1]
    out = io.BytesIO()
    tree = read_image(stored.objects.metadata(layer.metadata)).root
    write_image(tree, [Device(one.name.hex, one.size // 4096) for one in (*layer.blobs, blob)], out)
    both = replace(layer, metadata=stored.objects.put_metadata(out.getvalue()), blobs=(*layer.blobs, blob))
    assert check_image(stored.objects, with_layer(stored, both), deep=True).problems == []
    for blobs in (both.blobs[::-1], both.blobs[:1], ()):
        (problem,) = check_image(stored.objects, with_layer(stored, replace(both, blobs=blobs)), deep=False).problems
        assert problem.endswith("its metadata image has other blob devices than its descriptor")


def test_what_is_mounted_for_an_image_is_checked_too(stored: Stored) -> None:
    missing = Digest.of(b"a run")
    image = stored.objects.put_image(replace(stored.objects.image(stored.image), lowers=(missing,)))
    report = check_image(stored.objects, Reference(image), deep=True)
    (problem,) = report.problems
    assert str(missing) in problem
    assert report.layers == 2


def test_nothing_is_written_and_a_layer_is_checked_once(stored: Stored) -> None:
    metered = MeteredBlobs(stored.objects.blobs)
    image = stored.objects.image(stored.image)
    twice = stored.objects.put_image(replace(image, layers=image.layers * 2))
    steps: list[tuple[str, int, int]] = []
    report = check_image(Objects(metered), Reference(twice), deep=True, progress=lambda *step: steps.append(step))
    assert (report.layers, report.problems) == (1, [])
    assert [step for step in steps if step[0] == "layers"] == [("layers", 0, 1), ("layers", 1, 1)]
    assert metered.snapshot().total.bytes_sent == 0


def test_description() -> None:
    image = Image("toolkit", (Digest.of(b"layer"),), env=(("A", "1"),), path=("/bin",))
    facts = {"kind": "toolkit", "platform": None, "env": {"A": "1"}, "path": ["/bin"], "source_bytes": 5}
    assert describe(image, Origin(source_bytes=5)) == {**facts, "config": None, "manifest": None}
    manifest, config = Digest.of(b"manifest", "sha256"), Digest.of(b"config", "sha256")
    assert describe(image, Origin(manifest, config, 5)) == {**facts, "config": str(config), "manifest": str(manifest)}
