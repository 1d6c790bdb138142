"""Asking the node: every command that mounts comes through here, and starts the node when none runs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec_cli.wiring import Settings, process
from dsec_snapshotter import root
from dsec_snapshotter.client import NodeClient
from dsec_snapshotter.processes import Process
from dsec_store import ipc
from dsec_store.digest import Digest
from dsec_store.errors import Invalid, NotFound, Unavailable

RUNS: Final = "runs"
"""Below DSEC_ROOT: what the runtime keeps of running containers."""


@dataclass(frozen=True, slots=True)
class Composed:
    """A composition made for one run: its id, which is also the container's, and where the root is mounted."""

    id: str
    path: Path


def start(settings: Settings) -> ipc.Client:
    """A connection to the node of these settings; a node is started when none runs."""
    arguments = ("--root", str(settings.root), "--store", settings.store, "--cache-bytes", str(settings.cache_bytes))
    return NodeClient(settings.root).ensure_started(process("dsec_cli.nodeprocess", *arguments), settings.store)


def mount(settings: Settings, layers: Sequence[Digest], target: Path, *, writable: bool) -> None:
    with start(settings) as node:
        node.call(
            "compose",
            layers=[str(layer) for layer in layers],
            writable=writable,
            target=str(target),
            kind="mount",
            owner=None,
        )


def umount(settings: Settings, target: Path) -> None:
    with NodeClient(settings.root).connect() as node:
        node.call("umount", target=str(target))


@contextlib.contextmanager
def composed(settings: Settings, layers: Sequence[Digest]) -> Iterator[Composed]:
    """A writable root of these layers, for as long as the context lasts; the node ends it if this process dies.

    Raises `Unavailable` at the end when the root had been lost meanwhile.
    """
    me = Process.of(os.getpid())
    if me is None:
        raise Invalid("/proc does not show this process: dsec needs /proc mounted")
    with start(settings) as node:
        answer = node.call(
            "compose",
            layers=[str(layer) for layer in layers],
            writable=True,
            target=None,
            kind="run",
            owner=me.as_json(),
        )
    composed = Composed(answer["id"], settings.root / answer["path"])
    try:
        yield composed
    finally:
        _release(settings, composed)


def _release(settings: Settings, composed: Composed) -> None:
    """Over a new connection, for the node may be another by now. One that is gone does it when it starts again.

    Raises `Unavailable` when the node had ended the composition: it has killed what ran, and that is no outcome.
    """
    mark = settings.root / root.COMPOSITIONS / composed.id / root.LOST
    lost = mark.exists() or not os.path.ismount(composed.path)
    with contextlib.suppress(NotFound, Unavailable), NodeClient(settings.root).connect() as node:
        node.call("release", id=composed.id)
    if lost:
        raise Unavailable(
            "the sandbox lost its file system while it ran: the node was stopped by force, or its processes died "
            "(see 'dsec node status')"
        )
