"""Conversion: an OCI image becomes an image of the store, layer by layer.

    blob -> verify digest and size -> decompress -> spool (the diff_id is computed on the way) -> tar entries
         -> tree on top of the layers below -> chunks, metadata image -> descriptor -> lookups

A layer that the store has already, by its build key, is neither read nor built, if all that it consists of is there: so
converting again repairs what was lost. Damage inside of objects takes `verify` to be seen and repaired.

Nothing becomes visible before the whole image is stored: the name is written last. A crash or an error before leaves
objects that nobody refers to, which the next conversion of the same layers finds and uses.

Lookups: `build` and `chain` lead to every layer; `digest` and `diff`, which say nothing of what lies below, only to
layers that look the same on anything.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final

from dsec_registry.layouts import ImageSource, ResolvedImage
from dsec_registry.manifest import Descriptor, Platform
from dsec_store.check import Presence, layer_problems
from dsec_store.chunker import DEFAULT
from dsec_store.descriptor import Image
from dsec_store.digest import Digest, hasher_for
from dsec_store.errors import Corrupt, StoreError
from dsec_store.layer.assemble import Assembly, assemble_tar
from dsec_store.layer.build import StoredLayer, StoredStack, build_key, store_layer
from dsec_store.layer.decompress import open_decompressed
from dsec_store.layer.spool import spooled
from dsec_store.layer.tar import read_entries
from dsec_store.objects import Objects
from dsec_store.references import check_name
from dsec_store.upload import ChunkIndex

PIECE: Final = 1 << 20

_log: Final = logging.getLogger(__name__)

_BOTTOM: Final = Digest.of(b"", "sha256")
"""What a build key has for the parent of a bottom layer that looked below: nothing is a parent too."""

Progress = Callable[[str, int, int], None]
"""Told what is being done, and how many of how many layers are finished."""


@dataclass(frozen=True, slots=True)
class Converted:
    """What a conversion did: the image, and of its layers how many were built and what that added to the store."""

    image: Digest
    layers: int
    built: int
    new_packs: int
    new_bytes: int


def silent(what: str, done: int, total: int) -> None:
    """A progress that nobody watches."""


def convert(
    objects: Objects,
    source: ImageSource,
    tag: str | None,
    platform: Platform,
    name: str,
    *,
    progress: Progress = silent,
    workers: int = 0,
    verify: bool = False,
) -> Converted:
    """Store the image that `tag` names in `source` under `name`. Raises `StoreError`; then `name` is as it was.

    `verify`: whatever the store has already is read and verified before it is relied on, and stored anew if damaged.
    `workers` threads digest and compress, 0: one per processor. The result does not depend on them.
    """
    check_name(name)
    resolved = source.resolve(tag, platform)
    layers = _Layers(objects, source, workers, verify)
    count = len(resolved.manifest.layers)
    for number, (blob, diff_id) in enumerate(zip(resolved.manifest.layers, resolved.config.diff_ids, strict=True)):
        progress(f"layer {number + 1} of {count} ({diff_id.hex[:12]})", number, count)
        layers.add(blob, diff_id)
    progress("image", count, count)
    image = _store_image(objects, resolved, platform, layers.stack.layers)
    objects.references.set(name, image)
    built = layers.built
    return Converted(
        image=image,
        layers=count,
        built=len(built),
        new_packs=sum(layer.new_packs for layer in built),
        new_bytes=sum(layer.new_bytes for layer in built),
    )


def _store_image(objects: Objects, resolved: ResolvedImage, platform: Platform, layers: tuple[Digest, ...]) -> Digest:
    image = Image(
        kind="base",
        layers=layers,
        config=objects.put_oci(resolved.config_bytes),
        manifest=objects.put_oci(resolved.manifest_bytes),
        platform=str(resolved.config.platform or platform),
        source_bytes=sum(layer.size for layer in resolved.manifest.layers),
    )
    return objects.put_image(image)


class _Layers:
    """The layers of one image so far, bottom first."""

    def __init__(self, objects: Objects, source: ImageSource, workers: int, verify: bool) -> None:
        self._objects = objects
        self._source = source
        self._workers = workers
        self._verify = verify
        self._presence = Presence(objects)
        self._index: ChunkIndex | None = None
        self._chain: Digest | None = None
        self.stack = StoredStack(objects)
        self.built: list[StoredLayer] = []

    def add(self, blob: Descriptor, diff_id: Digest) -> None:
        """Put one more layer on top: found by its build key, or built."""
        alone = build_key(diff_id, DEFAULT, None)
        on_top = build_key(diff_id, DEFAULT, self._chain or _BOTTOM)
        self._chain = chain_id(self._chain, diff_id)
        key, layer = self._known(alone, on_top)
        if layer is None:
            assembly, layer = self._build(blob, diff_id)
            key = on_top if assembly.needs_lower else alone
            self.stack.push(layer, assembly.root)
            self._objects.set_lookup("build", key, layer)
        else:
            self.stack.push(layer)
        self._objects.set_lookup("chain", self._chain, layer)
        if key == alone:
            self._objects.set_lookup("digest", blob.digest, layer)
            self._objects.set_lookup("diff", diff_id, layer)

    def _known(self, *keys: Digest) -> tuple[Digest | None, Digest | None]:
        """The first of these build keys that leads to a layer of which nothing is missing, and the layer."""
        for key in keys:
            if (layer := self._objects.lookup("build", key)) and self._is_whole(layer):
                return key, layer
        return None, None

    def _is_whole(self, layer: Digest) -> bool:
        problems = layer_problems(self._objects, layer) if self._verify else self._presence.missing(layer)
        for problem in problems:
            _log.warning("layer %s is built again: %s", layer, problem)
        return not problems

    def _build(self, blob: Descriptor, diff_id: Digest) -> tuple[Assembly, Digest]:
        if self._index is None:
            self._index = ChunkIndex(self._objects, verify=self._verify)
        with spooled(self._plain(blob, diff_id)) as tar:
            assembly = self._assemble(tar, blob.digest)
            stored = store_layer(self._objects, self._index, assembly, diff_id=diff_id, workers=self._workers)
        self.built.append(stored)
        return assembly, stored.digest

    def _plain(self, blob: Descriptor, diff_id: Digest) -> Iterator[bytes]:
        """The uncompressed bytes of `blob`. Raises `Corrupt`, naming it, if blob or tar are not what they should be."""
        hasher = hasher_for("sha256")
        with self._source.open_blob(blob) as reader:
            tar = open_decompressed(reader)
            try:
                while piece := tar.read(PIECE):
                    hasher.update(piece)
                    yield piece
            except Corrupt as error:
                reader.finish()  # if the blob itself is damaged, that is the better message
                raise Corrupt(f"layer {blob.digest}: {error}") from None
            reader.finish()
        if (found := Digest("sha256", hasher.digest())) != diff_id:
            raise Corrupt(f"layer {blob.digest}: its uncompressed bytes are {found}, its config says diff_id {diff_id}")

    def _assemble(self, tar: BinaryIO, blob: Digest) -> Assembly:
        try:
            return assemble_tar(read_entries(tar), tar, self.stack.stack(), self.stack.open)
        except StoreError as error:
            raise type(error)(f"layer {blob}: {error}") from None


def chain_id(parent: Digest | None, diff_id: Digest) -> Digest:
    """The chain_id of a layer on `parent` (image-spec, config.md "Layer ChainID")."""
    return diff_id if parent is None else Digest.of(f"{parent} {diff_id}".encode(), "sha256")
