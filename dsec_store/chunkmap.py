"""Chunk maps and locators: from an address in a blob to a chunk, and from a chunk to bytes in a pack. Pure.

The *chunk map* is digested: it names chunks and lengths, so it is the same everywhere and for ever, and its digest is
the blob's name. The *locator* is not: it says where those chunks lie in this store today, entry by entry in the map's
order, and may be replaced at any time. Byte tables: docs/format/chunk-map.md.

>>> chunk_map = ChunkMap([bytes(32), bytes(31) + b"a"], [4096, 8192])
>>> [(ref.number, ref.address, ref.size) for ref in chunk_map.covering(offset=5000, length=100)]
[(1, 4096, 8192)]
"""

from __future__ import annotations

import bisect
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from dsec_store.binary import Cursor
from dsec_store.chunker import MAX_CHUNK
from dsec_store.digest import DIGEST_SIZE, Digest
from dsec_store.errors import Corrupt

_MAP_MAGIC: Final = b"DSECMAP1"
_LOCATOR_MAGIC: Final = b"DSECLOC1"
_MAP_HEADER: Final = struct.Struct("<QI")
_MAP_ENTRY: Final = struct.Struct("<32sI")
_LOCATOR_HEADER: Final = struct.Struct("<II")
_LOCATOR_ENTRY: Final = struct.Struct("<IIIB")


@dataclass(frozen=True, slots=True)
class ChunkRef:
    """One chunk of a blob: its number in the map, raw digest, address in the blob and size in bytes."""

    number: int
    digest: bytes
    address: int
    size: int

    @property
    def key(self) -> tuple[bytes, int]:
        """What tells it from other chunks: a map that gives a digest another size asks for something else."""
        return self.digest, self.size


class ChunkMap:
    """The chunks of one blob in address order; they cover it without gaps."""

    def __init__(self, digests: Sequence[bytes], sizes: Sequence[int]) -> None:
        self.digests = tuple(digests)
        self.sizes = tuple(sizes)
        self._ends = list(accumulate(sizes))

    @property
    def blob_size(self) -> int:
        """Bytes of the blob."""
        return self._ends[-1] if self._ends else 0

    def __len__(self) -> int:
        return len(self.digests)

    def __getitem__(self, number: int) -> ChunkRef:
        size = self.sizes[number]
        return ChunkRef(number, self.digests[number], self._ends[number] - size, size)

    def covering(self, offset: int, length: int) -> list[ChunkRef]:
        """The chunks that hold any of the `length` bytes from `offset` on, in order; none beyond the end."""
        first = bisect.bisect_right(self._ends, offset)
        last = bisect.bisect_left(self._ends, min(offset + length, self.blob_size))
        return [self[number] for number in range(first, min(last + 1, len(self)))] if length > 0 else []

    def encode(self) -> bytes:
        """The canonical bytes; their digest is the blob's name."""
        entries = [_MAP_ENTRY.pack(*entry) for entry in zip(self.digests, self.sizes, strict=True)]
        return _MAP_MAGIC + _MAP_HEADER.pack(self.blob_size, len(self)) + b"".join(entries)

    @classmethod
    def decode(cls, data: bytes, what: str) -> ChunkMap:
        """Raises `Corrupt` naming `what`. No chunk is empty or larger than `MAX_CHUNK`."""
        cursor = Cursor(data, what)
        cursor.magic(_MAP_MAGIC)
        blob_size, count = cursor.unpack(_MAP_HEADER)
        entries = list(cursor.records(_MAP_ENTRY, count))
        cursor.end()
        result = cls([digest for digest, _ in entries], [size for _, size in entries])
        if result.blob_size != blob_size or not all(0 < size <= MAX_CHUNK for size in result.sizes):
            raise Corrupt(f"{what}: its chunks do not cover its {blob_size} bytes, or one has an impossible size")
        return result


@dataclass(frozen=True, slots=True)
class ChunkLocation:
    """Where a chunk lies: pack, offset in it, stored bytes there, encoding."""

    pack: Digest
    offset: int
    stored: int
    encoding: int


def encode_locator(locations: Sequence[ChunkLocation]) -> bytes:
    """The locator of a chunk map whose chunk n lies at `locations[n]`."""
    numbers: dict[Digest, int] = {}
    entries = [
        _LOCATOR_ENTRY.pack(numbers.setdefault(at.pack, len(numbers)), at.offset, at.stored, at.encoding)
        for at in locations
    ]
    packs = b"".join(pack.raw for pack in numbers)
    return _LOCATOR_MAGIC + _LOCATOR_HEADER.pack(len(numbers), len(entries)) + packs + b"".join(entries)


def decode_locator(data: bytes, what: str, chunks: int | None = None) -> list[ChunkLocation]:
    """The locations of the `chunks` chunks of a map (None: of however many). Raises `Corrupt` naming `what`."""
    cursor = Cursor(data, what)
    cursor.magic(_LOCATOR_MAGIC)
    pack_count, count = cursor.unpack(_LOCATOR_HEADER)
    raw = cursor.take(pack_count * DIGEST_SIZE)
    packs = [Digest("blake3", raw[at : at + DIGEST_SIZE]) for at in range(0, len(raw), DIGEST_SIZE)]
    entries = list(cursor.records(_LOCATOR_ENTRY, count))
    cursor.end()
    if chunks is not None and count != chunks:
        raise Corrupt(f"{what}: {count} entries for {chunks} chunks")
    if any(number >= pack_count or stored == 0 for number, _, stored, _ in entries):
        raise Corrupt(f"{what}: an entry is empty or names a pack that the locator does not list")
    return [ChunkLocation(packs[number], offset, stored, encoding) for number, offset, stored, encoding in entries]
