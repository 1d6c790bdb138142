"""Runs of layers in the store: made once, found again by what they are made of, mounted as one layer.

    lowers = lowers_of(objects, image.layers)              # what a node mounts, by the automatic rule
    lowers = collapse(objects, image.layers, [range(len(image.layers))])      # everything as one run

A run is a layer of its own: a metadata image over the blobs of its layers. No content is read or written. It depends on
its layers and on those below (`dsec_store.layer.merge`), and so does the key by which it is found.

Boundaries of automatic runs are counted from the bottom and never depend on what lies above: images that have their
lower layers in common have the runs of these in common too, hence one mount of them on a node, and one page cache
(docs/decisions/0007-collapse.md).

Write order: metadata image, descriptor, lookup. A crash leaves objects that nobody refers to.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from dsec_store import document, keys
from dsec_store.descriptor import FORMAT, Blob, LayerDescriptor
from dsec_store.digest import Digest
from dsec_store.errors import Corrupt, Invalid, NotFound
from dsec_store.layer.build import inodes, metadata_image
from dsec_store.layer.erofs import read_image
from dsec_store.layer.merge import Part, from_opaque_root, merge
from dsec_store.layer.stack import Stack
from dsec_store.objects import Objects

RUN_LENGTH: Final = 32
"""Layers of an automatic run. Images of fewer layers are mounted as they are."""

LAYERS_AT_ONCE: Final = 16
"""Layers whose metadata images are fetched at once."""


def lowers_of(objects: Objects, layers: Sequence[Digest], *, verify: bool = False) -> tuple[Digest, ...]:
    """`Image.lowers` by the automatic rule: every complete run of RUN_LENGTH layers from the bottom up is collapsed.

    Empty where nothing is. `layers` must be stored. With `verify` runs are made again instead of looked up.
    """
    return collapse(objects, layers, automatic_runs(len(layers)), verify=verify)


def automatic_runs(count: int) -> list[range]:
    """The automatic runs of `count` layers."""
    return [range(start, start + RUN_LENGTH) for start in range(0, count - RUN_LENGTH + 1, RUN_LENGTH)]


def collapse(
    objects: Objects, layers: Sequence[Digest], runs: Sequence[range], *, verify: bool = False
) -> tuple[Digest, ...]:
    """`layers` (bottom first) with these runs of them collapsed; empty if that changes nothing.

    `runs` do not overlap, in order. Raises `StoreError` when a layer's metadata image cannot be had.
    """
    collapsing = _Collapsing(objects, layers, verify)
    done = 0
    for run in runs:
        collapsing.keep(range(done, run.start))
        collapsing.collapse(run)
        done = run.stop
    collapsing.keep(range(done, len(layers)))
    return () if collapsing.lowers == list(layers) else tuple(collapsing.lowers)


def run_key(run: Sequence[Digest], below: Sequence[Digest]) -> Digest:
    """What a run is looked up by: all that it depends on. `below` are the plain layers under it."""
    parts = {"run": list(map(str, run)), "below": list(map(str, below)), "format": FORMAT}
    return Digest.of(document.encode(parts))


class _Collapsing:
    """The layers of one image so far, bottom first. Trees are read when a run must be made that lies on them."""

    def __init__(self, objects: Objects, layers: Sequence[Digest], verify: bool) -> None:
        self._objects = objects
        self._layers = layers
        self._verify = verify
        self._parts: dict[Digest, Part[Blob]] = {}
        self.lowers: list[Digest] = []

    def keep(self, span: range) -> None:
        self.lowers += self._layers[span.start : span.stop]

    def collapse(self, span: range) -> None:
        """Put a run on top: found, or made. One that is only one layer again and again is that layer."""
        run, below = self._layers[span.start : span.stop], self._layers[: span.start]
        distinct = _topmost(run)
        if len(distinct) < 2:
            self.lowers += distinct
            return
        key = run_key(run, below)
        layer = None if self._verify else self._known(key, run)
        if layer is None:
            layer = self._make(run, distinct)
            self._objects.set_lookup("build", key, layer)
        self.lowers.append(layer)

    def _known(self, key: Digest, run: Sequence[Digest]) -> Digest | None:
        """The run that is stored under `key`, if nothing of its own is missing."""
        layer = self._objects.lookup("build", key)
        if layer is None:
            return None
        try:
            descriptor = self._objects.layer(layer)
        except (NotFound, Corrupt, Invalid):
            return None
        whole = self._objects.blobs.stat(keys.metadata(descriptor.metadata.digest)) is not None
        return layer if whole and descriptor.run == tuple(run) else None

    def _make(self, run: Sequence[Digest], distinct: Sequence[Digest]) -> Digest:
        below = from_opaque_root(self._read(self.lowers))
        merged = merge(self._read(distinct), Stack([part.tree for part in below]))
        descriptor = LayerDescriptor(
            metadata=self._objects.put_metadata(metadata_image(merged.tree, merged.devices)),
            blobs=merged.devices,
            inodes=len(inodes(merged.tree)),
            has_root=merged.has_root,
            run=tuple(run),
        )
        layer = self._objects.put_layer(descriptor)
        self._parts = {lower: self._parts[lower] for lower in self.lowers} | {layer: merged}
        return layer

    def _read(self, layers: Sequence[Digest]) -> list[Part[Blob]]:
        lacking = [layer for layer in dict.fromkeys(layers) if layer not in self._parts]
        with ThreadPoolExecutor(LAYERS_AT_ONCE, thread_name_prefix="tree") as pool:
            self._parts.update(zip(lacking, pool.map(self._part, lacking), strict=True))
        return [self._parts[layer] for layer in layers]

    def _part(self, layer: Digest) -> Part[Blob]:
        descriptor = self._objects.layer(layer)
        image = read_image(self._objects.metadata(descriptor.metadata))
        if [device.tag for device in image.devices] != [blob.name.hex for blob in descriptor.blobs]:
            raise Corrupt(f"layer {layer}: its metadata image has other blob devices than its descriptor")
        return Part(image.root, descriptor.has_root, descriptor.blobs)


def _topmost(layers: Sequence[Digest]) -> list[Digest]:
    """Equal layers count once, where they lie topmost (docs/decisions/0005-mounting-on-a-node.md)."""
    return list(reversed(dict.fromkeys(reversed(layers))))
