"""Packs: the objects that hold chunks, and the indexes that say what lies where. Pure functions of bytes.

    pack   = stored chunk ... stored chunk, section, footer       (docs/format/pack.md)
    index  = magic, section of pack, section of pack, ...         one object a build

A pack ends with its own section, so that every index can be made again from the packs alone.

>>> builder = PackBuilder()
>>> builder.add(bytes(32), size=9, encoding=0, stored=b"some data")
>>> pack = builder.seal()
>>> start, length = section_span(len(pack), pack[-FOOTER_SIZE:], "a pack")
>>> decode_section(pack[start : start + length], start, "a pack") == builder.chunks
True
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from dsec_store.binary import Cursor
from dsec_store.digest import DIGEST_SIZE, Digest
from dsec_store.errors import Corrupt

PACK_SIZE: Final = 16 << 20
"""Stored bytes after which a pack is closed; a pack is at most one chunk longer."""

_ENTRY: Final = struct.Struct("<32sIIIB")
_COUNT: Final = struct.Struct("<I")
_FOOTER: Final = struct.Struct("<I8s")
_PACK_MAGIC: Final = b"DSECPCK1"
_INDEX_MAGIC: Final = b"DSECIDX1"

FOOTER_SIZE: Final = _FOOTER.size


@dataclass(frozen=True, slots=True)
class PackedChunk:
    """One chunk inside a pack: its raw digest, where it lies (bytes from the pack's start), how long it is there and
    plain, and its encoding (`dsec_store.compression`)."""

    digest: bytes
    offset: int
    stored: int
    size: int
    encoding: int


@dataclass(slots=True)
class PackBuilder:
    """Gathers stored chunks in order; `seal` gives the finished object. `size`: stored bytes of the chunks so far."""

    chunks: list[PackedChunk] = field(default_factory=list)
    size: int = 0
    _parts: list[bytes] = field(default_factory=list)

    def add(self, digest: bytes, size: int, encoding: int, stored: bytes) -> None:
        """Append a chunk: its raw digest, plain size, and stored form."""
        self.chunks.append(PackedChunk(digest, self.size, len(stored), size, encoding))
        self._parts.append(stored)
        self.size += len(stored)

    def append(self, other: PackBuilder) -> None:
        """All chunks of another pack, behind those that are here."""
        self.chunks += [replace(chunk, offset=self.size + chunk.offset) for chunk in other.chunks]
        self._parts += other._parts
        self.size += other.size

    @property
    def full(self) -> bool:
        """Whether it is time to seal."""
        return self.size >= PACK_SIZE

    def seal(self) -> bytes:
        """The bytes of the pack: body, section, footer. Once: the builder lets go of the body, and keeps `chunks`."""
        section = encode_section(self.chunks)
        parts, self._parts = self._parts, []
        return b"".join((*parts, section, _FOOTER.pack(len(section), _PACK_MAGIC)))


def encode_section(chunks: Iterable[PackedChunk]) -> bytes:
    entries = [_ENTRY.pack(c.digest, c.offset, c.stored, c.size, c.encoding) for c in chunks]
    return _COUNT.pack(len(entries)) + b"".join(entries)


def section_span(pack_size: int, footer: bytes, what: str) -> tuple[int, int]:
    """Where the section of a pack lies, as (offset, length), from the pack's last `FOOTER_SIZE` bytes."""
    cursor = Cursor(footer, what)
    length, magic = cursor.unpack(_FOOTER)
    cursor.end()
    if magic != _PACK_MAGIC:
        raise Corrupt(f"{what}: not a pack, or written by another release")
    offset = pack_size - FOOTER_SIZE - length
    if offset < 0 or length < _COUNT.size:
        raise Corrupt(f"{what}: its section does not fit into its {pack_size} bytes")
    return offset, length


def decode_section(section: bytes, body_size: int, what: str) -> list[PackedChunk]:
    """The chunks of a pack whose stored chunks take `body_size` bytes."""
    cursor = Cursor(section, what)
    chunks = _section(cursor)
    cursor.end()
    if any(chunk.offset + chunk.stored > body_size for chunk in chunks):
        raise Corrupt(f"{what}: a chunk reaches beyond its {body_size} bytes of chunks")
    return chunks


def encode_index(packs: Iterable[tuple[Digest, Iterable[PackedChunk]]]) -> bytes:
    return _INDEX_MAGIC + b"".join(digest.raw + encode_section(chunks) for digest, chunks in packs)


def decode_index(data: bytes, what: str) -> list[tuple[Digest, list[PackedChunk]]]:
    cursor = Cursor(data, what)
    cursor.magic(_INDEX_MAGIC)
    packs = []
    while cursor.left:
        digest = Digest("blake3", cursor.take(DIGEST_SIZE))
        packs.append((digest, _section(cursor)))
    return packs


def _section(cursor: Cursor) -> list[PackedChunk]:
    (count,) = cursor.unpack(_COUNT)
    return [PackedChunk(*entry) for entry in cursor.records(_ENTRY, count)]
