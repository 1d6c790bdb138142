"""The contents of one layer on their way into its blob: each distinct one once, in the order in which they come.

Layout of the blob's address space: contents one behind the other, each at a multiple of 4 KiB, the rest filled with
zeros. So addresses depend on the source alone, and what lies together in it lies together here. A large content is
written as it arrives; if it proves to be one that is there already, its address is given back (its chunks are known, so
nothing was stored). Nothing is read twice and nothing waits on a disk.

    contents = Contents(upload.blob(DEFAULT), DEFAULT)
    inode.address = contents.add(pieces, size)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final, Protocol

from blake3 import blake3

from dsec_store.chunker import ChunkerParameters
from dsec_store.chunkmap import ChunkMap
from dsec_store.errors import Invalid
from dsec_store.layer.tree import Address

if TYPE_CHECKING:  # reading needs no building
    from dsec_store.upload import BlobWriter

BLOCK: Final = 4096
"""Bytes: contents begin at multiples of it, as EROFS wants it."""

PIECE: Final = 1 << 20
"""Bytes that are read at once from a content."""

_ZEROS: Final = bytes(PIECE)


class Contents(Protocol):
    """Where contents go; `StoredContents` is the one that stores them."""

    @property
    def small(self) -> int:
        """Contents of fewer bytes are wanted whole: `add_small`."""
        ...

    def add_small(self, data: bytes) -> Address:
        """The address of a content that is at hand as a whole, and not empty."""
        ...

    def add(self, pieces: Iterable[bytes], size: int, what: object) -> Address:
        """The address of a content of `size` > 0 bytes.

        Raises `changed(what)` unless the pieces are so many bytes; what keeps growing is not read on.
        """
        ...


class StoredContents:
    """The contents of a blob that is being written."""

    def __init__(self, blob: BlobWriter, chunker: ChunkerParameters) -> None:
        self._blob = blob
        self._small = chunker.solo
        self._known: dict[bytes, Address] = {}

    @property
    def small(self) -> int:
        return self._small

    def add(self, pieces: Iterable[bytes], size: int, what: object) -> Address:
        if size >= self._small:
            return self._add_alone(pieces, size, what)
        return self.add_small(b"".join(exactly(pieces, size, what)))

    def add_small(self, data: bytes) -> Address:
        key = blake3(data).digest()
        address = self._known.get(key)
        if address is None:
            address = self._known[key] = Address(0, self._blob.size)
            self._blob.write(data)
            if rest := -len(data) % BLOCK:
                self._blob.write(_ZEROS[:rest])
        return address

    def _add_alone(self, pieces: Iterable[bytes], size: int, what: object) -> Address:
        hasher = blake3()
        mark = self._blob.cut()
        address = Address(0, self._blob.size)
        for piece in exactly(pieces, size, what):
            hasher.update(piece)
            self._blob.write(piece)
        self._blob.write(_ZEROS[: -size % BLOCK])
        known = self._known.setdefault(hasher.digest(), address)
        if known is not address:
            self._blob.drop(mark)
        else:
            self._blob.cut()
        return known

    def finish(self) -> ChunkMap:
        """The chunks of the blob."""
        return self._blob.finish()


def exactly(pieces: Iterable[bytes], size: int, what: object) -> Iterator[bytes]:
    """The pieces of a content. Raises `changed(what)` unless they are `size` bytes."""
    left = size
    for piece in pieces:
        left -= len(piece)
        if left < 0:
            raise changed(what)
        yield piece
    if left:
        raise changed(what)


def changed(what: object) -> Invalid:
    """The error for a content that is not what it was."""
    return Invalid(f"{what}: changed while it was read; build again when nobody writes there")


def zeros(count: int) -> Iterator[bytes]:
    """So many zeros, in pieces."""
    for start in range(0, count, PIECE):
        yield _ZEROS[: count - start]
