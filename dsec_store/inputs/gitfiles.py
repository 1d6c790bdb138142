"""The files of a `.git` folder as functions of values: pack, pack index, index. docs/inputs.md says what is in them.

A pack that git writes depends on git's version, zlib's version and the number of threads. Ours must not: objects come
in an order of the caller, none is a delta, and the zlib streams hold stored blocks, whose bytes zlib has no say in. So
the same object is the same bytes in every pack, which is what lets a chunk store keep them once; it also compresses
them.

Formats: gitformat-pack(5) (pack version 2, index version 2), gitformat-index(5) (version 2), RFC 1950 and 1951.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from hashlib import _Hash

STORED_MAX: Final = 65_535
"""Bytes of one stored block of zlib's format."""

PACK_HEADER_SIZE: Final = 12
"""Bytes before the first object of a pack."""

_PACK_TYPES: Final = {b"commit": 1, b"tree": 2, b"blob": 3}
_ZLIB_HEADER: Final = b"\x78\x01"
_FINAL: Final = 1
_IDX_MAGIC: Final = b"\xfftOc"
_VERSION: Final = 2
_SMALL_OFFSET: Final = 1 << 31
_NAME_LENGTH_MAX: Final = 0xFFF
_INDEX_ALIGNMENT: Final = 8
_STAT_SIZE: Final = 24
"""Bytes of an index entry before its mode: ctime, mtime, device, inode."""
_OWNER_AND_SIZE: Final = bytes(12)


class Packed(NamedTuple):
    """An object in a pack: its id, the CRC-32 of its record, the byte at which that begins."""

    object_id: bytes
    crc32: int
    offset: int


class IndexEntry(NamedTuple):
    """A file in the index: its path, its mode as git has it, the id of its content."""

    path: bytes
    mode: int
    object_id: bytes


def pack_header(count: int) -> bytes:
    """The start of a pack of `count` objects."""
    return b"PACK" + struct.pack(">II", _VERSION, count)


def pack_record(kind: bytes, size: int, pieces: Iterable[bytes]) -> Iterator[bytes]:
    """One object of a pack: type and size, then `pieces`, which must be `size` bytes, as stored blocks."""
    head, rest = _PACK_TYPES[kind] << 4 | size & 0x0F, size >> 4
    start = bytearray()
    while rest:
        start.append(head | 0x80)
        head, rest = rest & 0x7F, rest >> 7
    start.append(head)
    yield from _stored(size, pieces, bytes(start) + _ZLIB_HEADER)


def _stored(size: int, pieces: Iterable[bytes], before: bytes) -> Iterator[bytes]:
    """`before`, blocks of `STORED_MAX` bytes, however long the pieces are, and the checksum."""
    checksum = zlib.adler32(b"")
    waiting = bytearray()
    left = size
    for piece in pieces:
        checksum = zlib.adler32(piece, checksum)
        waiting += piece
        at = 0
        while len(waiting) - at >= STORED_MAX and left > STORED_MAX:
            yield before + _block(waiting[at : at + STORED_MAX], final=False)
            before = b""
            at += STORED_MAX
            left -= STORED_MAX
        del waiting[:at]
    assert len(waiting) == left, "a caller gives as many bytes as it said"
    yield before + _block(waiting, final=True) + struct.pack(">I", checksum)


def _block(data: bytes | bytearray, *, final: bool) -> bytes:
    return struct.pack("<BHH", _FINAL if final else 0, len(data), len(data) ^ 0xFFFF) + data


def pack_index(objects: Iterable[Packed], pack_checksum: bytes, hasher: _Hash) -> bytes:
    """The index (version 2) of a pack. `hasher` is a fresh one of the repository's object format."""
    entries = sorted(objects)
    counts = [0] * 256
    for entry in entries:
        counts[entry.object_id[0]] += 1
    total, fanout = 0, []
    for count in counts:
        total += count
        fanout.append(total)
    large = [entry.offset for entry in entries if entry.offset >= _SMALL_OFFSET]
    numbers = {offset: number for number, offset in enumerate(large)}
    offsets = [
        entry.offset if entry.offset < _SMALL_OFFSET else _SMALL_OFFSET | numbers[entry.offset] for entry in entries
    ]
    data = b"".join(
        (
            _IDX_MAGIC,
            struct.pack(">I256I", _VERSION, *fanout),
            *(entry.object_id for entry in entries),
            struct.pack(f">{len(entries)}I", *(entry.crc32 for entry in entries)),
            struct.pack(f">{len(entries)}I", *offsets),
            struct.pack(f">{len(large)}Q", *large),
            pack_checksum,
        )
    )
    hasher.update(data)
    return data + hasher.digest()


def index_file(files: Iterable[IndexEntry], hasher: Callable[[], _Hash]) -> bytes:
    """The index (version 2) of a work tree. What stat(2) says is zero, so git looks at each content once."""
    entries = sorted(files)
    parts = [b"DIRC" + struct.pack(">II", _VERSION, len(entries))]
    for entry in entries:
        flags = min(len(entry.path), _NAME_LENGTH_MAX)
        fixed = bytes(_STAT_SIZE) + struct.pack(">I", entry.mode) + _OWNER_AND_SIZE + entry.object_id
        data = fixed + struct.pack(">H", flags) + entry.path
        parts.append(data + bytes(_INDEX_ALIGNMENT - len(data) % _INDEX_ALIGNMENT))
    data = b"".join(parts)
    digest = hasher()
    digest.update(data)
    return data + digest.digest()
