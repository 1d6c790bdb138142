"""An image's files without a mount: the merged view that a node would mount, straight from the store.

    files = Files(objects, image.mounted)
    entry = files.lookup(b"/usr/bin/python")              # symlinks are followed as the kernel would in this root
    for piece in files.read(entry): out.write(piece)
    for child in files.entries(files.lookup(b"/etc")): print(child.name)

Problem: over a network each metadata image is a wait, and the layer that has the file is often the topmost.
Choice:  a lookup reads layers from the top down, one after the other, and stops at the first that settles it. A list
         of a directory needs whatever may add a name, so the rest is fetched at once, `LAYERS_AT_ONCE` at a time.
Cost:    a path that does not exist is known to be absent only when all layers were read.

What is shown is what overlayfs shows on a node: marks are heeded and not shown, equal layers count once, a layer with
an opaque root is the lowest one, the root has the attributes of the topmost layer whose source described it.

Memory: the tree of each layer that was read, some 500 bytes a file, and the chunk maps and locators of the blobs that
were read from, about 400 bytes a chunk; a content passes in pieces of about `PIECE_SIZE`. Not safe for use by several
threads at once.
"""

from __future__ import annotations

import stat
from collections import Counter, deque
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, TypeVar

from dsec_store.chunkmap import ChunkMap
from dsec_store.chunks import ChunkCache, ChunkSource, NoCache
from dsec_store.descriptor import Blob, LayerDescriptor
from dsec_store.digest import Digest
from dsec_store.errors import Corrupt, Invalid, NotFound
from dsec_store.layer.erofs import read_image
from dsec_store.layer.stack import MAX_SYMLINKS, Found, join
from dsec_store.layer.tree import Directory, Inode, inode_of, shown
from dsec_store.objects import Objects
from dsec_store.storedblob import StoredBlob

T = TypeVar("T")

LAYERS_AT_ONCE: Final = 16
"""Layers of which something is fetched at once."""

PIECE_SIZE: Final = 8 << 20
"""Bytes of a content that are fetched at once, up to one chunk more: some range requests in parallel."""

OVERLAY_PREFIX: Final = b"trusted.overlay."
"""Xattrs for overlayfs, which it does not show."""

ESCAPED_PREFIX: Final = b"trusted.overlay.overlay."
"""Xattrs that overlayfs shows without their second `overlay.`."""

_DEFAULT_ROOT: Final = stat.S_IFDIR | 0o755

KINDS: Final = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
    stat.S_IFCHR: "character device",
    stat.S_IFBLK: "block device",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
}
"""Words for the types of files, by the type bits of a mode."""


@dataclass(slots=True)
class _Merged:
    """What lies at a path: the directories that are merged there, topmost first, or one other node.

    `unread`: layers below this number have not been looked at yet.
    """

    path: bytes
    unread: int
    found: list[Found] = field(default_factory=list)

    def add(self, layer: int, node: Inode | Directory | None) -> bool:
        """Take what one more layer, the next lower one, has here. True if it hides what lies below."""
        if node is None:
            return False
        closed = not isinstance(node, Directory) or node.is_opaque
        if isinstance(node, Directory) or not (self.found or node.is_whiteout):
            self.found.append(Found(layer, node))
        self.unread = 0 if closed else self.unread
        return closed


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of the image.

    path     from the root, without a slash in front; empty for the root
    inode    its attributes; see `shown_xattrs` for the xattrs that a reader sees
    layer    number of the layer that provides it or its attributes, in `Files.layers` (0 is the bottom)
    """

    path: bytes
    inode: Inode
    layer: int
    _merged: _Merged = field(repr=False)

    @property
    def name(self) -> bytes:
        """The last name of the path; `/` for the root."""
        return self.path.rpartition(b"/")[2] or b"/"


class Files:
    """See the module's text. Everything may raise `StoreError` when an object cannot be had."""

    def __init__(
        self,
        objects: Objects,
        layers: Sequence[Digest],
        *,
        trees: LayerTrees | None = None,
        cache: ChunkCache | None = None,
    ) -> None:
        """`layers`: what is mounted, bottom first (`Image.mounted`). Several images may share `trees`, and `cache`,
        which keeps chunks that were read."""
        self.layers = tuple(_topmost(layers))
        self._trees = trees or LayerTrees(objects)
        self._source = ChunkSource(objects.blobs, cache or NoCache())
        self._blobs: dict[Digest, StoredBlob] = {}
        self._links: dict[int, dict[Inode, int]] = {}

    def descriptor(self, number: int) -> LayerDescriptor:
        """Of the layer that `Entry.layer` calls so. The first call reads those of all layers."""
        self._trees.describe(self.layers)
        return self._trees.descriptor(self.layers[number])

    def read_all(self) -> None:
        """Read the metadata images of all layers at once: before a walk of everything."""
        self._trees.fetch(self.layers)

    # -- lookups ---------------------------------------------------------------------------------------------------

    def lookup(self, path: bytes, *, follow: bool = True) -> Entry:
        """What lies at `path`, where every path begins at the root: `..` there leads to the root again.

        A symlink at the end is followed with `follow`, or if a slash comes after it. Raises `NotFound`; `Invalid` where
        a directory was expected, and for more than `MAX_SYMLINKS` symlinks.
        """
        trail = [self._root()]
        pending = deque(_names(path))
        followed = 0
        while pending:
            name = pending.popleft()
            here = trail[-1]
            if not _is_directory(here):
                raise Invalid(f"{shown(path)}: {shown(b'/' + here.path)} is not a directory")
            if name == b"..":
                del trail[max(1, len(trail) - 1) :]
            elif name != b".":
                child = self._child(here, name)
                if not child.found:
                    raise NotFound(f"{shown(path)}: there is no {shown(b'/' + child.path)} in the image")
                target = _target(child)
                if target is None or not (pending or follow):
                    trail.append(child)
                    continue
                followed += 1
                if followed > MAX_SYMLINKS:
                    raise Invalid(f"{shown(path)}: more than {MAX_SYMLINKS} symlinks on the way")
                trail = trail[:1] if target.startswith(b"/") else trail
                pending.extendleft(reversed(_names(target)))
        return self._entry(trail[-1])

    def entries(self, directory: Entry) -> Iterator[Entry]:
        """What lies in a directory, in byte order of the names; nothing for what is no directory."""
        merged = directory._merged
        self._complete(merged)
        nodes = [found.node for found in merged.found]
        for name in sorted({name for node in nodes if isinstance(node, Directory) for name in node.entries}):
            child = self._child(merged, name)
            if child.found:
                yield self._entry(child)

    def walk(self, top: Entry, depth: int | None = None) -> Iterator[Entry]:
        """All that lies below `top`, at most `depth` levels of it: parents first, names in byte order."""
        stack = [self.entries(top)]
        while stack:
            entry = next(stack[-1], None)
            if entry is None:
                stack.pop()
                continue
            yield entry
            if entry.inode.is_directory and (depth is None or len(stack) < depth):
                stack.append(self.entries(entry))

    def links(self, entry: Entry) -> int:
        """The link count that overlayfs shows: of names in the layer that has the file; 1 for a merged directory."""
        node = entry._merged.found[0].node if entry._merged.found else Directory(entry.inode)
        if not isinstance(node, Directory):
            if entry.layer not in self._links:
                self._links[entry.layer] = _link_counts(self._tree(entry.layer))
            return self._links[entry.layer].get(node, 1)
        self._complete(entry._merged)
        if not entry.path or len(entry._merged.found) > 1:
            return 1
        return 2 + sum(isinstance(child, Directory) for child in node.entries.values())

    def providers(self, directory: Entry) -> tuple[Digest, ...]:
        """The layers whose directories are merged there, topmost first. Where they are the same at the same path of two
        images, so is everything below."""
        self._complete(directory._merged)
        return tuple(self.layers[found.layer] for found in directory._merged.found)

    # -- contents --------------------------------------------------------------------------------------------------

    def read(self, entry: Entry) -> Iterator[bytes]:
        """The content of a regular file, in pieces. `Invalid` for anything else."""
        if not stat.S_ISREG(entry.inode.mode):
            raise Invalid(f"{shown(b'/' + entry.path)} is a {kind(entry.inode)}, not a file")
        return self._pieces(entry)

    def blob(self, entry: Entry) -> Blob | None:
        """The blob that has the content of a regular file, at `entry.inode.address`; None for an empty one."""
        address = entry.inode.address
        if address is None:
            return None
        blobs = self.descriptor(entry.layer).blobs
        if address.device >= len(blobs):
            raise Corrupt(f"layer {self.layers[entry.layer]}: its metadata image has more blob devices than it")
        return blobs[address.device]

    def chunk_map(self, blob: Blob) -> ChunkMap:
        """The chunk map of a blob, kept once read."""
        return self._open(blob).chunk_map

    def read_range(self, blob: Blob, offset: int, length: int) -> bytes:
        """Bytes of a blob, verified. For contents, use `read`. Safe from several threads once the blob was opened."""
        return self._open(blob).lazy.read(offset, length)

    def _pieces(self, entry: Entry) -> Iterator[bytes]:
        blob, address = self.blob(entry), entry.inode.address
        if blob is None or address is None:
            return
        opened = self._open(blob)
        at, end = address.offset, address.offset + entry.inode.size
        while at < end:
            # Pieces end where a chunk does, so that none is fetched twice.
            last = opened.chunk_map.covering(at + PIECE_SIZE - 1, 1)
            stop = min(end, last[0].address + last[0].size if last else end)
            data = opened.lazy.read(at, stop - at)
            if len(data) != stop - at:
                raise Corrupt(f"blob {blob.name}: {entry.path!r} reaches beyond its {opened.lazy.size} bytes")
            yield data
            at = stop

    def _open(self, blob: Blob) -> StoredBlob:
        opened = self._blobs.get(blob.name)
        if opened is None:
            opened = self._blobs[blob.name] = StoredBlob(self._trees.objects, blob, self._source)
        return opened

    # -- merging ---------------------------------------------------------------------------------------------------

    def _tree(self, number: int) -> Directory:
        self._trees.describe(self.layers)
        return self._trees.tree(self.layers[number])

    def _root(self) -> _Merged:
        root = _Merged(b"", len(self.layers))
        self._settle(root)
        return root

    def _child(self, parent: _Merged, name: bytes) -> _Merged:
        """What lies under a name of a merged directory; nothing is found if there is nothing."""
        child = _Merged(join(parent.path, name), parent.unread)
        for found in parent.found:
            node = found.node.entries.get(name) if isinstance(found.node, Directory) else None
            if child.add(found.layer, node):
                return child
        self._settle(child)
        return child

    def _settle(self, merged: _Merged) -> None:
        """Read layers until it is known what lies there."""
        while not merged.found and merged.unread:
            self._extend(merged)

    def _complete(self, merged: _Merged) -> None:
        """Read layers until it is known which directories are merged there."""
        if merged.unread and _is_directory(merged):
            self._trees.fetch(self.layers[: merged.unread])
            while merged.unread:
                self._extend(merged)

    def _extend(self, merged: _Merged) -> None:
        merged.unread -= 1
        layer = merged.unread
        node, closed = _descend(self._tree(layer), merged.path)
        if merged.add(layer, node) or closed:
            merged.unread = 0

    def _entry(self, merged: _Merged) -> Entry:
        if merged.path:
            found = merged.found[0]
            return Entry(merged.path, inode_of(found.node), found.layer, merged)
        for layer in reversed(range(len(self.layers))):
            if self.descriptor(layer).has_root:
                return Entry(b"", self._tree(layer).inode, layer, merged)
        return Entry(b"", Inode(_DEFAULT_ROOT), 0, merged)


class LayerTrees:
    """Trees and descriptors of stored layers, each read when it is first needed, and kept. May serve several images."""

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self._descriptors: dict[Digest, LayerDescriptor] = {}
        self._trees: dict[Digest, Directory] = {}

    @property
    def read(self) -> int:
        """How many trees were read so far."""
        return len(self._trees)

    def descriptor(self, layer: Digest) -> LayerDescriptor:
        self.describe([layer])
        return self._descriptors[layer]

    def tree(self, layer: Digest) -> Directory:
        self.fetch([layer])
        return self._trees[layer]

    def describe(self, layers: Sequence[Digest]) -> None:
        """Read the descriptors of these layers, several at once."""
        self._descriptors.update(_at_once(self.objects.layer, layers, self._descriptors))

    def fetch(self, layers: Sequence[Digest]) -> None:
        """Read the trees of these layers, several at once."""
        self.describe(layers)
        self._trees.update(_at_once(self._load, layers, self._trees))

    def _load(self, layer: Digest) -> Directory:
        descriptor = self._descriptors[layer]
        image = read_image(self.objects.metadata(descriptor.metadata))
        if [device.tag for device in image.devices] != [blob.name.hex for blob in descriptor.blobs]:
            raise Corrupt(f"layer {layer}: its metadata image has other blob devices than its descriptor")
        return image.root


def _at_once(read: Callable[[Digest], T], layers: Sequence[Digest], known: Container[Digest]) -> dict[Digest, T]:
    lacking = [layer for layer in layers if layer not in known]
    if len(lacking) < 2:
        return {layer: read(layer) for layer in lacking}
    with ThreadPoolExecutor(LAYERS_AT_ONCE, thread_name_prefix="layer") as pool:
        return dict(zip(lacking, pool.map(read, lacking), strict=True))


def kind(inode: Inode) -> str:
    """The type of a file in words."""
    return KINDS[stat.S_IFMT(inode.mode)]


def shown_xattrs(inode: Inode) -> dict[bytes, bytes]:
    """The xattrs that overlayfs shows of a file."""
    return {
        OVERLAY_PREFIX + name.removeprefix(ESCAPED_PREFIX) if name.startswith(ESCAPED_PREFIX) else name: value
        for name, value in inode.xattrs.items()
        if name.startswith(ESCAPED_PREFIX) or not name.startswith(OVERLAY_PREFIX)
    }


def _topmost(layers: Sequence[Digest]) -> list[Digest]:
    """Equal layers count once, where they lie topmost (docs/decisions/0005-mounting-on-a-node.md)."""
    return list(reversed(dict.fromkeys(reversed(layers))))


def _names(path: bytes) -> list[bytes]:
    """The names of a path. A slash at its end asks for a directory, as a last `.` does."""
    return [name for name in path.split(b"/") if name] + [b"."] * path.endswith(b"/")


def _is_directory(merged: _Merged) -> bool:
    return not merged.path or isinstance(merged.found[0].node, Directory)


def _target(merged: _Merged) -> bytes | None:
    """Where a symlink leads."""
    node = merged.found[0].node
    return node.target if isinstance(node, Inode) and stat.S_ISLNK(node.mode) else None


def _descend(tree: Directory, path: bytes) -> tuple[Inode | Directory | None, bool]:
    """What one layer has at a path, and whether it hides there what lies below it."""
    node: Inode | Directory = tree
    closed = tree.is_opaque
    for name in path.split(b"/") if path else ():
        if not isinstance(node, Directory):
            return None, True
        if name not in node.entries:
            return None, closed
        node = node.entries[name]
        closed = closed or (isinstance(node, Directory) and node.is_opaque)
    return node, closed or not isinstance(node, Directory)


def _link_counts(tree: Directory) -> dict[Inode, int]:
    """How many names the inodes of a layer have, of those that have more than one."""
    counts = Counter(node for _, node in tree.walk() if isinstance(node, Inode))
    return {inode: count for inode, count in counts.items() if count > 1}
