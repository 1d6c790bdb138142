"""Merging indexes: each build leaves one, and who builds reads all of them. gc makes few of many.

An index is kept as it is when it is large and names nothing but packs that stay. The packs of all others are gathered
into new indexes of bounded size; then the old ones are superseded, and condemned like dead objects. Until they are
deleted, chunks are found in both.

Memory: the chunks of two merged indexes, some 80 MB, and 150 bytes for each pack.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from dsec_store import keys
from dsec_store.blobs import BlobStat
from dsec_store.digest import Digest
from dsec_store.errors import Corrupt, NotFound
from dsec_store.objects import Objects
from dsec_store.pack import PackedChunk, encode_index, encode_section
from dsec_store.reachable import Each

MERGED_SIZE: Final = 8 << 20
"""Bytes after which a merged index is closed: 186,000 chunks, of some 12 GB at the default sizes."""

_ENTRY: Final = len(encode_section([PackedChunk(bytes(32), 0, 0, 0, 0)])) - len(encode_section([]))

_log: Final = logging.getLogger(__name__)

_Packs = list[tuple[Digest, list[PackedChunk]]]


@dataclass(slots=True)
class Merged:
    """Digests of the indexes that are there now, and keys of those that they supersede."""

    indexes: list[Digest] = field(default_factory=list)
    superseded: list[str] = field(default_factory=list)


def worth_reading(indexes: Iterable[BlobStat], dead_packs: bool) -> list[BlobStat]:
    """Those of which fewer or smaller ones may be made: all if packs are dead, else the small ones, of which a store
    has one once they were merged."""
    return [each for each in indexes if dead_packs or each.size < MERGED_SIZE // 2]


class IndexMerger:
    """Feeds indexes in, the largest first, and puts merged ones."""

    def __init__(self, objects: Objects, stays: Callable[[Digest], bool]) -> None:
        """`stays`: whether a pack is stored and will be."""
        self._objects = objects
        self._stays = stays
        self._covered: set[Digest] = set()
        self._stored: set[Digest] = set()
        self._gathered: _Packs = []
        self._bytes = 0
        self._merged = Merged()

    def run(self, indexes: Iterable[BlobStat], unindexed: Iterable[Digest], each: Each) -> Merged:
        """Merge these. Packs of `unindexed` that none of them names are asked for what they hold."""
        indexes = list(indexes)
        self._stored = {keys.digest_in(stat.key) for stat in indexes}
        for group in _groups(sorted(indexes, key=lambda stat: (-stat.size, stat.key))):
            digests = [keys.digest_in(stat.key) for stat in group]
            for stat, digest, packs in zip(group, digests, each(self._read, digests), strict=True):
                self._take(stat, digest, packs)
        missing = [pack for pack in unindexed if pack not in self._covered]
        for found in each(self._section, missing):
            self._gather(found)
        self._flush()
        made = {keys.index(digest) for digest in self._merged.indexes}
        self._merged.superseded = [key for key in self._merged.superseded if key not in made]
        return self._merged

    def _read(self, digest: Digest) -> _Packs:
        try:
            return self._objects.index(digest)
        except (Corrupt, NotFound) as error:
            _log.warning("an index is left out: %s", error)
            return []

    def _section(self, pack: Digest) -> _Packs:
        try:
            return [(pack, self._objects.pack_chunks(pack))]
        except (Corrupt, NotFound) as error:
            _log.warning("a pack is in no index: %s", error)
            return []

    def _take(self, stat: BlobStat, digest: Digest, packs: _Packs) -> None:
        wanted = [(pack, chunks) for pack, chunks in packs if pack not in self._covered and self._stays(pack)]
        if len(wanted) == len(packs) > 0 and stat.size >= MERGED_SIZE // 2:
            self._covered.update(pack for pack, _ in wanted)
            self._merged.indexes.append(digest)
            return
        self._merged.superseded.append(stat.key)
        self._gather(wanted)

    def _gather(self, packs: _Packs) -> None:
        for pack, chunks in packs:
            self._covered.add(pack)
            self._gathered.append((pack, chunks))
            self._bytes += _ENTRY * len(chunks)
            if self._bytes >= MERGED_SIZE:
                self._flush()

    def _flush(self) -> None:
        if self._gathered:
            data = encode_index(sorted(self._gathered, key=lambda each: each[0].raw))
            digest = Digest.of(data)
            if digest not in self._stored:
                self._objects.blobs.put(keys.index(digest), data)
            self._merged.indexes.append(digest)
            self._gathered, self._bytes = [], 0


def _groups(indexes: Iterable[BlobStat]) -> Iterator[list[BlobStat]]:
    """Indexes to be read at once: together about as large as a merged one."""
    group: list[BlobStat] = []
    size = 0
    for stat in indexes:
        if group and size + stat.size > MERGED_SIZE:
            yield group
            group, size = [], 0
        group.append(stat)
        size += stat.size
    if group:
        yield group
