"""Images for tests of gc, built step by step in one thread, as a conversion does it: a layer is a tuple of numbers, of
which each stands for one chunk.

>>> build(objects, "demo", [(1, 2), (2, 3)])
"""

import io
import random
import stat
from collections.abc import Iterable, Sequence
from functools import cache

from dsec_store import compression, keys
from dsec_store.check import check_image
from dsec_store.chunker import DEFAULT
from dsec_store.chunkmap import ChunkLocation, ChunkMap
from dsec_store.descriptor import Blob, Image, LayerDescriptor
from dsec_store.digest import Digest
from dsec_store.errors import StoreError
from dsec_store.layer.erofs import Device, write_image
from dsec_store.layer.erofs.format import BLOCK
from dsec_store.layer.tree import Directory, Inode
from dsec_store.objects import Objects
from dsec_store.pack import PackBuilder, PackedChunk
from dsec_store.references import Origin

Numbers = tuple[int, ...]


@cache
def chunk(number: int) -> bytes:
    """A chunk that does not compress."""
    return random.Random(number).randbytes(BLOCK)


def build(objects: Objects, name: str, layers: Sequence[Numbers]) -> Digest:
    """Store an image of these layers under `name`."""
    return commit(objects, name, [layer(objects, numbers) for numbers in layers])


def commit(objects: Objects, name: str, digests: Sequence[Digest]) -> Digest:
    """Store an image of these layers, which are stored, under `name`."""
    config = objects.put_oci(repr(digests).encode())
    image = objects.put_image(Image("base", tuple(digests)))
    objects.references.set(name, image, Origin(config=config))
    return image


def build_key(numbers: Numbers) -> Digest:
    return Digest.of(repr(numbers).encode())


def layer(objects: Objects, numbers: Numbers) -> Digest:
    """Store one layer, unless a lookup leads to it and nothing of it is missing."""
    known = objects.lookup("build", build_key(numbers))
    digest = known if known and is_whole(objects, known) else put_layer(objects, numbers)
    objects.set_lookup("build", build_key(numbers), digest)
    return digest


def is_whole(objects: Objects, digest: Digest) -> bool:
    try:
        descriptor = objects.layer(digest)
        wanted = {keys.metadata(descriptor.metadata.digest)}
        for blob in descriptor.stored_blobs:
            locations = objects.locator(blob.name, len(objects.chunk_map(blob.chunk_map)))
            wanted |= {keys.pack(at.pack) for at in locations}
    except StoreError:
        return False
    return all(objects.blobs.stat(key) for key in sorted(wanted))


def put_layer(objects: Objects, numbers: Numbers) -> Digest:
    locations = known_chunks(objects)
    chunks = [chunk(number) for number in numbers]
    fresh = {Digest.of(data).raw: data for data in chunks if Digest.of(data).raw not in locations}
    if fresh:
        pack, packed = put_pack(objects, fresh.values())
        objects.put_index([(pack, packed)])
        locations |= located(pack, packed)
    chunk_map = ChunkMap([Digest.of(data).raw for data in chunks], [len(data) for data in chunks])
    blob = Blob(objects.put_chunk_map(chunk_map), chunk_map.blob_size)
    out = io.BytesIO()
    root = Directory(Inode(stat.S_IFDIR | 0o755))
    write_image(root, [Device(blob.name.hex, blob.size // BLOCK)], out)
    metadata = objects.put_metadata(out.getvalue())
    objects.put_locator(blob.chunk_map, [locations[digest] for digest in chunk_map.digests])
    return objects.put_layer(LayerDescriptor(metadata, (blob,), 1, False, DEFAULT))


def put_pack(objects: Objects, chunks: Iterable[bytes]) -> tuple[Digest, list[PackedChunk]]:
    builder = PackBuilder()
    for data in chunks:
        encoding, stored = compression.encode(data)
        builder.add(Digest.of(data).raw, len(data), encoding, stored)
    return objects.put_pack(builder.seal()), builder.chunks


def located(pack: Digest, chunks: Iterable[PackedChunk]) -> dict[bytes, ChunkLocation]:
    return {each.digest: ChunkLocation(pack, each.offset, each.stored, each.encoding) for each in chunks}


def known_chunks(objects: Objects) -> dict[bytes, ChunkLocation]:
    """What the indexes tell of packs that are there."""
    stored = objects.packs()
    found: dict[bytes, ChunkLocation] = {}
    for digest in sorted(objects.index_digests(), key=str):
        try:
            indexed = objects.index(digest)
        except StoreError:
            continue
        for pack, chunks in indexed:
            if pack in stored:
                found |= located(pack, chunks)
    return found


def problems(objects: Objects) -> list[str]:
    """What is wrong with the images that have a name, every byte being read."""
    return [
        f"{name}: {problem}"
        for name in objects.references.names()
        for problem in check_image(objects, objects.references.read(name), deep=True).problems
    ]


def stored(objects: Objects) -> set[str]:
    """All keys but those of indexes."""
    return {each.key for each in objects.blobs.list("")} - {each.key for each in objects.blobs.list("indexes/")}
