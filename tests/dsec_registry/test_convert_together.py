"""Layers whose contents are stored side by side: the same result as one after the other, and a prompt end."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from dsec_registry import convert as convert_module
from dsec_registry.convert import convert, silent
from dsec_registry.images import VerifiedReader
from dsec_registry.layouts import OciLayout
from dsec_registry.manifest import Descriptor, host_platform
from dsec_store import chunker
from dsec_store import upload as upload_module
from dsec_store.backends.memory import MemoryBlobs
from dsec_store.chunks import ChunkSource, NoCache
from dsec_store.descriptor import Blob, Image
from dsec_store.digest import Digest
from dsec_store.errors import Corrupt, Invalid, StoreError
from dsec_store.layer.build import pieces
from dsec_store.layer.recipe import read_recipe
from dsec_store.objects import Objects
from dsec_store.storedblob import open_blob
from tests import tarmaker as tar
from tests.dsec_store.blobmaker import PATIENCE, noise
from tests.ocimaker import CONFIG, MANIFEST, Layer, LayoutMaker, blob_path, damage, digest_of, read_json, write_layout
from tests.views import merged_view

Progress = Callable[[str, int, int], None]

SHARED = noise(700_000, "shared")
LAYERS = [
    tar.archive(
        *(tar.file(b"%d/%d" % (number, each), noise(each * 701, f"file {each}")) for each in range(40)),
        tar.file(b"own%d" % number, noise(90_000, f"own {number}")),
        tar.file(b"shared%d" % number, SHARED),
    )
    for number in range(4)
]
"""Layers that have nearly all of their contents in common."""


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that chunks are claimed long before a layer is finished, as in large layers."""
    monkeypatch.setattr(chunker, "WINDOW", 600_000)
    monkeypatch.setattr(upload_module, "BATCH", 50_000)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    ours = ("layer", "read-ahead", "chunk", "pack", "lookup", "index")
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(ours)]


class Gated(OciLayout):
    """Says when a blob is opened, and waits there until it may go on."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.opened: dict[str, Callable[[], object]] = {}

    def open_blob(self, descriptor: Descriptor, *, hashed: bool = True) -> VerifiedReader:
        self.opened.get(str(descriptor.digest), lambda: None)()
        return super().open_blob(descriptor, hashed=hashed)


@pytest.fixture(autouse=True)
def two_layers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on machines with few processors."""
    monkeypatch.setattr(convert_module, "LAYERS_AT_ONCE", 2)


def convert_from(source: OciLayout, objects: Objects, *, progress: Progress = silent, workers: int = 0) -> Image:
    done = convert(objects, source, "t", host_platform(), "demo", progress=progress, workers=workers)
    return objects.image(done.image)


def converted(objects: Objects, layout: Path, workers: int = 0) -> Image:
    with OciLayout(layout) as source:
        return convert_from(source, objects, workers=workers)


def layout(folder: Path, layers: Sequence[bytes | Layer]) -> Path:
    return write_layout(folder, layers).path


def plain(layers: Sequence[bytes]) -> list[Layer]:
    return [Layer(data, "plain") for data in layers]


def tar_again(objects: Objects, layer: Digest) -> bytes:
    """What the recipe of a stored layer makes."""
    descriptor = objects.layer(layer)
    assert descriptor.recipe is not None
    source = ChunkSource(objects.blobs, NoCache())

    def opened(blob: Blob) -> Iterator[bytes]:
        return pieces(open_blob(objects, blob, source), 0, blob.size)

    contents = open_blob(objects, descriptor.blobs[0], source) if descriptor.blobs else None
    return b"".join(read_recipe(opened(descriptor.recipe), contents.read if contents else lambda *_: b"", "recipe"))


def held(objects: Objects) -> list[bytes]:
    return [chunk.digest for digest in objects.packs() for chunk in objects.pack_chunks(digest)]


# -- the same as one after the other -----------------------------------------------------------------------------------


def test_layers_with_shared_contents(tmp_path: Path) -> None:
    objects = Objects(MemoryBlobs())
    image = converted(objects, layout(tmp_path / "all", LAYERS))
    assert len(held(objects)) == len(set(held(objects))), "each chunk is stored once"
    for number, (layer, data) in enumerate(zip(image.layers, LAYERS, strict=True)):
        assert tar_again(objects, layer) == data
        assert merged_view(objects, image)[b"shared%d" % number].data == SHARED
        alone = converted(Objects(MemoryBlobs()), layout(tmp_path / str(number), LAYERS[: number + 1]))
        assert alone.layers == image.layers[: number + 1]


def test_digests_do_not_depend_on_workers(tmp_path: Path) -> None:
    path = layout(tmp_path / "layout", LAYERS)
    images = [converted(Objects(MemoryBlobs()), path, workers) for workers in (1, 2, 8)]
    assert images[0] == images[1] == images[2]


def test_digests_do_not_depend_on_the_pieces_in_which_a_layer_arrives(tmp_path: Path) -> None:
    """Each form of compression gives other pieces; padding and headers lie across their ends."""
    data = tar.archive(*(tar.file(b"f%d" % number, noise(number * 977 % 20_011, f"{number}")) for number in range(600)))
    images = [
        converted(Objects(MemoryBlobs()), layout(tmp_path / compression, [Layer(data, compression)]))
        for compression in ("plain", "gzip", "gzip members", "zstd")
    ]
    assert all(image == images[0] for image in images)


@pytest.mark.parametrize("first", [0, 1])
def test_a_layer_that_needs_what_the_next_one_has_claimed(first: int, tmp_path: Path) -> None:
    """Layer `first` is not opened before the other one is unpacked."""
    path = layout(tmp_path / "layout", plain(LAYERS[:2]))
    unpacked = threading.Event()

    def progress(title: str, done: int, total: int) -> None:
        if done == total and title.startswith(f"layer {2 - first} "):
            unpacked.set()

    objects = Objects(MemoryBlobs())
    with Gated(path) as source:
        source.opened[digest_of(LAYERS[first])] = lambda: unpacked.wait(PATIENCE)
        image = convert_from(source, objects, progress=progress)
    assert [tar_again(objects, layer) for layer in image.layers] == LAYERS[:2]
    assert len(held(objects)) == len(set(held(objects)))


def test_the_same_layer_twice(tmp_path: Path) -> None:
    alone = tar.archive(tar.directory(b"d/"), tar.file(b"d/f", SHARED))
    objects = Objects(MemoryBlobs())
    with OciLayout(layout(tmp_path / "layout", [alone, LAYERS[0], alone, alone])) as source:
        done = convert(objects, source, "t", host_platform(), "demo")
    layers = objects.image(done.image).layers
    assert (done.layers, done.built) == (4, 2)
    assert layers[0] == layers[2] == layers[3] != layers[1]


def test_the_same_layer_twice_where_it_depends_on_what_lies_below(tmp_path: Path) -> None:
    implying = tar.archive(tar.file(b"d/f", SHARED))
    objects = Objects(MemoryBlobs())
    lower = tar.archive(tar.directory(b"d/", mode=0o700))
    image = converted(objects, layout(tmp_path / "layout", [implying, lower, implying]))
    assert image.layers[0] != image.layers[2]
    assert [tar_again(objects, layer) for layer in image.layers] == [implying, lower, implying]


# -- what a failure leaves ---------------------------------------------------------------------------------------------


def test_when_a_layer_fails_the_one_that_is_being_unpacked_is_given_up(tmp_path: Path) -> None:
    zeros = tar.archive(tar.file(b"zeros", bytes(100 << 20)))
    bad = b"no tar" * 999
    path = layout(tmp_path / "layout", plain([bad, zeros]))
    started, ended = threading.Event(), threading.Event()

    def progress(title: str, done: int, total: int) -> None:
        if title.startswith("layer 2 "):
            (ended if done == total else started).set()

    objects = Objects(MemoryBlobs())
    with Gated(path) as source:
        source.opened[digest_of(bad)] = lambda: started.wait(PATIENCE)
        with pytest.raises(Corrupt, match=f"^layer {digest_of(bad)}: tar archive"):
            convert_from(source, objects, progress=progress)
    assert started.is_set()
    assert not ended.is_set()
    assert not list(objects.references.names())
    assert not list(objects.blobs.list("layers/"))


def test_the_error_of_a_layer_that_another_one_relies_on_is_told(tmp_path: Path) -> None:
    bad = tar.archive(tar.file(b"s", SHARED), tar.file(b"own", noise(900_000, "own")), tar.file(b"f", uid=2**32))
    path = layout(tmp_path / "layout", plain([LAYERS[0], bad]))
    read = threading.Event()

    def progress(title: str, done: int, total: int) -> None:
        if done == total and title.startswith("layer 2 "):
            read.set()

    objects = Objects(MemoryBlobs())
    with Gated(path) as source:
        source.opened[digest_of(LAYERS[0])] = lambda: read.wait(PATIENCE)
        with pytest.raises(Invalid, match=f"^layer {digest_of(bad)}: .*uid"):
            convert_from(source, objects, progress=progress)
    assert not list(objects.references.names())


@pytest.mark.parametrize("compression", ["plain", "gzip", "zstd"])
def test_nothing_is_stored_of_a_blob_with_a_wrong_digest(compression: str, tmp_path: Path) -> None:
    path = layout(tmp_path / "layout", [Layer(LAYERS[0], compression)])  # type: ignore[arg-type]
    with OciLayout(path) as source:
        digest = source.resolve("t", host_platform()).manifest.layers[0].digest
    damage(path, str(digest), lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    objects = Objects(MemoryBlobs())
    with pytest.raises(Corrupt, match=digest.hex):
        converted(objects, path)
    assert not list(objects.blobs.list(""))


def test_no_layer_is_stored_of_a_tar_with_a_wrong_diff_id(tmp_path: Path) -> None:
    maker = LayoutMaker(tmp_path / "layout")
    image = maker.image([LAYERS[0]])
    manifest = read_json(maker.path, image["digest"])
    config = json.loads(blob_path(maker.path, manifest["config"]["digest"]).read_bytes())
    config["rootfs"]["diff_ids"] = [f"sha256:{hashlib.sha256(b'other').hexdigest()}"]
    manifest["config"] = maker.document(config, CONFIG)
    maker.add({**maker.document(manifest, MANIFEST), "platform": image["platform"]}, tag="t")
    objects = Objects(MemoryBlobs())
    with pytest.raises(Corrupt, match=r"its uncompressed bytes are .*, its config says diff_id"):
        converted(objects, maker.path)
    assert {stat.key.partition("/")[0] for stat in objects.blobs.list("")} <= {"packs"}


@pytest.mark.parametrize("missing", range(4))
def test_whichever_layer_fails_the_end_is_prompt_and_the_next_time_it_works(missing: int, tmp_path: Path) -> None:
    path = layout(tmp_path / "layout", plain(LAYERS[:4]))
    expected = converted(Objects(MemoryBlobs()), path)
    objects = Objects(MemoryBlobs())
    blob = blob_path(path, digest_of(LAYERS[missing]))
    blob.rename(blob.with_name("away"))
    with suppress(StoreError):
        converted(objects, path)
        pytest.fail("it lacks a layer")
    assert not list(objects.references.names())
    blob.with_name("away").rename(blob)
    assert converted(objects, path) == expected
