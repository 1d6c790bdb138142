"""From a tree whose contents are in the store to a layer, and back to a tree: image, chunk maps, descriptor.

Write order: packs, index, chunk map and locator of each blob, metadata image, descriptor. The descriptor is the commit
point: a crash before it leaves objects that nobody refers to (docs/format/store.md).
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dsec_store.chunker import DEFAULT, ChunkerParameters
from dsec_store.chunkmap import ChunkMap
from dsec_store.chunks import ChunkSource, LazyBlob, NoCache
from dsec_store.descriptor import FORMAT, Blob, LayerDescriptor
from dsec_store.digest import Digest
from dsec_store.layer.assemble import IMPLIED_MODE, Assembly
from dsec_store.layer.contents import BLOCK, PIECE, StoredContents
from dsec_store.layer.erofs import Device, read_image, write_image
from dsec_store.layer.recipe import RecipeWriter
from dsec_store.layer.stack import Found, Stack
from dsec_store.layer.tree import Directory, Inode, inode_of
from dsec_store.objects import Objects
from dsec_store.storedblob import open_blob
from dsec_store.upload import ChunkIndex, Upload


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


class LayerBuild:
    """One layer on its way into the store: contents first, then the tree that refers to them.

        with LayerBuild(objects, index) as build:
            placed = unpack(stream, build.contents, build.recipe)
            layer = build.commit(assemble(placed, build.contents, lower, open_lower), diff_id)

    Without `with_recipe`, the tar cannot be made again. Several may be under way with one index.
    """

    def __init__(
        self,
        objects: Objects,
        index: ChunkIndex,
        *,
        chunker: ChunkerParameters = DEFAULT,
        workers: int = 0,
        with_recipe: bool = False,
    ) -> None:
        self._objects = objects
        self._chunker = chunker
        self._upload = Upload(objects, index, workers)
        self.contents = StoredContents(self._upload.blob(chunker), chunker)
        self.recipe = RecipeWriter(self._upload.blob(chunker)) if with_recipe else None

    def __enter__(self) -> LayerBuild:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """Free what it holds. What is not committed, perhaps for an `error`, has left chunks that nobody refers to."""
        self._upload.close(error)

    def commit(self, assembly: Assembly, diff_id: Digest | None = None) -> StoredLayer:
        """On return the layer is stored. Equal trees in equal order give equal digests, whatever the store held."""
        maps = [self.contents.finish()]
        if self.recipe:
            maps.append(self.recipe.finish())
        self._upload.finish()
        contents, *recipe = [self._put_blob(chunk_map) for chunk_map in maps]
        blobs = (contents,) if contents else ()
        descriptor = LayerDescriptor(
            metadata=self._objects.put_metadata(metadata_image(assembly.root, blobs)),
            blobs=blobs,
            inodes=len(inodes(assembly.root)),
            has_root=assembly.has_root,
            chunker=self._chunker,
            diff_id=diff_id,
            recipe=recipe[0] if recipe else None,
        )
        digest = self._objects.put_layer(descriptor)
        return StoredLayer(digest, descriptor, self._upload.new_packs, self._upload.new_bytes)

    def _put_blob(self, chunk_map: ChunkMap) -> Blob | None:
        """Store a chunk map and its locator; nothing for an empty one."""
        if not len(chunk_map):
            return None
        blob = Blob(self._objects.put_chunk_map(chunk_map), chunk_map.blob_size)
        self._objects.put_locator(blob.chunk_map, self._upload.locate(chunk_map))
        return blob


def metadata_image(root: Directory, blobs: Iterable[Blob]) -> bytes:
    """The EROFS image of a tree whose contents have addresses; its devices carry the names of the blobs."""
    out = io.BytesIO()
    write_image(root, [Device(blob.name.hex, blob.size // BLOCK) for blob in blobs], out)
    return out.getvalue()


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
        self._opened: dict[tuple[int, int], LazyBlob] = {}

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

    def open(self, found: Found) -> Iterator[bytes]:
        """The content of a regular file of the stack that is not empty, in pieces."""
        inode = inode_of(found.node)
        assert inode.address is not None, "only files that are not empty have a content"
        device = inode.address.device
        blob = self._opened.get((found.layer, device))
        if blob is None:
            descriptor = self._objects.layer(self._layers[found.layer])
            blob = self._opened[found.layer, device] = open_blob(self._objects, descriptor.blobs[device], self._source)
        return pieces(blob, inode.address.offset, inode.size)


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


def pieces(blob: LazyBlob, offset: int, size: int) -> Iterator[bytes]:
    """`size` bytes of a blob from `offset` on."""
    for done in range(0, size, PIECE):
        yield blob.read(offset + done, min(PIECE, size - done))
