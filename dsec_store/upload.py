"""From streams of bytes to chunks in packs: what a build does with the address spaces of its blobs.

An `Upload` is what one build adds to the store, a `BlobWriter` one blob of it. Digesting and compressing run on a few
threads, in windows, while results are taken in order: packs, and so every object of a store that began empty, come out
the same at any thread count. A chunk that the store knows already is not compressed, not stored and not sent again.

    with Upload(objects, ChunkIndex(objects)) as upload:
        blob = upload.blob(DEFAULT)
        blob.write(content)                     # bytes, in address order
        chunk_map = blob.finish()
        upload.finish()                         # every chunk is stored now
        objects.put_locator(..., upload.locate(chunk_map))

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

from blake3 import blake3

from dsec_store import compression
from dsec_store.chunker import ChunkerParameters, Cut, Cutter
from dsec_store.chunkmap import ChunkLocation, ChunkMap
from dsec_store.digest import Digest
from dsec_store.errors import Corrupt, NotFound, StoreError, Unavailable
from dsec_store.objects import Objects
from dsec_store.pack import PACK_SIZE, PackBuilder, PackedChunk

BATCH: Final = 2 << 20
"""Plain bytes that one thread digests and compresses at a time: threads that hand over less wait for each other more
than they work."""

BATCHES_AHEAD: Final = 1
"""Batches per thread, and beyond, that may wait between cutter and pack: at most 18 MiB for two threads."""

UPLOADS: Final = 2
"""Packs that may be on their way to the store at once."""

INDEX_READERS: Final = 16
"""Indexes that are read at once."""

_log: Final = logging.getLogger(__name__)

_Encoded = tuple[bytes, int, int, bytes]
"""Raw digest, plain size, encoding, stored bytes; no bytes when the store has the chunk."""

_KNOWN: Final = (compression.PLAIN, b"")

_Batch = list[Cut]

_StoredPack = tuple[Digest, list[PackedChunk]]


class ChunkIndex:
    """Where the chunks of a store lie, as its index objects tell; loaded once, and told of every new pack.

    Only chunks whose pack is there and long enough count: a build must never rely on a pack that was lost. An index
    that is damaged or was removed meanwhile is passed over: it costs chunks that are stored twice, not the build.

    With `verify`, a pack is read whole before the first of its chunks counts, and none of a damaged one does: so a
    build stores them anew. Safe to ask from many threads: several uploads may share an index, and a chunk that one of
    them has claimed is stored by that one. Whoever needs its place before that has it stored at once, so nobody waits
    for what another does with the rest of its blobs.
    """

    def __init__(self, objects: Objects, *, verify: bool = False) -> None:
        self._objects = objects
        self._verify = verify
        self._lock = threading.Lock()
        self._claims: dict[bytes, Upload] = {}
        self._failures: dict[bytes, BaseException | None] = {}
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
            for chunk in chunks:
                self._claims.pop(chunk.digest, None)
            self._learn(pack, chunks)

    def __contains__(self, digest: bytes) -> bool:
        """Whether the chunk is in the store, or on its way there."""
        if not self._verify:
            return digest in self._locations or digest in self._claims
        with self._lock:
            while (location := self._locations.get(digest)) and not self._is_sound(location.pack):
                self._forget(digest)
            return location is not None or digest in self._claims

    def claim(self, digest: bytes, upload: Upload) -> bool:
        """Whether `upload` must store this chunk: nobody else has, or will."""
        if digest in self:
            return False
        with self._lock:
            return digest not in self._locations and self._claims.setdefault(digest, upload) is upload

    def abandon(self, upload: Upload, error: BaseException | None = None) -> None:
        """`upload` has failed, perhaps by `error`: nothing more comes of what it claimed."""
        with self._lock:
            for digest in [digest for digest, owner in self._claims.items() if owner is upload]:
                del self._claims[digest]
                self._failures[digest] = error

    def locate(self, digest: bytes) -> ChunkLocation:
        """Where the chunk lies. What another upload has claimed, and not stored yet, is stored first.

        When that upload has failed, raises its `StoreError`, or `Unavailable` if it had none.
        """
        while True:
            with self._lock:
                if location := self._locations.get(digest):
                    return location
                owner = self._claims.get(digest)
                failure = self._failures.get(digest)
            if owner is None:
                problem = f"chunk blake3:{digest.hex()} was not stored: another upload failed"
                raise failure if isinstance(failure, StoreError) else Unavailable(problem)
            owner.settle()

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


class Upload:
    """What one build adds to the store; see the module's text. A context manager, used from one thread at a time.

    `index` learns of the new packs when an index object names them: at the end, or when another upload needs one of
    their chunks. `workers` is the number of threads that compress (0: one for each CPU).
    """

    def __init__(self, objects: Objects, index: ChunkIndex, workers: int = 0) -> None:
        self._objects = objects
        self._index = index
        self.workers = workers or len(os.sched_getaffinity(0))
        self._pool = ThreadPoolExecutor(self.workers, thread_name_prefix="chunk")
        self._uploader = ThreadPoolExecutor(UPLOADS, thread_name_prefix="pack")
        self._uploading: deque[Future[_StoredPack]] = deque()
        self.lock = threading.RLock()  # over packs and claims: `settle` is called from other threads
        self._writers: list[BlobWriter] = []
        self._begun: list[PackBuilder] = []
        self._packs: list[_StoredPack] = []
        self._indexed = 0  # of `_packs`
        self._closed = False
        self._finished = False

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """Free the threads, and give up the claims of what is not finished, perhaps because of `error`."""
        with self.lock:
            self._pool.shutdown(cancel_futures=True)
            self._uploader.shutdown(cancel_futures=True)
            self._closed = True
            if not self._finished:
                self._index.abandon(self, error)

    @property
    def new_packs(self) -> int:
        """Packs that this upload added to the store; final after `finish`."""
        return len(self._packs)

    @property
    def new_bytes(self) -> int:
        """Stored bytes of the chunks that this upload added; final after `finish`."""
        return sum(chunk.stored for _, chunks in self._packs for chunk in chunks)

    def blob(self, parameters: ChunkerParameters) -> BlobWriter:
        """A new blob. Several can be written side by side; the chunks of each lie together."""
        self._writers.append(BlobWriter(self, parameters))
        return self._writers[-1]

    def finish(self) -> None:
        """Store what is left, when all blobs are finished. On return every chunk is stored and indexed."""
        with self.lock:
            self._store_begun()
            self._finished = True

    def settle(self) -> None:
        """Store and index all that was claimed so far. From any thread: another upload needs some of it now."""
        with self.lock:
            if self._closed:
                return
            try:
                for writer in self._writers:
                    writer.leave()
                self._store_begun()
            except BaseException as error:
                self._index.abandon(self, error)
                raise

    def locate(self, chunk_map: ChunkMap) -> list[ChunkLocation]:
        """Where the chunks of a blob lie, once the upload is finished."""
        return [self._index.locate(digest) for digest in chunk_map.digests]

    # -- for the blobs ---------------------------------------------------------------------------------------------

    def encode(self, batch: _Batch) -> Future[list[_Encoded]]:
        """Digest the chunks of a batch, and compress those that the store does not have."""
        return self._pool.submit(self._encode, batch)

    def claim(self, digest: bytes) -> bool:
        return self._index.claim(digest, self)

    def store(self, pack: PackBuilder) -> None:
        """Send a pack on its way."""
        if len(self._uploading) >= UPLOADS:
            self._settle()
        self._uploading.append(self._uploader.submit(_store, self._objects, pack))

    def leave(self, pack: PackBuilder) -> None:
        """A pack that is not full, at the end of a blob or before it."""
        self._begun.append(pack)

    def _encode(self, batch: _Batch) -> list[_Encoded]:
        """On a thread of the pool: may read what the index knows."""
        encoded = []
        for cut in batch:
            for chunk in cut.chunks():
                digest = blake3(chunk).digest()
                stored = _KNOWN if digest in self._index else compression.encode(chunk)
                encoded.append((digest, len(chunk), *stored))
        return encoded

    def _store_begun(self) -> None:
        """Store what was left, and index what was stored."""
        for pack in _joined(self._begun):
            self.store(pack)
        self._begun.clear()
        while self._uploading:
            self._settle()
        if packs := self._packs[self._indexed :]:
            self._objects.put_index(packs)
            self._indexed = len(self._packs)
            for digest, chunks in packs:
                self._index.add(digest, chunks)

    def _settle(self) -> None:
        self._packs.append(self._uploading.popleft().result())


class BlobWriter:
    """One blob on its way into the store. Not for use from several threads."""

    def __init__(self, upload: Upload, parameters: ChunkerParameters) -> None:
        self._upload = upload
        self._cutter = Cutter(parameters)
        self._batch: _Batch = []
        self._batch_size = 0
        self._encoding: deque[Future[list[_Encoded]]] = deque()
        self._most = upload.workers + BATCHES_AHEAD
        self._pack = PackBuilder()
        self._sizes: list[int] = []
        self._digests: list[bytes] = []
        self._dropped: list[tuple[int, int]] = []
        self.size = 0

    def write(self, data: bytes) -> None:
        """The next bytes of the address space. Raises `StoreError` of a pack that could not be stored."""
        self.size += len(data)
        if cut := self._cutter.add(data):
            self._submit(cut)

    def cut(self) -> int:
        """End the stream that the cutter sees: no chunk reaches over this address. Returns a mark for `drop`."""
        if cut := self._cutter.end():
            self._submit(cut)
        return len(self._sizes)

    def drop(self, mark: int) -> None:
        """Cut, and forget what was written since the cut that returned `mark`: its address is free again."""
        end = self.cut()
        self.size -= sum(self._sizes[mark:end])
        if end > mark:
            self._dropped.append((mark, end))

    def finish(self) -> ChunkMap:
        """Digest and pack what is left. The chunks are stored when the upload is finished."""
        self.cut()
        if self._batch:
            self._flush()
        while self._encoding:
            self._take()
        self.leave()
        for begin, end in reversed(self._dropped):
            del self._digests[begin:end], self._sizes[begin:end]
        return ChunkMap(self._digests, self._sizes)

    def leave(self) -> None:
        """Hand over the pack that was begun."""
        with self._upload.lock:
            if self._pack.chunks:
                self._upload.leave(self._pack)
                self._pack = PackBuilder()

    def _submit(self, cut: Cut) -> None:
        start = 0
        for end in cut.ends:
            self._sizes.append(end - start)
            start = end
        self._batch.append(cut)
        self._batch_size += start
        if self._batch_size >= BATCH:
            self._flush()

    def _flush(self) -> None:
        self._encoding.append(self._upload.encode(self._batch))
        self._batch, self._batch_size = [], 0
        if len(self._encoding) >= self._most:
            self._take()

    def _take(self) -> None:
        encoded = self._encoding.popleft().result()
        with self._upload.lock:
            for digest, size, encoding, stored in encoded:
                self._digests.append(digest)
                if stored and self._upload.claim(digest):
                    self._pack.add(digest, size, encoding, stored)
                    if self._pack.full:
                        self._upload.store(self._pack)
                        self._pack = PackBuilder()


def _store(objects: Objects, pack: PackBuilder) -> _StoredPack:
    return objects.put_pack(pack.seal()), pack.chunks


def _joined(packs: list[PackBuilder]) -> Iterable[PackBuilder]:
    """Fewer packs with the same chunks in the same order, none larger than a full one."""
    last: PackBuilder | None = None
    for pack in packs:
        if last is not None and last.size + pack.size <= PACK_SIZE:
            last.append(pack)
            continue
        if last is not None:
            yield last
        last = pack
    if last is not None:
        yield last
