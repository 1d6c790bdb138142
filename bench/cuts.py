"""A chunk store that keeps only digests and sizes: what a cut rule would store of layers that come one after the other.

Nothing of the builder is used but its cutter: the contents of a layer's tar are put in order, laid out in an address
space, cut into streams and chunks, digested and compressed, as docs/format/chunk-map.md says ("Cuts").
"""

from __future__ import annotations

import mmap
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from pathlib import Path
from time import thread_time
from typing import Final

import zstandard
from blake3 import blake3

from dsec_store.chunker import ChunkerParameters, Cutter

ALIGNMENT: Final = 4096

MAP_BYTES: Final = 36 + 13
"""Of one chunk in chunk map and locator."""
INDEX_BYTES: Final = 45
"""Of one new chunk in the index of its pack."""

NEVER: Final = 1 << 62
"""A `solo` that no content reaches: everything is one stream."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How contents are ordered, laid out, cut and compressed. The fields' defaults are those of the format."""

    chunker: ChunkerParameters
    alignment: int = ALIGNMENT
    by_suffix: bool = False
    """Contents in the order of their names' suffixes, then of paths; else of paths alone."""
    level: int = 3


@dataclass(frozen=True, slots=True)
class Content:
    """Distinct bytes of a layer, under the first of their paths."""

    path: str
    digest: bytes
    data: memoryview


@dataclass(frozen=True, slots=True)
class Layer:
    """Contents in path order, and what each path of a regular file that is not empty has."""

    contents: tuple[Content, ...]
    digests: dict[str, bytes]

    @property
    def sizes(self) -> dict[bytes, int]:
        """Bytes of each content, by its digest."""
        return {content.digest: len(content.data) for content in self.contents}


@cache
def read_layer(tar: Path) -> Layer:
    """The files of an uncompressed tar, mapped, not read; kept for the life of the process."""
    with tar.open("rb") as file:
        whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    with tarfile.open(tar, "r:") as archive:
        entries = {entry.name.removeprefix("./"): entry for entry in archive if entry.isreg() and entry.size}
    digests: dict[str, bytes] = {}
    distinct: dict[bytes, Content] = {}
    for path, entry in sorted(entries.items()):
        data = whole[entry.offset_data : entry.offset_data + entry.size]
        digests[path] = blake3(data).digest()
        distinct.setdefault(digests[path], Content(path, digests[path], data))
    return Layer(tuple(distinct.values()), digests)


@dataclass(slots=True)
class Cpu:
    """Seconds of one thread."""

    cut: float = 0.0
    digest: float = 0.0
    compress: float = 0.0

    def total(self) -> float:
        return self.cut + self.digest + self.compress


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk where it lies in a layer's address space; sizes in bytes."""

    size: int
    stored: int


@dataclass(slots=True)
class Laid:
    """One layer in the store: its chunks in address order, where each content begins, and what was new."""

    pieces: list[Piece] = field(default_factory=list)
    starts: dict[bytes, int] = field(default_factory=dict)
    size: int = 0
    new_chunks: int = 0
    new_size: int = 0
    new_stored: int = 0

    @property
    def ends(self) -> list[int]:
        """The address behind each chunk."""
        return list(accumulate(piece.size for piece in self.pieces))

    @property
    def metadata(self) -> int:
        """Bytes of chunk map, locator and index entries."""
        return MAP_BYTES * len(self.pieces) + INDEX_BYTES * self.new_chunks


class Model:
    """A store under one rule. The same layer twice costs nothing the second time."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._cutter = Cutter(rule.chunker)
        self._compressor = zstandard.ZstdCompressor(level=rule.level, write_checksum=False)
        self._stored: dict[bytes, int] = {}
        self.cpu = Cpu()

    def add(self, layer: Layer) -> Laid:
        laid = Laid()
        for stream in streams(layer, self._rule, laid.starts):
            for piece in (*stream, None):
                before = thread_time()
                cut = self._cutter.end() if piece is None else self._cutter.add(bytes(piece))
                self.cpu.cut += thread_time() - before
                for chunk in cut.chunks() if cut else ():
                    self._take(chunk, laid)
        return laid

    def _take(self, chunk: memoryview, laid: Laid) -> None:
        before = thread_time()
        digest = blake3(chunk).digest()
        self.cpu.digest += thread_time() - before
        stored = self._stored.get(digest)
        if stored is None:
            before = thread_time()
            stored = self._stored[digest] = min(len(chunk), len(self._compressor.compress(chunk)))
            self.cpu.compress += thread_time() - before
            laid.new_chunks += 1
            laid.new_size += len(chunk)
            laid.new_stored += stored
        laid.size += len(chunk)
        laid.pieces.append(Piece(len(chunk), stored))


def streams(layer: Layer, rule: Rule, starts: dict[bytes, int]) -> Iterator[list[bytes | memoryview]]:
    """What is cut as one, piece by piece. Tells the address of each content in `starts`."""
    address = 0
    run: list[bytes | memoryview] = []
    for content in _ordered(layer.contents, by_suffix=rule.by_suffix):
        starts[content.digest] = address
        padding = bytes(-len(content.data) % rule.alignment)
        address += len(content.data) + len(padding)
        if len(content.data) < rule.chunker.solo:
            run += (content.data, padding)
            continue
        if run:
            yield run
            run = []
        yield [content.data, padding]
    if run:
        yield run


def _ordered(contents: Iterable[Content], *, by_suffix: bool) -> Iterable[Content]:
    if not by_suffix:
        return contents
    return sorted(contents, key=lambda content: (Path(content.path).suffix, content.path))
