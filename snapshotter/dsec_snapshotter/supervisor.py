"""Keeps the data plane up: the FUSE mount at `b`, the holder of its connection, and the data daemon that serves it.

    /dev/fuse ──fd──> mounted at b ──fd──> holder, slot "0" ──fd──> data daemon ──answers──> kernel

Problem: the connection lives as long as somebody has its descriptor, and everything mounted above is lost with it;
the daemon may crash at any moment, and this process too. Choice: holder and daemon are detached and outlive the node;
the next node finds them by their sockets and watches them by pidfd. The node keeps the descriptor as well, so that it
can start another holder. Cost: only the death of all three at once loses the mounts, and then everything is detached
and set up anew (`lost`).

The daemon is a program that we know by its command line alone (we must not import it). It is restarted at once, then
ever more slowly while it keeps dying. Locks: docs/concurrency.md, "Node".
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from dsec_snapshotter import mounts, root
from dsec_snapshotter.processes import ExitWatch, Process, kill_child, last_line, spawn, terminate
from dsec_store import ipc
from dsec_store.errors import Denied, NotFound, StoreError, Unavailable
from dsec_store.fdholder import Holder

READY_WITHIN: Final = 30.0
"""Seconds that the data daemon may take until it answers: Python starts, and its cache is opened."""

_DEVICE: Final = "/dev/fuse"
_PING_EVERY: Final = 0.02
_PING_TIMEOUT: Final = 2.0
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 5.0
_HEALTHY_AFTER: Final = 10.0
"""Seconds of life after which a daemon's death is a new matter, and its successor starts without a pause."""
_HOPELESS: Final = 3
"""Deaths in a row before it has ever answered: then it cannot start, and who waits for it is told so."""
_SIGTERM_PATIENCE: Final = 5.0
_NO_RESOURCES: Final = (OSError, RuntimeError)
"""What starting a process or a thread may raise."""

_log: Final = logging.getLogger(__name__)


class Supervisor:
    """See the module's text. `adopt` or `set_up`, then `start`, at the end `stop`; the rest from any thread."""

    def __init__(
        self,
        path: Path,
        argv: Sequence[str],
        env: Mapping[str, str],
        watch: ExitWatch,
        lost: Callable[[], None],
    ) -> None:
        """`path` is DSEC_ROOT. `lost` is called, in a thread of its own, when the connection has ended for good."""
        self._argv = argv
        self._env = env
        self._watch = watch
        self._lost = lost
        self._holder = Holder(path / root.HOLDER_SOCKET)
        self._socket = path / root.DAEMON_SOCKET
        self._log_file = path / root.DAEMON_LOG
        self._record = path / root.DAEMON_PID
        self._stopping = threading.Event()
        self._ready = threading.Event()
        self._connection: int | None = None
        self._negotiated = b""
        self._daemon: Process | None = None
        self._holder_process: Process | None = None
        self._started_at = 0.0
        self._lock = threading.Lock()
        self._deaths = 0  # in a row
        self._silent_deaths = 0  # in a row, of daemons that never answered
        self.restarts = 0

    # -- questions -------------------------------------------------------------------------------------------------

    @property
    def daemon_pid(self) -> int | None:
        return self._daemon.pid if self._daemon and self._daemon.alive() else None

    @property
    def holder_pid(self) -> int | None:
        try:
            return self._holder.pid()
        except Unavailable:
            return None

    def problems(self) -> list[str]:
        found = []
        if self.holder_pid is None:
            found.append("the holder is gone, and no other has been started yet")
        if not self._ready.is_set():
            found.append(f"the data daemon does not answer: {self._last_words()}")
        return found

    def stats(self) -> Any:
        """The data daemon's figures."""
        self.wait_ready()
        return ipc.call(self._socket, "stats", timeout=_PING_TIMEOUT)

    def wait_ready(self) -> None:
        """Return when the data daemon serves.

        Raises `Denied` if it cannot start, `Unavailable` if that takes long, or when we are stopping.
        """
        deadline = time.monotonic() + READY_WITHIN
        while not self._ready.wait(_PING_EVERY) or self._stopping.is_set():
            if self._stopping.is_set():
                raise Unavailable("the node is stopping; repeat the command to start it anew")
            if self._silent_deaths >= _HOPELESS:
                raise Denied(f"the data daemon ends as soon as it starts: {self._last_words()}")
            if time.monotonic() > deadline:
                raise Unavailable(f"the data daemon does not answer since {READY_WITHIN:.0f} s; see {root.DAEMON_LOG}")

    # -- beginning -------------------------------------------------------------------------------------------------

    def adopt(self) -> bool:
        """Take over the connection that a former node made; False when there is none, or it has ended."""
        if not any(mount.mountpoint == os.fsencode(os.path.abspath(root.BLOBS)) for mount in mounts.mountinfo()):
            return False
        try:
            self._connection, self._negotiated = self._kept()
        except (NotFound, Unavailable):
            return False
        return self._connected()

    def _kept(self) -> tuple[int, bytes]:
        """What the holder keeps; if it has died, another is started, and the daemon fills it with what it has."""
        try:
            return self._holder.get(root.HOLDER_SLOT)
        except (NotFound, Unavailable):
            if self._ping() is None:
                raise
            if not self._holder.running():
                Holder.spawn(self._holder.path)
            ipc.call(self._socket, "keep", timeout=_PING_TIMEOUT)
            return self._holder.get(root.HOLDER_SLOT)

    def set_up(self) -> None:
        """Open and mount a new connection, and give it to a new holder. Raises `StoreError`; `stop` cleans up."""
        try:
            self._connection = os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC)
            mounts.mount_fuse(self._connection, root.BLOBS)
        except OSError as error:
            raise mounts.refused(f"{_DEVICE} cannot be mounted", error) from error
        self._negotiated = b""
        self._hold()

    def start(self) -> None:
        """Find the data daemon or start one, and wait until it serves. Raises like `wait_ready`."""
        self._stopping.clear()
        self._deaths = self._silent_deaths = 0
        with self._lock:
            self._daemon = self._ping() or self._recorded()
            if self._daemon:
                self._follow(self._daemon)
            else:
                self._launch_first()
        self.wait_ready()
        self._raise_read_ahead()
        self._remember_negotiated()
        self._watch_holder()

    def _hold(self) -> None:
        if not self._holder.running():
            Holder.spawn(self._holder.path)
        if self._connection is not None:
            self._holder.put(root.HOLDER_SLOT, self._connection, self._negotiated)

    def _raise_read_ahead(self) -> None:
        """Opening the directory waits until the daemon has greeted the kernel, which resets read-ahead."""
        try:
            bdi = mounts.bdi_of(root.BLOBS)
            if bdi:
                mounts.set_read_ahead(bdi, mounts.READ_AHEAD)
        except OSError as error:
            _log.warning("%s: read-ahead stays at the kernel's default: %s", root.BLOBS, error)

    def _remember_negotiated(self) -> None:
        """What the daemon has kept with the connection: another holder must be given it again."""
        with contextlib.suppress(NotFound, Unavailable):
            descriptor, self._negotiated = self._holder.get(root.HOLDER_SLOT)
            os.close(descriptor)

    # -- the data daemon -------------------------------------------------------------------------------------------

    def _ping(self) -> Process | None:
        """The daemon that answers now, if one does."""
        try:
            return Process.of(ipc.call(self._socket, "ping", timeout=_PING_TIMEOUT))
        except (OSError, StoreError):
            return None

    def _launch_first(self) -> None:
        """Start a daemon. `Denied` when that fails; then it is tried again in the background, until we stop."""
        try:
            self._launch()
        except _NO_RESOURCES as error:
            threading.Thread(target=self._relaunch, args=(None,), name="daemon-launch", daemon=True).start()
            raise Denied(f"the data daemon cannot be started: {self._argv[0]}: {error}") from error

    def _launch(self) -> None:
        """Start a daemon that is followed, or none; and put it on record, for two at once would fight for their cache.

        A record that cannot be written is a risk only while no node runs.
        """
        daemon = spawn(self._argv, self._log_file, self._env)
        try:
            self._follow(daemon)
        except _NO_RESOURCES:
            kill_child(daemon)
            raise
        self._daemon = daemon
        try:
            self._record.write_text(json.dumps(daemon.as_json()))
        except OSError as error:
            _log.error("data daemon %d is not on record: %s", daemon.pid, error)

    def _relaunch(self, last: Process | None) -> None:
        """Start a daemon in place of `last`, however often that must be tried, unless somebody stops us."""
        while not self._stopping.wait(pause_before(self._deaths)):
            with self._lock:
                if self._stopping.is_set() or last != self._daemon:
                    return
                try:
                    self._launch()
                except _NO_RESOURCES as error:
                    self._deaths += 1
                    _log.error("the data daemon cannot be started, trying again: %s", error)
                else:
                    self.restarts += 1
                    return

    def _recorded(self) -> Process | None:
        """The daemon that was started last, if it lives: it may be about to answer."""
        try:
            process = Process.from_json(json.loads(self._record.read_bytes()))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return process if process.alive() else None

    def _follow(self, daemon: Process) -> None:
        """See to it that its end is noticed, and wait for its first answer in the background."""
        self._started_at = time.monotonic()
        self._watch.watch(daemon, self._daemon_ended)
        threading.Thread(target=self._await_answer, args=(daemon,), name="daemon-ready", daemon=True).start()

    def _await_answer(self, daemon: Process) -> None:
        while self._lives(daemon):
            if self._ping() == daemon:
                self._answered(daemon)
                return
            time.sleep(_PING_EVERY)

    def _lives(self, daemon: Process) -> bool:
        """Also when this process has no descriptor left to look."""
        try:
            return daemon.alive()
        except OSError:
            return True

    def _answered(self, daemon: Process) -> None:
        with self._lock:
            if daemon == self._daemon and daemon.alive():
                self._ready.set()
                self._silent_deaths = 0

    def _daemon_ended(self, daemon: Process) -> None:
        with self._lock:
            if self._stopping.is_set() or daemon != self._daemon:
                return
            self._silent_deaths += not self._ready.is_set()
            self._ready.clear()
        if not self._connected():
            _log.error("the connection at %s has ended: all mounts above it are lost", root.BLOBS)
            self._lost()
            return
        healthy = time.monotonic() - self._started_at > _HEALTHY_AFTER
        self._deaths = 1 if healthy else self._deaths + 1
        _log.warning("data daemon %d has ended: %s", daemon.pid, self._last_words())
        self._relaunch(daemon)

    def _connected(self) -> bool:
        """Whether the connection lives: an aborted one polls as an error, and so does an unmounted one."""
        if self._connection is None:
            return False
        poll = select.poll()
        poll.register(self._connection, 0)
        return not poll.poll(0)

    def _last_words(self) -> str:
        try:
            return last_line(self._log_file)
        except FileNotFoundError:
            return "it has not said anything"
        except OSError as error:
            return f"its log cannot be read: {error}"

    # -- the holder ------------------------------------------------------------------------------------------------

    def _watch_holder(self) -> None:
        self._holder_process = Process.of(self.holder_pid or 0)
        if self._holder_process:
            self._watch.watch(self._holder_process, self._holder_ended)

    def _holder_ended(self, holder: Process) -> None:
        with self._lock:
            if self._stopping.is_set() or holder != self._holder_process or not self._connected():
                return
            _log.error("holder %d has ended; starting another", holder.pid)
            self._hold()
            self._watch_holder()

    # -- the end ---------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """End the connection: whoever waits for the data daemon fails now, and what is mounted above can be detached.

        `stop` or, after it, another `set_up` must follow.
        """
        self._stopping.set()
        mounts.unmount_all(root.BLOBS, abort=True)

    def stop(self) -> None:
        """Abort, and end daemon and holder, in this order: so nobody ever waits for an answer that cannot come.

        May be repeated, and called after a failed start.
        """
        self.abort()
        with self._lock:  # who is just starting something has done so, and nobody will any more
            self._ready.clear()
        if self._connection is not None:
            os.close(self._connection)
            self._connection = None
        daemon = self._daemon or self._ping() or self._recorded()
        if daemon:
            terminate(daemon, _SIGTERM_PATIENCE)
        self._daemon = None
        with contextlib.suppress(Unavailable):
            self._holder.quit()
        for path in (self._socket, self._holder.path, self._record):
            path.unlink(missing_ok=True)


def pause_before(deaths: int) -> float:
    """Seconds to wait before a restart: none after the first death in a row, then 0.1, 0.2, 0.4 ... 5."""
    return 0.0 if deaths <= 1 else min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(deaths - 2, 16))
