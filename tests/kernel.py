"""mount(2) for tests, through libc: mount(8) puts a loop device under an EROFS image that has blob devices.

>>> with mount("layer.erofs", target, "erofs", f"device={blob}"):
...     print(os.listdir(target))
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MS_RDONLY = 1
MNT_DETACH = 2
_NR_FSOPEN = 430  # on every architecture
_FSOPEN_CLOEXEC = 1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
_libc.umount2.argtypes = [ctypes.c_char_p, ctypes.c_int]


def _check(result: int, what: str) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), what)


def umount(target: Path, flags: int = 0) -> None:
    """umount2(2). Raises OSError."""
    _check(_libc.umount2(os.fsencode(target), flags), str(target))


@contextmanager
def mount(
    source: Path | str, target: Path, filesystem: str, options: str = "", flags: int = MS_RDONLY
) -> Iterator[Path]:
    """Mount, give `target`, and unmount in any case; a mount that is still in use is detached and reported."""
    names = os.fsencode(source), os.fsencode(target), os.fsencode(filesystem)
    _check(_libc.mount(*names, flags, os.fsencode(options)), f"{filesystem} on {target}")
    try:
        yield target
    finally:
        try:
            umount(target)
        except OSError:
            umount(target, MNT_DETACH)
            raise


def unmountable(filesystem: str) -> str:
    """Why this kind cannot be mounted here; empty if it can. For `skipif`. fsopen(2) loads modules, mounts nothing."""
    context = _libc.syscall(_NR_FSOPEN, os.fsencode(filesystem), _FSOPEN_CLOEXEC)
    if context < 0:
        return f"{filesystem} cannot be mounted: {os.strerror(ctypes.get_errno())}"
    os.close(context)
    return ""
