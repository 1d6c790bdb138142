"""Export: an image of the store leaves as an OCI image, in a layout.

    image -> each layer's tar, byte for byte as it came (dsec_store.layer.export) -> compress -> blob of the layout
          -> the config with which the image came, or one that is made -> a new manifest -> the layout's index

Layers are made side by side. Nothing becomes visible before all of them have their diff_ids and are on the disk; an
error leaves the target as it was (`dsec_registry.layoutwriter`). What is identical and what is not: docs/export.md.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Final, Protocol

import zstandard
from isal import isal_zlib

from dsec_registry.layoutwriter import LayoutOut, Target, make_manifest, open_target
from dsec_registry.manifest import (
    OCI_CONFIG,
    OCI_LAYER,
    OCI_MANIFEST,
    Descriptor,
    Platform,
    host_platform,
    parse_config,
)
from dsec_registry.ociconfig import make_config
from dsec_store.chunks import ChunkSource
from dsec_store.descriptor import Image
from dsec_store.digest import Digest, hasher_for
from dsec_store.errors import Invalid, StoreError, Unavailable
from dsec_store.layer.ahead import ReadAhead
from dsec_store.layer.contents import PIECE
from dsec_store.layer.export import RecentChunks, layer_tar
from dsec_store.objects import Objects
from dsec_store.references import Reference

GZIP_LEVEL: Final = 2
"""Of isal, 0 to 3. Its own default: a little smaller than 1 in about the same time; 3 takes twice that for 2 %."""

ZSTD_LEVEL: Final = 3

LAYERS_AT_ONCE: Final = max(2, min(4, os.cpu_count() or 1))
"""Layers that are read, compressed and written side by side. Each takes some 80 MiB of memory."""

_GZIP: Final = 31
"""zlib's window bits for a gzip member: without a name, mtime 0."""

Progress = Callable[[str, int, int], None]
"""Told of what is being done, and how many of about how many plain bytes are. Called from several threads."""


class Compressor(Protocol):
    """The part of zlib's interface that is used."""

    def compress(self, data: bytes, /) -> bytes: ...

    def flush(self) -> bytes: ...


class _Plain:
    """No compression."""

    def compress(self, data: bytes, /) -> bytes:
        return data

    def flush(self) -> bytes:
        return b""


def _gzip() -> Compressor:
    return isal_zlib.compressobj(GZIP_LEVEL, isal_zlib.DEFLATED, _GZIP)


def _zstd() -> Compressor:
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=True).compressobj()


_COMPRESSIONS: Final[dict[str, tuple[str, Callable[[], Compressor]]]] = {
    "gzip": ("+gzip", _gzip),
    "zstd": ("+zstd", _zstd),
    "none": ("", _Plain),
}

COMPRESSIONS: Final = tuple(_COMPRESSIONS)
"""What a layer's blob can be compressed with. The result does not depend on the number of threads or on timing."""


@dataclass(frozen=True, slots=True)
class ExportedLayer:
    """A layer that has left: its descriptor in the store, the digest and bytes of its tar, and its blob."""

    layer: Digest
    diff_id: Digest
    plain_bytes: int
    blob: Descriptor


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export wrote. `original_config`: the config is the one with which the image came."""

    manifest: Descriptor
    config: Descriptor
    original_config: bool
    layers: tuple[ExportedLayer, ...]


def silent(what: str, done: int, total: int) -> None:
    """A progress that nobody watches."""


def export(
    objects: Objects,
    reference: Reference,
    target: Target,
    *,
    compression: str = "gzip",
    platform: Platform | None = None,
    progress: Progress = silent,
) -> Exported:
    """Add the image of `reference` to `target`. Raises `StoreError`; then the target is as it was.

    `platform`: what an image that runs anywhere is said to be for; else, this host's. `Invalid` for a layer that OCI
    has no form of, `Corrupt` and `NotFound` with what is damaged or missing in the store.
    """
    if compression not in _COMPRESSIONS:
        raise Invalid(f"unknown compression {compression!r} (known: {', '.join(COMPRESSIONS)})")
    image = objects.image(reference.image)
    meant, came = _platform(image, platform), _config_it_came_with(objects, reference, image)
    with open_target(target) as layout:
        exporting = _Export(objects, layout, compression, progress)
        layers = exporting.run(image.layers)
        diff_ids = tuple(layer.diff_id for layer in layers)
        original = came is not None and _says_the_same(came, image, diff_ids)
        config = layout.put(came if came and original else make_config(image, meant, diff_ids), OCI_CONFIG)
        data = make_manifest(config, [layer.blob for layer in layers])
        manifest = layout.put(data, OCI_MANIFEST, platform=meant)
        layout.commit(manifest)
    return Exported(manifest, config, original, layers)


def _platform(image: Image, wanted: Platform | None) -> Platform:
    if image.platform is None:
        return wanted or host_platform()
    own = Platform.parse(image.platform)
    if wanted not in (None, own):
        raise Invalid(f"the image is for {own}, and cannot be exported for {wanted}")
    return own


def _config_it_came_with(objects: Objects, reference: Reference, image: Image) -> bytes | None:
    """None if there is none, or the image adds variables that it cannot have."""
    if reference.origin.config is None or image.env or image.path:
        return None
    return objects.oci(reference.origin.config)


def _says_the_same(config: bytes, image: Image, diff_ids: tuple[Digest, ...]) -> bool:
    """Whether a config is that of the image as it is now."""
    parsed = parse_config(config, "of the image's origin", len(diff_ids))
    return (parsed.diff_ids, parsed.run) == (diff_ids, image.config)


class _Export:
    """The layers of one image on their way out."""

    def __init__(self, objects: Objects, layout: LayoutOut, compression: str, progress: Progress) -> None:
        self._objects = objects
        self._layout = layout
        self._suffix, self._compressor = _COMPRESSIONS[compression]
        self._progress = progress
        self._source = ChunkSource(objects.blobs, RecentChunks())
        self._given_up = threading.Event()

    def run(self, layers: tuple[Digest, ...]) -> tuple[ExportedLayer, ...]:
        """All layers, bottom first; what is there twice is made once."""
        titles: dict[Digest, str] = {}
        for number, layer in enumerate(layers, 1):
            titles.setdefault(layer, f"layer {number} of {len(layers)}")
        with ThreadPoolExecutor(LAYERS_AT_ONCE, thread_name_prefix="layer") as pool:
            try:
                futures = {layer: pool.submit(self._layer, layer, title) for layer, title in titles.items()}
                for future in as_completed(futures.values()):
                    future.result()  # the first that fails ends it
            except BaseException:
                self._given_up.set()
                pool.shutdown(cancel_futures=True)
                raise
        return tuple(futures[layer].result() for layer in layers)

    def _layer(self, layer: Digest, title: str) -> ExportedLayer:
        descriptor = self._objects.layer(layer)
        about = sum(blob.size for blob in descriptor.stored_blobs)
        hasher = None if descriptor.diff_id else hasher_for("sha256")  # that of a diff_id was verified by `layer_tar`
        compressor, plain = self._compressor(), 0
        try:
            with self._layout.blob() as out, ReadAhead(layer_tar(self._objects, descriptor, self._source)) as tar:
                while piece := tar.read(PIECE):
                    if self._given_up.is_set():
                        raise Unavailable("given up, since another layer failed")
                    if hasher:
                        hasher.update(piece)
                    plain += len(piece)
                    out.write(compressor.compress(piece))
                    self._progress(title, min(plain, about), about)
                out.write(compressor.flush())
        except StoreError as error:
            raise type(error)(f"{title}: {error}") from None
        self._progress(title, about, about)
        blob = Descriptor(OCI_LAYER + self._suffix, out.digest, out.size)
        diff_id = Digest("sha256", hasher.digest()) if hasher else descriptor.diff_id
        assert diff_id is not None, "one of the two"
        return ExportedLayer(layer, diff_id, plain, blob)
