"""From a stream of bytes to chunks in packs: what a build does with a blob's address space.

Digesting and compressing run on a few threads, in windows, while results are taken in order: packs, and so every object
of a store that began empty, come out the same at any thread count. A chunk that the store knows already is not
compressed, not stored and not sent again.

    with ChunkWriter(objects, ChunkIndex(objects), DEFAULT) as writer:
        for content in contents: writer.write(content)          # bytes, in address order
        chunk_map, locations = writer.finish()                  # every chunk is stored now

Write order (docs/format/store.md): packs, then the index that names them. A crash before the index leaves packs that
nobody refers to; after it, chunks that the next build can use.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from dsec_store import compression
from dsec_store.chunker import ChunkerParameters, Cutter
from dsec_store.chunkmap import ChunkLocation, ChunkMap
from dsec_store.digest import Digest
from dsec_store.errors import Corrupt, NotFound
from dsec_store.objects import Objects
from dsec_store.pack import PackBuilder, PackedChunk

WINDOW: Final = 64
"""Chunks that may wait between cutter and pack: at most 16 MiB of plain bytes."""

UPLOADS: Final = 2
"""Packs that may be on their way to the store at once."""

INDEX_READERS: Final = 16
"""Indexes that are read at once."""

_log: Final = logging.getLogger(__name__)

_Encoded = tuple[bytes, int, int, bytes]
"""Raw digest, plain size, encoding, stored bytes; no bytes when the store has the chunk."""

_StoredPack = tuple[Digest, list[PackedChunk]]


class ChunkIndex:
    """Where the chunks of a store lie, as its index objects tell; loaded once, and told of every new pack.

    Only chunks whose pack is there and long enough count: a build must never rely on a pack that was lost. An index
    that is damaged or was removed meanwhile is passed over: it costs chunks that are stored twice, not the build.

    With `verify`, a pack is read whole before the first of its chunks counts, and none of a damaged one does: so a
    build stores them anew. Safe to ask from many threads.
    """

    def __init__(self, objects: Objects, *, verify: bool = False) -> None:
        self._objects = objects
        self._verify = verify
        self._lock = threading.Lock()
        self._locations: dict[bytes, ChunkLocation] = {}
        self._spare: dict[bytes, list[ChunkLocation]] = {}
        self._sound: dict[Digest, bool] = {}
        packs = objects.packs()
        with ThreadPoolExecutor(INDEX_READERS, thread_name_prefix="index") as pool:
            for _ in pool.map(lambda digest: self._load(digest, packs), objects.index_digests()):
                pass

    def add(self, pack: Digest, chunks: Iterable[PackedChunk]) -> None:
        """Learn of a pack that was stored and indexed just now."""
        with self._lock:
            self._sound[pack] = True
            self._learn(pack, chunks)

    def __contains__(self, digest: bytes) -> bool:
        if not self._verify:
            return digest in self._locations
        with self._lock:
            while (location := self._locations.get(digest)) and not self._is_sound(location.pack):
                self._forget(digest)
            return location is not None

    def __getitem__(self, digest: bytes) -> ChunkLocation:
        return self._locations[digest]

    def _load(self, digest: Digest, packs: dict[Digest, int]) -> None:
        try:
            indexed = self._objects.index(digest)
        except (Corrupt, NotFound) as error:
            _log.warning("chunks are not found again by an index: %s", error)
            return
        for pack, chunks in indexed:
            size = packs.get(pack, 0)
            with self._lock:
                self._learn(pack, [chunk for chunk in chunks if chunk.offset + chunk.stored <= size])

    def _learn(self, pack: Digest, chunks: Iterable[PackedChunk]) -> None:
        """Under the lock."""
        for chunk in chunks:
            location = ChunkLocation(pack, chunk.offset, chunk.stored, chunk.encoding)
            if self._locations.setdefault(chunk.digest, location) is not location:
                self._spare.setdefault(chunk.digest, []).append(location)

    def _is_sound(self, pack: Digest) -> bool:
        """Under the lock."""
        if pack not in self._sound:
            try:
                self._objects.verify_pack(pack)
                self._sound[pack] = True
            except (Corrupt, NotFound) as error:
                _log.warning("its chunks are stored anew where they are needed: %s", error)
                self._sound[pack] = False
        return self._sound[pack]

    def _forget(self, digest: bytes) -> None:
        """Under the lock. The next place of this chunk counts, if there is one."""
        if spare := self._spare.get(digest):
            self._locations[digest] = spare.pop()
        else:
            del self._locations[digest]


class ChunkWriter:
    """One blob on its way into the store; see the module's text. Not for use from several threads.

    `index` learns of the new packs at the end only, when an index object names them. `workers` is the number of threads
    that compress (0: one for each CPU).
    """

    def __init__(self, objects: Objects, index: ChunkIndex, parameters: ChunkerParameters, workers: int = 0) -> None:
        self._objects = objects
        self._index = index
        self._cutter = Cutter(parameters)
        self._pool = ThreadPoolExecutor(workers or len(os.sched_getaffinity(0)), thread_name_prefix="chunk")
        self._uploader = ThreadPoolExecutor(UPLOADS, thread_name_prefix="pack")
        self._encoding: deque[Future[_Encoded]] = deque()
        self._uploading: deque[Future[_StoredPack]] = deque()
        self._digests: list[bytes] = []
        self._sizes: list[int] = []
        self._pack = PackBuilder()
        self._fresh: set[bytes] = set()
        self._new_packs: list[_StoredPack] = []

    def __enter__(self) -> ChunkWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._uploader.shutdown(cancel_futures=True)

    @property
    def new_packs(self) -> int:
        """Packs that this blob added to the store; final after `finish`."""
        return len(self._new_packs)

    @property
    def new_bytes(self) -> int:
        """Stored bytes of the chunks that this blob added; final after `finish`."""
        return sum(chunk.stored for _, chunks in self._new_packs for chunk in chunks)

    def write(self, data: bytes | memoryview) -> None:
        """The next bytes of the address space. Raises `StoreError` of a pack that could not be stored."""
        self._submit(self._cutter.feed(data))

    def cut(self) -> None:
        """End the stream that the cutter sees: no chunk reaches over this address."""
        self._submit(self._cutter.finish())

    def finish(self) -> tuple[ChunkMap, list[ChunkLocation]]:
        """Store what is left. On return every chunk of the map is stored and indexed."""
        self.cut()
        while self._encoding:
            self._take()
        if self._pack.chunks:
            self._upload()
        while self._uploading:
            self._settle()
        if self._new_packs:
            self._objects.put_index(self._new_packs)
            for pack, chunks in self._new_packs:
                self._index.add(pack, chunks)
        return ChunkMap(self._digests, self._sizes), [self._index[digest] for digest in self._digests]

    def _submit(self, chunks: Iterable[bytes]) -> None:
        for chunk in chunks:
            self._encoding.append(self._pool.submit(self._encode, chunk))
            if len(self._encoding) >= WINDOW:
                self._take()

    def _encode(self, chunk: bytes) -> _Encoded:
        """On a thread of the pool: may read what the writer knows, which only ever grows."""
        digest = Digest.of(chunk).raw
        if self._knows(digest):
            return digest, len(chunk), compression.PLAIN, b""
        return digest, len(chunk), *compression.encode(chunk)

    def _take(self) -> None:
        digest, size, encoding, stored = self._encoding.popleft().result()
        self._digests.append(digest)
        self._sizes.append(size)
        if self._knows(digest):
            return
        self._fresh.add(digest)
        self._pack.add(digest, size, encoding, stored)
        if self._pack.full:
            self._upload()

    def _knows(self, digest: bytes) -> bool:
        return digest in self._fresh or digest in self._index

    def _upload(self) -> None:
        if len(self._uploading) >= UPLOADS:
            self._settle()
        self._uploading.append(self._uploader.submit(_store, self._objects, self._pack))
        self._pack = PackBuilder()

    def _settle(self) -> None:
        self._new_packs.append(self._uploading.popleft().result())


def _store(objects: Objects, pack: PackBuilder) -> _StoredPack:
    return objects.put_pack(pack.seal()), pack.chunks
