"""The image specification's way to a file system: replay the layers' tars one after another.

A model to compare with: a dictionary from path to node, to which each layer's changes are applied. First its whiteouts
and opaque markers, which speak of lower layers only, then its entries in their order. Names of the operations' fields
are those of a tar; a path is names joined by `/`.

    tree = replay(replay({}, [MakeFolder(b"d"), MakeFile(b"d/f", b"data")]), [Whiteout(b"d/f")])
"""

import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tests import tarmaker as tar
from tests.views import Seen, View, folder, link, regular


@dataclass(frozen=True)
class Operation:
    """One entry of a layer's tar."""

    path: bytes


@dataclass(frozen=True)
class MakeFile(Operation):
    data: bytes = b""
    mode: int = 0o644
    uid: int = 0


@dataclass(frozen=True)
class MakeFolder(Operation):
    mode: int = 0o755
    mtime: int = 0


@dataclass(frozen=True)
class MakeLink(Operation):
    target: bytes = b"a"


@dataclass(frozen=True)
class MakeFifo(Operation):
    mode: int = 0o600


@dataclass(frozen=True)
class AddName(Operation):
    """A hardlink."""

    target: bytes = b"a"


@dataclass(frozen=True)
class Whiteout(Operation):
    pass


@dataclass(frozen=True)
class Opaque(Operation):
    """The marker inside the directory `path`."""


def entry(operation: Operation) -> bytes:
    """The operation as an entry of a tar."""
    path = operation.path
    match operation:
        case MakeFile():
            made = tar.file(path, operation.data, mode=operation.mode, uid=operation.uid)
        case MakeFolder():
            made = tar.directory(path + b"/", mode=operation.mode, mtime=operation.mtime)
        case MakeLink():
            made = tar.symlink(path, operation.target)
        case MakeFifo():
            made = tar.fifo(path, mode=operation.mode)
        case AddName():
            made = tar.hardlink(path, operation.target)
        case Whiteout():
            made = tar.file(_joined(_parent(path), b".wh." + path.rpartition(b"/")[2]))
        case _:
            made = tar.file(_joined(path, b".wh..wh..opq"))
    return made


class Refused(Exception):
    """An entry that cannot be applied."""


@dataclass(eq=False)
class Node:
    """An inode: two names of one file are the same object."""

    seen: Seen

    @property
    def is_folder(self) -> bool:
        return stat.S_ISDIR(self.seen.mode)


Tree = dict[bytes, Node]


def replay(below: Tree, operations: Sequence[Operation]) -> tuple[Tree, list[Operation]]:
    """The tree after one more layer, and those of its operations that could be applied: the others change nothing."""
    markers = [operation for operation in operations if isinstance(operation, Whiteout | Opaque)]
    entries = [operation for operation in operations if not isinstance(operation, Whiteout | Opaque)]
    own = {operation.path for operation in operations if not isinstance(operation, Opaque)}
    replaying = _Replaying(below, _without(below, markers, own))
    refused = set()
    for operation in entries:
        try:
            replaying.apply(operation)
        except Refused:
            refused.add(id(operation))
    return replaying.tree, [operation for operation in operations if id(operation) not in refused]


def seen(tree: Tree) -> View:
    """The tree as a view."""
    names: dict[Node, bytes] = {}
    for path in sorted(tree):
        names.setdefault(tree[path], path)
    return {b"": folder(), **{path: node.seen._replace(twin=names[node]) for path, node in tree.items()}}


def _without(below: Tree, markers: Iterable[Operation], own: set[bytes]) -> Tree:
    """What markers leave. Symlinks on the way to a marker count where the layer itself says nothing of their path."""
    followable = {path: node for path, node in below.items() if path not in own}
    left = dict(below)
    for marker in markers:
        place = marker.path if isinstance(marker, Opaque) else _parent(marker.path)
        try:
            place = _follow(followable, place)
        except Refused:
            continue
        if isinstance(marker, Opaque):
            _remove_below(left, place)
        else:
            _remove(left, _joined(place, marker.path.rpartition(b"/")[2]))
    return left


@dataclass
class _Replaying:
    below: Tree
    tree: Tree
    overwritten: set[bytes] = field(default_factory=set)

    def apply(self, operation: Operation) -> None:
        node = self._node(operation)
        parent = _follow(self.tree, _parent(operation.path))
        for length in range(len(parent.split(b"/")) if parent else 0):
            self.tree.setdefault(b"/".join(parent.split(b"/")[: length + 1]), Node(folder()))
        path = _joined(parent, operation.path.rpartition(b"/")[2])
        if not (node.is_folder and path in self.tree and self.tree[path].is_folder):
            _remove(self.tree, path)
        if not node.is_folder:
            self.overwritten.add(path)
        self.tree[path] = node

    def _node(self, operation: Operation) -> Node:
        match operation:
            case MakeFile():
                return Node(regular(operation.data, operation.mode, uid=operation.uid))
            case MakeFolder():
                return Node(folder(operation.mode, mtime_ns=operation.mtime * 10**9))
            case MakeLink():
                return Node(link(operation.target))
            case MakeFifo():
                return Node(Seen(stat.S_IFIFO | operation.mode))
            case AddName():
                return self._target(operation.target)
        raise AssertionError(operation)

    def _target(self, target: bytes) -> Node:
        """The file that a hardlink names; one that only a marker of this layer hides is still there for it."""
        path = _joined(_follow(self.tree, _parent(target)), target.rpartition(b"/")[2])
        gone = any(path.startswith(other + b"/") for other in self.overwritten)
        node = self.tree.get(path) or (None if gone else self.below.get(path))
        if node is None or node.is_folder:
            raise Refused
        return node


def _follow(tree: Tree, path: bytes, depth: int = 0) -> bytes:
    """The directory that `path` leads to. Names that do not exist are directories to come."""
    if depth > 40:
        raise Refused
    at = b""
    names = [name for name in path.split(b"/") if name]
    for number, name in enumerate(names):
        if name == b"..":
            at = _parent(at)
            continue
        at = _joined(at, name)
        node = tree.get(at)
        if node and stat.S_ISLNK(node.seen.mode):
            start = b"" if node.seen.target.startswith(b"/") else _parent(at)
            return _follow(tree, b"/".join([start, node.seen.target, *names[number + 1 :]]), depth + 1)
        if node and not node.is_folder:
            raise Refused
    return at


def _remove(tree: Tree, path: bytes) -> None:
    tree.pop(path, None)
    _remove_below(tree, path)


def _remove_below(tree: Tree, path: bytes) -> None:
    for other in [other for other in tree if not path or other.startswith(path + b"/")]:
        del tree[other]


def _parent(path: bytes) -> bytes:
    return path.rpartition(b"/")[0]


def _joined(parent: bytes, name: bytes) -> bytes:
    return parent + b"/" + name if parent else name
