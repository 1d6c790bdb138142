"""Paths inside a root file system, opened from outside, that cannot lead out of it.

Problem: an image is untrusted. `/etc/passwd` may be a symlink to the host's, `/srv` one to `/`, a program name may hold
"..". Following such a path with plain open(2) from outside walks the host's tree. Choice: every path goes through
openat2(2) with RESOLVE_IN_ROOT, so that the kernel resolves it as after chroot(2), without becoming another process.
Python has no binding for it, hence ctypes. Cost: Linux 5.6. Source: openat2(2).

A file is opened for reading only when it is a regular one: opening a pipe would block, and opening a device acts on the
host.

    with RootPath(root) as inside:
        passwd = inside.read("/etc/passwd", limit=1 << 20)
"""

from __future__ import annotations

import ctypes
import errno
import os
import posixpath
import stat
from pathlib import Path
from typing import Final

_SYS_OPENAT2: Final = 437  # one number on all architectures
_RESOLVE_NO_MAGICLINKS: Final = 0x02
_RESOLVE_IN_ROOT: Final = 0x10

_DIRECTORY_MODE: Final = 0o755
_TRIES: Final = 8
"""How often a lookup is repeated that met a rename (EAGAIN) or a signal (EINTR)."""

_libc: Final = ctypes.CDLL(None, use_errno=True)


class _OpenHow(ctypes.Structure):
    """`struct open_how` of linux/openat2.h."""

    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


class RootPath:
    """A root file system, held open. All paths are paths inside; all methods raise OSError."""

    def __init__(self, root: Path) -> None:
        self._root = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def __enter__(self) -> RootPath:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._root)

    def open(self, path: str, flags: int = os.O_PATH) -> int:
        """A descriptor for `path`, symlinks followed inside the root; the caller closes it."""
        how = _OpenHow(flags | os.O_CLOEXEC, 0, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)
        code = 0
        for _ in range(_TRIES):
            descriptor: int = _libc.syscall(
                ctypes.c_long(_SYS_OPENAT2),
                ctypes.c_int(self._root),
                ctypes.c_char_p(os.fsencode(path)),
                ctypes.byref(how),
                ctypes.c_size_t(ctypes.sizeof(how)),
            )
            if descriptor >= 0:
                return descriptor
            code = ctypes.get_errno()
            if code not in (errno.EAGAIN, errno.EINTR):
                break
        raise OSError(code, os.strerror(code), path)

    def stat(self, path: str) -> os.stat_result:
        """What `path` leads to."""
        descriptor = self.open(path)
        try:
            return os.fstat(descriptor)
        finally:
            os.close(descriptor)

    def read(self, path: str, limit: int) -> bytes:
        """The first `limit` bytes of the regular file at `path`; EINVAL for what is no regular file."""
        descriptor = self.open(path)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "not a regular file", path)
            with open(f"/proc/self/fd/{descriptor}", "rb") as file:
                return file.read(limit)
        finally:
            os.close(descriptor)

    def make_directories(self, path: str) -> None:
        """Make the directory `path` with what is missing above it, each root:root 0755. Fine when it exists.

        Raises FileExistsError for a dangling symlink in the way, NotADirectoryError for a file.
        """
        reached = "/"
        for name in path.strip("/").split("/"):
            parent, reached = reached, posixpath.join(reached, name)
            if self._is_directory(reached):
                continue
            try:
                self._make_directory(parent, name)
            except FileExistsError:  # a dangling symlink, or somebody was quicker
                if not self._is_directory(reached):
                    raise

    def _is_directory(self, path: str) -> bool:
        """False when nothing is there. Raises NotADirectoryError when something else is."""
        try:
            os.close(self.open(path, os.O_PATH | os.O_DIRECTORY))
        except FileNotFoundError:
            return False
        return True

    def _make_directory(self, parent: str, name: str) -> None:
        folder = self.open(parent, os.O_PATH | os.O_DIRECTORY)
        try:
            os.mkdir(name, _DIRECTORY_MODE, dir_fd=folder)
            os.chmod(name, _DIRECTORY_MODE, dir_fd=folder)  # whatever our umask is
        finally:
            os.close(folder)
