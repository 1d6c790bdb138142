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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from dsec_store.errors import Denied, Invalid, NotFound
from dsec_store.layer.assemble import DEVICE_0_0, Assembly, escape_xattrs
from dsec_store.layer.contents import PIECE, Contents, changed
from dsec_store.layer.stack import join
from dsec_store.layer.tree import Directory, Inode, shown

_USER_XATTRS: Final = b"user."
_CAPABILITY: Final = b"security.capability"
LeaveOut = Callable[[bytes, bool], bool]
"""Whether a path inside the folder, which is a directory or not, is left out."""

_OPEN_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""A symlink or pipe that took a file's place is not followed and does not block."""


def nothing(path: bytes, is_directory: bool) -> bool:
    """Nothing is left out."""
    return False


def assemble_folder(path: bytes, contents: Contents, *, keep_owner: bool, leave_out: LeaveOut = nothing) -> Assembly:
    """The layer of the folder `path`; its own attributes become the root's. Raises `NotFound`, `Denied`, `Invalid`.

    Contents are read once, directory by directory in byte order. What `leave_out` says yes to is not looked into.
    """
    if not os.path.isdir(path):
        raise NotFound(f"no folder {shown(path)}")
    return _Walker(contents, keep_owner, leave_out).assemble(path)


class _Walker:
    def __init__(self, contents: Contents, keep_owner: bool, leave_out: LeaveOut) -> None:
        self._contents = contents
        self._keep_owner = keep_owner
        self._leave_out = leave_out
        self._result = Assembly(has_root=True)
        self._links: dict[tuple[int, int], Inode] = {}

    def assemble(self, top: bytes) -> Assembly:
        with _errors_name(top):
            self._result.root.inode = self._inode(top, os.stat(top))
        pending = [(b"", self._result.root)]
        while pending:
            inside, directory = pending.pop()
            below = []
            for name in _names(os.path.join(top, inside)):
                path = join(inside, name)
                child = os.path.join(top, path)
                with _errors_name(child):
                    node = self._node(child, path)
                if node is not None:
                    directory.entries[name] = node
                if isinstance(node, Directory):
                    below.append((path, node))
            pending.extend(reversed(below))
        return self._result

    def _node(self, path: bytes, inside: bytes) -> Inode | Directory | None:
        """What lies at `path`, which is `inside` the folder."""
        status = os.lstat(path)
        if stat.S_ISSOCK(status.st_mode) or self._leave_out(inside, stat.S_ISDIR(status.st_mode)):
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
            if status.st_size:
                inode.address = self._contents.add(_read(path, status), status.st_size, shown(path))
        return inode


def _read(path: bytes, expected: os.stat_result) -> Iterator[bytes]:
    """The content of a file. Raises `changed` when somebody wrote into it since it was looked at, or does now."""
    with _errors_name(path), open(os.open(path, _OPEN_FLAGS), "rb", buffering=0) as file:
        while piece := file.read(PIECE):
            yield piece
        status = os.fstat(file.fileno())
    if (status.st_ino, status.st_size, status.st_mtime_ns) != (expected.st_ino, expected.st_size, expected.st_mtime_ns):
        raise changed(shown(path))


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
