"""A node's layer files: complete before the mount, healed when damaged, and enough for the data daemon."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from dsec_store import keys
from dsec_store.around import AroundBlobs
from dsec_store.backends.memory import MemoryBlobs
from dsec_store.chunker import DEFAULT
from dsec_store.chunkmap import ChunkMap
from dsec_store.chunks import ChunkSource, LazyBlob, NoCache
from dsec_store.descriptor import Blob, LayerDescriptor
from dsec_store.digest import Digest
from dsec_store.errors import Corrupt, Denied, NotFound, Unavailable
from dsec_store.fault import Fault, FaultBlobs, scripted
from dsec_store.layerfiles import LayerFiles, NodeBlobs
from dsec_store.meter import MeteredBlobs
from dsec_store.objects import Objects
from tests.dsec_store.blobmaker import PATIENCE, flipped, in_threads, noise, store_blob

DATA = noise(60_000, "layer")
METADATA = b"metadata image " * 50


@pytest.fixture
def metered() -> MeteredBlobs:
    return MeteredBlobs(MemoryBlobs())


@pytest.fixture
def objects(metered: MeteredBlobs) -> Objects:
    return Objects(metered)


@pytest.fixture
def layer(objects: Objects) -> LayerDescriptor:
    """A stored layer around `DATA`; its metadata image is none, which nobody here looks into."""
    blob = store_blob(objects, DATA)
    chunk_map = objects.put_chunk_map(blob.chunk_map)
    objects.put_locator(chunk_map, blob.locations)
    return LayerDescriptor(
        metadata=objects.put_metadata(METADATA),
        blobs=(Blob(chunk_map, len(DATA)),),
        inodes=2,
        has_root=True,
        chunker=DEFAULT,
        diff_id=None,
    )


@pytest.fixture
def files(tmp_path: Path) -> LayerFiles:
    return LayerFiles(tmp_path)


def everything(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def node_blobs(files: LayerFiles, objects: Objects) -> NodeBlobs:
    return NodeBlobs(files, objects, ChunkSource(objects.blobs, NoCache()))


def move_pack(objects: Objects, layer: LayerDescriptor) -> None:
    """What gc does: the chunks lie in another pack, the locator says so, the old pack is gone."""
    locations = objects.locator(layer.blobs[0].name)
    (old,) = {location.pack for location in locations}
    data = objects.blobs.get(keys.pack(old)) + b"moved"
    new = objects.put_pack(data)
    objects.put_locator(
        layer.blobs[0].chunk_map, [type(at)(new, at.offset, at.stored, at.encoding) for at in locations]
    )
    objects.blobs.delete(keys.pack(old))


def test_three_files_a_layer(objects: Objects, layer: LayerDescriptor, files: LayerFiles, tmp_path: Path) -> None:
    files.fetch(objects, layer)
    blob = layer.blobs[0].name
    assert everything(tmp_path) == {
        f"m/{layer.metadata.digest.hex}.erofs": METADATA,
        f"c/{blob.hex}.map": objects.chunk_map_bytes(layer.blobs[0].chunk_map),
        f"c/{blob.hex}.locator": objects.locator_bytes(blob),
    }
    assert files.metadata_path(layer).read_bytes() == METADATA
    assert files.blobs() == [blob.hex]
    assert files.chunk_map(blob).blob_size == len(DATA)
    assert files.locator(blob, len(files.chunk_map(blob))) == objects.locator(blob)


def test_each_blob_of_a_layer_has_its_files(
    objects: Objects, layer: LayerDescriptor, files: LayerFiles, tmp_path: Path
) -> None:
    """The recipe is no device: its blob stays in the store."""
    second, third = (store_blob(objects, noise(9_000, name)) for name in ("second", "recipe"))
    blobs = [Blob(objects.put_chunk_map(blob.chunk_map), len(blob.data)) for blob in (second, third)]
    for blob, stored in zip(blobs, (second, third), strict=True):
        objects.put_locator(blob.chunk_map, stored.locations)
    both = replace(layer, blobs=(*layer.blobs, blobs[0]), recipe=blobs[1])
    files.fetch(objects, both)
    assert files.blobs() == sorted(blob.name.hex for blob in both.blobs)
    assert len(everything(tmp_path)) == 1 + 2 * 2
    assert node_blobs(files, objects).open(blobs[0].name.hex).read(0, 2**20) == second.data
    files.remove(both)
    assert everything(tmp_path) == {}


def test_a_layer_without_contents_has_one_file(
    objects: Objects, layer: LayerDescriptor, files: LayerFiles, tmp_path: Path
) -> None:
    files.fetch(objects, replace(layer, blobs=()))
    assert everything(tmp_path) == {f"m/{layer.metadata.digest.hex}.erofs": METADATA}
    assert files.blobs() == []


def test_what_is_here_is_not_fetched_again(
    metered: MeteredBlobs, objects: Objects, layer: LayerDescriptor, files: LayerFiles
) -> None:
    files.fetch(objects, layer)
    before = metered.snapshot().total
    files.fetch(objects, layer)
    assert metered.snapshot().total == before


@pytest.mark.parametrize("name", ["*.erofs", "*.map"])
def test_damaged_files_are_fetched_again(
    objects: Objects, layer: LayerDescriptor, files: LayerFiles, tmp_path: Path, name: str
) -> None:
    files.fetch(objects, layer)
    right = everything(tmp_path)
    (path,) = tmp_path.rglob(name)
    data = path.read_bytes()
    for damage in (flipped(data, 9), data[:-1], data + b"?", b""):
        path.write_bytes(damage)
        files.fetch(objects, layer)
        assert everything(tmp_path) == right


def test_removed_files_are_gone(objects: Objects, layer: LayerDescriptor, files: LayerFiles, tmp_path: Path) -> None:
    files.fetch(objects, layer)
    for _ in range(2):
        files.remove(layer)
        assert (everything(tmp_path), files.blobs()) == ({}, [])
    digest = layer.blobs[0].name
    with pytest.raises(NotFound, match=f"no chunk map {digest}"):
        files.chunk_map(digest)
    with pytest.raises(NotFound, match=f"no locator of chunk map {digest}"):
        files.locator(digest, 1)


def test_nothing_here_yet(files: LayerFiles) -> None:
    assert files.blobs() == []


def test_what_is_damaged_in_the_store_never_arrives(
    objects: Objects, layer: LayerDescriptor, files: LayerFiles
) -> None:
    key = keys.metadata(layer.metadata.digest)
    objects.blobs.put(key, flipped(objects.blobs.get(key), 20))
    with pytest.raises(Corrupt, match="metadata image"):
        files.fetch(objects, layer)
    assert not files.metadata_path(layer).exists()


def test_many_fetch_the_same_layer(objects: Objects, layer: LayerDescriptor, files: LayerFiles, tmp_path: Path) -> None:
    assert in_threads([lambda: files.fetch(objects, layer)] * 8) == [None] * 8
    assert len(everything(tmp_path)) == 3


def test_a_full_disk_is_refused_with_a_way_out_and_leaves_nothing(
    objects: Objects, layer: LayerDescriptor, files: LayerFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(Denied, match="No space left on device; free space below DSEC_ROOT"):
            files.fetch(objects, layer)
    assert everything(tmp_path) == {}
    files.fetch(objects, layer)


def test_a_relative_root_stays_relative(
    objects: Objects, layer: LayerDescriptor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = LayerFiles(Path())
    files.fetch(objects, layer)
    assert str(files.metadata_path(layer)) == f"m/{layer.metadata.digest.hex}.erofs"


# -- the blobs of a node ---------------------------------------------------------------------------------------------


def test_a_blob_is_read(objects: Objects, layer: LayerDescriptor, files: LayerFiles) -> None:
    files.fetch(objects, layer)
    blobs = node_blobs(files, objects)
    (name,) = blobs.names()
    blob = blobs.open(name)
    assert (blob.size, blob.read(0, 2**20)) == (len(DATA), DATA)
    assert blobs.open(name) is blob
    assert blobs.figures() == {name: blob}


@pytest.mark.parametrize("name", ["", "x", "../m", "0" * 63, "A" * 64, "0" * 64])
def test_names_that_lead_nowhere(files: LayerFiles, objects: Objects, name: str) -> None:
    with pytest.raises(NotFound):
        node_blobs(files, objects).open(name)


@pytest.mark.parametrize("local", [b"", b"?", None])
def test_a_damaged_chunk_map_is_asked_for_and_replaced(
    objects: Objects, layer: LayerDescriptor, files: LayerFiles, tmp_path: Path, local: bytes | None
) -> None:
    files.fetch(objects, layer)
    path = tmp_path / "c" / f"{layer.blobs[0].name.hex}.map"
    path.unlink() if local is None else path.write_bytes(local)
    assert node_blobs(files, objects).open(layer.blobs[0].name.hex).read(0, 2**20) == DATA
    assert path.read_bytes() == objects.chunk_map_bytes(layer.blobs[0].chunk_map)


def test_a_full_disk_does_not_keep_a_chunk_map_from_its_reader(
    objects: Objects, layer: LayerDescriptor, files: LayerFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.fetch(objects, layer)
    (tmp_path / "c" / f"{layer.blobs[0].name.hex}.map").write_bytes(b"?")

    def full(*_: object) -> None:
        raise Denied("full")

    monkeypatch.setattr(files, "keep_chunk_map", full)
    assert node_blobs(files, objects).open(layer.blobs[0].name.hex).read(0, 2**20) == DATA


def test_a_chunk_map_that_cannot_be_had_is_named_until_it_can(
    objects: Objects, layer: LayerDescriptor, files: LayerFiles, tmp_path: Path
) -> None:
    files.fetch(objects, layer)
    key, hex = keys.chunk_map(layer.blobs[0].name), layer.blobs[0].name.hex
    right = objects.blobs.get(key)
    for path in tmp_path.rglob("*.map"):
        path.write_bytes(flipped(right, 30))
    objects.blobs.put(key, flipped(right, 40))
    source = ChunkSource(objects.blobs, NoCache())
    blobs = NodeBlobs(files, objects, source)
    for _ in range(2):
        with pytest.raises(Corrupt, match=f"chunk map blake3:{hex}"):
            blobs.open(hex)
        assert list(source.failures()) == [f"chunk map blake3:{hex}"]
        assert blobs.figures() == {}
    objects.blobs.put(key, right)
    assert blobs.open(hex).read(0, 10) == DATA[:10]
    assert source.failures() == {}


def test_a_name_that_leads_nowhere_asks_nobody(metered: MeteredBlobs, objects: Objects, files: LayerFiles) -> None:
    source = ChunkSource(objects.blobs, NoCache())
    with pytest.raises(NotFound):
        NodeBlobs(files, objects, source).open("0" * 64)
    assert metered.snapshot().total.requests == 0
    assert source.failures() == {}


def test_a_blob_that_is_being_opened_holds_back_no_other(
    objects: Objects, layer: LayerDescriptor, files: LayerFiles, tmp_path: Path
) -> None:
    """The first one's chunk map is on its way from the store when the second one is opened."""
    files.fetch(objects, layer)
    slow = layer.blobs[0].name
    (tmp_path / "c" / f"{slow.hex}.map").write_bytes(b"?")
    other = ChunkMap([bytes(32)], [1]).encode()
    files.keep_chunk_map(Digest.of(other), other)
    arrived, go_on = threading.Event(), threading.Event()

    class Gate(AroundBlobs):
        def get(self, key: str, limit: int | None = None) -> bytes:
            arrived.set()
            assert go_on.wait(PATIENCE)
            return self.inner.get(key, limit)

    blobs = node_blobs(files, Objects(Gate(objects.blobs)))
    with ThreadPoolExecutor(3) as pool:
        opening = [pool.submit(blobs.open, slow.hex) for _ in range(2)]
        assert arrived.wait(PATIENCE)
        try:
            assert pool.submit(blobs.open, Digest.of(other).hex).result(PATIENCE).size == 1
            assert list(blobs.figures()) == [Digest.of(other).hex]
        finally:
            go_on.set()
        assert opening[0].result(PATIENCE) is opening[1].result(PATIENCE)


@pytest.mark.parametrize("open_other", [NodeBlobs.open, NodeBlobs.at_hand])
def test_removed_layers_are_not_kept(
    objects: Objects, layer: LayerDescriptor, files: LayerFiles, open_other: Callable[[NodeBlobs, str], LazyBlob | None]
) -> None:
    blobs, hex = node_blobs(files, objects), layer.blobs[0].name.hex
    other = ChunkMap([bytes(32)], [1]).encode()
    files.keep_chunk_map(Digest.of(other), other)
    files.fetch(objects, layer)
    blobs.open(hex)
    files.remove(layer)
    open_other(blobs, Digest.of(other).hex)
    assert list(blobs.figures()) == [Digest.of(other).hex]
    with pytest.raises(NotFound):
        blobs.open(hex)
    files.fetch(objects, layer)
    assert blobs.open(hex).read(0, 10) == DATA[:10]
    files.remove(layer)
    assert blobs.names() == list(blobs.figures()) == [Digest.of(other).hex]


@pytest.mark.parametrize("local", [b"", b"?", None])
def test_a_damaged_locator_is_asked_for_and_replaced(
    objects: Objects, layer: LayerDescriptor, files: LayerFiles, tmp_path: Path, local: bytes | None
) -> None:
    files.fetch(objects, layer)
    path = tmp_path / "c" / f"{layer.blobs[0].name.hex}.locator"
    path.unlink() if local is None else path.write_bytes(local)
    assert node_blobs(files, objects).open(layer.blobs[0].name.hex).read(0, 2**20) == DATA
    assert path.read_bytes() == objects.locator_bytes(layer.blobs[0].name)


def test_a_stale_locator_is_asked_for_once_and_replaced(
    metered: MeteredBlobs, objects: Objects, layer: LayerDescriptor, files: LayerFiles, tmp_path: Path
) -> None:
    files.fetch(objects, layer)
    move_pack(objects, layer)
    blob = node_blobs(files, objects).open(layer.blobs[0].name.hex)
    before = metered.snapshot().by_operation
    assert in_threads([lambda: blob.read(0, 2**20)] * 16) == [DATA] * 16
    after = metered.snapshot().by_operation
    assert sum(after[op].requests - before[op].requests for op in after if op == "get") == 1
    path = tmp_path / "c" / f"{layer.blobs[0].name.hex}.locator"
    assert path.read_bytes() == objects.locator_bytes(layer.blobs[0].name)


def test_a_full_disk_does_not_keep_a_moved_chunk_from_its_reader(
    objects: Objects, layer: LayerDescriptor, files: LayerFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.fetch(objects, layer)
    move_pack(objects, layer)
    blob = node_blobs(files, objects).open(layer.blobs[0].name.hex)

    def full(*_: object) -> None:
        raise Denied("full")

    monkeypatch.setattr(files, "keep_locator", full)
    assert blob.read(0, 2**20) == DATA


def test_a_locator_of_another_map_is_never_kept(
    objects: Objects, layer: LayerDescriptor, files: LayerFiles, tmp_path: Path
) -> None:
    files.fetch(objects, layer)
    path = tmp_path / "c" / f"{layer.blobs[0].name.hex}.locator"
    right = path.read_bytes()
    objects.put_locator(layer.blobs[0].chunk_map, objects.locator(layer.blobs[0].name)[:1])
    for location in files.locator(layer.blobs[0].name, len(files.chunk_map(layer.blobs[0].name))):
        objects.blobs.delete(keys.pack(location.pack))
    with pytest.raises(Corrupt, match="1 entries for"):
        node_blobs(files, objects).open(layer.blobs[0].name.hex).read(0, 10)
    assert path.read_bytes() == right


def test_an_outage_is_no_absence(objects: Objects, layer: LayerDescriptor, files: LayerFiles) -> None:
    files.fetch(objects, layer)
    away = Objects(FaultBlobs(objects.blobs, scripted(Fault.UNAVAILABLE)))
    blob = node_blobs(files, away).open(layer.blobs[0].name.hex)
    with pytest.raises(Unavailable):
        blob.read(0, 10)
    assert blob.read(0, 10) == DATA[:10]


def test_the_daemon_needs_no_store_for_what_is_local(
    layer: LayerDescriptor, objects: Objects, files: LayerFiles
) -> None:
    files.fetch(objects, layer)
    assert node_blobs(files, Objects(MemoryBlobs())).open(layer.blobs[0].name.hex).size == len(DATA)
    assert Digest.of(DATA).hex not in files.blobs()
