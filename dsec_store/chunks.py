"""Reading chunks: from an address range of a blob to verified bytes.

    READ(offset, length) -> chunk map -> node cache -> (miss) -> one fetch per chunk however many wait for it
        -> neighbours in one pack joined into one range request -> decode -> verify -> admit to the cache -> answer

Nothing unverified leaves this module: a chunk enters the cache or an answer only after its digest and size matched.
What does not verify is asked for again, alone, since the way may have damaged it; the retries of the blob store cannot
do that, for a range has no digest. A chunk that cannot be had is `StoreError` for the readers that wait now, and is not
remembered: the next read tries again. Locking: docs/concurrency.md, "Chunk source".
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar

from dsec_store import compression, keys
from dsec_store.blobs import BlobStore
from dsec_store.bounds import check_length
from dsec_store.chunkmap import ChunkLocation, ChunkMap, ChunkRef
from dsec_store.digest import Digest
from dsec_store.errors import Corrupt, NotFound, StoreError

MAX_JOIN: Final = 4 << 20
"""Stored bytes of one joined range request."""

MAX_GAP: Final = 16 << 10
"""Stored bytes between two wanted chunks that are fetched along rather than asking twice."""

PARALLEL_RUNS: Final = 16
"""Range requests under way at once beside those that the reading threads make themselves."""

CORRUPT_REPEATS: Final = 2
"""How often a chunk that does not verify is asked for again before its readers get an error."""

MAX_REMEMBERED_FAILURES: Final = 64
"""Damaged or missing chunks that are kept by name for `node status`: the latest ones."""

_log: Final = logging.getLogger(__name__)


class ChunkCache(Protocol):
    """Where verified chunks are kept. Both calls are safe from any thread and never raise."""

    def get(self, digest: bytes, size: int) -> bytes | None:
        """The chunk, verified, or None."""
        ...

    def put(self, digest: bytes, chunk: bytes) -> None:
        """Keep `chunk`, which matches `digest`, if there is room."""
        ...


class NoCache:
    """Keeps nothing: for checks and conversions, which read each chunk once."""

    def get(self, digest: bytes, size: int) -> bytes | None:
        return None

    def put(self, digest: bytes, chunk: bytes) -> None:
        return None


@dataclass(slots=True)
class Figures:
    """What reading has cost so far. Bytes are plain unless they say wire.

    requests, wire_bytes            range requests made; bytes of those that were answered
    fetched_chunks, fetched_bytes   chunks that came and verified
    hits, hit_bytes                 chunks that the cache had
    joined_waits                    chunks that another reader was fetching already
    failures                        chunks that could not be had
    """

    requests: int = 0
    wire_bytes: int = 0
    fetched_bytes: int = 0
    fetched_chunks: int = 0
    hits: int = 0
    hit_bytes: int = 0
    joined_waits: int = 0
    failures: int = 0


_Chunks = dict[tuple[bytes, int], bytes]
"""Plain bytes by `ChunkRef.key`."""


@dataclass(slots=True, eq=False)
class _Flight:
    """One chunk on its way: fetched by the reader who began it, awaited by any number of others."""

    chunk: ChunkRef
    location: ChunkLocation
    landed: Future[bytes] = field(default_factory=Future)

    @property
    def name(self) -> str:
        return f"blake3:{self.chunk.digest.hex()}"


class ChunkSource:
    """Verified chunks of one store for all blobs of a process: cache in front, one fetch per chunk at a time."""

    def __init__(self, blobs: BlobStore, cache: ChunkCache) -> None:
        self._blobs = blobs
        self._cache = cache
        self._lock = threading.Lock()
        self._flying: dict[tuple[bytes, int], _Flight] = {}
        self._pool = ThreadPoolExecutor(PARALLEL_RUNS, thread_name_prefix="fetch")
        self._failures: dict[str, str] = {}
        self.figures = Figures()

    def failures(self) -> dict[str, str]:
        """What could not be had when last asked for, by name, with the reason of each: chunks, and what was noted."""
        with self._lock:
            return dict(self._failures)

    def note(self, name: str, failure: StoreError | None) -> None:
        """From now on `failures` tells this of `name`; None: it could be had."""
        with self._lock:
            self._note(name, failure)

    def read(self, refs: Sequence[ChunkRef], locations: Sequence[ChunkLocation], figures: Figures) -> list[bytes]:
        """The plain bytes of each of `refs`, in order; chunk n of the map lies at `locations[n]`.

        What it cost is added to `figures` too. Raises `StoreError` if one of them cannot be had.
        """
        wanted = {ref.key: ref for ref in refs}
        chunks = self._from_cache(wanted.values(), figures)
        missing = [ref for ref in wanted.values() if ref.key not in chunks]
        while missing:
            missing = self._get([_Flight(ref, locations[ref.number]) for ref in missing], chunks, figures)
        return [chunks[ref.key] for ref in refs]

    def cached(self, refs: Sequence[ChunkRef], figures: Figures) -> list[bytes] | None:
        """What `read` gives if the cache has all of it. Never waits for the store."""
        chunks: _Chunks = {}
        for ref in refs:
            if ref.key not in chunks:
                if (chunk := self._cache.get(ref.digest, ref.size)) is None:
                    return None
                chunks[ref.key] = chunk
        self._count(figures, hits=len(chunks), hit_bytes=sum(map(len, chunks.values())))
        return [chunks[ref.key] for ref in refs]

    def _from_cache(self, refs: Iterable[ChunkRef], figures: Figures) -> _Chunks:
        """The chunks that the cache has."""
        found = {}
        for ref in refs:
            if (chunk := self._cache.get(ref.digest, ref.size)) is not None:
                found[ref.key] = chunk
        if found:
            self._count(figures, hits=len(found), hit_bytes=sum(map(len, found.values())))
        return found

    def _get(self, wanted: list[_Flight], chunks: _Chunks, figures: Figures) -> list[ChunkRef]:
        """Fetch what nobody else is fetching, and wait for the rest. Returns what has to be tried again.

        That is a chunk that another reader failed to get from another place: its locator may have been an older one.
        """
        mine, others = self._board(wanted, figures)
        try:
            # A chunk may have landed between our look into the cache and our boarding.
            due = [flight for flight in mine if not self._landed_meanwhile(flight, figures)]
            self._fetch_all(join(flight for flight in due if self._may_ask(flight, figures)), figures)
        finally:
            for flight in mine:  # no waiter may be left behind, whatever happened to us
                self._land(flight, StoreError(f"chunk {flight.name}: its reader was interrupted"))
        chunks.update({flight.chunk.key: flight.landed.result() for flight in mine})
        again = []
        for flight, own in others:
            try:
                chunks[flight.chunk.key] = flight.landed.result()
            except StoreError:
                if flight.location == own.location:
                    raise
                again.append(own.chunk)
        return again

    def _board(self, wanted: list[_Flight], figures: Figures) -> tuple[list[_Flight], list[tuple[_Flight, _Flight]]]:
        """Begin the flights that are not under way yet: (those, (flight under way, the one that was wanted) pairs)."""
        mine, others = [], []
        with self._lock:
            for flight in wanted:
                flying = self._flying.setdefault(flight.chunk.key, flight)
                if flying is flight:
                    mine.append(flight)
                else:
                    others.append((flying, flight))
            self._add(figures, joined_waits=len(others))
        return mine, others

    def _landed_meanwhile(self, flight: _Flight, figures: Figures) -> bool:
        found = self._from_cache([flight.chunk], figures)
        return bool(found) and self._land(flight, found[flight.chunk.key])

    def _may_ask(self, flight: _Flight, figures: Figures) -> bool:
        """Whether its locator can be right; else the flight fails here, and costs neither request nor memory."""
        try:
            check_location(flight.chunk, flight.location, f"at byte {flight.location.offset}")
        except Corrupt as error:
            self._fail([flight], error, figures)
            return False
        return True

    def _fetch_all(self, runs: list[list[_Flight]], figures: Figures) -> None:
        others = [self._pool.submit(self._fetch, run, figures) for run in runs[1:]]
        for run in runs[:1]:
            self._fetch(run, figures)
        for other in others:
            other.result()

    def _fetch(self, run: list[_Flight], figures: Figures) -> None:
        """Fetch, verify, admit and hand out one run. No `Exception` gets out: every flight of it lands."""
        try:
            for flight, stored in zip(run, self._ask(run, figures), strict=True):
                self._deliver(flight, stored, figures)
        except StoreError as error:
            self._fail(run, error, figures)
        except Exception as error:  # a fault of ours must not leave readers waiting for ever
            _log.exception("fetch failed")
            self._fail(run, StoreError(f"{type(error).__name__}: {error}"), figures)

    def _ask(self, run: list[_Flight], figures: Figures) -> list[memoryview]:
        """The stored bytes of each chunk of a run, by one range request."""
        key, (start, length) = keys.pack(run[0].location.pack), span(run)
        self._count(figures, requests=1)
        answer = memoryview(check_length(key, self._blobs.get_range(key, start, length), length))
        self._count(figures, wire_bytes=length)
        return [stored_part(answer, start, flight.location) for flight in run]

    def _deliver(self, flight: _Flight, stored: memoryview, figures: Figures) -> None:
        try:
            chunk = self._verified(flight, stored, figures)
        except StoreError as error:
            self._fail([flight], error, figures)
            return
        self._cache.put(flight.chunk.digest, chunk)
        self._count(figures, fetched_chunks=1, fetched_bytes=len(chunk))
        self._land(flight, chunk)

    def _verified(self, flight: _Flight, stored: memoryview, figures: Figures) -> bytes:
        """The chunk from its stored bytes, which are asked for again if they do not verify."""
        what = f"at byte {flight.location.offset}"
        for _ in range(CORRUPT_REPEATS):
            try:
                return decode_chunk(flight.chunk, flight.location, stored, what)
            except Corrupt as error:
                _log.warning("chunk %s in pack %s: %s; asking again", flight.name, flight.location.pack, error)
                (stored,) = self._ask([flight], figures)
        return decode_chunk(flight.chunk, flight.location, stored, what)

    def _fail(self, run: list[_Flight], error: StoreError, figures: Figures) -> None:
        for flight in run:
            failure = type(error)(f"chunk {flight.name} in pack {flight.location.pack}: {error}")
            if self._land(flight, failure):
                _log.error("%s", failure)
                self._count(figures, failures=1)

    def _land(self, flight: _Flight, outcome: bytes | StoreError) -> bool:
        """Give the outcome to all who wait; False when the flight has landed already."""
        with self._lock:
            if self._flying.get(flight.chunk.key) is not flight:
                return False
            del self._flying[flight.chunk.key]
            self._note(flight.name, outcome if isinstance(outcome, StoreError) else None)
        if isinstance(outcome, StoreError):
            flight.landed.set_exception(outcome)
        else:
            flight.landed.set_result(outcome)
        return True

    def _note(self, name: str, failure: StoreError | None) -> None:
        """Under the lock."""
        self._failures.pop(name, None)
        if failure is not None:
            self._failures[name] = str(failure)
            while len(self._failures) > MAX_REMEMBERED_FAILURES:
                del self._failures[next(iter(self._failures))]

    def _count(self, figures: Figures, **amounts: int) -> None:
        with self._lock:
            self._add(figures, **amounts)

    def _add(self, figures: Figures, **amounts: int) -> None:
        """Under the lock."""
        for name, amount in amounts.items():
            for target in (figures, self.figures):
                setattr(target, name, getattr(target, name) + amount)


Locate = Callable[[Sequence[ChunkLocation] | None], Sequence[ChunkLocation]]
"""Gives a locator's entries, one for each chunk of the map. Called with what it gave before when that proved stale:
then it looks anew, unless it has done so since."""


class LazyBlob:
    """One blob whose bytes come through a `ChunkSource`. Safe for reads from many threads.

    `locate` is asked again when a chunk is not where it should be: gc may have moved it, or a new build stored it
    elsewhere because its pack was lost (a damaged one: when that build verified what it relied on).
    """

    def __init__(self, chunk_map: ChunkMap, locate: Locate, source: ChunkSource) -> None:
        self._map = chunk_map
        self._locate = locate
        self._source = source
        self.figures = Figures()

    @property
    def size(self) -> int:
        return self._map.blob_size

    def read(self, offset: int, length: int) -> bytes:
        """The `length` bytes from `offset` on, fewer only where the blob ends. Raises `StoreError`, never guesses."""
        refs = self._map.covering(offset, length)
        if not refs:
            return b""
        start = offset - refs[0].address
        return b"".join(self._chunks(refs))[start : start + length]

    def cached(self, offset: int, length: int) -> bytes | None:
        """What `read` gives if the cache has all of it. Never waits for the store."""
        refs = self._map.covering(offset, length)
        if not refs:
            return b""
        chunks = self._source.cached(refs, self.figures)
        start = offset - refs[0].address
        return None if chunks is None else b"".join(chunks)[start : start + length]

    def _chunks(self, refs: Sequence[ChunkRef]) -> list[bytes]:
        locations = self._locate(None)
        try:
            return self._source.read(refs, locations, self.figures)
        except (NotFound, Corrupt):
            fresh = self._locate(locations)
            if all(fresh[ref.number] == locations[ref.number] for ref in refs):
                raise
        return self._source.read(refs, fresh, self.figures)


def check_location(ref: ChunkRef, location: ChunkLocation, what: str) -> None:
    """Raise `Corrupt` naming `what` when a chunk would take more bytes stored than plain: no builder writes that."""
    if location.stored > ref.size:
        raise Corrupt(f"{what}: its locator says {location.stored} bytes stored, of {ref.size} plain ones")


def decode_chunk(ref: ChunkRef, location: ChunkLocation, stored: memoryview, what: str) -> bytes:
    """The verified plain bytes of a chunk from its stored form. Raises `Corrupt` naming `what`."""
    chunk = compression.decode(location.encoding, stored, ref.size, what)
    Digest("blake3", ref.digest).verify(chunk, what)
    return chunk


class Located(Protocol):
    """Anything that lies somewhere in a pack."""

    @property
    def location(self) -> ChunkLocation: ...


_L = TypeVar("_L", bound=Located)


def join(located: Iterable[_L]) -> list[list[_L]]:
    """Group chunks into runs that one range request each fetches: same pack, small gaps, bounded length."""
    runs: list[list[_L]] = []
    for chunk in sorted(located, key=lambda one: (one.location.pack.raw, one.location.offset)):
        if runs and _joins(runs[-1][0].location, runs[-1][-1].location, chunk.location):
            runs[-1].append(chunk)
        else:
            runs.append([chunk])
    return runs


def span(run: Sequence[Located]) -> tuple[int, int]:
    """The range of the pack that a run takes, as (offset, length)."""
    first, last = run[0].location, run[-1].location
    return first.offset, last.offset + last.stored - first.offset


def stored_part(answer: memoryview, start: int, location: ChunkLocation) -> memoryview:
    """The stored bytes of one chunk out of the bytes of a run that begins at byte `start` of the pack."""
    return answer[location.offset - start : location.offset - start + location.stored]


def _joins(first: ChunkLocation, last: ChunkLocation, following: ChunkLocation) -> bool:
    return (
        last.pack == following.pack
        and last.offset + last.stored <= following.offset <= last.offset + last.stored + MAX_GAP
        and following.offset + following.stored - first.offset <= MAX_JOIN
    )
