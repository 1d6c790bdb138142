"""The merged view of layers that lie on each other, as overlayfs would show it: for looking up, not for storing.

Conversion needs it where a layer says nothing itself: directories that its tar implies take their attributes from
below, hardlinks may name files of lower layers, and whiteouts of what is not there must not be stored.

>>> Stack([base, update]).find(b"etc/passwd")
Found(layer=0, node=...)

Paths are names joined by `/`, empty for the root. `Stack` and `Below` follow no symlink; `resolve` does. It walks
with a `Place`, so that each name of a path costs one step, however deep it lies.
"""

from __future__ import annotations

import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from dsec_store.errors import Invalid
from dsec_store.layer.tree import PATH_LENGTH_MAX, Directory, Inode

MAX_SYMLINKS: Final = 40
"""As the kernel's limit: more on the way to a directory is a loop."""

STEPS_MAX: Final = 1 << 27
"""Names that may be looked up for one layer, those in the targets of symlinks on the way included: a few minutes.
Symlinks that lead through symlinks cost so many for each entry behind them that a small layer could take days."""


@dataclass(frozen=True, slots=True)
class Place:
    """A directory that a walk has come to.

    own    the new layer's own directory there, None if it has none
    below  whether the layers below may show something in it
    """

    path: bytes = b""
    own: Directory | None = None
    below: bool = True


Look = Callable[[Place, bytes], tuple[Inode | Directory | None, Place]]
"""What lies under a name in a place, if anything, and the place that a directory there is."""


@dataclass(frozen=True, slots=True)
class Found:
    """A node of the merged view and the number of the layer (0 is the bottom) that provides it or its attributes."""

    layer: int
    node: Inode | Directory


class Trees(Protocol):
    """Layers from the bottom up: a list, or something that reads each when it is asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Directory: ...


class Stack:
    """See the module's text. The layers must not change while they are looked at: what was found is remembered."""

    def __init__(self, layers: Trees) -> None:
        self._layers = layers
        self._merged: dict[bytes, list[Found]] = {}
        self._linked: dict[int, dict[Inode, list[bytes]]] = {}

    def __len__(self) -> int:
        return len(self._layers)

    def find(self, path: bytes) -> Found | None:
        """What the merged view has at `path`; for a directory, the topmost one that is merged there."""
        parent, name = split_last(path)
        found = _step(self._directories(parent), name) if path else self._directories(b"")
        return found[0] if found else None

    def names(self, path: bytes) -> list[bytes]:
        """The sorted names in the merged directory at `path`; none when there is no directory."""
        here = self._directories(path)
        candidates = {name for found in here for name in _entries(found)}
        return sorted(name for name in candidates if _step(here, name))

    def links(self, found: Found) -> Iterator[bytes]:
        """Every path of the merged view that is a name of the same inode as `found`, which is no directory."""
        if found.layer not in self._linked:
            self._linked[found.layer] = _names_by_inode(self._layers[found.layer])
        for path in self._linked[found.layer].get(found.node, ()) if isinstance(found.node, Inode) else ():
            if (visible := self.find(path)) is not None and visible.node is found.node:
                yield path

    def _directories(self, path: bytes) -> list[Found]:
        """The directories that are merged at `path`, topmost first; none when something else is there."""
        if b"" not in self._merged:
            self._merged[b""] = [Found(number, self._layers[number]) for number in reversed(range(len(self._layers)))]
        names: list[bytes] = []
        while path not in self._merged:
            path, name = split_last(path)
            names.append(name)
        here = self._merged[path]
        while names and here:
            path = join(path, name := names.pop())
            here = [found for found in _step(here, name) if isinstance(found.node, Directory)]
            if here:  # what is not there may be asked for in too many ways
                self._merged[path] = here
        return here


class Below:
    """What a layer that is being made leaves visible of the layers below it, and whether anybody had to look there.

    hidden    paths that whiteouts hide, with all that is below them
    emptied   directories of which only the attributes show: opaque markers
    replaced  directories that took the place of something else in the new layer itself

    `stack` is None when it is not known what lies below; then nothing is visible.
    """

    def __init__(self, stack: Stack | None) -> None:
        self.stack = stack
        self.hidden: set[bytes] = set()
        self.emptied: set[bytes] = set()
        self.replaced: set[bytes] = set()
        self.asked = False
        self._steps = 0

    def count(self, node: Inode | Directory | None) -> None:
        """Count a name that was looked up, and what follows from it. Raises `Invalid` beyond STEPS_MAX."""
        self._steps += 1 + (node.target.count(b"/") if isinstance(node, Inode) else 0)
        if self._steps > STEPS_MAX:
            raise Invalid(f"more than {STEPS_MAX} names to look up: too many symlinks lead through symlinks")

    def look(self, here: Place, name: bytes) -> tuple[Inode | Directory | None, Place]:
        """What shows under `name`: the new layer's own, else what is left of the layers below."""
        path = join(here.path, name)
        below = here.below and not any(path in marked for marked in (self.hidden, self.emptied, self.replaced))
        own = here.own.entries.get(name) if here.own else None
        self.count(own)
        if own is not None:
            return own, Place(path, own if isinstance(own, Directory) else None, below)
        self.asked = True
        found = self.stack.find(path) if self.stack is not None and here.below and path not in self.hidden else None
        node = found.node if found else None
        if node is not None:
            self.count(node)
        return node, Place(path, below=below and isinstance(node, Directory))

    def find_unmarked(self, path: bytes) -> Found | None:
        """What would show at `path` if the new layer had no whiteouts and opaque markers."""
        self.asked = True
        return None if self.stack is None or _reaches(self.replaced, split_last(path)[0]) else self.stack.find(path)

    def names(self, path: bytes) -> list[bytes]:
        """The names that the directory `path` had before anything was hidden."""
        self.asked = True
        return self.stack.names(path) if self.stack is not None else []

    def hides(self, path: bytes) -> bool:
        """Whether nothing of the layers below shows at `path`."""
        return path in self.hidden or self.closes(split_last(path)[0])

    def closes(self, path: bytes) -> bool:
        """Whether nothing of the layers below shows in the directory `path`."""
        return any(_reaches(marked, path) for marked in (self.hidden, self.emptied, self.replaced))


def resolve(parts: Iterable[bytes], root: Place, look: Look) -> bytes | None:
    """The path of the directory that `parts` lead to: symlinks are followed and never lead out of the root.

    What `look` does not find counts as a directory that is still to be made. None when something else is in the way,
    or when symlinks make the path longer than Linux knows paths.
    """
    trail = [root]
    pending = deque(parts)
    followed = 0
    while pending:
        name = pending.popleft()
        if name in (b"", b"."):
            continue
        if name == b"..":
            if len(trail) > 1:
                trail.pop()
            continue
        node, place = look(trail[-1], name)
        if len(place.path) > PATH_LENGTH_MAX:
            return None
        if node is None or isinstance(node, Directory):
            trail.append(place)
        elif stat.S_ISLNK(node.mode) and followed < MAX_SYMLINKS:
            followed += 1
            trail = [root] if node.target.startswith(b"/") else trail
            pending.extendleft(reversed(node.target.split(b"/")))
        else:
            return None
    return trail[-1].path


def split_last(path: bytes) -> tuple[bytes, bytes]:
    """The path of the parent and the last name."""
    parent, _, name = path.rpartition(b"/")
    return parent, name


def join(parent: bytes, name: bytes) -> bytes:
    return parent + b"/" + name if parent else name


def _reaches(marked: set[bytes], path: bytes) -> bool:
    """Whether `path` or one above it is marked; the root, which is above all others, never is."""
    while marked and path:
        if path in marked:
            return True
        path = split_last(path)[0]
    return False


def _names_by_inode(root: Directory) -> dict[Inode, list[bytes]]:
    """The paths of each inode that is no directory, in byte order."""
    names: dict[Inode, list[bytes]] = {}
    for path, node in root.walk():
        if isinstance(node, Inode):
            names.setdefault(node, []).append(path)
    return names


def _entries(found: Found) -> dict[bytes, Inode | Directory]:
    return found.node.entries if isinstance(found.node, Directory) else {}


def _step(directories: list[Found], name: bytes) -> list[Found]:
    """One name down from a merged directory (topmost first): the merged directories there, or one other node."""
    result: list[Found] = []
    for found in directories:
        node = _entries(found).get(name)
        if node is None:
            continue
        if not isinstance(node, Directory):
            return result or ([] if node.is_whiteout else [Found(found.layer, node)])
        result.append(Found(found.layer, node))
        if node.is_opaque:
            break
    return result
