"""Reading chunks: one fetch however many wait, neighbours together, nothing unverified, nobody left waiting."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec_store import chunks, keys
from dsec_store.around import AroundBlobs, Operation
from dsec_store.backends.memory import MemoryBlobs
from dsec_store.blobs import BlobStore
from dsec_store.chunkmap import ChunkLocation, ChunkMap
from dsec_store.chunks import CORRUPT_REPEATS, MAX_REMEMBERED_FAILURES, ChunkSource, Figures, LazyBlob, NoCache, join
from dsec_store.digest import Digest
from dsec_store.errors import Corrupt, Denied, NotFound, StoreError, Unavailable
from dsec_store.fault import Fault, FaultBlobs, scripted, seeded
from dsec_store.meter import MeteredBlobs
from dsec_store.objects import Objects
from dsec_store.pack import PackBuilder
from dsec_store.retry import RetryBlobs, RetryPolicy
from dsec_store.verify import VerifyBlobs
from tests.dsec_store.blobmaker import PATIENCE, StoredBlob, eventually, flipped, in_threads, noise, store_blob

DATA = noise(200_000, "chunks") + bytes(80_000) + b"text " * 10_000
READERS = 32


class DictCache:
    """A cache that keeps everything, and says what it has."""

    def __init__(self) -> None:
        self.kept: dict[bytes, bytes] = {}

    def get(self, digest: bytes, size: int) -> bytes | None:
        return self.kept.get(digest)

    def put(self, digest: bytes, chunk: bytes) -> None:
        assert Digest.of(chunk).raw == digest
        self.kept[digest] = chunk


class Gate(AroundBlobs):
    """Holds back every range request until opened; `arrived` says when one came."""

    def __init__(self, inner: BlobStore) -> None:
        super().__init__(inner)
        self.open = threading.Event()
        self.arrived = threading.Semaphore(0)

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        self.arrived.release()
        assert self.open.wait(PATIENCE)
        return self.inner.get_range(key, offset, length)


class Raising(AroundBlobs):
    """Raises what is no error of a store, as often as `times` says."""

    def __init__(self, inner: BlobStore, error: BaseException, times: int = 1) -> None:
        super().__init__(inner)
        self.error = error
        self.times = times

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        if self.times:
            self.times -= 1
            raise self.error
        return self.inner.get_range(key, offset, length)


class Locator:
    """Gives each of `versions` in turn, when told that the one before is stale; counts the questions."""

    def __init__(self, *versions: Sequence[ChunkLocation]) -> None:
        self.versions = list(versions)
        self.renewed = 0
        self._lock = threading.Lock()

    def __call__(self, stale: Sequence[ChunkLocation] | None) -> Sequence[ChunkLocation]:
        with self._lock:
            if stale is self.versions[0] and len(self.versions) > 1:
                self.renewed += 1
                del self.versions[0]
            return self.versions[0]


@pytest.fixture
def memory() -> MemoryBlobs:
    return MemoryBlobs()


@pytest.fixture
def stored(memory: MemoryBlobs) -> StoredBlob:
    return store_blob(Objects(memory), DATA)


def lazy(stored: StoredBlob, source: ChunkSource) -> LazyBlob:
    return LazyBlob(stored.chunk_map, Locator(stored.locations), source)


def damage(memory: MemoryBlobs, location: ChunkLocation) -> bytes:
    """Flip a bit of one chunk where it lies; the pack as it was."""
    key = keys.pack(location.pack)
    right = memory.get(key)
    memory.put(key, flipped(right, location.offset + location.stored // 2))
    return right


def moved(memory: MemoryBlobs, stored: StoredBlob, *, keep: bool = False) -> list[ChunkLocation]:
    """Put all packs elsewhere, as gc does when it packs anew. Where the chunks are now."""
    new: dict[Digest, Digest] = {}
    for pack in {location.pack for location in stored.locations}:
        data = memory.get(keys.pack(pack)) + b"moved"
        new[pack] = Digest.of(data)
        memory.put(keys.pack(new[pack]), data)
        if not keep:
            memory.delete(keys.pack(pack))
    return [ChunkLocation(new[at.pack], at.offset, at.stored, at.encoding) for at in stored.locations]


# -- what is read ----------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(0, len(DATA) + 10), st.integers(0, len(DATA) + 10))
def test_any_range_is_the_slice(offset: int, length: int) -> None:
    memory = MemoryBlobs()
    stored = store_blob(Objects(memory), DATA)
    for cache in (NoCache(), DictCache()):
        blob = lazy(stored, ChunkSource(memory, cache))
        assert blob.read(offset, length) == blob.read(offset, length) == DATA[offset : offset + length]


def test_reads_end_where_the_blob_ends(memory: MemoryBlobs, stored: StoredBlob) -> None:
    metered = MeteredBlobs(memory)
    blob = lazy(stored, ChunkSource(metered, NoCache()))
    assert blob.size == len(DATA)
    assert blob.read(len(DATA) - 3, 100) == DATA[-3:]
    before = metered.snapshot().total
    assert [blob.read(len(DATA), 1), blob.read(10**15, 5), blob.read(5, 0)] == [b"", b"", b""]
    assert metered.snapshot().total == before


def test_an_empty_blob_needs_no_locator() -> None:
    blob = LazyBlob(ChunkMap([], []), lambda _: pytest.fail("asked"), ChunkSource(MemoryBlobs(), NoCache()))
    assert blob.read(0, 10) == b""


# -- what it costs ---------------------------------------------------------------------------------------------------


def test_neighbours_come_by_one_request(memory: MemoryBlobs, stored: StoredBlob) -> None:
    metered = MeteredBlobs(memory)
    blob = lazy(stored, ChunkSource(metered, NoCache()))
    assert blob.read(0, len(DATA)) == DATA
    traffic = metered.snapshot().by_operation[Operation.GET_RANGE]
    ends = {location.offset + location.stored for location in stored.locations}
    assert (traffic.requests, traffic.bytes_received) == (1, max(ends))


def test_figures_are_exact(memory: MemoryBlobs, stored: StoredBlob) -> None:
    metered = MeteredBlobs(memory)
    source = ChunkSource(metered, DictCache())
    first, second = lazy(stored, source), lazy(stored, source)
    different = dict(zip(stored.chunk_map.digests, stored.chunk_map.sizes, strict=True))
    count, size = len(different), sum(different.values())
    assert count < len(stored.chunk_map)  # zeros and text repeat
    first.read(0, len(DATA))
    wire = metered.snapshot().total.bytes_received
    assert first.figures == Figures(requests=1, wire_bytes=wire, fetched_chunks=count, fetched_bytes=size)
    second.read(0, len(DATA))
    assert second.figures == Figures(hits=count, hit_bytes=size)
    sums = {name: value + asdict(second.figures)[name] for name, value in asdict(first.figures).items()}
    assert asdict(source.figures) == sums


def test_a_cached_chunk_is_not_asked_for(memory: MemoryBlobs, stored: StoredBlob) -> None:
    metered = MeteredBlobs(memory)
    blob = lazy(stored, ChunkSource(metered, DictCache()))
    for _ in range(3):
        assert blob.read(1000, 50_000) == DATA[1000:51_000]
    assert metered.snapshot().total.requests == 1


def test_one_fetch_however_many_wait(memory: MemoryBlobs, stored: StoredBlob) -> None:
    metered = MeteredBlobs(memory)
    gate = Gate(metered)
    source = ChunkSource(gate, DictCache())
    blob = lazy(stored, source)
    with ThreadPoolExecutor(READERS) as pool:
        reads = [pool.submit(blob.read, 10, 100) for _ in range(READERS)]
        eventually(lambda: source.figures.joined_waits == READERS - 1)
        gate.open.set()
        assert {read.result(PATIENCE) for read in reads} == {DATA[10:110]}
    assert metered.snapshot().total.requests == 1
    assert (source.figures.requests, source.figures.fetched_chunks, source.figures.hits) == (1, 1, 0)


def test_one_fetch_per_chunk_of_overlapping_reads(memory: MemoryBlobs, stored: StoredBlob) -> None:
    source = ChunkSource(memory, DictCache())
    blobs = [lazy(stored, source) for _ in range(READERS)]
    results = in_threads(
        [lambda at=at, blob=blob: blob.read(at * 3000, 150_000) for at, blob in enumerate(blobs)]  # type: ignore[misc]
    )
    assert results == [DATA[at * 3000 : at * 3000 + 150_000] for at in range(READERS)]
    wanted = stored.chunk_map.covering(0, (READERS - 1) * 3000 + 150_000)
    assert source.figures.fetched_chunks == len({ref.digest for ref in wanted})


# -- runs ------------------------------------------------------------------------------------------------------------


class At:
    """Something located, for `join`."""

    def __init__(self, offset: int, stored: int, pack: bytes = b"pack") -> None:
        self.location = ChunkLocation(Digest.of(pack), offset, stored, 0)


def runs_of(*items: At) -> list[list[tuple[int, int]]]:
    return [[(item.location.offset, item.location.stored) for item in run] for run in join(items)]


def test_runs_are_in_pack_order() -> None:
    assert runs_of(At(20, 10), At(0, 10), At(10, 10)) == [[(0, 10), (10, 10), (20, 10)]]


def test_a_run_spans_small_gaps_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "MAX_GAP", 5)
    assert runs_of(At(0, 10), At(15, 10), At(31, 10)) == [[(0, 10), (15, 10)], [(31, 10)]]


def test_a_run_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "MAX_JOIN", 20)
    assert runs_of(At(0, 10), At(10, 10), At(20, 1), At(21, 50), At(71, 1)) == [
        [(0, 10), (10, 10)],
        [(20, 1)],
        [(21, 50)],
        [(71, 1)],
    ]


def test_packs_are_never_joined() -> None:
    assert len(join([At(0, 10), At(10, 10, b"other")])) == 2


def test_overlapping_entries_of_a_hostile_locator_are_never_joined() -> None:
    assert len(join([At(0, 100), At(50, 10), At(70, 10)])) == 2


def test_many_runs_come_in_parallel(memory: MemoryBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "MAX_JOIN", 1)
    stored = store_blob(Objects(memory), DATA)
    gate = Gate(memory)
    blob = lazy(stored, ChunkSource(gate, NoCache()))
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(blob.read, 0, len(DATA))
        for _ in range(8):
            assert gate.arrived.acquire(timeout=PATIENCE)
        gate.open.set()
        assert read.result(PATIENCE) == DATA
    assert blob.figures.requests == len(set(stored.chunk_map.digests))


# -- damage ----------------------------------------------------------------------------------------------------------


def test_a_damaged_pack(memory: MemoryBlobs, stored: StoredBlob, caplog: pytest.LogCaptureFixture) -> None:
    """Corrupt by name, never cached, the neighbours unharmed, and healed by the next read once the pack is."""
    cache, victim = DictCache(), stored.chunk_map[3]
    location = stored.locations[3]
    right = damage(memory, location)
    source = ChunkSource(memory, cache)
    blob, name = lazy(stored, source), f"blake3:{victim.digest.hex()}"
    for _ in range(2):
        with pytest.raises(Corrupt, match=rf"^chunk {name} in pack {location.pack}: at byte {location.offset}: "):
            blob.read(0, 100_000)
    assert victim.digest not in cache.kept
    assert len(cache.kept) == len(stored.chunk_map.covering(0, 100_000)) - 1
    assert list(source.failures()) == [name]
    assert source.failures()[name] in caplog.text
    assert blob.figures.failures == 2
    assert blob.figures.requests == 2 * (1 + CORRUPT_REPEATS)
    assert blob.read(victim.address + victim.size, 1000) == DATA[victim.address + victim.size :][:1000]

    memory.put(keys.pack(location.pack), right)
    assert blob.read(0, 100_000) == DATA[:100_000]
    assert not source.failures()
    assert cache.kept[victim.digest] == DATA[victim.address : victim.address + victim.size]


@pytest.mark.parametrize("fault", [Fault.FLIPPED, Fault.STALE, Fault.WRONG_RANGE])
def test_damage_on_the_way_is_asked_for_again(memory: MemoryBlobs, stored: StoredBlob, fault: Fault) -> None:
    faulty = FaultBlobs(memory, scripted(fault))
    source = ChunkSource(faulty, DictCache())
    blob = lazy(stored, source)
    offset = stored.chunk_map[1].address
    assert blob.read(offset, 5000) == DATA[offset : offset + 5000]
    assert faulty.injected == {fault: 1}
    assert (source.figures.failures, source.failures()) == (0, {})
    assert source.figures.requests >= 2


def test_a_locator_that_says_more_bytes_than_the_chunk_has_is_not_followed(
    memory: MemoryBlobs, stored: StoredBlob
) -> None:
    metered = MeteredBlobs(memory)
    first, second = stored.chunk_map[0], stored.chunk_map[1]
    wrong = [replace(stored.locations[0], stored=first.size + 1), *stored.locations[1:]]
    blob = LazyBlob(stored.chunk_map, Locator(wrong), ChunkSource(metered, NoCache()))
    with pytest.raises(Corrupt, match=f"{first.size + 1} bytes stored, of {first.size} plain ones"):
        blob.read(0, 10)
    assert metered.snapshot().total.requests == 0
    with pytest.raises(Corrupt):
        blob.read(0, second.address + 1)
    assert blob.read(second.address, 10) == DATA[second.address :][:10]
    healed = LazyBlob(stored.chunk_map, Locator(wrong, stored.locations), ChunkSource(metered, NoCache()))
    assert healed.read(0, 10) == DATA[:10]


def test_a_map_that_gives_a_chunk_another_size_harms_nobody_else(memory: MemoryBlobs, stored: StoredBlob) -> None:
    """It is read while the right one is on its way, and names it twice, with both sizes."""
    gate = Gate(memory)
    source = ChunkSource(gate, NoCache())
    ref, location = stored.chunk_map[0], stored.locations[0]
    hostile_map = ChunkMap([ref.digest, ref.digest], [ref.size, ref.size + 1])
    hostile = LazyBlob(hostile_map, Locator([location, location]), source)
    with ThreadPoolExecutor(2) as pool:
        wrong = pool.submit(hostile.read, ref.size, 10)
        assert gate.arrived.acquire(timeout=PATIENCE)
        right = pool.submit(lazy(stored, source).read, 0, 100)
        assert gate.arrived.acquire(timeout=PATIENCE)
        gate.open.set()
        assert right.result(PATIENCE) == DATA[:100]
        assert isinstance(wrong.exception(PATIENCE), Corrupt)
    with pytest.raises(Corrupt):
        hostile.read(0, hostile.size)


@pytest.mark.parametrize("fault", [Fault.SHORT, Fault.LONG, Fault.UNAVAILABLE, Fault.LOST])
def test_an_answer_that_is_none_is_unavailable(memory: MemoryBlobs, stored: StoredBlob, fault: Fault) -> None:
    source = ChunkSource(FaultBlobs(memory, scripted(fault)), DictCache())
    blob = lazy(stored, source)
    with pytest.raises(Unavailable, match=r"^chunk blake3:"):
        blob.read(0, 100)
    assert len(source.failures()) == 1
    assert blob.read(0, 100) == DATA[:100]
    assert not source.failures()


def test_a_refusal_keeps_its_class(memory: MemoryBlobs, stored: StoredBlob) -> None:
    blob = lazy(stored, ChunkSource(FaultBlobs(memory, scripted(Fault.DENIED)), NoCache()))
    with pytest.raises(Denied):
        blob.read(0, 100)


@pytest.mark.parametrize("seed", range(4))
def test_only_right_bytes_or_errors(memory: MemoryBlobs, stored: StoredBlob, seed: int) -> None:
    """As wired, over a backend of which every third answer is wrong, short, late, lost or refused."""
    faulty = FaultBlobs(memory, seeded(seed, 0.3), sleep=lambda _: None)
    wired = RetryBlobs(VerifyBlobs(faulty), RetryPolicy(attempts=3), sleep=lambda _: None)
    source = ChunkSource(wired, DictCache())
    blob = lazy(stored, source)
    outcomes = in_threads([lambda at=at: blob.read(at, 30_000) for at in range(0, 250_000, 10_000)])  # type: ignore[misc]
    for at, outcome in zip(range(0, 250_000, 10_000), outcomes, strict=True):
        assert isinstance(outcome, StoreError) or outcome == DATA[at : at + 30_000]
    assert any(isinstance(outcome, bytes) for outcome in outcomes)
    assert not source._flying


def test_the_list_of_failures_is_bounded_and_keeps_the_latest(memory: MemoryBlobs) -> None:
    data = noise((MAX_REMEMBERED_FAILURES + 10) * 16384, "failures")
    stored = store_blob(Objects(memory), data)
    for location in stored.locations:
        memory.delete(keys.pack(location.pack))
    source = ChunkSource(memory, NoCache())
    for ref in stored.chunk_map.covering(0, len(data)):
        with pytest.raises(NotFound):
            lazy(stored, source).read(ref.address, 1)
    latest = [f"blake3:{digest.hex()}" for digest in stored.chunk_map.digests[-MAX_REMEMBERED_FAILURES:]]
    assert list(source.failures()) == latest


# -- chunks that move ------------------------------------------------------------------------------------------------


def test_a_chunk_that_moved_is_looked_for_once(memory: MemoryBlobs, stored: StoredBlob) -> None:
    locator = Locator(stored.locations, moved(memory, stored))
    source = ChunkSource(memory, DictCache())
    blob = LazyBlob(stored.chunk_map, locator, source)
    assert in_threads([lambda: blob.read(0, 50_000)] * READERS) == [DATA[:50_000]] * READERS
    assert locator.renewed == 1
    assert not source.failures()


def test_a_damaged_chunk_is_looked_for_elsewhere(memory: MemoryBlobs, stored: StoredBlob) -> None:
    locator = Locator(stored.locations, moved(memory, stored, keep=True))
    damage(memory, stored.locations[0])
    blob = LazyBlob(stored.chunk_map, locator, ChunkSource(memory, NoCache()))
    assert blob.read(0, 100) == DATA[:100]


def test_a_chunk_that_is_gone_is_named(memory: MemoryBlobs, stored: StoredBlob) -> None:
    pack = stored.locations[0].pack
    memory.delete(keys.pack(pack))
    blob = lazy(stored, ChunkSource(memory, NoCache()))
    with pytest.raises(NotFound, match=rf"^chunk blake3:{stored.chunk_map.digests[0].hex()} in pack {pack}: "):
        blob.read(0, 100)


def test_a_reader_does_not_fail_for_the_old_locator_of_another(memory: MemoryBlobs, stored: StoredBlob) -> None:
    new = moved(memory, stored)
    gate = Gate(memory)
    source = ChunkSource(gate, NoCache())
    old_reader, new_reader = lazy(stored, source), LazyBlob(stored.chunk_map, Locator(new), source)
    with ThreadPoolExecutor(2) as pool:
        old = pool.submit(old_reader.read, 0, 100)
        assert gate.arrived.acquire(timeout=PATIENCE)
        fresh = pool.submit(new_reader.read, 0, 100)
        eventually(lambda: source.figures.joined_waits == 1)
        gate.open.set()
        assert fresh.result(PATIENCE) == DATA[:100]
        assert isinstance(old.exception(PATIENCE), NotFound)


# -- faults of ours --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ZeroDivisionError("ours"), MemoryError(), OSError("ours")])
def test_a_fault_of_ours_leaves_nobody_waiting(memory: MemoryBlobs, stored: StoredBlob, error: Exception) -> None:
    gate = Gate(Raising(memory, error))
    source = ChunkSource(gate, NoCache())
    blob = lazy(stored, source)
    with ThreadPoolExecutor(8) as pool:
        reads = [pool.submit(blob.read, 0, 100) for _ in range(8)]
        eventually(lambda: source.figures.joined_waits == 7)
        gate.open.set()
        assert {type(read.exception(PATIENCE)) for read in reads} == {StoreError}
    assert blob.read(0, 100) == DATA[:100]


def test_an_interrupted_reader_leaves_nobody_waiting(memory: MemoryBlobs, stored: StoredBlob) -> None:
    gate = Gate(Raising(memory, KeyboardInterrupt()))
    source = ChunkSource(gate, NoCache())
    blob = lazy(stored, source)

    def open_when_joined() -> None:
        eventually(lambda: source.figures.joined_waits == 1)
        gate.open.set()

    def join_in() -> bytes:
        assert gate.arrived.acquire(timeout=PATIENCE)
        return blob.read(0, 100)

    with ThreadPoolExecutor(2) as pool:
        pool.submit(open_when_joined)
        waiting = pool.submit(join_in)
        with pytest.raises(KeyboardInterrupt):
            blob.read(0, 100)
        with pytest.raises(StoreError, match="interrupted"):
            waiting.result(PATIENCE)
    assert blob.read(0, 100) == DATA[:100]
    assert not source._flying


class BrokenCache(NoCache):
    """Breaks the promise never to raise."""

    def put(self, digest: bytes, chunk: bytes) -> None:
        raise ZeroDivisionError("cache")


def test_a_broken_cache_leaves_nobody_waiting(memory: MemoryBlobs, stored: StoredBlob) -> None:
    source = ChunkSource(memory, BrokenCache())
    blob = lazy(stored, source)
    outcomes = in_threads([lambda: blob.read(0, 100_000)] * 8)
    assert all(isinstance(outcome, StoreError) for outcome in outcomes)
    assert not source._flying


# -- strange stores --------------------------------------------------------------------------------------------------


def hostile_locations(stored: StoredBlob) -> Iterator[tuple[str, list[ChunkLocation]]]:
    first, *rest = stored.locations
    changes: dict[str, Callable[[ChunkLocation], ChunkLocation]] = {
        "beyond the end": lambda at: ChunkLocation(at.pack, 2**32 - 1, at.stored, at.encoding),
        "too long": lambda at: ChunkLocation(at.pack, at.offset, 2**32 - 1, at.encoding),
        "too short": lambda at: ChunkLocation(at.pack, at.offset, at.stored - 1, at.encoding),
        "another chunk's": lambda at: rest[0],
        "unknown encoding": lambda at: ChunkLocation(at.pack, at.offset, at.stored, 77),
        "wrong encoding": lambda at: ChunkLocation(at.pack, at.offset, at.stored, 1 - at.encoding),
        "wrong pack": lambda at: ChunkLocation(Digest.of(b"none"), at.offset, at.stored, at.encoding),
    }
    for name, change in changes.items():
        yield name, [change(first), *rest]


def test_a_hostile_locator_gives_errors_only(memory: MemoryBlobs, stored: StoredBlob) -> None:
    for name, locations in hostile_locations(stored):
        blob = LazyBlob(stored.chunk_map, Locator(locations), ChunkSource(memory, NoCache()))
        with pytest.raises((Corrupt, NotFound)):
            pytest.fail(f"{name}: {len(blob.read(0, 100))} bytes were served")


def test_a_pack_of_another_content_is_corrupt(memory: MemoryBlobs, stored: StoredBlob) -> None:
    builder = PackBuilder()
    builder.add(bytes(32), 9, 0, noise(len(DATA)))
    memory.put(keys.pack(stored.locations[0].pack), builder.seal())
    with pytest.raises(Corrupt, match=re.escape(str(stored.locations[0].pack))):
        lazy(stored, ChunkSource(memory, NoCache())).read(0, 100)
