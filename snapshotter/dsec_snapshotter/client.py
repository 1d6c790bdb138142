"""How commands and sandboxes reach the node of a DSEC_ROOT, and start it when nobody is there.

    client = NodeClient(Path("/var/lib/dsec"))
    with client.ensure_started([sys.executable, "-m", "...", ...], store_url) as node:
        node.call("compose", layers=[...], kind="mount", writable=False, target="/mnt/demo")
    client.stop()

Nothing here mounts, and nothing keeps running in the caller's process.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec_snapshotter import root
from dsec_snapshotter.processes import Process, last_line, spawn, try_lock, wait_ended
from dsec_snapshotter.root import Root
from dsec_store import ipc
from dsec_store.errors import Denied, Invalid, StoreError, Unavailable

READY_WITHIN: Final = 60.0
"""Seconds that a node may take to start: it may wait for one that is ending, and for its data daemon."""
STOP_WITHIN: Final = 60.0
"""Seconds that a node may take to answer to `stop`."""
ENDED_WITHIN: Final = 30.0
"""Seconds between the answer to `stop` and the end of the process."""
LOCK_WITHIN: Final = STOP_WITHIN + ENDED_WITHIN + 10.0
"""Seconds that others may take to start or stop the node."""
_ASK_EVERY: Final = 0.02
_PING_TIMEOUT: Final = 10.0


@dataclass(frozen=True, slots=True)
class NodeClient:
    """The node of the DSEC_ROOT `root`, running or not. A value: it keeps no connection."""

    root: Path

    def connect(self) -> ipc.Client:
        """A connection to the running node, which the caller closes. `Unavailable` when none runs, `Denied` to others
        than root."""
        return self._connect(None)

    def _connect(self, timeout: float | None) -> ipc.Client:
        try:
            return ipc.Client(self.root / root.NODE_SOCKET, timeout)
        except PermissionError as error:
            raise self._only_root() from error
        except OSError as error:
            raise Unavailable(f"no node runs for {self.root}: start it with `dsec node start`") from error

    def running(self) -> Process | None:
        """The node process, if one answers. `Denied` to others than root."""
        try:
            return Process.of(ipc.call(self.root / root.NODE_SOCKET, "ping", timeout=_PING_TIMEOUT)["pid"])
        except PermissionError as error:
            raise self._only_root() from error
        except (OSError, Unavailable):
            return None

    def ensure_started(
        self, argv: Sequence[str], store_url: str, *, env: Mapping[str, str] | None = None
    ) -> ipc.Client:
        """A connection to the node, which is started by `argv`, detached, if none runs; its log is `node.log`.

        `argv` is a program that calls `dsec_snapshotter.node.serve` for this root and store. Many at once start one.
        Raises `Invalid` when the root is bound to another store, or when the node mounts where this process does not
        see it; `Denied` with the last line of the log when the node cannot start.
        """
        home = Root.prepare(self.root)
        with _locked(home.path / root.START_LOCK):
            if not self.running():
                home.bind(store_url)
                self._start(home, argv, os.environ if env is None else env)
        node = self.connect()
        try:
            answer = node.call("ping")
            home.check_store(answer["store"], store_url)
            _check_namespace(answer["pid"])
        except StoreError:
            node.close()
            raise
        return node

    def stop(self, *, force: bool = False) -> bool:
        """Stop the node and everything it has made; False if none runs. `Invalid` while something is composed,
        unless `force`; `Unavailable` when that takes too long. On return its process has ended."""
        if not self.running():
            return False
        with _locked(self.root / root.START_LOCK):
            process = self.running()
            if process is None:
                return False
            deadline = time.monotonic() + STOP_WITHIN
            try:
                with self._connect(STOP_WITHIN) as node:
                    node.call("stop", force=force)
            except Unavailable as error:
                if time.monotonic() < deadline:
                    raise
                log = self.root / root.NODE_LOG
                raise Unavailable(
                    f"node process {process.pid} does not stop within {STOP_WITHIN:.0f} s: see {log}, or kill it"
                ) from error
            if not wait_ended(process, ENDED_WITHIN):
                raise Unavailable(f"node process {process.pid} has taken everything down, but does not end")
        return True

    def _only_root(self) -> Denied:
        return Denied(f"only root may ask the node of {self.root}: run the command as root (sudo)")

    def _start(self, home: Root, argv: Sequence[str], env: Mapping[str, str]) -> None:
        log = home.path / root.NODE_LOG
        try:
            process = spawn(argv, log, env)
        except OSError as error:
            raise Denied(f"the node cannot be started: {argv[0]}: {error.strerror}") from error
        deadline = time.monotonic() + READY_WITHIN
        while self.running() != process:
            if wait_ended(process, _ASK_EVERY):
                raise Denied(f"the node does not start: {last_line(log)}; see {log}")
            if time.monotonic() > deadline:
                raise Unavailable(f"the node does not answer since {READY_WITHIN:.0f} s; see {log}")


def _check_namespace(pid: int) -> None:
    if _mount_namespace(pid) != _mount_namespace("self"):
        raise Invalid(
            f"the node runs in another mount namespace (process {pid}), and its mounts are not seen here: "
            f"stop it and start it from here, or enter that one (nsenter -t {pid} -m)"
        )


def _mount_namespace(pid: int | str) -> str | None:
    """None when /proc does not show the process: then it is in another namespace of processes, too."""
    try:
        return os.readlink(f"/proc/{pid}/ns/mnt")
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + LOCK_WITHIN
    try:
        while not try_lock(descriptor):
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"another command starts or stops the node since {LOCK_WITHIN:.0f} s: try again later"
                )
            time.sleep(_ASK_EVERY)
        yield
    finally:
        os.close(descriptor)
