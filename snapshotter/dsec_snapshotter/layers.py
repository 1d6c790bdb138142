"""Layers on this node: one EROFS mount each, shared by every composition that has the layer.

A layer is *acquired*: its files are fetched and checked, and it is mounted at `l/<short id>`, unless it is already.
It is never given back: how many use it is counted from the compositions' records (`dsec_snapshotter.compositions`),
and an unused layer stays, warm, until `gc` or `stop` unmounts it.

    layer = layers.acquire(digest)         # from any thread; equal digests meet in one mount
    os.listdir(layer.path)

Locks: docs/concurrency.md, "Node". All paths are relative to DSEC_ROOT, the working directory.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dsec_snapshotter import mounts, root
from dsec_snapshotter.features import Features
from dsec_snapshotter.keylocks import KeyLocks
from dsec_snapshotter.records import Records
from dsec_snapshotter.shortids import claim_folder
from dsec_store.descriptor import LayerDescriptor
from dsec_store.digest import Digest
from dsec_store.errors import Corrupt
from dsec_store.layerfiles import LayerFiles
from dsec_store.objects import Objects

_ID_LENGTH: Final = 4
"""Characters of a short id: a million of them, where a node has some thousand layers."""

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Layer:
    """A mounted layer. Its record holds the descriptor as well: a node that starts anew need not ask the store."""

    id: str
    digest: Digest
    descriptor: LayerDescriptor

    @property
    def path(self) -> str:
        return f"{root.LAYERS}/{self.id}"

    @property
    def image(self) -> str:
        return f"{root.METADATA}/{self.descriptor.metadata.digest.hex}.erofs"

    @property
    def devices(self) -> list[str]:
        """The blob devices: none if no file of the layer has contents."""
        return [f"{root.BLOBS}/{blob.name.hex}.blob" for blob in self.descriptor.blobs]

    def as_json(self) -> dict[str, Any]:
        return {"id": self.id, "digest": str(self.digest), "descriptor": json.loads(self.descriptor.encode())}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Layer:
        encoded = json.dumps(value["descriptor"]).encode()
        digest = Digest.parse(value["digest"])
        return cls(str(value["id"]), digest, LayerDescriptor.decode(encoded, f"record of layer {digest}"))


def layer_records() -> Records[Layer]:
    return Records(Path(root.RECORDS), "layer", Layer.as_json, Layer.from_json)


class Layers:
    """See the module's text. Safe for calls from many threads."""

    def __init__(self, objects: Objects, features: Features, devices_ready: Callable[[], None]) -> None:
        """`devices_ready` returns when blob devices can be read, and raises `StoreError` when they cannot.

        It is asked before each mount, also of a layer without a device: once the node stops, nothing is mounted.
        """
        self._objects = objects
        self._features = features
        self._devices_ready = devices_ready
        self._files = LayerFiles(Path())
        self._records = layer_records()
        self._key_locks = KeyLocks[Digest]()
        self._lock = threading.Lock()
        self._mounted: dict[Digest, Layer] = {}

    def all(self) -> list[Layer]:
        with self._lock:
            return sorted(self._mounted.values(), key=lambda layer: layer.id)

    def acquire(self, digest: Digest) -> Layer:
        """The layer, mounted. Raises `StoreError`; then nothing of it stays mounted."""
        with self._key_locks(digest):
            layer = self._get(digest)
            if layer is None:
                layer = self._mount(digest)
                with self._lock:
                    self._mounted[digest] = layer
            return layer

    def adopt(self, layer: Layer) -> bool:
        """Take over a mount that a former node process made. False, and nothing done, if we have this layer."""
        with self._lock:
            return self._mounted.setdefault(layer.digest, layer) is layer

    def release(self, layer: Layer, *, lazy: bool = False) -> bool:
        """Unmount a layer that no composition has. Its files stay (`sweep`). False when it is in use after all.

        With `lazy` it is detached in any case.
        """
        with self._key_locks(layer.digest):
            if self._get(layer.digest) is layer:
                if not mounts.try_unmount(layer.path, lazy=lazy):
                    return False
                with self._lock:
                    del self._mounted[layer.digest]
                self._forget(layer)
            return True

    def sweep(self) -> int:
        """Remove the local files that no mounted layer has; returns how many. Nobody may acquire meanwhile."""
        layers = self.all()
        metadata = {layer.descriptor.metadata.digest.hex for layer in layers}
        chunk_maps = {blob.name.hex for layer in layers for blob in layer.descriptor.blobs}
        return _remove_others(root.METADATA, metadata) + _remove_others(root.CHUNK_MAPS, chunk_maps)

    def _get(self, digest: Digest) -> Layer | None:
        with self._lock:
            return self._mounted.get(digest)

    def _mount(self, digest: Digest) -> Layer:
        descriptor = self._objects.layer(digest)
        self._fetch(descriptor)
        self._devices_ready()
        with contextlib.ExitStack() as undo:
            layer = Layer(claim_folder(root.LAYERS, _ID_LENGTH), digest, descriptor)
            undo.callback(self._forget, layer)
            self._records.write(layer.id, layer)
            try:
                mounts.mount_erofs(layer.image, layer.devices, layer.path, direct_io=self._features.direct_io)
            except OSError as error:
                raise mounts.refused(f"layer {digest} cannot be mounted", error) from error
            undo.pop_all()
        self._raise_read_ahead(layer)
        return layer

    def _fetch(self, descriptor: LayerDescriptor) -> None:
        """Have the files of the layer here, and the metadata image as it was stored: the kernel will trust it."""
        self._files.fetch(self._objects, descriptor)
        image = self._files.metadata_path(descriptor)
        try:
            descriptor.metadata.digest.verify(image.read_bytes(), f"local metadata image {image.name}")
        except Corrupt as error:
            _log.warning("%s; fetching it again", error)
            image.unlink()
            self._files.fetch(self._objects, descriptor)

    def _raise_read_ahead(self, layer: Layer) -> None:
        """Before any file of it is opened: an open file keeps what it found. A layer without it is slow, not wrong."""
        if not (self._features.read_ahead and layer.devices):
            return
        try:
            bdi = mounts.bdi_of(layer.path)
            if bdi:
                mounts.set_read_ahead(bdi, mounts.READ_AHEAD)
        except OSError as error:
            _log.warning("layer %s: read-ahead stays at the kernel's default: %s", layer.digest, error)

    def _forget(self, layer: Layer) -> None:
        os.rmdir(layer.path)
        self._records.remove(layer.id)


def _remove_others(folder: str, digests: Collection[str]) -> int:
    """Remove the files of other digests; hidden ones are being written by the data daemon, and get a name soon."""
    strangers = [path for path in Path(folder).glob("[!.]*") if path.name.partition(".")[0] not in digests]
    for path in strangers:
        path.unlink(missing_ok=True)
    return len(strangers)
