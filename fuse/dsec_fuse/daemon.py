"""The data daemon: takes a connection over from the holder, serves it, and may die at any time.

    serve(blobs, holder=root / "holder.sock", slot="blobs/0", control=root / "data.sock")

Before that, the node opened /dev/fuse, mounted on it and put the descriptor into the holder's slot; this process
touches no mount, because it would wait for itself. What it needs of its predecessor is what was negotiated, kept in the
slot as well. The order is what makes every moment safe to die in:

    read INIT -> keep the result in the slot -> answer INIT -> serve

Dead before the answer: the successor asks the kernel to resend, and gets INIT again. Dead later: it gets every request
that was read and not answered.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from dsec_fuse.blobfs import BlobFileSystem, Blobs
from dsec_fuse.connection import Connection
from dsec_fuse.protocol import Negotiated
from dsec_fuse.server import THREADS, Server
from dsec_store import ipc
from dsec_store.allocator import keep_freed
from dsec_store.fdholder import Holder

_log: Final = logging.getLogger(__name__)

SWITCH_INTERVAL: Final = 0.001
"""Seconds after which a thread that computes gives way to one that waits for Python's lock. Beside a thread that
computes all the time, a small read takes 84 us on average, and 136 us with the default of 0.005."""


class Ending(enum.Enum):
    """Why `serve` returned."""

    UNMOUNTED = "unmounted"
    """The node unmounted. The slot can be dropped."""
    ABORTED = "aborted"
    """The connection was aborted by an administrator: the mount is dead, and so is what is mounted above it."""
    TERMINATED = "terminated"
    """SIGTERM: the mount waits for a successor."""


def serve(
    blobs: Blobs,
    *,
    holder: Path,
    slot: str,
    control: Path,
    stats: Callable[[], dict[str, Any]] = dict,
    threads: int = THREADS,
) -> Ending:
    """Serve `blobs` on the connection in the holder's `slot` until it ends, or SIGTERM (in the main thread).

    `control` is the daemon's own socket (`dsec_store.ipc`): `ping` tells its pid, `stats` its figures with those of the
    callback `stats`, and `keep` fills the slot again, of a new holder after the old one died. Raises `NotFound` when
    nothing is in the slot, `Unavailable` when no holder answers.

    Requests that are being served when it returns are left to a successor: end the process soon, by `os._exit` if
    threads of yours may wait long.
    """
    keep_freed()
    sys.setswitchinterval(SWITCH_INTERVAL)
    kept = _Slot(Holder(holder), slot)
    connection = Connection(kept.fd)
    server = Server(connection, BlobFileSystem(blobs), remember=kept.remember, threads=threads)

    def figures(*_: object) -> dict[str, Any]:
        return {"pid": os.getpid(), **dataclasses.asdict(server.stats()), **stats()}

    control_ops = {"ping": lambda *_: os.getpid(), "stats": figures, "keep": lambda *_: kept.fill()}
    try:
        with _sigterm_raises(), ipc.Server(control, control_ops):
            _take_over(connection, kept.state)
            server.start()
            ended = server.wait()
    except _Terminated:
        return Ending.TERMINATED
    return Ending.ABORTED if ended.aborted else Ending.UNMOUNTED


class _Slot:
    """The holder's slot: the connection, and what was negotiated on it."""

    def __init__(self, holder: Holder, name: str) -> None:
        self._holder = holder
        self._name = name
        self.fd, self.state = holder.get(name)

    def remember(self, negotiated: Negotiated) -> None:
        self.state = negotiated.to_bytes()
        self.fill()

    def fill(self) -> None:
        self._holder.put(self._name, self.fd, self.state)


def _take_over(connection: Connection, state: bytes) -> None:
    """Get what a predecessor left unanswered; before INIT was answered too, for it may be INIT itself."""
    resent = connection.resend()
    if state:
        negotiated = Negotiated.from_bytes(state)
        _log.info("took over a connection of FUSE 7.%d, features %#x", negotiated.minor, negotiated.features)
        if not (resent and negotiated.can_resend):
            _log.warning("this kernel cannot resend: requests that the last daemon was serving will never be answered")


class _Terminated(BaseException):
    """SIGTERM came."""


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Only the main thread can receive it; elsewhere nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(*_: object) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
