"""The node process: the one process of a DSEC_ROOT that mounts and counts.

    serve(Path("/var/lib/dsec"), objects, store_url, [sys.executable, "-m", "...", ...])

Commands and sandboxes ask it over `node.sock` (`dsec_store.ipc`, one JSON object a line):

    op        arguments                                      answer
    ping                                                     {pid, store}
    status                                                   see `Node.status`
    stats                                                    see `Node.stats`
    compose   layers [digest, bottom first], writable, kind  {id, path}
              ("run", "mount"), target (absolute or null),
              owner ({pid, started} or null)
    release   id                                             null
    umount    target (absolute)                              {id}
    gc                                                       {layers, files}: how many were unmounted and removed
    stop      force                                          null; the node ends when the caller hangs up

It may be killed at any time. Its mounts, the holder and the data daemon live on, and the next node takes over
(`dsec_snapshotter.reconcile`). SIGTERM ends the process in the same way; only `stop` takes everything down. Actors,
locks and what each crash leaves: docs/concurrency.md, "Node".
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import select
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from dsec_snapshotter import mounts, reconcile, root
from dsec_snapshotter.compositions import Composition, Compositions
from dsec_snapshotter.features import Features, probe
from dsec_snapshotter.gate import Gate
from dsec_snapshotter.layers import Layer, Layers
from dsec_snapshotter.processes import ExitWatch, Process, try_lock
from dsec_snapshotter.root import Root
from dsec_snapshotter.storelease import StoreLease
from dsec_snapshotter.supervisor import Supervisor
from dsec_store.digest import Digest
from dsec_store.errors import Denied, Invalid, StoreError
from dsec_store.ipc import Handler, Json, Peer, Server
from dsec_store.objects import Objects
from dsec_store.parallel import in_parallel

LOCK_WITHIN: Final = 15.0
"""Seconds that a new node waits for one that is just ending."""
_LOCK_EVERY: Final = 0.02
_HANG_UP_WITHIN: Final = 5.0
"""Seconds that the caller of `stop` has to take its answer."""

_OTHERS_WITHIN: Final = 30.0
"""Seconds that `stop` waits for the requests under way."""
_FORCED_WITHIN: Final = 5.0
"""The same with `force`, when those that waited for the data daemon have failed already."""

_ENDING: Final = 8
"""Compositions that `stop` takes down at once."""

_log: Final = logging.getLogger(__name__)

OnOrphan = Callable[[str], None]
Traffic = Callable[[], Mapping[str, int]]


def ignore_orphan(id: str) -> None:
    """Nothing runs in a composition but what its owner has ended with itself."""


def no_traffic() -> Mapping[str, int]:
    """Nothing is counted."""
    return {"requests": 0, "wire_bytes": 0}


def serve(
    path: Path,
    objects: Objects,
    store_url: str,
    daemon_argv: Sequence[str],
    *,
    daemon_env: Mapping[str, str] | None = None,
    on_orphan: OnOrphan = ignore_orphan,
    traffic: Traffic = no_traffic,
) -> None:
    """Be the node of the DSEC_ROOT `path`, in this process, until `stop` or SIGTERM. Call it in the main thread.

    `daemon_argv` is the command line of the data daemon, which finds the kernel's connection at the holder's socket
    `root.HOLDER_SOCKET` in the slot `root.HOLDER_SLOT`, and listens at `root.DAEMON_SOCKET`. `on_orphan(id)` ends the
    sandbox in a composition whose owner has died. `traffic` tells the {requests, wire_bytes} that the node itself made
    of `objects`, for `stats`. Raises `StoreError` when it cannot start.
    """
    home = Root.prepare(path)
    with _lock(home):
        home.bind(store_url)
        home.enter()
        _allow_many_descriptors()
        env = os.environ if daemon_env is None else daemon_env
        node = Node(
            home, objects, store_url, daemon_argv=daemon_argv, daemon_env=env, on_orphan=on_orphan, traffic=traffic
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: node.ended.set())
        node.start()
        with Server(home.path / root.NODE_SOCKET, node.handlers):
            _log.info("node %d serves %s from %s", os.getpid(), home.path, store_url)
            node.ended.wait()
            node.say_goodbye()


@contextlib.contextmanager
def _lock(home: Root) -> Iterator[None]:
    """Be the only node of this root, as long as this process lives."""
    descriptor = os.open(home.path / root.NODE_PID, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + LOCK_WITHIN
        while not try_lock(descriptor):
            if time.monotonic() > deadline:
                pid = os.pread(descriptor, 32, 0).decode().strip()
                raise Denied(f"{home.path} is in use by node process {pid}")
            time.sleep(_LOCK_EVERY)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _allow_many_descriptors() -> None:
    """A connection and a pidfd for each of thousands of sandboxes: take what the hard limit gives."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class Node:
    """What `serve` serves. The working directory is DSEC_ROOT, and nobody else has it."""

    def __init__(
        self,
        home: Root,
        objects: Objects,
        store_url: str,
        *,
        daemon_argv: Sequence[str],
        daemon_env: Mapping[str, str],
        on_orphan: OnOrphan,
        traffic: Traffic,
    ) -> None:
        self._home = home
        self._store_url = store_url
        self._traffic = traffic
        self._gate = Gate()
        self._problems: list[str] = []
        self._caller_of_stop: int | None = None
        self.ended = threading.Event()
        self._features = _probe()
        watch = ExitWatch()
        self._supervisor = Supervisor(home.path, daemon_argv, daemon_env, watch, self._connection_lost)
        self._layers = Layers(objects, self._features, self._supervisor.wait_ready)
        self._lease = StoreLease(objects.blobs)
        self._compositions = Compositions(self._layers, watch, on_orphan, self._lease.hold)

    @property
    def handlers(self) -> Mapping[str, Handler]:
        return {
            "ping": lambda request, peer: {"pid": os.getpid(), "store": self._store_url},
            "status": lambda request, peer: self.status(),
            "stats": lambda request, peer: self.stats(),
            "compose": lambda request, peer: self.compose(request),
            "release": lambda request, peer: self.release(request["id"]),
            "umount": lambda request, peer: self.umount(request["target"]),
            "gc": lambda request, peer: self.gc(),
            "stop": lambda request, peer: self.stop(bool(request.get("force")), peer),
        }

    def start(self) -> None:
        """Take over what the last node left, or set up anew. Raises `StoreError`, then what was new is gone again."""
        reconcile.reconcile(self._layers, self._compositions)
        if self._supervisor.adopt():
            self._start_adopted()
        else:
            self._lose_all("the connection to the kernel had ended with the last processes that held it")
            self._start_anew()
        self._lease.start(self._mounted())

    # -- requests --------------------------------------------------------------------------------------------------

    def status(self) -> Json:
        """Plain values for people and programs; `users` of a layer counts compositions."""
        users = self._compositions.users()
        return {
            "node_pid": os.getpid(),
            "daemon_pid": self._supervisor.daemon_pid,
            "holder_pid": self._supervisor.holder_pid,
            "root": str(self._home.path),
            "store": self._store_url,
            "version": root.VERSION,
            "features": self._features.as_json(),
            "restarts": self._supervisor.restarts,
            "layers": [
                {"id": layer.id, "descriptor": str(layer.digest), "users": users[layer.digest]}
                for layer in self._layers.all()
            ],
            "compositions": [_described(composition) for composition in self._compositions.all()],
            "problems": [
                *self._problems,
                *self._supervisor.problems(),
                *self._lease.problems(),
                *map(_broken, reconcile.broken_records()),
            ],
        }

    def stats(self) -> Json:
        """The data daemon's figures, in all and for each mounted layer (none for one that was never read), and what the
        node itself has fetched: `metadata`."""
        figures = dict(self._supervisor.stats())
        blobs = figures.pop("blobs", {})
        layers = [
            {"id": layer.id, "descriptor": str(layer.digest), **_summed(blobs, layer)} for layer in self._layers.all()
        ]
        return {**figures, "layers": layers, "metadata": dict(self._traffic())}

    def compose(self, request: Json) -> Json:
        layers = [Digest.parse(layer) for layer in request["layers"]]
        target, owner = request.get("target"), request.get("owner")
        with self._gate.shared():
            composition = self._compositions.create(
                layers,
                kind=request["kind"],
                writable=bool(request["writable"]),
                target=Path(target) if target else None,
                owner=Process.from_json(owner) if owner else None,
            )
        return {"id": composition.id, "path": composition.path}

    def release(self, id: str) -> None:
        with self._gate.shared():
            self._compositions.release(id)

    def umount(self, target: str) -> Json:
        with self._gate.shared():
            composition = self._compositions.by_target(Path(target))
            self._compositions.release(composition.id)
        return {"id": composition.id}

    def gc(self) -> Json:
        """Unmount the layers that no composition has, and remove every local file that no mounted layer has."""
        with self._gate.alone():
            users = self._compositions.users()
            unused = [layer for layer in self._layers.all() if not users[layer.digest]]
            unmounted = sum(self._layers.release(layer) for layer in unused)
            self._lease.set(self._mounted())
            return {"layers": unmounted, "files": self._layers.sweep()}

    def stop(self, force: bool, peer: Peer) -> None:
        """Take everything down. `Invalid` while something is composed, unless `force`.

        The connection to the kernel goes first: no end may wait for a data daemon that does not answer.
        """
        if force:
            self._gate.close()
            self._compositions.mark_lost()
            self._supervisor.abort()
        with self._gate.alone(_FORCED_WITHIN if force else _OTHERS_WITHIN, anyway=force):
            in_use = len(self._compositions.all()) + len(reconcile.broken_records())
            if in_use and not force:
                raise Invalid(f"{in_use} compositions are in use: end them, or stop with --force and they fail")
            self._gate.close()
            self._supervisor.abort()
            failures = self._end_all()
            if failures:
                self._start_anew()
                self._gate.open()
                raise failures[0]
            reconcile.clear_all()
            self._supervisor.stop()
            self._lease.end()
        self._caller_of_stop = os.dup(peer.connection.fileno())
        self.ended.set()

    def say_goodbye(self) -> None:
        """Wait until the caller of `stop` has its answer: it hangs up then."""
        if self._caller_of_stop is not None:
            poll = select.poll()
            poll.register(self._caller_of_stop, select.POLLRDHUP)
            poll.poll(_HANG_UP_WITHIN * 1000)
            os.close(self._caller_of_stop)

    def _mounted(self) -> list[Digest]:
        return [layer.digest for layer in self._layers.all()]

    # -- beginnings and ends ---------------------------------------------------------------------------------------

    def _start_adopted(self) -> None:
        """The mounts live: whatever is wrong with the daemon is reported, and must not keep the node from counting."""
        try:
            self._supervisor.start()
        except StoreError as error:
            _log.error("%s", error)

    def _start_anew(self) -> None:
        self._supervisor.stop()
        try:
            self._supervisor.set_up()
            self._supervisor.start()
        except StoreError:
            self._supervisor.stop()
            raise

    def _end_all(self) -> list[StoreError]:
        """End every composition, then detach every layer. What cannot be ended is told and does not stop the rest.

        The connection to the kernel has ended: nothing here waits for the data daemon.
        """
        failures = []

        def end(composition: Composition) -> None:
            try:
                self._compositions.end(composition, _FORCED_WITHIN)
            except StoreError as error:
                failures.append(error)

        in_parallel(end, self._compositions.all(), _ENDING)
        for layer in self._layers.all():
            self._layers.release(layer, lazy=True)
        return failures

    def _lose_all(self, reason: str) -> None:
        """What is mounted cannot be read any more: end it, and tell what it was."""
        lost = [composition.path for composition in self._compositions.all()]
        failures = self._end_all()
        if lost:
            self._problems.append(f"{reason}: lost {', '.join(lost)}")
        self._problems.extend(map(str, failures))

    def _connection_lost(self) -> None:
        with self._gate.alone():
            if self._gate.closed:
                return
            self._lose_all("the connection to the kernel was aborted")
            self._lease.set(self._mounted())
            try:
                self._start_anew()
            except StoreError as error:
                self._problems.append(f"{error}; run node stop and start")


def _probe() -> Features:
    try:
        return probe()
    except OSError as error:
        raise mounts.refused("EROFS cannot be mounted", error) from error


def _described(composition: Composition) -> Json:
    described = composition.as_json()
    described["target"] = described.pop("path") if described.pop("target") else None
    described["path"] = composition.path
    return described


def _summed(blobs: Mapping[str, Mapping[str, int]], layer: Layer) -> dict[str, int]:
    """The figures of all blobs of a layer. Nothing for one that was never read."""
    figures: Counter[str] = Counter()
    for blob in layer.descriptor.blobs:
        figures.update(blobs.get(blob.name.hex, {}))
    return dict(figures)


def _broken(record: Path) -> str:
    return f"{record} cannot be read: what it tells of is left as it is; node stop --force clears it away"
