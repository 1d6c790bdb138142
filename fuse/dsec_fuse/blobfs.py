"""The file system: one directory with one read-only file per blob, `<64 hex digits>.blob`.

Problem: the daemon may be replaced at any moment while the kernel still holds node ids that the old one gave out.
Choice: a node id is a part of the blob's digest, and so is the place of a file in the listing: a successor finds both
again without a table. Cost: of two blobs whose digests share 62 bits one is refused, and after a restart both. By
chance that does not happen (with a million blobs, once in ten million nodes); who wants to can make such a pair, and
must not get one blob's bytes served as the other's.

What cannot be served is an error and never something else: READ gives exactly the bytes asked for, or EIO. A short
answer would be taken for the end of the file and filled with zeros, ENOENT for a file that does not exist.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import stat
from bisect import bisect_right
from collections.abc import Iterator
from typing import Final, Protocol

from dsec_fuse.protocol import ROOT, Attributes, Entry
from dsec_store.errors import Corrupt, NotFound, StoreError

_log: Final = logging.getLogger(__name__)

FILE_MODE: Final = stat.S_IFREG | 0o400
DIRECTORY_MODE: Final = stat.S_IFDIR | 0o500
"""Only root may read blobs: sandboxes see them through EROFS, with the permissions that the image gives."""

_NAME: Final = re.compile(rb"([0-9a-f]{64})\.blob")
_NODE_BIT: Final = 1 << 62
"""Set in every blob's node id: none is 0 or ROOT, and none is negative as a directory offset."""
_SHARED: Final = ""
"""Stands for the blob of a node id that belongs to two, and that a predecessor may have given out for either."""


class Blob(Protocol):
    """The bytes of one blob device, fetched when they are first read."""

    @property
    def size(self) -> int:
        """Bytes."""
        ...

    def read(self, offset: int, length: int) -> bytes:
        """Exactly what lies there; shorter only where the blob ends. Verified. Raises `StoreError`."""
        ...

    def cached(self, offset: int, length: int) -> bytes | None:
        """The same without waiting for the store; None when it must be asked."""
        ...


class Blobs(Protocol):
    """The blobs that this node serves. Safe for calls from many threads."""

    def open(self, hex: str) -> Blob:
        """Cheap when it was opened before. Raises `NotFound` when the node has no such blob, else `StoreError`."""
        ...

    def at_hand(self, hex: str) -> Blob | None:
        """The same without waiting for the store; None when it must be asked."""
        ...

    def names(self) -> list[str]:
        """Their digests in hex, sorted."""
        ...


class Refused(Exception):
    """The answer to a request is an error number."""

    def __init__(self, number: int) -> None:
        super().__init__(os.strerror(number))
        self.number = number


class WouldWait(Exception):
    """The answer to a request needs the store, which the caller does not want to wait for."""


def node_of(hex: str) -> int:
    """The node id of a blob. Ids sort like their digests."""
    return int(hex[:16], 16) >> 2 | _NODE_BIT


class BlobFileSystem:
    """Answers in values; raises `Refused`, and `WouldWait` if called with `wait=False`."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._names: dict[
            int, str
        ] = {}  # node id -> hex or _SHARED, as far as known; grows, and an entry never changes

    def lookup(self, parent: int, name: bytes, *, wait: bool = True) -> Attributes:
        """The file `name` of the root directory."""
        match = _NAME.fullmatch(name)
        if parent != ROOT or match is None:
            raise Refused(errno.ENOENT)
        return self._file(match[1].decode(), wait)

    def attributes(self, node: int, *, wait: bool = True) -> Attributes:
        if node == ROOT:
            return Attributes(ROOT, DIRECTORY_MODE, 0, links=2)
        return self._file(self._hex(node), wait)

    def entries(self, after: int) -> Iterator[Entry]:
        """The root directory from the entry behind cookie `after` on. A cookie is a node id; 0 is the beginning."""
        with _platform_fault("the blobs"):
            names = self._blobs.names()
        for hex in names[bisect_right(names, after, key=node_of) :]:
            node = node_of(hex)
            yield Entry(node, node, FILE_MODE, f"{hex}.blob".encode())

    def count(self) -> int:
        with _platform_fault("the blobs"):
            return len(self._blobs.names())

    def read(self, node: int, offset: int, length: int, *, wait: bool = True) -> bytes:
        """Bytes of a file, exactly, or EIO."""
        hex = self._hex(node, unknown=errno.EIO)
        with _platform_fault(f"{hex}.blob, {length} bytes at {offset}"):
            blob = self._open(hex, wait)
            data = blob.read(offset, length) if wait else blob.cached(offset, length)
            if data is None:
                raise WouldWait
            if len(data) != max(0, min(length, blob.size - offset)):
                raise Corrupt(f"{len(data)} bytes came")
            return data

    def _open(self, hex: str, wait: bool) -> Blob:
        blob = self._blobs.open(hex) if wait else self._blobs.at_hand(hex)
        if blob is None:
            raise WouldWait
        return blob

    def _file(self, hex: str, wait: bool) -> Attributes:
        with _platform_fault(f"{hex}.blob"):
            try:
                size = self._open(hex, wait).size
            except NotFound:
                raise Refused(errno.ENOENT) from None
        node = node_of(hex)
        if node not in self._names:
            self._learn(hex)
        if (owner := self._names[node]) != hex:
            _log.error("%s.blob is not served: its node id %#x belongs to %s too", hex, node, owner or "another blob")
            raise Refused(errno.EIO)
        return Attributes(node, FILE_MODE, size)

    def _hex(self, node: int, unknown: int = errno.ESTALE) -> str:
        """The blob of a node id, which may have been given out by a predecessor."""
        if node not in self._names:
            self._learn()
        hex = self._names.get(node)
        if hex == _SHARED:
            _log.error("node id %#x is not served: it belongs to two blobs", node)
            raise Refused(errno.EIO)
        if hex is None:
            raise Refused(unknown)
        return hex

    def _learn(self, *hexes: str) -> None:
        """Enter `hexes` and all blobs that are here; a node id that has its owner keeps it."""
        with _platform_fault("the blobs"):
            found = {*hexes, *self._blobs.names()}
        owners: dict[int, str] = {}
        for hex in found:
            node = node_of(hex)
            owners[node] = _SHARED if node in owners else hex
        for node, owner in owners.items():
            self._names.setdefault(node, owner)


@contextlib.contextmanager
def _platform_fault(what: str) -> Iterator[None]:
    """Whatever goes wrong with the store is EIO to the kernel; the log says what it was."""
    try:
        yield
    except StoreError as error:
        _log.error("%s: %s: %s", what, type(error).__name__, error)
        raise Refused(errno.EIO) from error
