"""DSEC_ROOT: the one folder that a node's state lives in, and the names in it.

Problem: every process of a node must agree on paths, the folder's own path may be 200 characters long, and the
strings of fsconfig(2) end at 255 bytes. Choice: all names are constants of this module, relative to the folder; the
node process makes DSEC_ROOT its working directory (`Root.enter`) and mounts by relative names only. Cost: one root
per process.

    root = Root.prepare(Path("/var/lib/dsec"))      # creates it, or checks that it is one that this release can use
    root.bind("file:///srv/store")                  # from now on no other store
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec_store.errors import Denied, Invalid

VERSION: Final = "dsec-root 1"
"""What the file `version` says. A release that lays the folder out otherwise raises the number."""

VERSION_FILE: Final = "version"
STORE_FILE: Final = "store"
"""The URL of the store that this root is bound to: what is local here was verified against that store only."""

NODE_SOCKET: Final = "node.sock"
DAEMON_SOCKET: Final = "daemon.sock"
HOLDER_SOCKET: Final = "holder.sock"
NODE_PID: Final = "node.pid"
"""Holds the node's process id, and its flock(2): two nodes never share a root."""
START_LOCK: Final = "start.lock"
"""Locked by who starts or stops the node: many commands at once start one, and none meets one that is ending."""
DAEMON_PID: Final = "daemon.pid"
"""The data daemon that was started last, as JSON: a node that starts anew finds it before it can answer."""
NODE_LOG: Final = "node.log"
DAEMON_LOG: Final = "daemon.log"

METADATA: Final = "m"
"""Metadata images, `<metadata digest>.erofs` (`dsec_store.layerfiles`)."""
CHUNK_MAPS: Final = "c"
"""Chunk maps and locators, `<chunk map digest>.map` and `.locator` (`dsec_store.layerfiles`)."""
BLOBS: Final = "b"
"""Where the data daemon's file system is mounted: `<chunk map digest>.blob`."""
LAYERS: Final = "l"
"""One EROFS mount per layer, `<short id>`."""
COMPOSITIONS: Final = "s"
"""One folder per composition, `<id>/`, with `upper` and `work` or `top`, and `merged`."""
LOST: Final = "lost"
"""A file in the folder of a composition that the node itself ends, made before what runs in it is killed: so whoever
waits for that knows that its end says nothing."""
RECORDS: Final = "records"

HOLDER_SLOT: Final = "0"
"""The name under which the holder keeps the connection of BLOBS; the data daemon must be told the same."""

_FOLDERS: Final = (METADATA, CHUNK_MAPS, BLOBS, LAYERS, COMPOSITIONS, RECORDS)
_MODE: Final = 0o700
"""The images below may hold setuid programs and device nodes: nobody but root walks in."""


@dataclass(frozen=True, slots=True)
class Root:
    """A DSEC_ROOT that exists and fits this release; `path` is absolute, without symlinks, as the kernel shows it."""

    path: Path

    @classmethod
    def prepare(cls, path: Path) -> Root:
        """Create `path` and its folders where they lack. May be repeated, by many processes at once.

        Raises `Denied` when this user or disk cannot have it, `Invalid` when it is of another release or no root.
        """
        if os.geteuid() != 0:
            raise Denied(f"{path}: mounting needs root; run the command as root (sudo)")
        with _disk_errors(path):
            path.mkdir(mode=_MODE, parents=True, exist_ok=True)
            root = cls(path.resolve(strict=True))
            root._check_owner()
            root._check_version()
            root.path.chmod(_MODE)
            for folder in _FOLDERS:
                with suppress(FileExistsError):  # Path.mkdir would look at it, and `b` may have nobody who answers
                    os.mkdir(root.path / folder, _MODE)
        return root

    def bind(self, store: str) -> None:
        """Bind this root to the store of this URL. `Invalid` when it is bound to another."""
        file = self.path / STORE_FILE
        with _disk_errors(self.path):
            if not file.exists():
                _write_once(file, store)
            bound = file.read_text(encoding="utf-8").strip()
        self.check_store(bound, store)

    def check_store(self, bound: str, store: str) -> None:
        """`Invalid`, naming both, when `bound` and `store` differ."""
        if bound != store:
            raise Invalid(
                f"{self.path} is bound to the store {bound}, not to {store}: "
                f"use another --root, or stop the node and remove {self.path}"
            )

    def enter(self) -> None:
        """Make this the working directory: relative names of this module then are paths."""
        os.chdir(self.path)

    def _check_owner(self) -> None:
        """Its owner could exchange what root mounts and runs."""
        owner = self.path.stat().st_uid
        if owner != 0:
            raise Denied(
                f"{self.path} belongs to user {owner}, not to root: chown it (chown -R 0), or use another --root"
            )

    def _check_version(self) -> None:
        file = self.path / VERSION_FILE
        if not file.exists():
            self._check_unused()
            _write_once(file, VERSION)
        found = file.read_text(encoding="utf-8", errors="replace").strip()
        if found != VERSION:
            raise Invalid(
                f"{self.path} is {found[:64]!r}, and this release reads {VERSION!r}: "
                "use the release that made it, or another --root"
            )

    def _check_unused(self) -> None:
        """A folder with other things in it is somebody else's: removing a root must never remove them."""
        strangers = sorted(name for name in os.listdir(self.path) if not name.startswith("."))
        if strangers and not (self.path / VERSION_FILE).exists():
            raise Invalid(f"{self.path} is no DSEC_ROOT and not empty (it has {strangers[0]!r}): use another --root")


def _write_once(file: Path, text: str) -> None:
    """Make `file` with this line, unless somebody was quicker. Never seen half written."""
    descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=".tmp-")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as out:
            out.write(f"{text}\n")
            out.flush()
            os.fsync(out.fileno())
        if not file.exists():
            os.link(temporary, file)
    except FileExistsError:
        pass
    finally:
        os.unlink(temporary)


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise Denied(f"{path} cannot be used as DSEC_ROOT: {reason}; choose another with --root") from error
