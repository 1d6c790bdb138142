"""Mounting, by the kernel's own interface: EROFS layers, overlays over them, the data daemon's FUSE mount.

Problem: mount(8) puts a loop device under an EROFS image that has a blob device; the option string of mount(2) ends
at one page, which 128 layers overrun; a string of fsconfig(2) ends at 255 bytes, which one long path overruns.
Choice: fsopen, fsconfig, fsmount and move_mount through libc's syscall(2), an option a call, and names relative to
the working directory, which is DSEC_ROOT (`dsec_snapshotter.root`). Cost: Linux 5.2 or later, 6.12 for EROFS on plain
files.

Functions raise OSError whose text names the option that was refused and holds what the kernel has logged about it;
`refused` turns that into a store error at the edge of each caller.

Source: Linux `fs/fsopen.c`, `fs/overlayfs/params.c`, `fs/erofs/super.c`, `fs/fuse/inode.c`; proc_pid_mountinfo(5).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec_store.errors import Denied, Invalid, NotFound, StoreError, Unavailable

OVERLAY_OPTIONS: Final = (
    ("redirect_dir", "on"),  # rename(2) of a directory from a lower layer works; else it is EXDEV
    ("metacopy", "off"),  # a changed mode copies the file: an upper directory stands for itself
    ("index", "off"),  # else an upper directory is tied to one set of lowers by file handle, for ever
    ("nfs_export", "off"),  # needs index
    ("xino", "on"),  # st_ino is unique and stays over copy-up; `auto` is off on EROFS, whose numbers have 64 bits
)
"""The same for every composition, whatever the defaults of the kernel are; an option that could change what an upper
directory means must never differ between two mounts of it. `userxattr` is left out: marks are `trusted.overlay.*`
alone, which nobody without CAP_SYS_ADMIN on the host can forge. The kernel takes all of them with and without an
upper."""

WRITABLE_FLAGS: Final = ("volatile",)
"""Of an overlay with an upper, which never outlives its mount: nothing is synced to disk for it. Without it
unmounting one writes out all that is dirty on the disk of DSEC_ROOT, whoever wrote it, and a sandbox's fsync(2) waits
for the disk."""

MAX_LOWERS: Final = 500
"""Lower directories of one overlay (OVL_MAX_STACK)."""

READ_AHEAD: Final = 8 << 10
"""KiB that the kernel reads ahead of a stream in a layer: eight requests of 1 MiB under way hide the store's
latency."""

FUSE_MAX_READ: Final = 1 << 20
"""Bytes of one READ request."""

NEEDS_KERNEL: Final = "Linux 6.12 or later with EROFS, overlayfs and FUSE is needed"

_FSOPEN, _FSCONFIG, _FSMOUNT, _MOVE_MOUNT = 430, 431, 432, 429
"""Numbers of system calls: the same on every architecture."""
_CLOEXEC: Final = 1
_SET_FLAG, _SET_STRING, _CREATE = 0, 1, 6
_MOVE_FROM_FD: Final = 4
_AT_FDCWD: Final = -100
_MNT_FORCE: Final = 1
_MNT_DETACH: Final = 2
_UMOUNT_NOFOLLOW: Final = 8
_FS_IOC_GETFSSYSFSPATH: Final = 0x80811501
"""_IOR(0x15, 1, struct fs_sysfs_path): one byte of length, 128 of name (linux/fs.h, since 6.10)."""

READ_ONLY, NO_SUID, NO_DEVICES, NO_EXEC = 1, 2, 4, 8
"""Attributes of a mount (MOUNT_ATTR_*)."""

LAYER_ATTRIBUTES: Final = READ_ONLY | NO_SUID | NO_DEVICES
"""Of a layer's own mount. Overlayfs goes by its own attributes and not by those of its lowers: setuid programs work in
a sandbox, and not for who finds a way to the layer itself."""

_BDI: Final = Path("/sys/class/bdi")
_OCTAL: Final = re.compile(rb"\\([0-7]{3})")

_libc: Final = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class MountInfo:
    """One line of /proc/self/mountinfo. Paths are bytes, as the kernel has them."""

    id: int
    parent: int
    device: str
    mountpoint: bytes
    filesystem: str
    source: bytes
    options: frozenset[bytes]


# -- making mounts -----------------------------------------------------------------------------------------------------


def mount_erofs(image: str, devices: Iterable[str], target: str, *, direct_io: bool) -> None:
    """Mount a metadata image with its blob devices, in the order of the image's device table.

    `direct_io`: read the devices past the page cache of their file system, so that nothing is cached twice.
    """
    options = [("source", image), *(("device", device) for device in devices)]
    _mount("erofs", options, ["ro", *(["directio"] if direct_io else [])], target, LAYER_ATTRIBUTES)


def mount_overlay(lowers: Sequence[str], upper: tuple[str, str] | None, target: str, attributes: int = 0) -> None:
    """Mount an overlay: `lowers` from the top down, `upper` as (upper, work) or None for a read-only one.

    Without an upper two lowers are the least. No directory may occur twice.
    """
    options = [("source", "overlay"), *(("lowerdir+", lower) for lower in lowers)]
    if upper:
        options += [("upperdir", upper[0]), ("workdir", upper[1])]
    flags = WRITABLE_FLAGS if upper else ("ro",)
    _mount("overlay", [*options, *OVERLAY_OPTIONS], flags, target, attributes | (0 if upper else READ_ONLY))


def mount_fuse(fd: int, target: str) -> None:
    """Mount the file system that whoever reads /dev/fuse's `fd` serves. Nobody needs to read it yet."""
    options = [
        ("source", "dsec"),
        ("fd", str(fd)),
        ("rootmode", "40000"),
        ("user_id", "0"),
        ("group_id", "0"),
        ("max_read", str(FUSE_MAX_READ)),
    ]
    flags = ["ro", "allow_other", "default_permissions"]
    _mount("fuse", options, flags, target, READ_ONLY | NO_SUID | NO_DEVICES | NO_EXEC)


def unmount(target: str, *, lazy: bool = False, abort: bool = False) -> None:
    """Unmount what is mounted on top at `target`. Raises OSError: EINVAL if nothing is, EBUSY if it is in use.

    `lazy`: take it out of the tree now, and let go of it when its last user does.
    `abort`: end a FUSE connection first, so that whoever waits for its server fails at once.
    """
    flags = _UMOUNT_NOFOLLOW | (_MNT_DETACH if lazy else 0) | (_MNT_FORCE if abort else 0)
    if _libc.umount2(os.fsencode(target), flags):
        raise _last_error(f"unmount {target}")


def try_unmount(target: str, *, lazy: bool = False) -> bool:
    """Like `unmount`, but True when nothing is mounted there now, also if nothing was; False when it is in use."""
    try:
        unmount(target, lazy=lazy)
    except OSError as error:
        if error.errno == errno.EBUSY:
            return False
        if error.errno not in (errno.EINVAL, errno.ENOENT):
            raise
    return True


def unmount_all(target: str, *, abort: bool = False) -> None:
    """Detach whatever is mounted at `target`, one over the other, in use or not. `abort` as for `unmount`."""
    with contextlib.suppress(OSError):
        while True:
            unmount(target, lazy=True, abort=abort)


def _mount(
    filesystem: str, options: Sequence[tuple[str, str]], flags: Sequence[str], target: str, attributes: int
) -> None:
    context = _call(f"no {filesystem} in this kernel", _FSOPEN, filesystem.encode(), _CLOEXEC)
    try:
        for key, value in options:
            with _logged(context):
                _call(f"{key}={value}", _FSCONFIG, context, _SET_STRING, key.encode(), os.fsencode(value), 0)
        for flag in flags:
            with _logged(context):
                _call(flag, _FSCONFIG, context, _SET_FLAG, flag.encode(), None, 0)
        with _logged(context):
            _call(f"mount {filesystem} at {target}", _FSCONFIG, context, _CREATE, None, None, 0)
            mounted = _call("fsmount", _FSMOUNT, context, _CLOEXEC, attributes)
    finally:
        os.close(context)
    try:
        _call(f"mount at {target}", _MOVE_MOUNT, mounted, b"", _AT_FDCWD, os.fsencode(target), _MOVE_FROM_FD)
    finally:
        os.close(mounted)


def _call(what: str, number: int, *arguments: int | bytes | None) -> int:
    result: int = _libc.syscall(number, *arguments)
    if result < 0:
        raise _last_error(what)
    return result


def _last_error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


@contextlib.contextmanager
def _logged(context: int) -> Iterator[None]:
    """Add to an error what the kernel has logged in this file system context."""
    try:
        yield
    except OSError as error:
        lines = []
        with contextlib.suppress(OSError):  # ENODATA: no more messages
            while line := os.read(context, 4096):
                lines.append(line.decode(errors="replace").strip())
        if lines:
            raise OSError(error.errno, f"{error.strerror} ({'; '.join(lines)})") from None
        raise


# -- errors ------------------------------------------------------------------------------------------------------------

_CLASSES: Final[dict[int, type[StoreError]]] = {
    errno.ENOENT: NotFound,
    errno.EBUSY: Invalid,
    errno.ENOTDIR: Invalid,
    errno.EIO: Unavailable,
    errno.ENOTCONN: Unavailable,
    errno.ECONNABORTED: Unavailable,
    errno.ETIMEDOUT: Unavailable,
    errno.ENOSPC: Denied,
    errno.EROFS: Denied,
    errno.EPERM: Denied,
    errno.EACCES: Denied,
    errno.ENODEV: Denied,
    errno.ENOSYS: Denied,
    errno.ENOTBLK: Denied,
    errno.EOPNOTSUPP: Denied,
}
_HINTS: Final = {
    errno.ENODEV: (NEEDS_KERNEL,),
    errno.ENOSYS: (NEEDS_KERNEL,),
    errno.ENOTBLK: (
        "the file system of DSEC_ROOT carries no EROFS images (as tmpfs and overlay): choose --root on ext4 or xfs",
        f"or the kernel is too old: {NEEDS_KERNEL}",
    ),
}


def refused(what: str, error: OSError) -> StoreError:
    """The store error that stands for `error` of a system call while we did `what`."""
    kind = _CLASSES.get(error.errno or 0, StoreError)
    return kind("; ".join([f"{what}: {error.strerror or error}", *_HINTS.get(error.errno or 0, ())]))


# -- looking at mounts -------------------------------------------------------------------------------------------------


def mountinfo() -> list[MountInfo]:
    """The mounts of this process's mount namespace, parents before children."""
    return parse_mountinfo(Path("/proc/self/mountinfo").read_bytes())


def parse_mountinfo(text: bytes) -> list[MountInfo]:
    return [_parse_line(line) for line in text.splitlines()]


def _parse_line(line: bytes) -> MountInfo:
    """Fields before " - ": id, parent, device, root, mountpoint, options, tags; behind it: type, source, options."""
    before, _, after = line.partition(b" - ")
    id, parent, device, _, mountpoint, options, *_ = before.split(b" ")
    filesystem, source, more = after.split(b" ", 2)
    return MountInfo(
        id=int(id),
        parent=int(parent),
        device=device.decode(),
        mountpoint=_unescape(mountpoint),
        filesystem=filesystem.decode(errors="replace"),
        source=_unescape(source),
        options=frozenset(_unescape(option) for option in (options + b"," + more).split(b",")),
    )


def _unescape(field: bytes) -> bytes:
    """Space, tab, newline and backslash are written as three octal digits."""
    return _OCTAL.sub(lambda match: bytes([int(match[1], 8)]), field)


# -- read-ahead --------------------------------------------------------------------------------------------------------


def bdi_of(mounted: str) -> str | None:
    """The name in /sys/class/bdi of the file system at this path; None when this kernel does not tell.

    A device number leads to it for FUSE. For EROFS on a file it is `erofs-<n>`, the name under which the file system
    appears in sysfs, and the kernel tells that by ioctl.
    """
    descriptor = os.open(mounted, os.O_RDONLY | os.O_DIRECTORY)
    try:
        device = os.fstat(descriptor).st_dev
        answer = bytearray(129)
        with contextlib.suppress(OSError):
            fcntl.ioctl(descriptor, _FS_IOC_GETFSSYSFSPATH, answer)
    finally:
        os.close(descriptor)
    sysfs_name = answer[1 : 1 + answer[0]].decode(errors="replace").rpartition("/")[2]
    names = (f"{os.major(device)}:{os.minor(device)}", sysfs_name)
    return next((name for name in names if name and (_BDI / name).exists()), None)


def set_read_ahead(bdi: str, kib: int) -> None:
    (_BDI / bdi / "read_ahead_kb").write_text(str(kib))
