"""The index of the node cache, in LMDB: from a digest to a place in a segment, and from a segment to its digests.

    digest  ->  segment, offset, length              table "digest"
    segment, digest  ->  nothing                     table "segment": what an eviction has to remove

LMDB maps its file into memory and trusts what it reads there: a file that was cut short kills the process by SIGBUS,
damaged pages may do the same. So no index is opened that was not looked at before. One that was closed in order must be
the same bytes still: `fingerprint`. One whose process died is walked from end to end by a throwaway process (0.15 s for
the 330,000 chunks of 20 GiB): `is_sound`. If that process dies of it, the index is thrown away, not we.
"""

from __future__ import annotations

import os
import resource
import struct
import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple

import lmdb

from dsec_store.digest import hasher_for

FAILURES: Final = (OSError, lmdb.Error, struct.error)
"""What the methods raise when the disk is full or fails, or when the index holds nonsense."""

CHECK_SECONDS: Final = 60.0
"""An index that takes longer to walk is taken for damaged: its pages may form a circle."""

_PLACE: Final = struct.Struct("<III")
_NUMBER: Final = struct.Struct(">I")
"""Big-endian, so that the table's order is that of the numbers."""

_FILE: Final = "data.mdb"
_DIGESTS: Final = b"digest"
_SEGMENTS: Final = b"segment"
_PIECE: Final = 1 << 20
_CHECK_ROOM: Final = 16 << 20
"""Address space of the check beyond the size of the file."""


class Place(NamedTuple):
    """Where a chunk lies: number of the segment, offset and length there in bytes."""

    segment: int
    offset: int
    length: int


class CacheIndex:
    """Not safe for several threads at once: the cache has one lock for itself and its index.

    Nothing is synced before `close`: after a crash of the process the kernel still has every page, and after one of the
    machine the cache starts empty.
    """

    def __init__(self, path: Path, map_size: int) -> None:
        self._env = _open(path, map_size)
        self._digests = self._env.open_db(_DIGESTS)
        self._segments = self._env.open_db(_SEGMENTS)

    def get(self, digest: bytes) -> Place | None:
        with self._env.begin(db=self._digests) as transaction:
            return _place(transaction.get(digest))

    def put(self, digest: bytes, place: Place) -> None:
        with self._env.begin(write=True) as transaction:
            transaction.put(digest, _PLACE.pack(*place), db=self._digests)
            transaction.put(_NUMBER.pack(place.segment) + digest, b"", db=self._segments)

    def drop(self, digest: bytes, place: Place) -> None:
        """Forget that `digest` lies at `place`, unless it has been put elsewhere."""
        with self._env.begin(write=True) as transaction:
            if _place(transaction.get(digest, db=self._digests)) == place:
                transaction.delete(digest, db=self._digests)
            transaction.delete(_NUMBER.pack(place.segment) + digest, db=self._segments)

    def drop_segment(self, number: int) -> None:
        """Forget every chunk of a segment."""
        prefix = _NUMBER.pack(number)
        with self._env.begin(write=True) as transaction, transaction.cursor(db=self._segments) as cursor:
            found = cursor.set_range(prefix)
            while found and cursor.key().startswith(prefix):
                digest = cursor.key()[_NUMBER.size :]
                place = _place(transaction.get(digest, db=self._digests))
                if place is not None and place.segment == number:
                    transaction.delete(digest, db=self._digests)
                found = cursor.delete()

    def segments(self) -> list[int]:
        """The segments in which something lies."""
        numbers = []
        with self._env.begin(db=self._segments) as transaction, transaction.cursor() as cursor:
            found = cursor.first()
            while found:
                (number,) = _NUMBER.unpack_from(cursor.key())
                numbers.append(number)
                found = cursor.set_range(_NUMBER.pack(number + 1))
        return numbers

    def __len__(self) -> int:
        with self._env.begin() as transaction:
            return int(transaction.stat(self._digests)["entries"])

    def close(self) -> None:
        """On return the index is on the disk."""
        try:
            self._env.sync(True)
        finally:
            self._env.close()


def fingerprint(path: Path) -> str:
    """Names all bytes of the closed index at `path`; empty when there is none."""
    hasher = hasher_for("blake3")
    try:
        with open(path / _FILE, "rb", buffering=0) as file:
            while piece := file.read(_PIECE):
                hasher.update(piece)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    return hasher.digest().hex()


def is_sound(path: Path) -> bool:
    """Whether the index at `path` exists and can be read from end to end and written to, as a process finds out that
    may die of it. Raises OSError when there can be no such process."""
    if not (path / _FILE).is_file():
        return False
    command = [sys.executable, "-P", __file__, str(path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    null = subprocess.DEVNULL
    try:
        check = subprocess.run(
            command, env=environment, stdin=null, stdout=null, stderr=null, timeout=CHECK_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return check.returncode == 0


def _open(path: Path, map_size: int) -> lmdb.Environment:
    # No lock file: one process has the cache, and one thread at a time its index.
    return lmdb.open(str(path), map_size=map_size, max_dbs=2, sync=False, metasync=False, lock=False)


def _place(value: bytes | None) -> Place | None:
    return Place(*_PLACE.unpack(value)) if value is not None and len(value) == _PLACE.size else None


def _walk(path: Path) -> None:
    """Read everything, and begin to write, which reads the list of free pages. May be killed by a signal."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with _open(path, (path / _FILE).stat().st_size + _CHECK_ROOM) as env:
        for name in (_DIGESTS, _SEGMENTS):
            table = env.open_db(name, create=False)
            with env.begin(db=table) as transaction, transaction.cursor() as cursor:
                _check_order(cursor, int(transaction.stat(table)["entries"]))
            with env.begin(db=table, write=True) as transaction:
                transaction.put(b"trial", b"")
                transaction.abort()


def _check_order(cursor: lmdb.Cursor, entries: int) -> None:
    """Every key is larger than the one before, so no page is met twice, and none is missing."""
    last, count = b"", 0
    for key, value in ((bytes(key), value) for key, value in cursor):
        if key <= last or len(value) > _PLACE.size:
            raise ValueError(f"entry {count} is out of order")
        last, count = key, count + 1
    if count != entries:
        raise ValueError(f"{count} entries of {entries}")


if __name__ == "__main__":
    _walk(Path(sys.argv[1]))
