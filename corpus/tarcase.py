"""`python -m corpus.tarcase FILE`: read one archive as a layer, and say as JSON what came of it.

A process of its own, because that is what can be limited: memory and time are held against what they may be.
"""

from __future__ import annotations

import hashlib
import json
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from dsec_store.backends.memory import MemoryBlobs
from dsec_store.chunker import DEFAULT
from dsec_store.chunkmap import ChunkLocation, ChunkMap
from dsec_store.chunks import ChunkSource, LazyBlob, NoCache
from dsec_store.errors import Corrupt, Invalid
from dsec_store.layer.assemble import assemble
from dsec_store.layer.contents import StoredContents
from dsec_store.layer.decompress import open_decompressed
from dsec_store.layer.recipe import RecipeWriter, read_recipe
from dsec_store.layer.stack import Stack
from dsec_store.layer.tar import PIECE, TarEntry, TarReader
from dsec_store.layer.unpack import Placed, unpack
from dsec_store.objects import Objects
from dsec_store.upload import ChunkIndex, Upload

HOLES: Final = 1 << 30
"""Bytes of holes beyond which an archive is only read: its zeros would take minutes."""


def main(path: Path) -> Any:
    """What came of it: "refused" with the reason, or "entries", "remade" (whether its recipe gives the same bytes, None
    if that was not tried) and "layer" (empty, or why no layer can be made of it)."""
    try:
        entries = _entries(path)
        found: dict[str, Any] = {"entries": [_plain(entry) for entry in entries], "remade": None, "layer": ""}
        if sum(entry.size for entry in entries if entry.runs is not None) < HOLES:
            found["remade"], found["layer"] = _stored(path)
    except (Corrupt, Invalid) as error:
        found = {"refused": f"{type(error).__name__}: {error}"}
    return {**found, "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10}


def _entries(path: Path) -> list[TarEntry]:
    with path.open("rb") as file:
        reader = TarReader(open_decompressed(file))
        entries = []
        for entry in reader:
            for _ in reader.content():
                pass
            entries.append(entry)
        reader.finish()
        return entries


def _plain(entry: TarEntry) -> list[Any]:
    """The entry as JSON has it: bytes as Latin-1."""
    path, link = entry.path.decode("latin-1"), entry.link.decode("latin-1")
    attributes = (entry.mode, entry.uid, entry.gid, entry.mtime_ns, entry.size)
    return [path, entry.kind.value, *attributes, link, list(entry.rdev)]


def _stored(path: Path) -> tuple[bool, str]:
    objects = Objects(MemoryBlobs())
    with Upload(objects, ChunkIndex(objects)) as upload:
        contents, recipe = StoredContents(upload.blob(DEFAULT), DEFAULT), RecipeWriter(upload.blob(DEFAULT))
        hasher = hashlib.sha256()
        with path.open("rb") as file:
            placed = unpack(_Hashed(open_decompressed(file), hasher), contents, recipe)
        problem = _problem(placed, contents)
        maps = contents.finish(), recipe.finish()
        upload.finish()
        source = ChunkSource(objects.blobs, NoCache())
        blob, written = (_blob(each, upload.locate(each), source) for each in maps)
    pieces = (written.read(at, PIECE) for at in range(0, written.size, PIECE))
    again = hashlib.sha256()
    for piece in read_recipe(pieces, blob.read, "recipe"):
        again.update(piece)
    return again.digest() == hasher.digest(), problem


def _blob(chunk_map: ChunkMap, places: Sequence[ChunkLocation], source: ChunkSource) -> LazyBlob:
    return LazyBlob(chunk_map, lambda _: places, source)


def _problem(placed: list[Placed], contents: StoredContents) -> str:
    try:
        assemble(placed, contents, Stack([]))
    except Invalid as error:
        return str(error)
    return ""


class _Hashed:
    def __init__(self, stream: Any, hasher: Any) -> None:
        self._stream = stream
        self._hasher = hasher

    def read(self, size: int, /) -> bytes:
        data: bytes = self._stream.read(size)
        self._hasher.update(data)
        return data


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
