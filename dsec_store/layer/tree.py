"""A layer's file tree as plain values: what the tar reader yields, the EROFS writer stores, the reader gives back.

An `Inode` holds everything but names. A `Directory` maps names to nodes; two names of one file refer to the *same*
`Inode` object: that is what a hardlink is here, and link counts are counted, never stored.

Overlay semantics inside a layer (docs/format/layers.md): a *whiteout* is a character device 0:0, an *opaque* directory
has the xattr `trusted.overlay.opaque` = `y`. Only the builder makes them.

>>> root = Directory(Inode(mode=stat.S_IFDIR | 0o755))
>>> root.entries[b"hello"] = Inode(mode=stat.S_IFREG | 0o644, size=5, address=Address(0, 4096))
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

ID_MAX: Final = 2**32 - 2
"""Largest uid and gid; 2**32-1 means "no change" to chown(2) and is refused."""

PATH_LENGTH_MAX: Final = 4095
"""Bytes of a path or link target: Linux' PATH_MAX without its NUL."""

SHOWN_LENGTH: Final = 200
"""Bytes of a path that an error shows."""

OPAQUE_XATTR: Final = b"trusted.overlay.opaque"
OPAQUE_VALUE: Final = b"y"
WHITEOUT_MODE: Final = stat.S_IFCHR


@dataclass(frozen=True, slots=True)
class Address:
    """Where a content lies: index of the blob device (0 for the first) and byte offset in it, a multiple of 4096."""

    device: int
    offset: int


@dataclass(slots=True, eq=False)
class Inode:
    """One inode that is not a directory's list of names. Compared by identity: see the module's text.

    mode    st_mode with type bits          mtime_ns  nanoseconds since 1970, negative before
    rdev    (major, minor) of a device      target    bytes of a symlink
    xattrs  full name -> value, both bytes  address   where the content of a regular file lies that is not empty
    size    of a regular file in bytes
    """

    mode: int
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    rdev: tuple[int, int] = (0, 0)
    target: bytes = b""
    xattrs: dict[bytes, bytes] = field(default_factory=dict)
    size: int = 0
    address: Address | None = None

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_whiteout(self) -> bool:
        return stat.S_ISCHR(self.mode) and self.rdev == (0, 0)


@dataclass(slots=True, eq=False)
class Directory:
    """A directory: its inode and its entries by name (bytes without `/` and NUL; never `.` or `..`)."""

    inode: Inode
    entries: dict[bytes, Inode | Directory] = field(default_factory=dict)

    @property
    def is_opaque(self) -> bool:
        return self.inode.xattrs.get(OPAQUE_XATTR) == OPAQUE_VALUE

    def walk(self, prefix: bytes = b"") -> Iterator[tuple[bytes, Inode | Directory]]:
        """Every node below with its path ("a/b", no leading slash), parents first, names in byte order."""
        stack = [(prefix, iter(sorted(self.entries.items())))]
        while stack:
            base, names = stack[-1]
            for name, node in names:
                path = base + b"/" + name if base else name
                yield path, node
                if isinstance(node, Directory):
                    stack.append((path, iter(sorted(node.entries.items()))))
                    break
            else:
                stack.pop()

    def find(self, path: bytes) -> Inode | Directory | None:
        """The node at `path` (no symlink is followed), or None. The empty path is this directory."""
        node: Inode | Directory = self
        for name in path.split(b"/") if path else []:
            if not isinstance(node, Directory) or name not in node.entries:
                return None
            node = node.entries[name]
        return node


def inode_of(node: Inode | Directory) -> Inode:
    """The inode of a node of either form."""
    return node.inode if isinstance(node, Directory) else node


def shown(path: bytes) -> str:
    """A path for a message: one line of ASCII in quotes, cut to `SHOWN_LENGTH` bytes."""
    return repr(path[:SHOWN_LENGTH])[1:] + ("…" if len(path) > SHOWN_LENGTH else "")


def whiteout() -> Inode:
    """A fresh whiteout: hides the name in every layer below."""
    return Inode(mode=WHITEOUT_MODE)
