"""Compositions: a list of layers, made one file tree by one overlay mount.

    make a folder and a record ──> acquire the layers ──> our own directory on top ──> mount   ...   release

A composition is *writable* (its top is `s/<id>/upper`) or read-only (its top is the empty lower `s/<id>/top`; so one
layer can be composed too, which overlayfs alone refuses). It is mounted at `s/<id>/merged` or at a target of the
caller's. A `run` composition belongs to a sandbox and ends with its owner process; a `mount` one stays until it is
released.

The record is on disk before anything is mounted, and goes last. Who uses a layer is told by the records alone. A step
that fails undoes those before it.

    composition = compositions.create([base, workspace], kind="run", writable=True, owner=Process.of(pid))
    compositions.release(composition.id)

Locks: docs/concurrency.md, "Node". Relative paths start at DSEC_ROOT, the working directory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dsec_snapshotter import mounts, root, rootdir
from dsec_snapshotter.keylocks import FOREVER, KeyLocks
from dsec_snapshotter.layers import Layer, Layers
from dsec_snapshotter.mounts import MountInfo
from dsec_snapshotter.processes import ExitWatch, Process
from dsec_snapshotter.records import Records
from dsec_snapshotter.shortids import claim_folder
from dsec_store.digest import Digest
from dsec_store.errors import Invalid, NotFound, StoreError, Unavailable
from dsec_store.parallel import in_parallel

RUN: Final = "run"
MOUNT: Final = "mount"
ATTRIBUTES: Final = {RUN: mounts.NO_DEVICES, MOUNT: mounts.NO_SUID | mounts.NO_DEVICES}
"""Attributes of the overlay by kind. A device node that came in an image must never open a device of the host's. A
`mount` may lie where every user of the host can reach it, so there an image brings no setuid programs either."""

_ID_LENGTH: Final = 10
_PARALLEL: Final = 16
"""Layers that are fetched at once."""
_PATIENCE: Final = (0.02, 0.1, 0.4)
"""Seconds to wait before unmounting again what a dying sandbox still uses; after that it is detached."""

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Composition:
    """One overlay. `layers` from the bottom up, `path` is absolute, `target` whether the caller chose it."""

    id: str
    kind: str
    layers: tuple[Digest, ...]
    writable: bool
    path: str
    target: bool
    owner: Process | None = None

    @property
    def folder(self) -> str:
        return f"{root.COMPOSITIONS}/{self.id}"

    @property
    def top(self) -> str:
        """Our own directory, which lies above all layers."""
        return f"{self.folder}/upper" if self.writable else f"{self.folder}/top"

    @property
    def work(self) -> str:
        return f"{self.folder}/work"

    @property
    def merged(self) -> str:
        return f"{self.folder}/merged"

    @property
    def mountpoint(self) -> str:
        return self.path if self.target else self.merged

    def is_at(self, mount: MountInfo | None) -> bool:
        """Whether `mount` is this composition: its options name our own directory, which no other has."""
        option = f"{'upperdir' if self.writable else 'lowerdir+'}={self.top}".encode()
        return mount is not None and mount.filesystem == "overlay" and option in mount.options

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "kind": self.kind,
            "layers": [str(layer) for layer in self.layers],
            "writable": self.writable,
            "path": self.path,
            "target": self.target,
            "owner": self.owner.as_json() if self.owner else None,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Composition:
        return cls(
            id=str(value["id"]),
            kind=_known_kind(value["kind"]),
            layers=tuple(Digest.parse(layer) for layer in value["layers"]),
            writable=bool(value["writable"]),
            path=str(value["path"]),
            target=bool(value["target"]),
            owner=Process.from_json(value["owner"]) if value["owner"] else None,
        )


def composition_records() -> Records[Composition]:
    return Records(Path(root.RECORDS), "composition", Composition.as_json, Composition.from_json)


def topmost_occurrences(layers: Sequence[Digest]) -> list[Digest]:
    """The layers without those that occur again above, order kept.

    What a layer has at a path, it shows or hides for everything below. Its upper occurrence does that first, wherever
    the lower one would; so the lower one changes nothing, whatever lies between (docs/decisions/, "Duplicate layers").
    """
    return list(reversed(dict.fromkeys(reversed(layers))))


def hold_nothing(layers: Sequence[Digest]) -> None:
    """Nobody else has to know what is mounted."""


class Compositions:
    """See the module's text. Safe for calls from many threads."""

    def __init__(
        self,
        layers: Layers,
        watch: ExitWatch,
        on_orphan: Callable[[str], None],
        hold: Callable[[Sequence[Digest]], None] = hold_nothing,
    ) -> None:
        """`on_orphan(id)` ends what still runs in a composition whose owner is gone. `hold(layers)` is called before
        layers are mounted that were not (`dsec_snapshotter.storelease`)."""
        self._hold = hold
        self._layers = layers
        self._watch = watch
        self._on_orphan = on_orphan
        self._records = composition_records()
        self._key_locks = KeyLocks[str]()
        self._lock = threading.Lock()
        self._compositions: dict[str, Composition] = {}

    # -- questions -------------------------------------------------------------------------------------------------

    def all(self) -> list[Composition]:
        with self._lock:
            return sorted(self._compositions.values(), key=lambda composition: composition.id)

    def users(self) -> Counter[Digest]:
        """How many compositions have each layer; those that are being made count."""
        return Counter(layer for composition in self.all() for layer in set(composition.layers))

    def by_target(self, path: Path) -> Composition:
        """The composition at this absolute path. `NotFound` when there is none."""
        wanted = os.path.realpath(path)
        for composition in self.all():
            if composition.path == wanted:
                return composition
        raise NotFound(f"nothing of this node is mounted at {path}")

    # -- making ----------------------------------------------------------------------------------------------------

    def create(
        self,
        layers: Sequence[Digest],
        *,
        kind: str,
        writable: bool,
        target: Path | None = None,
        owner: Process | None = None,
    ) -> Composition:
        """Compose `layers`, from the bottom up, at `target`, an existing directory, or in a folder of our own.

        On return it is mounted and on record. Raises `StoreError`; then nothing of it is left.
        """
        _known_kind(kind)
        distinct = _checked(layers, writable)
        place = self._free_target(target) if target else None
        id = claim_folder(root.COMPOSITIONS, _ID_LENGTH)
        path = place or os.path.abspath(f"{root.COMPOSITIONS}/{id}/merged")
        composition = Composition(id, kind, tuple(layers), writable, path, place is not None, owner)
        with self._key_locks(id), contextlib.ExitStack() as undo:
            undo.callback(self._forget, composition)
            self._register(composition)
            self._watch_owner(composition)  # if it dies now, its end waits for our lock
            self._mount(composition, self._acquire(distinct))
            undo.pop_all()
        return composition

    def adopt(self, composition: Composition) -> None:
        """Take over what a former node process mounted."""
        with self._lock:
            self._compositions[composition.id] = composition
        self._watch_owner(composition)

    def _free_target(self, target: Path) -> str:
        """The directory's real path, once nothing of ours is mounted there: what somebody unmounted is released."""
        if not target.is_absolute():
            raise Invalid(f"{target}: the node needs an absolute path")
        path = os.path.realpath(target)
        if not os.path.lexists(path):
            raise NotFound(f"{target} does not exist: make the directory first")
        if not os.path.isdir(path):
            raise Invalid(f"{target} is no directory")
        if Path(path).is_relative_to(os.getcwd()):
            raise Invalid(f"{target} is inside DSEC_ROOT: choose a directory elsewhere")
        for other in self.all():
            if other.path == path:
                self._release_if_unmounted(other)
        return path

    def _release_if_unmounted(self, other: Composition) -> None:
        with self._key_locks(other.id):
            if other.is_at(_topmost(other.path)):
                raise _taken(other.path)
            self._forget(other)

    def _register(self, composition: Composition) -> None:
        """From here on its layers are in use, and its target is taken."""
        with self._lock:
            if any(other.path == composition.path for other in self._compositions.values()):
                raise _taken(composition.path)
            self._compositions[composition.id] = composition
        self._records.write(composition.id, composition)

    def _acquire(self, layers: Sequence[Digest]) -> list[Layer]:
        """All layers mounted, those that lack at the same time. Waits for all of them, also when one fails."""
        mounted = {layer.digest for layer in self._layers.all()}
        if missing := [digest for digest in layers if digest not in mounted]:
            self._hold(missing)
        in_parallel(self._layers.acquire, missing, _PARALLEL)
        return [self._layers.acquire(digest) for digest in layers]

    def _mount(self, composition: Composition, layers: Sequence[Layer]) -> None:
        lowers = [layer.path for layer in _visible(layers)]
        try:
            _make_folders(composition, layers)
            if composition.writable:
                upper, stack = (composition.top, composition.work), lowers
            else:
                upper, stack = None, [composition.top, *lowers]
            mounts.mount_overlay(stack, upper, composition.mountpoint, ATTRIBUTES[composition.kind])
        except OSError as error:
            raise mounts.refused(f"{len(layers)} layers cannot be composed", error) from error

    # -- ending ----------------------------------------------------------------------------------------------------

    def release(self, id: str, *, lazy: bool = False) -> None:
        """Unmount it and remove its folder, upper and all. `NotFound` if there is none; `Invalid` when it is in use.

        A `run` composition, or any with `lazy`, is detached when it is in use: it goes when its last user does.
        """
        self._release(id, lazy=lazy)

    def _release(self, id: str, *, lazy: bool, within: float = FOREVER) -> None:
        with self._key_locks(id, within):
            with self._lock:
                composition = self._compositions.get(id)
            if composition is None:
                raise NotFound(f"no composition {id}")
            self._unmount(composition, lazy)
            self._forget(composition)

    def mark_lost(self) -> None:
        """Tell of all that what happens to it from now on is our doing."""
        for composition in self.all():
            _mark_lost(composition)

    def end(self, composition: Composition, within: float = FOREVER) -> None:
        """End what runs in it, and release it whatever happens.

        One that somebody else is still making or releasing after `within` seconds is left to `reconcile`.
        """
        _mark_lost(composition)
        if composition.kind == RUN:
            try:
                self._on_orphan(composition.id)
            except Exception:  # a callback of somebody else's must not keep a mount alive
                _log.exception("composition %s: its sandbox could not be ended", composition.id)
        try:
            self._release(composition.id, lazy=True, within=within)
        except NotFound:
            return
        except TimeoutError:
            _log.error("composition %s: somebody is still making or releasing it", composition.id)

    def _unmount(self, composition: Composition, lazy: bool) -> None:
        if composition.target and not composition.is_at(_topmost(composition.path)):
            if any(composition.is_at(mount) for mount in mounts.mountinfo()):
                raise Invalid(f"something else is mounted over {composition.path}: unmount that first")
            return
        patience = _PATIENCE if composition.kind == RUN and not lazy else ()
        try:
            for pause in patience:
                if mounts.try_unmount(composition.mountpoint):
                    return
                time.sleep(pause)
            if not mounts.try_unmount(composition.mountpoint, lazy=lazy or composition.kind == RUN):
                path = composition.path
                raise Invalid(f"{path} is in use: leave it (fuser -vm {path} lists who has it), then try again")
        except OSError as error:
            raise mounts.refused(f"composition {composition.id}", error) from error

    def _forget(self, composition: Composition) -> None:
        """Remove its folder and, last, its record. It is not mounted."""
        remove_folder(composition.folder)
        self._records.remove(composition.id)
        with self._lock:
            self._compositions.pop(composition.id, None)
            owners = {other.owner for other in self._compositions.values()}
            if composition.owner and composition.owner not in owners:
                self._watch.forget(composition.owner)

    # -- owners ----------------------------------------------------------------------------------------------------

    def _watch_owner(self, composition: Composition) -> None:
        with self._lock:
            if composition.owner and composition.id in self._compositions:
                try:
                    self._watch.watch(composition.owner, self._owner_ended)
                except (OSError, RuntimeError) as error:
                    raise Unavailable(f"process {composition.owner.pid} cannot be watched: {error}") from error

    def _owner_ended(self, owner: Process) -> None:
        for composition in self.all():
            if composition.owner == owner:
                _log.info("composition %s: its owner, process %d, is gone", composition.id, owner.pid)
                try:
                    self.end(composition)
                except StoreError:
                    _log.exception("composition %s cannot be released", composition.id)


def _mark_lost(composition: Composition) -> None:
    with contextlib.suppress(OSError):
        Path(composition.folder, root.LOST).touch()


def remove_folder(folder: str) -> None:
    """Remove a composition's folder. The mount point goes first: while something is mounted there, that fails.

    What cannot be removed stays for the next start of a node.
    """
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(f"{folder}/merged")
    if os.path.isdir(folder):
        shutil.rmtree(folder, onerror=lambda _, path, error: _log.warning("%s stays: %s", path, error[1]))


def _checked(layers: Sequence[Digest], writable: bool) -> list[Digest]:
    distinct = topmost_occurrences(layers)
    most = mounts.MAX_LOWERS - (0 if writable else 1)
    if not distinct:
        raise Invalid("a composition needs at least one layer")
    if len(distinct) > most:
        raise Invalid(f"{len(distinct)} layers are more than the {most} that one overlay takes: merge some of them")
    return distinct


def _known_kind(kind: str) -> str:
    if kind not in ATTRIBUTES:
        raise Invalid(f"unknown kind of composition {kind!r} (known: {', '.join(ATTRIBUTES)})")
    return kind


def _visible(layers: Sequence[Layer]) -> list[Layer]:
    """From the top down, ending at a layer whose root is opaque: overlayfs would go on there."""
    stack = []
    for layer in reversed(layers):
        stack.append(layer)
        if rootdir.is_opaque(layer.path):
            break
    return stack


def _make_folders(composition: Composition, layers: Sequence[Layer]) -> None:
    """Our own directory with the root's attributes, and the other folders that this composition needs."""
    for folder in [composition.work] * composition.writable + [composition.merged] * (not composition.target):
        os.mkdir(folder)
    os.mkdir(composition.top)
    described = next((layer for layer in reversed(layers) if layer.descriptor.has_root), None)
    if described:
        rootdir.copy_attributes(described.path, composition.top)
    else:
        rootdir.default_attributes(composition.top)


def _topmost(path: str) -> MountInfo | None:
    """The mount that one sees at this path: the latest of those made there."""
    wanted = os.fsencode(path)
    return next((mount for mount in reversed(mounts.mountinfo()) if mount.mountpoint == wanted), None)


def _taken(path: str) -> Invalid:
    return Invalid(f"{path} has a composition of this node already: unmount that first")
