"""The typed objects of a store over its blobs: every read is checked against digest, size and format.

    objects = Objects(blobs)
    image = objects.image(objects.references.get("demo"))
    layer = objects.layer(image.layers[0])
    blob = layer.blobs[0]
    chunk_map = objects.chunk_map(blob.chunk_map)
    locations = objects.locator(blob.name, len(chunk_map))

Key names: `dsec_store.keys`. What leads to what: docs/format/store.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from dsec_store import compression, document, keys
from dsec_store.blobs import BlobStore
from dsec_store.bounds import check_limit
from dsec_store.chunkmap import ChunkLocation, ChunkMap, decode_locator, encode_locator
from dsec_store.descriptor import Image, LayerDescriptor, Sized
from dsec_store.digest import Digest
from dsec_store.errors import Corrupt, Invalid, NotFound
from dsec_store.pack import FOOTER_SIZE, PackedChunk, decode_index, decode_section, encode_index, section_span
from dsec_store.references import References

KeyOf = Callable[[Digest], str]

MAX_INDEX: Final = 1 << 30
"""Bytes of one index that a reader accepts."""

MAX_METADATA: Final = 1 << 30
"""Plain bytes of one metadata image that a reader accepts: some ten million inodes."""

MAX_CHUNK_MAP: Final = 256 << 20
"""Bytes of one chunk map that a reader accepts: seven million chunks, of some 450 GiB at the default sizes."""

MAX_LOCATOR: Final = 320 << 20
"""Bytes of one locator that a reader accepts: for the largest chunk map, each chunk in a pack of its own."""

MAX_SECTION: Final = 64 << 20
"""Bytes of one pack's section that a reader accepts: more than a pack of the smallest chunks has."""

MAX_PACK: Final = 128 << 20
"""Bytes of one pack that a reader accepts when it reads it whole."""

MAX_OCI_OBJECT: Final = 8 << 20
"""Bytes of an OCI manifest or config."""

_LOOKUP_SIZE: Final = 128
"""Bytes of a lookup that a reader accepts; a digest in writing takes 71."""


class Objects:
    """See the module's text. Raises `NotFound` naming what is missing, `Corrupt` naming what is damaged."""

    def __init__(self, blobs: BlobStore) -> None:
        self.blobs = blobs
        self.references = References(blobs)

    # -- layer descriptors and images ------------------------------------------------------------------------------

    def put_layer(self, descriptor: LayerDescriptor) -> Digest:
        return self._put_document(keys.layer, "a layer descriptor", descriptor.encode())

    def layer(self, digest: Digest) -> LayerDescriptor:
        return LayerDescriptor.decode(self._get(keys.layer(digest), digest, "layer"), f"layer {digest}")

    def has_layer(self, digest: Digest) -> bool:
        return self.blobs.stat(keys.layer(digest)) is not None

    def put_image(self, image: Image) -> Digest:
        return self._put_document(keys.image, "an image", image.encode())

    def image(self, digest: Digest) -> Image:
        return Image.decode(self._get(keys.image(digest), digest, "image"), f"image {digest}")

    def put_oci(self, data: bytes) -> Digest:
        _check_written("an OCI object", len(data), MAX_OCI_OBJECT)
        digest = Digest.of(data, "sha256")
        self.blobs.put(keys.oci(digest), data)
        return digest

    def oci(self, digest: Digest) -> bytes:
        return self._get(keys.oci(digest), digest, "OCI object", limit=MAX_OCI_OBJECT)

    # -- what a layer consists of ----------------------------------------------------------------------------------

    def put_metadata(self, image: bytes) -> Sized:
        """Store a metadata image: one byte of encoding, then the stored form."""
        _check_written("a metadata image", len(image), MAX_METADATA)
        digest = Digest.of(image)
        encoding, stored = compression.encode(image)
        self.blobs.put(keys.metadata(digest), bytes([encoding]) + stored)
        return Sized(digest, len(image))

    def metadata(self, sized: Sized) -> bytes:
        """The plain metadata image, verified."""
        what = f"metadata image {sized.digest}"
        if sized.size > MAX_METADATA:
            raise Corrupt(f"{what}: {sized.size} bytes, expected at most {MAX_METADATA}")
        stored = self._fetch(keys.metadata(sized.digest), what, limit=sized.size + 1)
        plain = compression.decode(stored[0] if stored else -1, memoryview(stored)[1:], sized.size, what)
        sized.digest.verify(plain, what)
        return plain

    def put_chunk_map(self, chunk_map: ChunkMap) -> Sized:
        data = chunk_map.encode()
        _check_written("a chunk map", len(data), MAX_CHUNK_MAP)
        return Sized(self._put(keys.chunk_map, data), len(data))

    def chunk_map_bytes(self, sized: Sized) -> bytes:
        data = self.chunk_map_bytes_of(sized.digest, min(sized.size, MAX_CHUNK_MAP))
        if len(data) != sized.size:
            raise Corrupt(f"chunk map {sized.digest}: {len(data)} bytes where {sized.size} were expected")
        return data

    def chunk_map_bytes_of(self, digest: Digest, limit: int | None = None) -> bytes:
        """The bytes of a chunk map whose size is not known, at most `limit`."""
        return self._get(keys.chunk_map(digest), digest, "chunk map", MAX_CHUNK_MAP if limit is None else limit)

    def chunk_map(self, sized: Sized) -> ChunkMap:
        return ChunkMap.decode(self.chunk_map_bytes(sized), f"chunk map {sized.digest}")

    def put_locator(self, chunk_map: Sized, locations: list[ChunkLocation]) -> None:
        data = encode_locator(locations)
        _check_written("a locator", len(data), MAX_LOCATOR)
        self.blobs.put(keys.locator(chunk_map.digest), data)

    def locator_bytes(self, chunk_map: Digest) -> bytes:
        return self._fetch(keys.locator(chunk_map), f"locator of chunk map {chunk_map}", limit=MAX_LOCATOR)

    def locator(self, chunk_map: Digest, chunks: int | None = None) -> list[ChunkLocation]:
        """Where the chunks of this map lie; `chunks` is how many it has, if that is known already."""
        return decode_locator(self.locator_bytes(chunk_map), f"locator of chunk map {chunk_map}", chunks)

    # -- packs and their indexes -----------------------------------------------------------------------------------

    def put_pack(self, data: bytes) -> Digest:
        return self._put(keys.pack, data)

    def put_index(self, packs: Iterable[tuple[Digest, list[PackedChunk]]]) -> Digest:
        data = encode_index(packs)
        _check_written("an index", len(data), MAX_INDEX)
        return self._put(keys.index, data)

    def pack_chunks(self, pack: Digest) -> list[PackedChunk]:
        """The chunks of a stored pack, by its own section: what an index says of it. Two small requests."""
        key, what = keys.pack(pack), f"pack {pack}"
        if (stat := self.blobs.stat(key)) is None:
            raise NotFound(f"{what} is missing in {self.blobs.location}")
        footer = self.blobs.get_range(key, max(0, stat.size - FOOTER_SIZE), FOOTER_SIZE)
        start, length = section_span(stat.size, footer, what)
        check_limit(f"{what}: its section", length, MAX_SECTION)
        return decode_section(self.blobs.get_range(key, start, length), start, what)

    def verify_pack(self, pack: Digest) -> None:
        """Read a whole pack. Raises `NotFound` or `Corrupt` unless it is what was stored."""
        self._get(keys.pack(pack), pack, "pack", limit=MAX_PACK)

    def packs(self) -> dict[Digest, int]:
        """Every pack that is stored, with its size in bytes."""
        return {digest: stat.size for stat in self.blobs.list("packs/") for digest in _named(stat.key, keys.pack)}

    def index_digests(self) -> Iterator[Digest]:
        """Every index that is stored."""
        return (digest for stat in self.blobs.list("indexes/") for digest in _named(stat.key, keys.index))

    def index(self, digest: Digest) -> list[tuple[Digest, list[PackedChunk]]]:
        """The packs that this index names, with their chunks."""
        data = self._get(keys.index(digest), digest, "index", limit=MAX_INDEX)
        return decode_index(data, f"index {digest}")

    def indexes(self) -> Iterator[tuple[Digest, list[PackedChunk]]]:
        """Every pack that some index names, with its chunks. Raises `StoreError` at the first index that is damaged."""
        for digest in self.index_digests():
            yield from self.index(digest)

    # -- lookups ---------------------------------------------------------------------------------------------------

    def set_lookup(self, kind: str, key: Digest, layer: Digest) -> None:
        """From now on `key` leads to `layer`, which must be stored already."""
        self.blobs.put(keys.lookup(kind, key), str(layer).encode())

    def lookup(self, kind: str, key: Digest) -> Digest | None:
        """The layer that `key` leads to, or None when it leads nowhere, to nonsense, or to a layer that is gone.

        None costs a build, which sets the lookup anew; so a damaged lookup heals.
        """
        with contextlib.suppress(NotFound, Corrupt, Invalid):
            layer = Digest.parse(self.blobs.get(keys.lookup(kind, key), limit=_LOOKUP_SIZE).decode(errors="replace"))
            return layer if self.has_layer(layer) else None
        return None

    # -- below -----------------------------------------------------------------------------------------------------

    def _put_document(self, key: KeyOf, what: str, data: bytes) -> Digest:
        _check_written(what, len(data), document.MAX_DOCUMENT)
        return self._put(key, data)

    def _put(self, key: KeyOf, data: bytes) -> Digest:
        digest = Digest.of(data)
        self.blobs.put(key(digest), data)
        return digest

    def _get(self, key: str, digest: Digest, kind: str, limit: int = document.MAX_DOCUMENT) -> bytes:
        data = self._fetch(key, f"{kind} {digest}", limit)
        digest.verify(data, f"{kind} {digest}")
        return data

    def _fetch(self, key: str, what: str, limit: int) -> bytes:
        try:
            return self.blobs.get(key, limit=limit)
        except NotFound:
            raise NotFound(f"{what} is missing in {self.blobs.location}") from None


def _named(key: str, key_of: KeyOf) -> Iterator[Digest]:
    """The digest that `key` names, unless it is no key of that family."""
    with contextlib.suppress(Invalid):
        if key_of(digest := keys.digest_in(key)) == key:
            yield digest


def _check_written(what: str, size: int, limit: int) -> None:
    """Nothing is written that readers refuse."""
    if size > limit:
        raise Invalid(f"{what} of {size} bytes cannot be stored (at most {limit}); divide the layer, or the image")
