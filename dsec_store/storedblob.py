"""A blob that is read straight from the store, without a node: for builds and tools."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from dsec_store.chunkmap import ChunkLocation
from dsec_store.chunks import ChunkSource, LazyBlob
from dsec_store.descriptor import Blob
from dsec_store.digest import Digest
from dsec_store.objects import Objects


def open_blob(objects: Objects, blob: Blob, source: ChunkSource) -> LazyBlob:
    """The bytes of a blob; see `StoredBlob`."""
    return StoredBlob(objects, blob, source).lazy


class StoredBlob:
    """Its chunk map, and its bytes as a `LazyBlob`. Follows its chunks when gc or a build moves them meanwhile.

    Raises `StoreError` when chunk map or locator cannot be had. Safe for reads from many threads.
    """

    def __init__(self, objects: Objects, blob: Blob, source: ChunkSource) -> None:
        self.chunk_map = objects.chunk_map(blob.chunk_map)
        self.lazy = LazyBlob(self.chunk_map, _Locator(objects, blob.name, len(self.chunk_map)), source)


class _Locator:
    """A blob's locator, read again when it proved stale."""

    def __init__(self, objects: Objects, name: Digest, chunks: int) -> None:
        self._objects = objects
        self._name = name
        self._chunks = chunks
        self._lock = threading.Lock()
        self._current: Sequence[ChunkLocation] = objects.locator(name, chunks)

    def __call__(self, stale: Sequence[ChunkLocation] | None) -> Sequence[ChunkLocation]:
        with self._lock:
            if stale is self._current:
                self._current = self._objects.locator(self._name, self._chunks)
            return self._current
