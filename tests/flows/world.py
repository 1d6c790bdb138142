"""A private DSec for one test: a DSEC_ROOT, a store, the real commands as processes, and nothing of it afterwards.

with private_world() as world:
    world.ok("dsec-image", "convert", f"oci:{layout}:plain", "box")
    assert world.run("dsec", "run", "box", "--", "false").code == 1

Whatever a test mounts or starts lies below `world.folder` or names it, so what is left is found by that.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import pytest

from dsec_snapshotter import root as names
from dsec_snapshotter.mounts import mountinfo, unmount
from dsec_snapshotter.processes import Process, wait_ended
from dsec_store import ipc
from tests.dsec_sandbox import box
from tests.dsec_snapshotter.nodes import until
from tests.kernel import unmountable

COMMANDS: Final = {"dsec": "dsec_cli.main", "dsec-image": "dsec_cli.image"}

WITHIN: Final = 100.0
"""Seconds after which a command hangs."""

PIPES: Final[dict[str, Any]] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}

SETTINGS: Final = ("DSEC_STORE", "DSEC_ROOT", "DSEC_CACHE_BYTES", "AWS_", "SOURCE_DATE_EPOCH")
"""How the variables begin that our commands heed."""

MARK: Final = "DSEC_TEST_WORLD"
"""The environment variable by which a process of a container is known as ours."""


FIRST_KERNEL: Final = (6, 12)
"""EROFS on plain files."""


def lacking() -> str:
    """What this machine lacks for flows; empty if nothing. For skips."""
    if reason := box.lacking():
        return reason
    if tuple(int(part) for part in os.uname().release.split(".")[:2]) < FIRST_KERNEL:
        return f"kernel {os.uname().release} cannot mount EROFS from files"
    return next(filter(None, map(unmountable, ("erofs", "overlay", "fuse"))), "")


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    stdout: bytes
    stderr: bytes

    @property
    def lines(self) -> list[str]:
        return self.stdout.decode().splitlines()

    @property
    def errors(self) -> list[str]:
        return self.stderr.decode().splitlines()

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)


@dataclass(frozen=True)
class World:
    """One environment to run commands in. `with_` makes another in the same folder, which ends with this one."""

    folder: Path
    environment: dict[str, str]
    roots: set[Path] = field(default_factory=set)
    before: tuple[str, ...] = ()
    """Put in front of every command line."""

    def __post_init__(self) -> None:
        self.roots.add(self.root)

    @property
    def root(self) -> Path:
        return Path(self.environment["DSEC_ROOT"])

    @property
    def store(self) -> Path:
        """The folder of a `file:` store."""
        return Path(self.environment["DSEC_STORE"].removeprefix("file://"))

    def with_(self, **variables: str) -> "World":
        return replace(self, environment=self.environment | variables)

    def with_root(self, name: str) -> "World":
        """The same store, and another node."""
        return self.with_(DSEC_ROOT=str(self.folder / name))

    def with_store(self, name: str) -> "World":
        """An empty store in a folder of this name, and a node of its own."""
        return self.with_(DSEC_STORE=f"file://{self.folder / name}", DSEC_ROOT=str(self.folder / f"root of {name}"))

    def make(self, name: str) -> Path:
        """A new empty folder of this world."""
        path = self.folder / name
        path.mkdir()
        return path

    # -- commands ----------------------------------------------------------------------------------------------------

    def start(self, program: str, *arguments: str, **popen: Any) -> "subprocess.Popen[bytes]":
        """Start one of our commands, all its streams being pipes."""
        command = [*self.before, sys.executable, "-m", COMMANDS[program], *arguments]
        return subprocess.Popen(command, **{**PIPES, "cwd": self.folder, "env": self.environment, **popen})

    def run(self, program: str, *arguments: str, stdin: bytes = b"", **popen: Any) -> Ended:
        """Run one of our commands to its end."""
        return ended(self.start(program, *arguments, **popen), stdin)

    def ok(self, program: str, *arguments: str, **options: Any) -> Ended:
        """Run one of our commands, which must succeed and have nothing to complain about."""
        done = self.run(program, *arguments, **options)
        assert (done.code, done.errors) == (0, [])
        return done

    def json(self, program: str, *arguments: str) -> Any:
        return self.ok(program, *arguments, "--json").json

    def sandbox(self, *arguments: str) -> "Sandbox":
        """Start `dsec run` with a command that says one line when it is ready, and return then."""
        return Sandbox(self, self.start("dsec", "run", "--env", f"{MARK}={self.folder}", *arguments))

    # -- questions ---------------------------------------------------------------------------------------------------

    def status(self) -> Any:
        return self.json("dsec", "node", "status")

    def asked(self) -> Any:
        """The node's status without a command in between: for conditions that are waited for."""
        return ipc.call(self.root / names.NODE_SOCKET, "status", WITHIN)

    def stats(self) -> Any:
        return self.json("dsec", "node", "stats")

    def wire_bytes(self) -> int:
        """Bytes that this node has fetched so far."""
        stats = self.stats()
        return int(stats["total"]["wire_bytes"] + stats["metadata"]["wire_bytes"])

    def kill(self, *which: str) -> None:
        """SIGKILL the processes of these names ("node", "daemon", "holder"), in this order; they are gone on return."""
        status = self.asked()
        processes = [Process.of(status[f"{name}_pid"]) for name in which]
        for process in filter(None, processes):
            os.kill(process.pid, signal.SIGKILL)
        assert all(process and wait_ended(process, WITHIN) for process in processes)

    def compositions(self) -> list[Any]:
        return list(self.asked()["compositions"])

    def mounts(self) -> list[str]:
        """Mount points below our folder."""
        inside = os.fsencode(self.folder) + b"/"
        return [os.fsdecode(one.mountpoint) for one in mountinfo() if one.mountpoint.startswith(inside)]

    def overlays(self) -> list[str]:
        inside = os.fsencode(self.folder) + b"/"
        mounts = [mount for mount in mountinfo() if mount.filesystem == "overlay"]
        return [os.fsdecode(one.mountpoint) for one in mounts if one.mountpoint.startswith(inside)]

    def processes(self) -> list[Process]:
        """Those that name our folder in their arguments or their environment."""
        return [process for pid in os.listdir("/proc") if pid.isdecimal() and (process := self._ours(int(pid)))]

    def _ours(self, pid: int) -> Process | None:
        name = os.fsencode(self.folder)
        with contextlib.suppress(OSError):
            if any(name in Path(f"/proc/{pid}/{file}").read_bytes() for file in ("cmdline", "environ")):
                return Process.of(pid)
        return None

    # -- the end -----------------------------------------------------------------------------------------------------

    def end(self) -> list[str]:
        """Stop all nodes. What is still there then is returned, and removed by force."""
        complaints = []
        for root in filter(Path.exists, sorted(self.roots)):
            done = self.run("dsec", "node", "stop", "--force", "--root", str(root))
            complaints += done.errors if done.code else []
        with contextlib.suppress(pytest.fail.Exception):
            until(lambda: not self.processes() and not self.mounts())
        left = [*map(str, self.mounts()), *(_described(process) for process in self.processes())]
        self._clear()
        return complaints + left

    def _clear(self) -> None:
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        for mountpoint in reversed(self.mounts()):
            with contextlib.suppress(OSError):
                unmount(mountpoint, lazy=True)


class Sandbox:
    """A `dsec run` under way."""

    def __init__(self, world: World, process: "subprocess.Popen[bytes]") -> None:
        self.process = process
        self._world = world
        if not self.line():
            raise AssertionError(f"not ready: {ended(process).errors}")

    def line(self) -> str:
        """The next line that the command prints; empty at its end."""
        assert self.process.stdout is not None
        return str(self.process.stdout.readline().decode())

    def init(self) -> Process:
        """The command itself, as the host sees it: the only one of this node."""
        (file,) = self._world.root.glob("runs/bundles/*/init")
        process = Process.of(int(file.read_text().split()[0]))
        assert process is not None
        return process

    def finish(self, stdin: bytes = b"") -> Ended:
        return ended(self.process, stdin)


def assert_lost(sandbox: Sandbox) -> None:
    """Its file system was taken away: that is a failure of the platform, and never looks like the command's end."""
    done = sandbox.finish()
    assert (done.code, len(done.errors)) == (125, 1)
    assert "lost its file system" in done.errors[0]


def ended(process: "subprocess.Popen[bytes]", stdin: bytes = b"") -> Ended:
    """Wait for the end of a process whose streams are pipes, and take what it says."""
    try:
        stdout, stderr = process.communicate(stdin if process.stdin else None, WITHIN)
    except BaseException:
        process.kill()
        process.communicate()
        raise
    return Ended(process.returncode, stdout or b"", stderr or b"")


@contextlib.contextmanager
def private_world(store: str | None = None, **variables: str) -> Iterator[World]:
    """A world with this store, or with a new one in its own folder. It must end without a trace."""
    with tempfile.TemporaryDirectory(prefix="dsec-flow-") as name:
        folder = Path(os.path.realpath(name))
        private = {"DSEC_STORE": store or f"file://{folder}/store", "DSEC_ROOT": f"{folder}/root"}
        world = World(folder, {**_clean_environment(), **private, **variables})
        try:
            yield world
        finally:
            left = world.end()
        assert left == []


def _clean_environment() -> dict[str, str]:
    """Ours, without what would change how our commands behave."""
    return {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}


def _described(process: Process) -> str:
    with contextlib.suppress(OSError):
        arguments = Path(f"/proc/{process.pid}/cmdline").read_bytes().replace(b"\0", b" ")
        return f"process {process.pid}: {arguments.decode(errors='replace')}"
    return f"process {process.pid}"
