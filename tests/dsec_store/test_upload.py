"""From a stream to packs: the same objects at any thread count, nothing twice, and nothing referenced after a crash."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

import pytest

from dsec_store import chunker, compression, keys, pack
from dsec_store import upload as upload_module
from dsec_store.around import AroundBlobs, Operation, Request
from dsec_store.backends.memory import MemoryBlobs
from dsec_store.blobs import BlobStore
from dsec_store.chunkmap import ChunkLocation
from dsec_store.chunks import ChunkSource, LazyBlob, NoCache
from dsec_store.digest import Digest
from dsec_store.errors import Denied, Unavailable
from dsec_store.fault import Fault, FaultBlobs, Plan
from dsec_store.meter import MeteredBlobs
from dsec_store.objects import Objects
from dsec_store.upload import BATCHES_AHEAD, INDEX_READERS, UPLOADS, ChunkIndex, Upload
from tests.dsec_store.blobmaker import PATIENCE, SMALL, StoredBlob, flipped, noise, store_blob

T = TypeVar("T")

DATA = noise(400_000, "one") + bytes(200_000) + b"text " * 40_000 + noise(300_000, "two") + noise(100_000, "one")
"""Incompressible, empty, compressible, and repeated stretches."""


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that little data makes many windows, batches and packs."""
    monkeypatch.setattr(chunker, "WINDOW", 40_000)
    monkeypatch.setattr(upload_module, "BATCH", 50_000)
    for module in (pack, upload_module):
        monkeypatch.setattr(module, "PACK_SIZE", 100_000)


def contents(blobs: BlobStore) -> dict[str, bytes]:
    return {stat.key: blobs.get(stat.key) for stat in blobs.list("")}


def families(blobs: BlobStore) -> set[str]:
    return {key.partition("/")[0] for key in contents(blobs)}


def read_back(objects: Objects, blob: StoredBlob) -> bytes:
    source = ChunkSource(objects.blobs, NoCache())
    return LazyBlob(blob.chunk_map, lambda _: blob.locations, source).read(0, len(blob.data))


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(("chunk", "pack"))]


def write_all(objects: Objects, data: bytes, workers: int) -> Upload:
    """Write piece by piece, with a cut in the middle."""
    with Upload(objects, ChunkIndex(objects), workers) as upload:
        writer = upload.blob(SMALL)
        for start in range(0, len(data), 50_000):
            writer.write(data[start : start + 50_000])
            if start == 500_000:
                writer.cut()
        writer.finish()
        upload.finish()
    return upload


def test_what_was_written_is_read() -> None:
    objects = Objects(MemoryBlobs())
    blob = store_blob(objects, DATA)
    assert read_back(objects, blob) == DATA
    assert blob.chunk_map.blob_size == len(DATA)
    assert len(objects.packs()) > 3


def test_nothing_written_nothing_stored() -> None:
    objects = Objects(MemoryBlobs())
    blob = store_blob(objects, b"")
    assert (len(blob.chunk_map), blob.locations, contents(objects.blobs)) == (0, [], {})


def test_the_same_objects_at_any_thread_count() -> None:
    stores = []
    for workers in (1, 2, 8, 8):
        objects = Objects(MemoryBlobs())
        write_all(objects, DATA, workers)
        stores.append(contents(objects.blobs))
    assert stores[0] == stores[1] == stores[2] == stores[3]
    assert {key.partition("/")[0] for key in stores[0]} == {"packs", "indexes"}


def test_a_pack_holds_each_chunk_once_and_is_named_by_its_bytes() -> None:
    objects = Objects(MemoryBlobs())
    write_all(objects, DATA, 4)
    held = [chunk.digest for digest in objects.packs() for chunk in objects.pack_chunks(digest)]
    assert len(held) == len(set(held))
    assert all(keys.pack(Digest.of(data)) == key for key, data in contents(objects.blobs).items() if "packs" in key)


def test_the_index_is_what_the_packs_say() -> None:
    objects = Objects(MemoryBlobs())
    write_all(objects, DATA, 4)
    assert dict(objects.indexes()) == {digest: objects.pack_chunks(digest) for digest in objects.packs()}


def test_a_second_write_stores_nothing() -> None:
    metered = MeteredBlobs(MemoryBlobs())
    objects = Objects(metered)
    first = write_all(objects, DATA, 2)
    before = metered.snapshot().by_operation[Operation.PUT]
    second = write_all(objects, DATA, 2)
    assert metered.snapshot().by_operation[Operation.PUT] == before
    assert (first.new_packs, second.new_packs, second.new_bytes) == (before.requests - 1, 0, 0)
    assert 0 < first.new_bytes < before.bytes_sent


def test_known_chunks_are_not_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = Objects(MemoryBlobs())
    write_all(objects, DATA, 2)
    monkeypatch.setattr(compression, "encode", lambda _: pytest.fail("compressed again"))
    write_all(objects, DATA, 2)


def test_one_index_serves_many_blobs() -> None:
    objects = Objects(MemoryBlobs())
    index = ChunkIndex(objects)
    first, second = store_blob(objects, DATA, index=index), store_blob(objects, DATA, index=index)
    assert second.locations == first.locations
    assert len(list(objects.index_digests())) == 1


# -- packs that were lost or damaged --------------------------------------------------------------------------------


def test_chunks_of_a_lost_pack_are_stored_again() -> None:
    objects = Objects(MemoryBlobs())
    first = store_blob(objects, DATA)
    objects.blobs.delete(keys.pack(first.locations[0].pack))
    assert read_back(objects, store_blob(objects, DATA)) == DATA


def test_chunks_beyond_the_end_of_a_cut_pack_are_stored_again() -> None:
    objects = Objects(MemoryBlobs())
    first = store_blob(objects, DATA)
    key = keys.pack(first.locations[0].pack)
    objects.blobs.put(key, objects.blobs.get(key)[:50_000])
    again = store_blob(objects, DATA)
    assert again.locations[0] == first.locations[0]
    assert read_back(objects, again) == DATA


def test_a_damaged_index_costs_chunks_and_not_the_build() -> None:
    objects = Objects(MemoryBlobs())
    store_blob(objects, DATA)
    (digest,) = objects.index_digests()
    objects.blobs.put(keys.index(digest), flipped(objects.blobs.get(keys.index(digest)), 100))
    again = store_blob(objects, DATA)
    assert read_back(objects, again) == DATA
    assert dict(objects.indexes()).keys() == {location.pack for location in again.locations}  # and it is whole again


def test_an_index_that_vanishes_while_it_is_listed_is_passed_over() -> None:
    objects = Objects(MemoryBlobs())
    store_blob(objects, DATA)
    (digest,) = objects.index_digests()

    class Forgetful(AroundBlobs):
        def get(self, key: str, limit: int | None = None) -> bytes:
            self.inner.delete(keys.index(digest))
            return self.inner.get(key, limit)

    assert Digest.of(b"anything").raw not in ChunkIndex(Objects(Forgetful(objects.blobs)))


def damage(objects: Objects, location: ChunkLocation) -> None:
    """Flip a bit of a chunk where it lies."""
    key = keys.pack(location.pack)
    objects.blobs.put(key, flipped(objects.blobs.get(key), location.offset + location.stored // 2))


def test_with_verify_chunks_of_a_damaged_pack_are_stored_again() -> None:
    metered = MeteredBlobs(MemoryBlobs())
    objects = Objects(metered)
    first = store_blob(objects, DATA)
    damage(objects, first.locations[0])
    assert store_blob(objects, DATA).locations == first.locations
    data = noise(30_000, "new") + DATA
    again = store_blob(objects, data, index=ChunkIndex(objects, verify=True))
    assert read_back(objects, again) == data
    assert {at.pack for at in first.locations} - {at.pack for at in again.locations} == {first.locations[0].pack}

    puts = metered.snapshot().by_operation[Operation.PUT].requests
    for _ in range(2):
        assert store_blob(objects, data, index=ChunkIndex(objects, verify=True)).locations == again.locations
    assert metered.snapshot().by_operation[Operation.PUT].requests == puts


def test_with_verify_a_pack_that_is_made_again_counts_from_then_on() -> None:
    metered = MeteredBlobs(MemoryBlobs())
    objects = Objects(metered)
    first = store_blob(objects, DATA)
    damage(objects, first.locations[0])
    index = ChunkIndex(objects, verify=True)
    again = store_blob(objects, DATA, index=index)
    assert (again.locations, read_back(objects, again)) == (first.locations, DATA)
    puts = metered.snapshot().by_operation[Operation.PUT].requests
    store_blob(objects, DATA, index=index)
    assert metered.snapshot().by_operation[Operation.PUT].requests == puts


def test_with_verify_a_pack_is_read_once_and_only_if_it_is_needed() -> None:
    metered = MeteredBlobs(MemoryBlobs())
    objects = Objects(metered)
    store_blob(objects, noise(300_000, "not needed"))
    needed = {at.pack for at in store_blob(objects, DATA).locations}
    index = ChunkIndex(objects, verify=True)
    before = metered.snapshot().by_operation[Operation.GET].requests
    for _ in range(2):
        store_blob(objects, DATA, index=index)
        assert metered.snapshot().by_operation[Operation.GET].requests - before == len(needed)


def test_indexes_are_read_beside_each_other() -> None:
    objects = Objects(MemoryBlobs())
    blobs = [store_blob(objects, noise(20_000, f"blob {number}")) for number in range(INDEX_READERS)]
    all_there = threading.Barrier(INDEX_READERS)

    class Together(AroundBlobs):
        def get(self, key: str, limit: int | None = None) -> bytes:
            all_there.wait(PATIENCE)
            return self.inner.get(key, limit)

    index = ChunkIndex(Objects(Together(objects.blobs)))
    assert all(digest in index for blob in blobs for digest in blob.chunk_map.digests)


def test_an_outage_while_indexes_are_read_is_told() -> None:
    objects = Objects(MemoryBlobs())
    store_blob(objects, DATA)

    def plan(request: Request) -> Fault | None:
        return Fault.UNAVAILABLE if request.operation is Operation.GET else None

    with pytest.raises(Unavailable):
        ChunkIndex(Objects(FaultBlobs(objects.blobs, plan)))


# -- crashes ---------------------------------------------------------------------------------------------------------


def failing_put(number: int, fault: Fault, family: str = "packs") -> Plan:
    """A plan by which put number `number` of `family` fails."""
    seen = iter(range(1_000_000))

    def plan(request: Request) -> Fault | None:
        put = request.operation is Operation.PUT and request.key.startswith(family)
        return fault if put and next(seen) == number else None

    return plan


@pytest.mark.parametrize("number", [0, 2, 5])
@pytest.mark.parametrize("fault", [Fault.DENIED, Fault.UNAVAILABLE, Fault.LOST])
def test_a_failed_pack_leaves_nothing_referenced_and_no_thread(number: int, fault: Fault) -> None:
    blobs = MemoryBlobs()
    with pytest.raises((Denied, Unavailable)):
        write_all(Objects(FaultBlobs(blobs, failing_put(number, fault))), DATA, 4)
    assert families(blobs) <= {"packs"}
    assert not our_threads()
    again = store_blob(Objects(blobs), DATA)
    assert read_back(Objects(blobs), again) == DATA


def test_a_failed_index_leaves_nothing_referenced_and_the_next_blob_does_not_rely_on_it() -> None:
    blobs = MemoryBlobs()
    objects = Objects(FaultBlobs(blobs, failing_put(0, Fault.DENIED, "indexes")))
    index = ChunkIndex(objects)
    with pytest.raises(Denied):
        store_blob(objects, DATA, index=index)
    assert families(blobs) == {"packs"}
    again = store_blob(objects, DATA, index=index)
    assert dict(objects.indexes()).keys() == {location.pack for location in again.locations}


def test_a_reader_that_fails_in_the_middle_leaves_no_thread() -> None:
    objects = Objects(MemoryBlobs())
    with suppress(ZeroDivisionError), Upload(objects, ChunkIndex(objects)) as upload:
        upload.blob(SMALL).write(DATA)
        raise ZeroDivisionError
    assert families(objects.blobs) <= {"packs"}
    assert not our_threads()


# -- bounds ----------------------------------------------------------------------------------------------------------


class Gate(AroundBlobs):
    """Holds back every put until opened; counts how many wait at once."""

    def __init__(self, inner: BlobStore) -> None:
        super().__init__(inner)
        self.open = threading.Event()
        self.arrived = threading.Semaphore(0)
        self.waiting = self.most = 0
        self._lock = threading.Lock()

    def put(self, key: str, data: bytes | memoryview) -> None:
        with self._lock:
            self.waiting += 1
            self.most = max(self.most, self.waiting)
        self.arrived.release()
        assert self.open.wait(PATIENCE)
        self.inner.put(key, data)
        with self._lock:
            self.waiting -= 1


def counted(call: Callable[[], T], note: Callable[[], None]) -> T:
    note()
    return call()


def test_a_slow_store_holds_the_writer_back(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(MemoryBlobs())
    upload = Upload(Objects(gate), ChunkIndex(Objects(gate)), workers=4)
    writer = upload.blob(SMALL)
    waiting, encode = [], compression.encode
    monkeypatch.setattr(
        compression, "encode", lambda data: counted(lambda: encode(data), lambda: waiting.append(len(writer._encoding)))
    )
    data = noise(3_000_000, "much")

    def write() -> None:
        for start in range(0, len(data), 10_000):
            writer.write(data[start : start + 10_000])
        writer.finish()
        upload.finish()

    with upload, ThreadPoolExecutor(1) as other:
        writing = other.submit(write)
        for _ in range(UPLOADS):
            assert gate.arrived.acquire(timeout=PATIENCE)
        assert not writing.done()
        gate.open.set()
        writing.result(PATIENCE)
    assert gate.most == UPLOADS
    assert max(waiting) <= 4 + BATCHES_AHEAD
    assert len(waiting) > 100


def test_as_many_threads_as_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5, 7})
    objects = Objects(MemoryBlobs())
    with Upload(objects, ChunkIndex(objects)) as upload:
        assert (upload.workers, upload._pool._max_workers) == (3, 3)
