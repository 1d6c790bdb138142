"""Rewriting packs: what is in use of packs that are mostly dead is copied into new ones, which the locators name then.

    read old pack ─> verify each chunk in use ─> new packs ─> their index ─> locators, one by one

A kill at any point leaves locators that name the old pack and locators that name the new one; both hold what they say.
The old packs are not touched: once no locator names them, gc condemns them like any other object.

Of a locator as it is by then, the places that moved are replaced, and no others: whoever has put another one since the
store was marked knows better. A builder whose locator we overtake between our look and our put finds out before it
commits (`dsec_store.leased`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from dsec_store import keys
from dsec_store.chunkmap import ChunkLocation, ChunkRef, encode_locator
from dsec_store.chunks import decode_chunk
from dsec_store.digest import Digest
from dsec_store.errors import Corrupt, NotFound
from dsec_store.objects import MAX_PACK, Objects
from dsec_store.pack import FOOTER_SIZE, PackBuilder, PackedChunk, decode_section, encode_section, section_span
from dsec_store.reachable import PackUse, Reached

LIVE_SHARE: Final = 0.5
"""A pack is rewritten when less than this share of its stored chunk bytes is in use. Lower: more dead bytes stay.
Higher: more bytes are copied for each that is freed (at one half: at most one for one)."""

BATCH: Final = 64
"""Packs that are rewritten before their locators are replaced: at most 1 GiB is read, and the new places of their
chunks, some 200 bytes each, are in memory."""

_ENTRY: Final = len(encode_section([PackedChunk(bytes(32), 0, 0, 0, 0)])) - len(encode_section([]))
_FIXED: Final = len(encode_section([])) + FOOTER_SIZE
"""Bytes that a pack's section takes for each chunk, and what an empty pack takes."""

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rewritten:
    """How many packs were rewritten into how many, and how many stored bytes were copied."""

    packs: int = 0
    into: int = 0
    copied: int = 0
    problems: tuple[str, ...] = ()

    def __add__(self, other: Rewritten) -> Rewritten:
        return Rewritten(
            self.packs + other.packs,
            self.into + other.into,
            self.copied + other.copied,
            self.problems + other.problems,
        )


def is_mostly_dead(size: int, use: PackUse) -> bool:
    """Whether a pack of `size` bytes is worth rewriting. Its section is not read: it has one entry for each chunk."""
    dead = size - _FIXED - _ENTRY * len(use.offsets) - use.stored
    return dead > 0 and use.stored < LIVE_SHARE * (use.stored + dead)


def rewrite(objects: Objects, packs: Sequence[Digest], reached: Reached) -> Iterator[Rewritten]:
    """Rewrite these packs, batch by batch. A pack with a damaged chunk in use stays as it is, and is a problem."""
    for at in range(0, len(packs), BATCH):
        yield _Batch(objects, reached).run(packs[at : at + BATCH])


class _Batch:
    def __init__(self, objects: Objects, reached: Reached) -> None:
        self._objects = objects
        self._reached = reached
        self._pack = PackBuilder()
        self._from: list[tuple[Digest, int]] = []
        self._moved: dict[tuple[Digest, int], ChunkLocation] = {}
        self._new: list[tuple[Digest, list[PackedChunk]]] = []

    def run(self, packs: Iterable[Digest]) -> Rewritten:
        done = Rewritten()
        chunk_maps: set[Digest] = set()
        for pack in packs:
            use = self._reached.packs[pack]
            try:
                chunks = _in_use(self._objects, pack, use)
            except (Corrupt, NotFound) as error:
                _log.warning("pack %s is not rewritten: %s", pack, error)
                done += Rewritten(problems=(f"pack {pack} is not rewritten: {error}",))
                continue
            self._copy(pack, chunks)
            chunk_maps |= use.chunk_maps
            done += Rewritten(packs=1, copied=use.stored)
        self._seal()
        if self._new:
            self._objects.put_index(self._new)
        for chunk_map in sorted(chunk_maps, key=lambda digest: digest.raw):
            self._replace(chunk_map)
        return replace(done, into=len(self._new))

    def _copy(self, pack: Digest, chunks: Iterable[tuple[PackedChunk, bytes]]) -> None:
        for chunk, stored in chunks:
            self._pack.add(chunk.digest, chunk.size, chunk.encoding, stored)
            self._from.append((pack, chunk.offset))
            if self._pack.full:
                self._seal()

    def _seal(self) -> None:
        """Store the pack that was gathered, and note where its chunks came from."""
        chunks = self._pack.chunks
        if not chunks:
            return
        stored = self._objects.put_pack(self._pack.seal())
        for source, chunk in zip(self._from, chunks, strict=True):
            self._moved[source] = ChunkLocation(stored, chunk.offset, chunk.stored, chunk.encoding)
        self._new.append((stored, chunks))
        self._pack, self._from = PackBuilder(), []

    def _replace(self, chunk_map: Digest) -> None:
        """Have the locator name the new packs where it names the old ones."""
        try:
            locations = self._objects.locator(chunk_map)
        except NotFound:
            return
        moved = [self._moved.get((at.pack, at.offset), at) for at in locations]
        if moved != locations:
            self._objects.blobs.put(keys.locator(chunk_map), encode_locator(moved))


def _in_use(objects: Objects, pack: Digest, use: PackUse) -> list[tuple[PackedChunk, bytes]]:
    """The chunks in use of a pack, each verified, with their stored bytes. Raises `Corrupt` or `NotFound`."""
    what = f"pack {pack}"
    data = objects.blobs.get(keys.pack(pack), limit=MAX_PACK)
    start, length = section_span(len(data), data[-FOOTER_SIZE:], what)
    chunks = [
        chunk for chunk in decode_section(data[start : start + length], start, what) if chunk.offset in use.offsets
    ]
    if {chunk.offset for chunk in chunks} != use.offsets or len(chunks) != len(use.offsets):
        raise Corrupt(f"{what}: a locator names a chunk that its section does not list")
    return [(chunk, _verified(chunk, data, pack)) for chunk in chunks]


def _verified(chunk: PackedChunk, data: bytes, pack: Digest) -> bytes:
    stored = data[chunk.offset : chunk.offset + chunk.stored]
    at = ChunkLocation(pack, chunk.offset, chunk.stored, chunk.encoding)
    name = f"chunk blake3:{chunk.digest.hex()} in pack {pack} at byte {chunk.offset}"
    decode_chunk(ChunkRef(0, chunk.digest, 0, chunk.size), at, memoryview(stored), name)
    return stored
