"""From an assembled tree to a layer in the store, and back to a tree: lay out, chunk, store, commit.

Layout of the blob's address space: each distinct content once, contiguous, at a multiple of 4 KiB, in the order in
which a walk in byte order first meets it. So addresses depend on the tree alone, and what lies together in a folder
lies together here.

Write order: packs, index, metadata image, chunk map, locator, descriptor. The descriptor is the commit point: a crash
before it leaves objects that nobody refers to (docs/format/store.md).
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from dsec_store.chunker import DEFAULT, ChunkerParameters
from dsec_store.chunks import ChunkSource, LazyBlob, NoCache
from dsec_store.descriptor import FORMAT, LayerDescriptor
from dsec_store.digest import Digest, hasher_for
from dsec_store.layer.assemble import IMPLIED_MODE, PIECE, Assembly, Source, changed, exactly
from dsec_store.layer.erofs import Device, read_image, write_image
from dsec_store.layer.stack import Found, Stack
from dsec_store.layer.tree import Address, Content, Directory, Inode, inode_of
from dsec_store.objects import Objects
from dsec_store.upload import ChunkIndex, ChunkWriter

BLOCK: Final = 4096


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """A layer that is in the store, and what this build added to it."""

    digest: Digest
    descriptor: LayerDescriptor
    new_packs: int
    new_bytes: int


def build_key(diff_id: Digest, chunker: ChunkerParameters, parent: Digest | None) -> Digest:
    """What a layer's build depends on. `parent` is the chain_id below, for a layer that needs it."""
    parts = {
        "diff_id": str(diff_id),
        "format": FORMAT,
        "chunker": chunker.as_json(),
        "parent": str(parent) if parent else None,
    }
    return Digest.of(json.dumps(parts, sort_keys=True).encode())


def store_layer(
    objects: Objects,
    index: ChunkIndex,
    assembly: Assembly,
    *,
    diff_id: Digest | None,
    chunker: ChunkerParameters = DEFAULT,
    workers: int = 0,
) -> StoredLayer:
    """Store `assembly`. On return the layer is committed. Equal trees give equal digests, whatever the store held."""
    contents, blob_size = lay_out(assembly.root)
    with ChunkWriter(objects, index, chunker, workers) as writer:
        for content in contents:
            _write_content(writer, content, assembly.sources[content.digest], chunker)
        chunk_map, locations = writer.finish()
    stored_map = objects.put_chunk_map(chunk_map)
    metadata = objects.put_metadata(metadata_image(assembly.root, stored_map.digest, blob_size))
    objects.put_locator(stored_map, locations)
    descriptor = LayerDescriptor(
        metadata=metadata,
        chunk_map=stored_map,
        blob_size=blob_size,
        inodes=len(inodes(assembly.root)),
        has_root=assembly.has_root,
        chunker=chunker,
        diff_id=diff_id,
    )
    return StoredLayer(objects.put_layer(descriptor), descriptor, writer.new_packs, writer.new_bytes)


def lay_out(root: Directory) -> tuple[list[Content], int]:
    """Give every content of the tree its address; the contents in address order, and the bytes that they span."""
    contents: list[Content] = []
    offsets: dict[Digest, int] = {}
    end = 0
    for _, node in root.walk():
        if isinstance(node, Directory) or node.content is None:
            continue
        if node.content.digest not in offsets:
            offsets[node.content.digest] = end
            contents.append(node.content)
            end += -(-node.content.size // BLOCK) * BLOCK
        node.address = Address(0, offsets[node.content.digest])
    return contents, end


def metadata_image(root: Directory, chunk_map: Digest, blob_size: int) -> bytes:
    """The EROFS image of a tree that was laid out; its one device carries the name of the blob."""
    out = io.BytesIO()
    write_image(root, [Device(chunk_map.hex, blob_size // BLOCK)] if blob_size else [], out)
    return out.getvalue()


def _write_content(writer: ChunkWriter, content: Content, source: Source, chunker: ChunkerParameters) -> None:
    """One content and its padding. It must still be what the tree was made of."""
    alone = content.size >= chunker.solo
    if alone:
        writer.cut()
    hasher = hasher_for("blake3")
    for piece in exactly(source, content.size):
        hasher.update(piece)
        writer.write(piece)
    if hasher.digest() != content.digest.raw:
        raise changed(source)
    writer.write(bytes(-content.size % BLOCK))
    if alone:
        writer.cut()


def graft(assembly: Assembly, prefix: tuple[bytes, ...]) -> None:
    """Move the tree to `prefix`, whose parents become 0755 root with mtime 0, so they are the same everywhere."""
    for name in reversed(prefix):
        parent = Directory(Inode(IMPLIED_MODE))
        parent.entries[name] = assembly.root
        assembly.root = parent
        assembly.has_root = False


def clamp_mtimes(assembly: Assembly, latest: int) -> None:
    """No mtime later than `latest` seconds since 1970: the rule of SOURCE_DATE_EPOCH."""
    for inode in inodes(assembly.root):
        inode.mtime_ns = min(inode.mtime_ns, latest * 1_000_000_000)


def inodes(root: Directory) -> set[Inode]:
    """Every inode of a tree once, the root's too."""
    return {root.inode, *(inode_of(node) for _, node in root.walk())}


class StoredStack:
    """The layers below one that is being built. A tree is read back from the store when first needed, and kept."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._source = ChunkSource(objects.blobs, NoCache())
        self._layers: list[Digest] = []
        self._trees = _Trees(objects)
        self._opened: dict[int, LazyBlob] = {}

    @property
    def layers(self) -> tuple[Digest, ...]:
        return tuple(self._layers)

    def push(self, layer: Digest, root: Directory | None = None) -> None:
        """Put a stored layer on top; `root` is its tree where that is at hand, laid out."""
        self._layers.append(layer)
        self._trees.push(layer, root)

    def stack(self) -> Stack:
        """The merged view of the layers so far; of no use any more when another is pushed."""
        return Stack(self._trees)

    def open(self, found: Found) -> Source:
        """How to read the content of a regular file of the stack."""
        blob = self._opened.get(found.layer)
        if blob is None:
            descriptor = self._objects.layer(self._layers[found.layer])
            blob = self._opened[found.layer] = open_blob(self._objects, descriptor, self._source)
        return StoredPart(blob, inode_of(found.node))


class _Trees:
    """Trees of stored layers, for `Stack`."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._trees: list[Directory | Digest] = []

    def push(self, layer: Digest, root: Directory | None) -> None:
        self._trees.append(root or layer)

    def __len__(self) -> int:
        return len(self._trees)

    def __getitem__(self, number: int, /) -> Directory:
        tree = self._trees[number]
        if isinstance(tree, Digest):
            tree = read_image(self._objects.metadata(self._objects.layer(tree).metadata)).root
            self._trees[number] = tree
        return tree


@dataclass(frozen=True, slots=True)
class StoredPart:
    """The content of a file in a stored layer."""

    blob: LazyBlob
    inode: Inode

    def pieces(self) -> Iterator[bytes]:
        assert self.inode.address is not None, "only files that are not empty have a content"
        start, size = self.inode.address.offset, self.inode.size
        for offset in range(0, size, PIECE):
            yield self.blob.read(start + offset, min(PIECE, size - offset))

    def __str__(self) -> str:
        return "a file of a stored layer"


def open_blob(objects: Objects, descriptor: LayerDescriptor, source: ChunkSource) -> LazyBlob:
    """The blob of a stored layer, read straight from the store."""
    chunk_map = objects.chunk_map(descriptor.chunk_map)
    locations = objects.locator(descriptor.chunk_map.digest, len(chunk_map))
    return LazyBlob(chunk_map, lambda _: locations, source)
