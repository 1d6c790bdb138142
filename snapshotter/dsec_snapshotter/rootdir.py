"""The root directory of a composition: our own, with the attributes that the image's root has.

Problem: in an overlay the attributes of a merged directory are those of the topmost one, and on top lies a directory
of ours: the upper, or an empty lower. Choice: it gets mode, owner, time and xattrs of the topmost layer whose source
had an entry for its root (`LayerDescriptor.has_root`); a layer without one says nothing about it. Cost: an lstat per
composition.
"""

from __future__ import annotations

import os
import stat
from typing import Final

OPAQUE: Final = "trusted.overlay.opaque"
_OVERLAY_MARKS: Final = "trusted.overlay."
_DEFAULT_MODE: Final = 0o755


def copy_attributes(source: str, directory: str) -> None:
    """Give `directory` what `source` has, but for the marks of overlayfs. OSError if this disk cannot hold them."""
    attributes = os.lstat(source)
    os.chown(directory, attributes.st_uid, attributes.st_gid)
    os.chmod(directory, stat.S_IMODE(attributes.st_mode))
    for name in os.listxattr(source, follow_symlinks=False):
        if not name.startswith(_OVERLAY_MARKS):
            os.setxattr(directory, name, os.getxattr(source, name, follow_symlinks=False))
    _set_time(directory, attributes.st_mtime_ns)


def default_attributes(directory: str) -> None:
    """What a root directory has that no layer describes: root's, 0755, of 1970."""
    os.chmod(directory, _DEFAULT_MODE)
    _set_time(directory, 0)


def is_opaque(directory: str) -> bool:
    """Whether `directory` hides everything below. Overlayfs heeds the mark everywhere but on a layer's root."""
    try:
        return os.getxattr(directory, OPAQUE) == b"y"
    except OSError:
        return False


def _set_time(directory: str, mtime_ns: int) -> None:
    os.utime(directory, ns=(mtime_ns, mtime_ns))
