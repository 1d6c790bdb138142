"""Several uploads with one index: each chunk is stored once, nobody waits for ever, and a failure is told."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from dsec_store import chunker, pack
from dsec_store import upload as upload_module
from dsec_store.around import Operation, Request
from dsec_store.backends.memory import MemoryBlobs
from dsec_store.chunkmap import ChunkMap
from dsec_store.digest import Digest
from dsec_store.errors import Corrupt, Denied, StoreError, Unavailable
from dsec_store.fault import Fault, FaultBlobs
from dsec_store.objects import Objects
from dsec_store.pack import PackedChunk
from dsec_store.upload import BlobWriter, ChunkIndex, Upload
from tests.dsec_store.blobmaker import PATIENCE, SMALL, StoredBlob, in_threads, noise
from tests.dsec_store.test_upload import read_back

DATA = noise(1_000_000, "shared")


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that little data makes many windows, batches and packs."""
    monkeypatch.setattr(chunker, "WINDOW", 40_000)
    monkeypatch.setattr(upload_module, "BATCH", 50_000)
    for module in (pack, upload_module):
        monkeypatch.setattr(module, "PACK_SIZE", 100_000)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(("chunk", "pack"))]


def write(writer: BlobWriter, data: bytes) -> None:
    for start in range(0, len(data), 10_000):
        writer.write(data[start : start + 10_000])


def finished(upload: Upload, writer: BlobWriter) -> ChunkMap:
    chunk_map = writer.finish()
    upload.finish()
    return chunk_map


def held(objects: Objects) -> list[bytes]:
    """Every chunk of every pack."""
    return [chunk.digest for digest in objects.packs() for chunk in objects.pack_chunks(digest)]


def blob(upload: Upload, chunk_map: ChunkMap) -> StoredBlob:
    return StoredBlob(DATA, chunk_map, upload.locate(chunk_map))


# -- claims ------------------------------------------------------------------------------------------------------------


def test_a_claim_is_given_once() -> None:
    index = ChunkIndex(Objects(MemoryBlobs()))
    chunk = Digest.of(b"chunk").raw
    with Upload(index._objects, index, 1) as one, Upload(index._objects, index, 1) as other:
        assert index.claim(chunk, one)
        assert not index.claim(chunk, other)
        assert not index.claim(chunk, one), "its first place counts"
        assert chunk in index
        index.abandon(one)
        assert chunk not in index
        assert index.claim(chunk, other)
        where = Digest.of(b"pack")
        index.add(where, [PackedChunk(chunk, 0, 5, 5, 0)])
        assert index.locate(chunk).pack == where
        assert not index.claim(chunk, one)


def test_what_another_upload_has_claimed_is_stored_when_it_is_needed() -> None:
    objects = Objects(MemoryBlobs())
    index = ChunkIndex(objects)
    with Upload(objects, index, 2) as early, Upload(objects, index, 2) as late:
        first, second = early.blob(SMALL), late.blob(SMALL)
        write(second, DATA)  # not finished
        write(first, DATA)
        chunk_map = finished(early, first)
        assert read_back(objects, blob(early, chunk_map)) == DATA
        again = finished(late, second)
        assert again.encode() == chunk_map.encode()
        assert read_back(objects, blob(late, again)) == DATA
        assert late.new_packs > 0
    assert len(held(objects)) == len(set(held(objects)))
    assert {digest for digest, _ in objects.indexes()} == set(objects.packs())


def test_uploads_need_each_other() -> None:
    """Each has claimed what the other one needs."""
    objects = Objects(MemoryBlobs())
    index = ChunkIndex(objects)
    one, other = noise(800_000, "one"), noise(800_000, "other")
    with Upload(objects, index, 2) as first, Upload(objects, index, 2) as second:
        writers = first.blob(SMALL), second.blob(SMALL)
        for writer, data in zip(writers, (one, other), strict=True):
            write(writer, data)
            writer.cut()
        for writer, data in zip(writers, (other, one), strict=True):
            write(writer, data)
        for upload, writer, data in ((first, writers[0], one + other), (second, writers[1], other + one)):
            chunk_map = finished(upload, writer)
            assert read_back(objects, StoredBlob(data, chunk_map, upload.locate(chunk_map))) == data
    assert len(held(objects)) == len(set(held(objects)))


@pytest.mark.parametrize("round_", range(5))
def test_many_threads_store_the_same(round_: int) -> None:
    objects = Objects(MemoryBlobs())
    index = ChunkIndex(objects)
    together = threading.Barrier(4)

    def run(number: int) -> StoredBlob:
        own = noise(50_000 * (number + round_), f"own {number}")
        with Upload(objects, index, 2) as upload:
            writer = upload.blob(SMALL)
            together.wait(PATIENCE)
            write(writer, own)
            writer.cut()
            write(writer, DATA)
            chunk_map = finished(upload, writer)
            return StoredBlob(own + DATA, chunk_map, upload.locate(chunk_map))

    for stored in in_threads([lambda number=number: run(number) for number in range(4)]):  # type: ignore[misc]
        assert isinstance(stored, StoredBlob)
        assert read_back(objects, stored) == stored.data
    assert len(held(objects)) == len(set(held(objects)))


# -- one of them fails -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "told"), [(None, Unavailable), (Corrupt("layer 2"), Corrupt), (OSError(), Unavailable)]
)
def test_who_needs_a_chunk_of_an_upload_that_failed_is_told(
    error: BaseException | None, told: type[StoreError]
) -> None:
    objects = Objects(MemoryBlobs())
    index = ChunkIndex(objects)
    failing = Upload(objects, index, 2)
    write(failing.blob(SMALL), DATA)
    with Upload(objects, index, 2) as upload:
        writer = upload.blob(SMALL)
        write(writer, DATA)
        chunk_map = finished(upload, writer)
        failing.close(error)
        with pytest.raises(told, match="layer 2" if told is Corrupt else "was not stored: another upload failed"):
            upload.locate(chunk_map)
    with Upload(objects, index, 2) as upload:
        writer = upload.blob(SMALL)
        write(writer, DATA)
        assert read_back(objects, blob(upload, finished(upload, writer))) == DATA


def test_a_failure_inside_the_with_statement_is_the_one_that_is_told() -> None:
    objects = Objects(MemoryBlobs())
    index = ChunkIndex(objects)
    with Upload(objects, index, 2) as upload:
        writer = upload.blob(SMALL)
        with suppress(Corrupt), Upload(objects, index, 2) as failing:
            write(failing.blob(SMALL), DATA)
            write(writer, DATA)
            raise Corrupt("the reason")
        chunk_map = finished(upload, writer)
        with pytest.raises(Corrupt, match="the reason"):
            upload.locate(chunk_map)


def test_a_store_that_refuses_what_is_needed_is_told_to_both() -> None:
    refuse = False

    def plan(request: Request) -> Fault | None:
        return Fault.DENIED if refuse and request.operation is Operation.PUT else None

    objects = Objects(FaultBlobs(MemoryBlobs(), plan))
    index = ChunkIndex(objects)
    with Upload(objects, index, 2) as early, Upload(objects, index, 2) as late:
        first, second = early.blob(SMALL), late.blob(SMALL)
        write(second, DATA)
        write(first, DATA[:300_000])
        chunk_map = finished(early, first)
        refuse = True
        with pytest.raises(Denied):
            early.locate(chunk_map)
        refuse = False
        with pytest.raises(Denied):
            late.locate(finished(late, second))


# -- dropping ----------------------------------------------------------------------------------------------------------


def test_what_is_dropped_is_no_part_of_the_blob() -> None:
    objects = Objects(MemoryBlobs())
    parts = [noise(70_000, "a"), noise(90_000, "b"), noise(30_000, "c")]
    with Upload(objects, ChunkIndex(objects), 2) as upload:
        writer = upload.blob(SMALL)
        write(writer, parts[0])
        for dropped in (noise(120_000, "dropped"), b"short", b""):
            mark = writer.cut()
            before = writer.size
            write(writer, dropped)
            writer.drop(mark)
            assert writer.size == before
        write(writer, parts[1])
        mark = writer.cut()
        write(writer, parts[1])
        writer.drop(mark)
        write(writer, parts[2])
        chunk_map = finished(upload, writer)
        stored = StoredBlob(b"".join(parts), chunk_map, upload.locate(chunk_map))
    assert chunk_map.blob_size == writer.size == len(stored.data)
    assert read_back(objects, stored) == stored.data


def test_a_blob_of_which_all_is_dropped_is_empty() -> None:
    objects = Objects(MemoryBlobs())
    with Upload(objects, ChunkIndex(objects), 2) as upload:
        writer = upload.blob(SMALL)
        mark = writer.cut()
        write(writer, DATA)
        writer.drop(mark)
        assert len(finished(upload, writer)) == 0
