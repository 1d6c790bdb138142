"""What a node keeps of each layer on its own disk: metadata image, chunk map and locator; the data stays behind.

    m/<metadata digest>.erofs       mounted by the node
    c/<chunk map digest>.map        read by the data daemon, and replaced by it when it proved damaged or lost
    c/<chunk map digest>.locator    read by the data daemon, and replaced by it when it proved stale

The node fetches them before it mounts; the data daemon needs nothing but this folder and the store to start again.
Files appear whole: written beside, synced, renamed. What was damaged later is fetched again, a metadata image at
the next mount, the other two when they are read as well.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Final

from dsec_store.chunkmap import ChunkLocation, ChunkMap, decode_locator
from dsec_store.chunks import ChunkSource, LazyBlob
from dsec_store.descriptor import Blob, LayerDescriptor, Sized
from dsec_store.digest import Digest
from dsec_store.errors import Corrupt, Denied, Invalid, NotFound, StoreError
from dsec_store.objects import Objects
from dsec_store.parallel import in_parallel

METADATA: Final = "m"
CHUNK_MAPS: Final = "c"

REQUESTS_AT_ONCE: Final = 16
"""Files that are fetched at once, of all layers together."""

_log: Final = logging.getLogger(__name__)


class LayerFiles:
    """The layer files below `root`. Relative roots stay relative: the node mounts by short names."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._requests = threading.BoundedSemaphore(REQUESTS_AT_ONCE)

    def metadata_path(self, layer: LayerDescriptor) -> Path:
        """Where the metadata image of `layer` is, once fetched."""
        return self._root / METADATA / f"{layer.metadata.digest.hex}.erofs"

    def fetch(self, objects: Objects, layer: LayerDescriptor) -> None:
        """On return all files of `layer` are here and match their digests.

        Raises `StoreError`; `Denied` when this disk does not take them.
        """
        steps: list[Callable[[], None]] = [lambda: _ensure(self.metadata_path(layer), layer.metadata, objects.metadata)]
        for blob in dict.fromkeys(layer.blobs):
            steps += [partial(self._fetch_map, objects, blob), partial(self._fetch_locator, objects, blob)]
        in_parallel(self._one_of_few, steps, REQUESTS_AT_ONCE)

    def _one_of_few(self, step: Callable[[], None]) -> None:
        with self._requests:
            step()

    def _fetch_map(self, objects: Objects, blob: Blob) -> None:
        _ensure(self._map_path(blob.name), blob.chunk_map, objects.chunk_map_bytes)

    def _fetch_locator(self, objects: Objects, blob: Blob) -> None:
        if not self._locator_path(blob.name).exists():
            self.keep_locator(blob.name, objects.locator_bytes(blob.name))

    def keep_locator(self, chunk_map: Digest, data: bytes) -> None:
        """Keep `data` as the locator of this chunk map. Raises `Denied` when this disk does not take it."""
        _write(self._locator_path(chunk_map), data)

    def keep_chunk_map(self, chunk_map: Digest, data: bytes) -> None:
        """Keep `data`, which matches the digest. Raises `Denied` when this disk does not take it."""
        _write(self._map_path(chunk_map), data)

    def remove(self, layer: LayerDescriptor) -> None:
        """Remove the files of a layer that is not mounted, and whose blobs no mounted layer shares."""
        self.metadata_path(layer).unlink(missing_ok=True)
        for blob in layer.blobs:
            # The locator goes before the map: a map that is gone while its locator is here was lost, not removed.
            self._locator_path(blob.name).unlink(missing_ok=True)
            self._map_path(blob.name).unlink(missing_ok=True)

    def blobs(self) -> list[str]:
        """Hex digests of the chunk maps that are here, sorted: the blobs that the data daemon shows."""
        return sorted(path.stem for path in (self._root / CHUNK_MAPS).glob("*.map"))

    def expects(self, digest: Digest) -> bool:
        """Whether a chunk map belongs here, be it damaged or lost: one of its files is here."""
        return self._map_path(digest).exists() or self._locator_path(digest).exists()

    def chunk_map(self, digest: Digest) -> ChunkMap:
        """Raises `NotFound` when it is not here, `Corrupt` when the file was damaged."""
        try:
            data = self._map_path(digest).read_bytes()
        except FileNotFoundError:
            raise NotFound(f"this node has no chunk map {digest}") from None
        digest.verify(data, f"local chunk map {digest}")
        return ChunkMap.decode(data, f"local chunk map {digest}")

    def locator(self, digest: Digest, chunks: int) -> list[ChunkLocation]:
        """The locator of a chunk map of `chunks` chunks.

        Raises `NotFound` when it is not here, `Corrupt` when it is none. Its digest is not checked: it has none.
        """
        try:
            data = self._locator_path(digest).read_bytes()
        except FileNotFoundError:
            raise NotFound(f"this node has no locator of chunk map {digest}") from None
        return decode_locator(data, f"local locator {digest}", chunks)

    def _map_path(self, chunk_map: Digest) -> Path:
        return self._root / CHUNK_MAPS / f"{chunk_map.hex}.map"

    def _locator_path(self, chunk_map: Digest) -> Path:
        return self._root / CHUNK_MAPS / f"{chunk_map.hex}.locator"


class NodeBlobs:
    """The blobs that this node shows: one `LazyBlob` for each chunk map of `files`, made at first use and kept.

    A blob that is being made is a future: who comes second waits for it, and nobody waits for another blob.
    """

    def __init__(self, files: LayerFiles, objects: Objects, source: ChunkSource) -> None:
        self._files = files
        self._objects = objects
        self._source = source
        self._lock = threading.Lock()
        self._open: dict[str, Future[LazyBlob]] = {}

    def names(self) -> list[str]:
        """The blobs that are here, sorted. What was kept of others is dropped: their layers were removed."""
        with self._lock:
            before = {name for name, opening in self._open.items() if opening.done()}
        names = self._files.blobs()
        with self._lock:
            for gone in before.difference(names):
                self._open.pop(gone, None)
        return names

    def open(self, hex: str) -> LazyBlob:
        """Raises `NotFound` when this node has no such blob.

        A chunk map that was damaged or lost here comes from the store; `StoreError` when it cannot be had there either.
        """
        with self._lock:
            if begin := (opening := self._open.get(hex)) is None:
                opening = self._open[hex] = Future()
        assert opening is not None
        if begin:
            self._begin(hex, opening)
        return opening.result()

    def at_hand(self, hex: str) -> LazyBlob | None:
        """The same without waiting for the store, or for another thread that does: then it is None."""
        with self._lock:
            opening = self._open.get(hex)
        if opening is None:
            digest = _digest(hex)
            if (chunk_map := self._local(digest)) is None:
                return None
            made: Future[LazyBlob] = Future()
            made.set_result(self._lazy(digest, chunk_map))
            with self._lock:
                opening = self._open.setdefault(hex, made)
        return opening.result() if opening.done() and opening.exception() is None else None

    def figures(self) -> dict[str, LazyBlob]:
        """The blobs that were opened so far, by hex digest."""
        with self._lock:
            return {name: opening.result() for name, opening in self._open.items() if opening.done()}

    def _begin(self, hex: str, opening: Future[LazyBlob]) -> None:
        """Make the blob. A failure is for those who wait now: the next one tries again."""
        try:
            blob = self._make(hex)
        except BaseException as error:
            with self._lock:
                self._open.pop(hex, None)
            opening.set_exception(error)
            return
        opening.set_result(blob)

    def _make(self, hex: str) -> LazyBlob:
        digest = _digest(hex)
        chunk_map = self._local(digest)
        return self._lazy(digest, self._fetched(digest) if chunk_map is None else chunk_map)

    def _lazy(self, digest: Digest, chunk_map: ChunkMap) -> LazyBlob:
        self.names()  # the time to drop what is gone
        return LazyBlob(chunk_map, _Locator(self._files, self._objects, digest, len(chunk_map)), self._source)

    def _local(self, digest: Digest) -> ChunkMap | None:
        """None when it must come from the store. Raises `NotFound` when it does not belong here."""
        try:
            return self._files.chunk_map(digest)
        except (NotFound, Corrupt, OSError) as error:
            if not self._files.expects(digest):
                raise
            _log.warning("the store will be asked: %s", error)
            return None

    def _fetched(self, digest: Digest) -> ChunkMap:
        name = f"chunk map {digest}"
        try:
            chunk_map = self._stored(digest, name)
        except StoreError as error:
            _log.error("%s", error)
            self._source.note(name, error)
            raise
        self._source.note(name, None)
        return chunk_map

    def _stored(self, digest: Digest, name: str) -> ChunkMap:
        data = self._objects.chunk_map_bytes_of(digest)
        chunk_map = ChunkMap.decode(data, name)
        try:
            self._files.keep_chunk_map(digest, data)
        except Denied as error:
            _log.warning("%s", error)  # a full disk costs a request at the next start, not the read
        return chunk_map


def _digest(hex: str) -> Digest:
    try:
        return Digest.parse(f"blake3:{hex}")
    except Invalid:
        raise NotFound(f"no blob has the name {hex!r}") from None


class _Locator:
    """Reads a locator from the node's disk at first use, and from the store when it proved stale or is damaged."""

    def __init__(self, files: LayerFiles, objects: Objects, chunk_map: Digest, chunks: int) -> None:
        self._files = files
        self._objects = objects
        self._chunk_map = chunk_map
        self._chunks = chunks
        self._lock = threading.Lock()
        self._locations: Sequence[ChunkLocation] | None = None

    def __call__(self, stale: Sequence[ChunkLocation] | None) -> Sequence[ChunkLocation]:
        with self._lock:
            if self._locations is None:
                self._locations = self._local()
            if self._locations is None or self._locations is stale:
                self._locations = self._stored()
            return self._locations

    def _local(self) -> Sequence[ChunkLocation] | None:
        try:
            return self._files.locator(self._chunk_map, self._chunks)
        except (NotFound, Corrupt, OSError) as error:
            _log.warning("asking the store: %s", error)
            return None

    def _stored(self) -> Sequence[ChunkLocation]:
        data = self._objects.locator_bytes(self._chunk_map)
        locations = decode_locator(data, f"locator of chunk map {self._chunk_map}", self._chunks)
        try:
            self._files.keep_locator(self._chunk_map, data)
        except Denied as error:
            _log.warning("%s", error)  # a full disk costs a request at the next start, not the read
        return locations


def _ensure(path: Path, sized: Sized, fetch: Callable[[Sized], bytes]) -> None:
    """On return `path` holds what `sized` names."""
    if not _holds(path, sized):
        _write(path, fetch(sized))


def _holds(path: Path, sized: Sized) -> bool:
    try:
        data = path.read_bytes()
    except OSError:
        return False
    return len(data) == sized.size and Digest.of(data, sized.digest.algorithm) == sized.digest


def _write(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tmp-")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.rename(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise Denied(f"{path.name} cannot be kept on this node: {error.strerror}; free space below DSEC_ROOT") from None
