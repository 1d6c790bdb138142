"""What `dsec_store.check` asks of single objects. Each function reads what it needs, and tells what is wrong.

A *record* is what a locator and a chunk map together say of one chunk, in 45 bytes: raw digest, offset in the pack,
stored bytes, plain bytes, encoding. A pack's section says the same, so comparing them is comparing sets of records.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dsec_store import keys
from dsec_store.browse import LayerTrees
from dsec_store.chunkmap import ChunkLocation, ChunkRef
from dsec_store.chunks import ChunkSource, check_location, decode_chunk, join, span, stored_part
from dsec_store.descriptor import Blob, Image, LayerDescriptor
from dsec_store.digest import Digest
from dsec_store.errors import Corrupt, Invalid, NotFound
from dsec_store.layer.erofs import Device, read_image, write_image
from dsec_store.layer.erofs.format import BLOCK
from dsec_store.layer.merge import Part, from_opaque_root, merge
from dsec_store.layer.recipe import read_recipe
from dsec_store.layer.stack import Stack
from dsec_store.objects import Objects
from dsec_store.references import Origin
from dsec_store.sourcedocs import chain_ids, diff_ids
from dsec_store.storedblob import StoredBlob

Record = bytes

_RECORD: Final = struct.Struct("<32sIIIB")
_LOOKUP_SIZE: Final = 128
_RECIPE_PIECE: Final = 4 << 20
"""Bytes of a recipe that are read at once."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A record in words."""

    ref: ChunkRef
    location: ChunkLocation

    @classmethod
    def of(cls, record: Record, pack: Digest) -> Chunk:
        digest, offset, stored, size, encoding = _RECORD.unpack(record)
        return cls(ChunkRef(0, digest, 0, size), ChunkLocation(pack, offset, stored, encoding))

    @property
    def name(self) -> str:
        return f"chunk blake3:{self.ref.digest.hex()} in pack {self.location.pack} at byte {self.location.offset}"


@dataclass(frozen=True, slots=True)
class ChunkProblem:
    """What is wrong with one chunk, by its raw digest."""

    digest: bytes
    text: str


# -- a layer -----------------------------------------------------------------------------------------------------------


def check_metadata(objects: Objects, digest: Digest, layer: LayerDescriptor) -> None:
    """The metadata image is well formed, names the layer's blobs, and no file reaches beyond them."""
    devices = read_image(objects.metadata(layer.metadata)).devices
    if devices != _devices(layer.blobs):
        raise Corrupt(f"layer {digest}: its metadata image has other blob devices than its descriptor")


def blob_records(objects: Objects, blob: Blob) -> tuple[dict[Digest, set[Record]], list[str]]:
    """The records of a blob by pack, and what is wrong beside them. Raises `StoreError` when there are none."""
    chunk_map = objects.chunk_map(blob.chunk_map)
    wrong = [] if chunk_map.blob_size == blob.size else [f"blob {blob.name}: its chunk map has another size"]
    records: dict[Digest, set[Record]] = {}
    for number, at in enumerate(objects.locator(blob.name, len(chunk_map))):
        ref = chunk_map[number]
        check_location(ref, at, Chunk(ref, at).name)
        records.setdefault(at.pack, set()).add(_RECORD.pack(ref.digest, at.offset, at.stored, ref.size, at.encoding))
    return records, wrong


def check_recipe(objects: Objects, layer: LayerDescriptor, source: ChunkSource) -> None:
    """The recipe can be read to its end, and asks for nothing that the layer's blob does not have."""
    assert layer.recipe, "only layers that came as a tar are asked"
    what = f"recipe {layer.recipe.name}"
    size = layer.blobs[0].size if layer.blobs else 0

    def read(address: int, length: int) -> bytes:
        if address + length > size:
            raise Corrupt(f"{what}: a content at bytes {address} to {address + length}, of a blob of {size} bytes")
        return bytes(length)

    lazy = StoredBlob(objects, layer.recipe, source).lazy
    pieces = (lazy.read(start, _RECIPE_PIECE) for start in range(0, lazy.size, _RECIPE_PIECE))
    for _ in read_recipe(pieces, read, what):
        pass


# -- packs and their chunks --------------------------------------------------------------------------------------------


def disagreements(objects: Objects, pack: Digest, records: Iterable[Record]) -> list[ChunkProblem]:
    """The records of a pack that its own section does not have. Raises `StoreError` when there is no such section."""
    section = {_RECORD.pack(c.digest, c.offset, c.stored, c.size, c.encoding) for c in objects.pack_chunks(pack)}
    wrong = (Chunk.of(record, pack) for record in sorted(set(records) - section))
    text = "the locator and the pack's own section do not agree"
    return [ChunkProblem(chunk.ref.digest, f"{chunk.name}: {text}") for chunk in wrong]


def read_chunks(objects: Objects, pack: Digest, records: Iterable[Record]) -> Iterator[int | ChunkProblem]:
    """Fetch and verify chunks of a pack: the plain bytes of each, or what is wrong. Raises `NotFound` without pack."""
    for run in join(Chunk.of(record, pack) for record in records):
        start, length = span(run)
        try:
            data = memoryview(objects.blobs.get_range(keys.pack(pack), start, length))
        except Corrupt as error:
            yield from (ChunkProblem(chunk.ref.digest, f"{chunk.name}: {error}") for chunk in run)
            continue
        for chunk in run:
            stored = stored_part(data, start, chunk.location)
            try:
                yield len(decode_chunk(chunk.ref, chunk.location, stored, chunk.name))
            except Corrupt as error:
                yield ChunkProblem(chunk.ref.digest, str(error))


# -- an image and its name ---------------------------------------------------------------------------------------------


def check_origin(objects: Objects, origin: Origin, layers: Sequence[LayerDescriptor]) -> None:
    """The configuration with which an image came is that of its layers. One of layers without tar says nothing."""
    if origin.config is None or not any(layer.diff_id for layer in layers):
        return
    what = f"config {origin.config}"
    if diff_ids(objects.oci(origin.config), what) != [layer.diff_id for layer in layers]:
        raise Corrupt(f"{what}: its diff_ids are not those of the image's layers")


def run_problems(
    objects: Objects, digest: Digest, image: Image, layers: Mapping[Digest, LayerDescriptor]
) -> Iterator[str]:
    """What is wrong with what is mounted for an image's layers. `layers` holds all that it names."""
    covered = [layer for lower in image.lowers for layer in (layers[lower].run or (lower,))]
    if image.lowers and _without_repeats(covered) != _without_repeats(image.layers):
        yield f"image {digest}: what is mounted for it does not stand for its layers"
        return
    trees = LayerTrees(objects)

    def part(layer: Digest) -> Part[Blob]:
        return Part(trees.tree(layer), layers[layer].has_root, layers[layer].blobs)

    for number, lower in enumerate(image.lowers):
        if run := layers[lower].run:
            trees.fetch([*run, *image.lowers[:number]])
            below = from_opaque_root([part(layer) for layer in image.lowers[:number]])
            topmost = list(reversed(dict.fromkeys(reversed(run))))
            merged = merge([part(layer) for layer in topmost], Stack([one.tree for one in below]))
            yield from _differing(lower, layers[lower], merged)


def _differing(digest: Digest, run: LayerDescriptor, merged: Part[Blob]) -> Iterator[str]:
    if run.blobs != merged.devices:
        yield f"run {digest}: its blob devices are not those of its layers"
    elif run.has_root != merged.has_root or Digest.of(_image_of(merged)) != run.metadata.digest:
        yield f"run {digest}: its tree is not that of its layers (dsec-image collapse makes it anew)"


def _image_of(part: Part[Blob]) -> bytes:
    out = io.BytesIO()
    write_image(part.tree, _devices(part.devices), out)
    return out.getvalue()


def lookup_keys(layers: Sequence[LayerDescriptor]) -> list[tuple[str, int]]:
    """The lookups by which the layers of an image (bottom first) may be found, each with the number of its layer.

    The others depend on more than the image tells.
    """
    diffs = [layer.diff_id for layer in layers if layer.diff_id]
    if len(diffs) < len(layers):
        return []
    chains = enumerate(chain_ids(diffs))
    return [
        *((keys.lookup("diff", diff), number) for number, diff in enumerate(diffs)),
        *((keys.lookup("chain", chain), number) for number, chain in chains),
    ]


def check_lookup(objects: Objects, key: str, diff_id: Digest | None = None) -> None:
    """A lookup leads to a layer that is there, and if one is given, of this diff_id. That there is none is no problem.

    It need not be the layer from which one came: another release may have built the same tar in another way.
    """
    what = f"lookup {key.removeprefix('lookup/')}"
    try:
        layer = Digest.parse(objects.blobs.get(key, limit=_LOOKUP_SIZE).decode(errors="replace"))
    except NotFound:
        return
    except Invalid:
        raise Corrupt(f"{what}: it holds no digest of a layer (the next conversion sets it anew)") from None
    if not objects.has_layer(layer):
        raise NotFound(f"{what}: layer {layer} is missing (the next conversion sets it anew)")
    if diff_id and objects.layer(layer).diff_id != diff_id:
        raise Corrupt(f"{what}: it leads to layer {layer}, which is of another tar")


def _devices(blobs: Iterable[Blob]) -> tuple[Device, ...]:
    return tuple(Device(blob.name.hex, blob.size // BLOCK) for blob in blobs)


def _without_repeats(layers: Sequence[Digest]) -> list[Digest]:
    """Layers of which several equal ones in a row are one."""
    return [layer for number, layer in enumerate(layers) if number == 0 or layers[number - 1] != layer]
