"""From a folder to a layer's tree: the same folder gives the same layer on any machine.

Kept: names, types, permission bits, hardlinks, symlinks, mtimes, `user.*` xattrs and `security.capability`. Owners
become 0:0 unless asked for. Left out, because they belong to the machine: other xattrs (labels of its security modules,
ACLs that name its users) and sockets. Order is by bytes, whatever the file system's or the locale's order is.

Nobody may write in the folder meanwhile: what is found to have changed is `Invalid`.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from dsec_store.errors import Denied, Invalid, NotFound
from dsec_store.layer.assemble import DEVICE_0_0, PIECE, Assembly, escape_xattrs
from dsec_store.layer.tar import shown
from dsec_store.layer.tree import Directory, Inode

_USER_XATTRS: Final = b"user."
_CAPABILITY: Final = b"security.capability"
_OPEN_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""A symlink or pipe that took a file's place is not followed and does not block."""


@dataclass(frozen=True, slots=True)
class FilePart:
    """The content of a file on this machine."""

    path: bytes

    def pieces(self) -> Iterator[bytes]:
        with _errors_name(self.path), open(os.open(self.path, _OPEN_FLAGS), "rb", buffering=0) as file:
            while piece := file.read(PIECE):
                yield piece

    def __str__(self) -> str:
        return shown(self.path)


def assemble_folder(path: bytes, *, keep_owner: bool) -> Assembly:
    """The layer of the folder `path`; its own attributes become the root's. Raises `NotFound`, `Denied`, `Invalid`."""
    if not os.path.isdir(path):
        raise NotFound(f"no folder {shown(path)}")
    return _Walker(keep_owner).assemble(path)


class _Walker:
    def __init__(self, keep_owner: bool) -> None:
        self._keep_owner = keep_owner
        self._result = Assembly(has_root=True)
        self._links: dict[tuple[int, int], Inode] = {}

    def assemble(self, top: bytes) -> Assembly:
        with _errors_name(top):
            self._result.root.inode = self._inode(top, os.stat(top))
        pending = [(top, self._result.root)]
        while pending:
            path, directory = pending.pop()
            for name in _names(path):
                child = os.path.join(path, name)
                with _errors_name(child):
                    node = self._node(child)
                if node is not None:
                    directory.entries[name] = node
                if isinstance(node, Directory):
                    pending.append((child, node))
        return self._result

    def _node(self, path: bytes) -> Inode | Directory | None:
        status = os.lstat(path)
        if stat.S_ISSOCK(status.st_mode):
            return None
        if stat.S_ISDIR(status.st_mode):
            return Directory(self._inode(path, status))
        if status.st_nlink == 1:
            return self._inode(path, status)
        key = (status.st_dev, status.st_ino)
        if key not in self._links:
            self._links[key] = self._inode(path, status)
        return self._links[key]

    def _inode(self, path: bytes, status: os.stat_result) -> Inode:
        device = stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode)
        if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
            raise Invalid(f"{shown(path)}: {DEVICE_0_0}")
        inode = Inode(
            mode=status.st_mode,
            uid=status.st_uid if self._keep_owner else 0,
            gid=status.st_gid if self._keep_owner else 0,
            mtime_ns=status.st_mtime_ns,
            rdev=(os.major(status.st_rdev), os.minor(status.st_rdev)) if device else (0, 0),
            target=os.readlink(path) if stat.S_ISLNK(status.st_mode) else b"",
            xattrs=_xattrs(path),
        )
        if stat.S_ISREG(status.st_mode):
            inode.size = status.st_size
            inode.content = self._result.content(FilePart(path), status.st_size)
        return inode


def _names(path: bytes) -> list[bytes]:
    with _errors_name(path):
        return sorted(os.listdir(path))


def _xattrs(path: bytes) -> dict[bytes, bytes]:
    try:
        names = [os.fsencode(name) for name in os.listxattr(path, follow_symlinks=False)]
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:  # a file system without xattrs
            return {}
        raise
    kept = [name for name in names if name.startswith(_USER_XATTRS) or name == _CAPABILITY]
    return escape_xattrs({name: os.getxattr(path, name, follow_symlinks=False) for name in kept}, path)


@contextmanager
def _errors_name(path: bytes) -> Iterator[None]:
    """Errors of the system as errors about `path`, which was there a moment ago."""
    try:
        yield
    except FileNotFoundError:
        raise Invalid(f"{shown(path)}: went away while it was read") from None
    except OSError as error:
        raise Denied(f"{shown(path)} cannot be read: {error.strerror}") from None
