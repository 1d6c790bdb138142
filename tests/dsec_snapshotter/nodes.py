"""A node under test: started as a process of its own, and gone without a trace afterwards, whatever happened."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dsec_snapshotter import root as names
from dsec_snapshotter.client import NodeClient
from dsec_snapshotter.mounts import MountInfo, mountinfo, unmount
from dsec_snapshotter.processes import Process, wait_ended
from dsec_store import ipc
from dsec_store.backends.folder import FolderBlobs
from dsec_store.digest import Digest
from dsec_store.errors import StoreError
from dsec_store.fdholder import Holder
from dsec_store.objects import Objects

PROGRAM = Path(__file__).with_name("node_program.py")
ENDS_WITHIN = 20.0
_LOOK_EVERY = 0.02
_LOOKS = 1000


@dataclass
class NodeUnderTest:
    """`root` and `store` are folders; `extra` are further arguments of the node program."""

    root: Path
    store: Path
    extra: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store.mkdir(parents=True, exist_ok=True)
        self.objects = Objects(FolderBlobs(self.store))
        self.client = NodeClient(self.root)

    @property
    def argv(self) -> list[str]:
        return [sys.executable, str(PROGRAM), str(self.root), str(self.store), *self.extra]

    def start(self) -> ipc.Client:
        return self.client.ensure_started(self.argv, self.objects.blobs.location)

    def call(self, op: str, **arguments: Any) -> Any:
        with self.start() as node:
            return node.call(op, **arguments)

    def compose(self, *layers: Digest, **arguments: Any) -> Any:
        defaults = {"writable": False, "kind": "mount", "target": None, "owner": None}
        return self.call("compose", layers=[str(layer) for layer in layers], **defaults | arguments)

    def status(self) -> Any:
        return self.call("status")

    def kill(self, *names: str) -> None:
        """SIGKILL "node", "daemon" or "holder", in the order given; wait until they are gone."""
        status = self.status()
        processes = [Process.of(status[f"{name}_pid"]) for name in names]
        for process in processes:
            assert process is not None
            os.kill(process.pid, signal.SIGKILL)
        for process in processes:
            assert process is not None
            assert wait_ended(process, ENDS_WITHIN)

    def mounts(self) -> list[MountInfo]:
        inside = os.fsencode(self.root.resolve()) + b"/"
        return [mount for mount in mountinfo() if mount.mountpoint.startswith(inside)]

    def mounted(self, filesystem: str) -> list[str]:
        """Where this node has mounted file systems of a type, relative to its root."""
        here = os.fsencode(self.root.resolve()) + b"/"
        return sorted(
            os.fsdecode(mount.mountpoint.removeprefix(here))
            for mount in self.mounts()
            if mount.filesystem == filesystem
        )

    def processes(self) -> list[int]:
        """The processes that were started with our root on their command line."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                arguments = (folder / "cmdline").read_bytes().split(b"\0")
                if os.fsencode(self.root) in arguments and Process.of(int(folder.name)):
                    found.append(int(folder.name))
        return found

    def assert_gone(self) -> None:
        assert self.mounts() == []
        assert self.processes() == []
        assert list(self.root.glob("*.sock")) == []


@contextlib.contextmanager
def node_under_test(root: Path, store: Path, *extra: str) -> Iterator[NodeUnderTest]:
    node = NodeUnderTest(root, store, list(extra))
    try:
        yield node
        node.client.stop(force=True)
        node.assert_gone()
    finally:
        _clear(node)


def _clear(node: NodeUnderTest) -> None:
    """By force, without the node's help."""
    with contextlib.suppress(StoreError, OSError):
        node.client.stop(force=True)
    for pid in node.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(StoreError):
        Holder(node.root / names.HOLDER_SOCKET).quit()
    for mount in reversed(node.mounts()):
        with contextlib.suppress(OSError):
            unmount(os.fsdecode(mount.mountpoint), lazy=True)


@contextlib.contextmanager
def owner_process() -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    """A process that waits to be killed, and what a composition's record says of it."""
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            identity = Process.of(process.pid)
            assert identity is not None
            yield process, identity.as_json()
        finally:
            process.kill()


def until(condition: Callable[[], object]) -> None:
    """Wait for an event that is on its way. The pause only spares the processor."""
    pause = threading.Event()
    for _ in range(_LOOKS):
        if condition():
            return
        pause.wait(_LOOK_EVERY)
    pytest.fail("it did not happen")
