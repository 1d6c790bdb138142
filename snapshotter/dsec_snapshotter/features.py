"""What this kernel can do, found out by trying once when the node starts.

A version number says little (distributions carry features back, and build them out), so a tiny image is mounted.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from dsec_snapshotter import mounts, root
from dsec_store.layer.erofs import write_image
from dsec_store.layer.tree import Directory, Inode

_PROBE: Final = "probe"


@dataclass(frozen=True, slots=True)
class Features:
    """direct_io    EROFS reads its blob devices past the page cache: contents are cached once, not twice
    read_ahead   the kernel tells which bdi belongs to an EROFS mount, so its read-ahead can be raised

    Without one of them everything works, with more memory or smaller requests.
    """

    direct_io: bool
    read_ahead: bool

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def probe() -> Features:
    """Mount a tiny image below the working directory, and unmount it. Raises OSError when EROFS cannot be mounted."""
    image, target = f"{root.METADATA}/.{_PROBE}", f"{root.LAYERS}/.{_PROBE}"
    tree = io.BytesIO()
    write_image(Directory(Inode(stat.S_IFDIR | 0o700)), [], tree)
    Path(image).write_bytes(tree.getvalue())
    os.makedirs(target, exist_ok=True)
    try:
        direct_io = _mount(image, target)
        try:
            return Features(direct_io, read_ahead=mounts.bdi_of(target) is not None)
        finally:
            mounts.unmount(target)
    finally:
        os.unlink(image)
        with contextlib.suppress(OSError):
            os.rmdir(target)


def _mount(image: str, target: str) -> bool:
    """Whether direct I/O is known to this kernel; mounted in either case."""
    try:
        mounts.mount_erofs(image, [], target, direct_io=True)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        mounts.mount_erofs(image, [], target, direct_io=False)
        return False
    return True
