"""Checking an image: is everything there, does it match its digest, can every byte be had?

Shallow: each object that the image leads to is read and verified; each pack that it needs is there, is as long as it
should be, and says of its chunks what the locator says. Deep: every chunk is fetched and verified too. Nothing is
repaired and nothing is written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from dsec_store import keys
from dsec_store.chunkmap import ChunkLocation, ChunkMap, ChunkRef
from dsec_store.chunks import check_location, decode_chunk, join, span, stored_part
from dsec_store.descriptor import Image, LayerDescriptor
from dsec_store.digest import Digest
from dsec_store.errors import Corrupt, Invalid, NotFound
from dsec_store.layer.erofs import read_image
from dsec_store.layer.tree import Directory, inode_of
from dsec_store.objects import Objects

PACKS_AT_ONCE: Final = 16
"""Packs that are asked for at once."""


@dataclass(slots=True)
class Report:
    """What was looked at, and what is wrong: one line each, naming the object."""

    layers: int = 0
    chunks: int = 0
    bytes: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One chunk of a layer, and where it should lie."""

    ref: ChunkRef
    location: ChunkLocation


def check_image(
    objects: Objects, digest: Digest, *, deep: bool, progress: Callable[[int, int], None] = lambda done, total: None
) -> Report:
    """Check the image and all that it leads to. Raises `StoreError` only when the image object itself cannot be read,
    or when the store cannot be reached."""
    image = objects.image(digest)
    report = Report()
    for oci in filter(None, (image.config, image.manifest)):
        _try(report, objects.oci, oci)
    layers = list(dict.fromkeys(image.layers))
    for number, layer in enumerate(layers):
        progress(number, len(layers))
        _try(report, _check_layer, objects, layer, deep, report)
    progress(len(layers), len(layers))
    return report


def layer_problems(objects: Objects, digest: Digest) -> list[str]:
    """What is wrong with one layer, all of its chunks included."""
    report = Report()
    _try(report, _check_layer, objects, digest, True, report)
    return report.problems


class Presence:
    """Whether the parts of layers are there; for builders, who ask about many layers. Packs are asked for once."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._packs: dict[Digest, int] = {}

    def missing(self, digest: Digest) -> list[str]:
        """What this layer lacks: objects that are lost, packs that are too short. Chunks are not looked at."""
        report = Report()
        _try(report, self._check, digest)
        return report.problems

    def _check(self, digest: Digest) -> None:
        layer = self._objects.layer(digest)
        if self._objects.blobs.stat(keys.metadata(layer.metadata.digest)) is None:
            raise NotFound(f"metadata image {layer.metadata.digest} is missing in {self._objects.blobs.location}")
        chunk_map = self._objects.chunk_map(layer.chunk_map)
        needed: dict[Digest, int] = defaultdict(int)
        for at in self._objects.locator(layer.chunk_map.digest, len(chunk_map)):
            needed[at.pack] = max(needed[at.pack], at.offset + at.stored)
        self._ask([pack for pack, size in needed.items() if self._packs.get(pack, 0) < size])
        for pack, size in needed.items():
            if self._packs[pack] < size:
                raise NotFound(f"pack {pack} has {self._packs[pack]} bytes where at least {size} are needed")

    def _ask(self, packs: list[Digest]) -> None:
        with ThreadPoolExecutor(PACKS_AT_ONCE, thread_name_prefix="stat") as pool:
            stats = pool.map(lambda pack: self._objects.blobs.stat(keys.pack(pack)), packs)
            self._packs.update({pack: stat.size if stat else 0 for pack, stat in zip(packs, stats, strict=True)})


def _try(report: Report, check: Callable[..., object], *arguments: object) -> None:
    try:
        check(*arguments)
    except (Corrupt, Invalid, NotFound) as error:
        report.problems.append(str(error))


def _check_layer(objects: Objects, digest: Digest, deep: bool, report: Report) -> None:
    report.layers += 1
    layer = objects.layer(digest)
    _try(report, _check_metadata, objects, layer, digest)
    chunk_map = objects.chunk_map(layer.chunk_map)
    if chunk_map.blob_size != layer.blob_size:
        report.problems.append(f"layer {digest}: its blob has another size than chunk map {layer.chunk_map.digest}")
    locations = objects.locator(layer.chunk_map.digest, len(chunk_map))
    for pack, chunks in _by_pack(chunk_map, locations).items():
        _try(report, _check_pack, objects, pack, chunks)
        if deep:
            _check_chunks(objects, pack, chunks, report)


def _by_pack(chunk_map: ChunkMap, locations: list[ChunkLocation]) -> dict[Digest, list[_Chunk]]:
    packs: dict[Digest, list[_Chunk]] = defaultdict(list)
    for number, location in enumerate(locations):
        chunk = _Chunk(chunk_map[number], location)
        check_location(chunk.ref, location, _name(chunk))
        packs[location.pack].append(chunk)
    return packs


def _check_metadata(objects: Objects, layer: LayerDescriptor, digest: Digest) -> None:
    """The metadata image is well formed, and every file lies inside the blob."""
    for path, node in read_image(objects.metadata(layer.metadata)).root.walk():
        inode = inode_of(node)
        if not isinstance(node, Directory) and inode.address and inode.address.offset + inode.size > layer.blob_size:
            raise Corrupt(f"layer {digest}: the content of {path!r} lies beyond the blob's end")


def _check_pack(objects: Objects, pack: Digest, chunks: list[_Chunk]) -> None:
    """The pack is there and complete, and holds what the locator says, if its own section can be believed."""
    packed = {
        (chunk.digest, chunk.size): ChunkLocation(pack, chunk.offset, chunk.stored, chunk.encoding)
        for chunk in objects.pack_chunks(pack)
    }
    for chunk in chunks:
        if packed.get((chunk.ref.digest, chunk.ref.size)) != chunk.location:
            raise Corrupt(f"{_name(chunk)}: the locator and the pack's own section do not agree")


def _check_chunks(objects: Objects, pack: Digest, chunks: list[_Chunk], report: Report) -> None:
    for run in join(chunks):
        start, length = span(run)
        try:
            data = memoryview(objects.blobs.get_range(keys.pack(pack), start, length))
        except NotFound:
            return  # reported once already
        except Corrupt as error:
            report.problems.append(f"pack {pack}: {error}")
            continue
        for chunk in run:
            report.chunks += 1
            report.bytes += chunk.ref.size
            stored = stored_part(data, start, chunk.location)
            _try(report, decode_chunk, chunk.ref, chunk.location, stored, _name(chunk))


def _name(chunk: _Chunk) -> str:
    return f"chunk blake3:{chunk.ref.digest.hex()} in pack {chunk.location.pack} at byte {chunk.location.offset}"


def describe(image: Image) -> dict[str, object]:
    """The image's own fields for `inspect`."""
    return {
        "kind": image.kind,
        "platform": image.platform,
        "config": str(image.config) if image.config else None,
        "manifest": str(image.manifest) if image.manifest else None,
        "env": dict(image.env),
        "path": list(image.path),
        "source_bytes": image.source_bytes,
    }
