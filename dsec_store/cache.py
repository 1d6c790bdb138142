"""The node cache: verified chunks on the node's own disk, shared by all layers, bounded in bytes.

Chunks are appended to a few large *segments* (`data/<number>`); an index (`dsec_store.cacheindex`) leads from digest to
segment, offset and length. Room is made by dropping whole segments, the least recently used first, so that neither
files nor free-space bookkeeping grow with the number of chunks.

Nothing here has to be trusted: every read is verified against its digest (0.15 ms a MiB), and an entry that fails is
dropped, so the caller fetches the chunk again. That is why the index is not synced. The cache starts empty when its
index may be torn (the machine went down while it was open) or proves damaged.

A full or failing disk costs speed, never an error: chunks are then served uncached, and the oldest segment is given up,
so that a cache whose quota is larger than its disk goes on turning over.

One process owns a cache (`flock`); the kernel gives the lock back when that process dies. Locking: docs/concurrency.md,
"Node cache". Files and their bytes: docs/format/cache.md.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Final

from dsec_store.cacheindex import FAILURES, CacheIndex, Place, fingerprint, is_sound
from dsec_store.digest import Digest
from dsec_store.errors import Denied

DEFAULT_QUOTA: Final = 20 << 30
"""Bytes of chunks, unless the node is told otherwise."""

MIN_QUOTA: Final = 16 << 20
"""A smaller quota counts as this: segments must hold a chunk of the largest usual size."""

SEGMENTS: Final = 64
"""A full cache has about this many segments: as many open files, and 1/64 of the quota goes at an eviction."""

RETRY_SECONDS: Final = 5.0
"""After a failed write, chunks are served uncached for so long before the disk is tried again."""

_MIN_INDEX: Final = 1 << 30
_QUOTA_TO_INDEX: Final = 8
"""Largest size of the index: an eighth of the quota, enough for chunks of 4 KiB. It is address space, not disk."""

_SEGMENT_NAME: Final = re.compile("[0-3][0-9]{9}")
"""Ten digits, below 2**32."""

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CacheFigures:
    """State and history of a cache: bytes and chunks now, and since this process opened it."""

    quota: int
    bytes: int
    chunks: int
    admitted: int
    evicted_bytes: int
    damaged: int
    failed_writes: int


@dataclass(slots=True)
class _History:
    """What has happened since this process opened the cache."""

    admitted: int = 0
    evicted_bytes: int = 0
    damaged: int = 0
    failed_writes: int = 0


class _DataFile:
    """A descriptor that is closed when the last reader lets go of it: an evicted segment may still be read."""

    def __init__(self, path: Path, flags: int) -> None:
        self.fd = os.open(path, flags | os.O_RDWR | os.O_CLOEXEC, 0o600)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)


@dataclass(slots=True)
class _Segment:
    """One data file: bytes that are taken in it, and when it was last used."""

    number: int
    file: _DataFile
    size: int
    used: int = field(default=0)


class NodeCache:
    """A `dsec_store.chunks.ChunkCache` on disk; see the module's text.

    Raises `Denied` when another process has it, or when nothing can be kept at `path`. `clock` tells seconds.
    """

    def __init__(self, path: Path, quota: int = DEFAULT_QUOTA, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._quota = max(quota, MIN_QUOTA)
        self._segment_size = self._quota // SEGMENTS
        self._clock = clock
        self._lock = threading.Lock()
        self._uses = 0
        self._blocked_until = float("-inf")
        self._history = _History()
        self._segments: dict[int, _Segment] = {}
        self._active: _Segment | None = None
        self._index: CacheIndex | None = None
        self._closed = False
        self._owner = _own(path)
        try:
            self._open()
            self._make_room(0)  # the quota may have been larger
        except FAILURES as error:
            self._failed(error)

    # -- the interface of a chunk cache ----------------------------------------------------------------------------

    def get(self, digest: bytes, size: int) -> bytes | None:
        """The chunk, verified, or None. A damaged entry is dropped; one of another size is right for other readers."""
        with self._lock:
            place = self._find(digest)
            segment = self._use(place.segment) if place else None
        if place is None:
            return None
        chunk = _read(segment.file, place) if segment else b""
        if Digest.of(chunk).raw == digest:
            return chunk if len(chunk) == size else None
        self._drop(digest, place, damaged=segment is not None)
        return None

    def put(self, digest: bytes, chunk: bytes) -> None:
        """Keep `chunk` if the disk takes it, and if it is no larger than a segment."""
        try:
            with self._lock:
                if not self._accepts(digest, chunk):
                    return
                segment, place = self._reserve(len(chunk))
            _write(segment.file, place.offset, chunk)
            with self._lock:
                self._enter(digest, place)
        except FAILURES as error:
            self._failed(error)

    # -- the rest --------------------------------------------------------------------------------------------------

    def figures(self) -> CacheFigures:
        with self._lock:
            history = self._history
            return CacheFigures(
                quota=self._quota,
                bytes=self._bytes(),
                chunks=0 if self._index is None else len(self._index),
                admitted=history.admitted,
                evicted_bytes=history.evicted_bytes,
                damaged=history.damaged,
                failed_writes=history.failed_writes,
            )

    def close(self) -> None:
        """Make the cache survive a reboot, and let another process have it. From now on it has and takes nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                if self._index is not None:
                    self._index.close()
                    _write_state(self._path, _closed_state(self._path / "index"))
            except FAILURES as error:
                _log.warning("the node cache will start empty after a reboot: %s", error)
            self._index = None
            self._segments.clear()
            self._active = None
            self._owner.close()

    # -- all below, down to the functions: under the lock, unless it says otherwise ---------------------------------

    def _find(self, digest: bytes) -> Place | None:
        if self._index is None:
            return None
        try:
            return self._index.get(digest)
        except FAILURES as error:
            _log.warning("the node cache starts empty: its index cannot be read (%s)", error)
            self._abandon()
            return None

    def _abandon(self) -> None:
        """Forget everything; the next write begins anew with an empty cache."""
        if self._index is not None:
            with contextlib.suppress(*FAILURES):
                self._index.close()
        self._index = None
        self._segments.clear()
        self._active = None
        _clear(self._path)

    def _use(self, number: int) -> _Segment | None:
        """The segment, now the one that was used last; None when it was evicted."""
        if (segment := self._segments.get(number)) is not None:
            self._uses += 1
            segment.used = self._uses
        return segment

    def _accepts(self, digest: bytes, chunk: bytes) -> bool:
        if self._closed or len(chunk) > self._segment_size or self._clock() < self._blocked_until:
            return False
        index = self._open() if self._index is None else self._index
        return index.get(digest) is None

    def _reserve(self, length: int) -> tuple[_Segment, Place]:
        """Room for `length` bytes; what must go for it is evicted first."""
        if self._active is None or self._active.size + length > self._segment_size:
            self._active = self._new_segment()
        self._make_room(length)
        place = Place(self._active.number, self._active.size, length)
        self._active.size += length
        self._use(self._active.number)
        return self._active, place

    def _enter(self, digest: bytes, place: Place) -> None:
        if self._index is not None and place.segment in self._segments:  # else it was evicted while we wrote
            self._index.put(digest, place)
            self._history.admitted += 1

    def _drop(self, digest: bytes, place: Place, *, damaged: bool) -> None:
        """Not under the lock. Forget an entry that did not verify, or whose segment is gone."""
        with self._lock:
            if damaged:
                self._history.damaged += 1
                _log.warning("cached chunk blake3:%s is damaged: dropped, it will be fetched again", digest.hex())
            if self._index is not None:
                with contextlib.suppress(*FAILURES):  # it will be dropped when it is read again
                    self._index.drop(digest, place)

    def _make_room(self, length: int) -> None:
        while self._bytes() + length > self._quota and self._evict_oldest():
            pass

    def _evict_oldest(self) -> bool:
        """Drop the segment that was not used for longest. The active one stays: it is at most 1/64 of the quota."""
        oldest = min((s for s in self._segments.values() if s is not self._active), key=lambda s: s.used, default=None)
        if oldest is None:
            return False
        # The file goes first: that may be what frees the room to write in the index. Entries that are left then lead to
        # a segment that is gone, and are dropped one by one.
        self._segment_path(oldest.number).unlink(missing_ok=True)
        del self._segments[oldest.number]
        self._history.evicted_bytes += oldest.size
        if self._index is not None:
            self._index.drop_segment(oldest.number)
        return True

    def _bytes(self) -> int:
        return sum(segment.size for segment in self._segments.values())

    def _failed(self, error: Exception) -> None:
        """Not under the lock. Stop writing for a while, and give up the oldest segment: the disk may be full."""
        with self._lock:
            self._history.failed_writes += 1
            self._blocked_until = self._clock() + RETRY_SECONDS
            with contextlib.suppress(*FAILURES):
                self._evict_oldest()
        # As text: a log record that keeps the error keeps its frames, and with them the descriptor of a segment.
        _log.warning("the node cache takes no chunks for %.0f s: %s", RETRY_SECONDS, str(error))

    def _segment_path(self, number: int) -> Path:
        return self._path / "data" / f"{number:010d}"

    def _new_segment(self) -> _Segment:
        number = max(self._segments, default=0) + 1
        segment = _Segment(number, _DataFile(self._segment_path(number), os.O_CREAT | os.O_TRUNC), 0)
        self._segments[number] = segment
        return segment

    def _open(self) -> CacheIndex:
        """Take over what is there, if it is whole; else begin with nothing."""
        boot, state, index = _BOOT_ID.read_text().strip(), _read_state(self._path), self._path / "index"
        whole = is_sound(index) if state == boot else state == _closed_state(index)
        if not whole:
            _clear(self._path)
        _write_state(self._path, boot)
        try:
            return self._load()
        except FAILURES as error:
            if not whole:
                raise
            _log.warning("the node cache starts empty: its index cannot be used (%s)", error)
            _clear(self._path)
            return self._load()

    def _load(self) -> CacheIndex:
        (self._path / "data").mkdir(exist_ok=True)
        index = CacheIndex(self._path / "index", max(_MIN_INDEX, self._quota // _QUOTA_TO_INDEX))
        try:
            self._segments = _segments(self._path / "data")
            for number in index.segments():
                if number not in self._segments:
                    index.drop_segment(number)
        except BaseException:
            index.close()
            raise
        self._active = self._segments.get(max(self._segments, default=0))
        self._index = index
        return index


def _segments(folder: Path) -> dict[int, _Segment]:
    """The segments that are in `folder`, by number. What does not have the name of one is left alone."""
    found = {}
    for path in sorted(folder.iterdir()):
        if _SEGMENT_NAME.fullmatch(path.name) and path.is_file():
            file = _DataFile(path, 0)
            found[int(path.name)] = _Segment(int(path.name), file, os.fstat(file.fd).st_size)
    return found


def _read(file: _DataFile, place: Place) -> bytes:
    try:
        return os.pread(file.fd, place.length, place.offset)
    except OSError as error:
        _log.warning("the node cache cannot be read: %s", error)
        return b""


def _write(file: _DataFile, offset: int, chunk: bytes) -> None:
    view = memoryview(chunk)
    while view:
        written = os.pwrite(file.fd, view, offset)
        view, offset = view[written:], offset + written


def _own(path: Path) -> FileIO:
    """The lock of the cache, held as long as the file is open."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        file = FileIO(path / "lock", "a")
    except OSError as error:
        raise Denied(
            f"nothing can be kept at {path}: {error.strerror}; free space or choose another DSEC_ROOT"
        ) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise Denied(
            f"the node cache {path} is in use by another data daemon; each needs a DSEC_ROOT of its own"
        ) from None
    return file


def _read_state(path: Path) -> str:
    try:
        return (path / "state").read_text(errors="replace")
    except OSError:
        return ""


def _closed_state(index: Path) -> str:
    """State of a cache that was closed in order with this index; that of an open one is the id of the boot."""
    return f"closed {fingerprint(index)}"


def _write_state(path: Path, state: str) -> None:
    """On return the state is on the disk. One that is torn matches nothing."""
    with open(path / "state", "w", encoding="ascii") as file:
        file.write(state)
        file.flush()
        os.fsync(file.fileno())


def _clear(path: Path) -> None:
    for name in ("index", "data"):
        shutil.rmtree(path / name, ignore_errors=True)
        with contextlib.suppress(OSError):  # a file where a folder should be
            (path / name).unlink()
