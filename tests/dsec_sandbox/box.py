"""A tiny root file system of busybox, and runs in it by callers that are processes of their own.

box.run("echo", "hello").stdout == b"hello\\n"
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsec_sandbox.executable import interpreter_of
from dsec_sandbox.outcome import Outcome
from dsec_sandbox.run import kill_leftover

BUSYBOX = Path("/bin/busybox")
RUNNER = Path(__file__).with_name("runner.py")

PASSWD = "root:x:0:0:root:/root:/bin/sh\nworker:x:1000:1001:A worker:/home/worker:/bin/sh\n"
GROUP = "root:x:0:\nworker:x:1001:\nbuild:x:2000:other,worker\nalone:x:2001:\n"


def lacking() -> str:
    """What this machine lacks for real runs; empty if nothing. For skips."""
    if os.geteuid() != 0:
        return "containers need root"
    if shutil.which("crun") is None:
        return "crun is not installed"
    if not BUSYBOX.exists() or interpreter_of(BUSYBOX.read_bytes()):
        return "no static busybox (package busybox-static)"
    return ""


def make_root(root: Path) -> None:
    """Busybox with all its applets, two users, and nothing else."""
    for name in ("bin", "etc", "tmp", "root", "home/worker"):
        (root / name).mkdir(parents=True)
    shutil.copy(BUSYBOX, root / "bin/busybox")
    for applet in subprocess.run([BUSYBOX, "--list"], check=True, capture_output=True, text=True).stdout.split():
        if applet != "busybox":
            (root / "bin" / applet).symlink_to("busybox")
    (root / "etc/passwd").write_text(PASSWD)
    (root / "etc/group").write_text(GROUP)


@dataclass(frozen=True)
class Result:
    """What a caller saw of a run, and the outcome that it wrote (None when it died before)."""

    stdout: bytes
    stderr: bytes
    returncode: int
    outcome: Outcome | None

    @property
    def lines(self) -> list[str]:
        return self.stdout.decode().splitlines()


class Box:
    """A root and a state folder; each run has an id of its own."""

    def __init__(self, folder: Path) -> None:
        self.root, self.state, self.bin = folder / "root", folder / "state", folder / "bin"
        self._runs: list[Run] = []
        make_root(self.root)
        self.bin.mkdir()

    def start(
        self, *args: str, before: tuple[str, ...] = (), popen: dict[str, Any] | None = None, **config: Any
    ) -> "Run":
        """Start a caller. `before` goes in front of its command line; `popen` and `config` add to what is set here."""
        container_id = f"box-{len(self._runs) + 1}"
        status = self.state.with_name(f"{container_id}.status")
        request = {
            "root": str(self.root),
            "state": str(self.state),
            "id": container_id,
            "status": str(status),
            "config": {"env": [], **config, "args": args},
        }
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        options = {**streams, **(popen or {})}
        options["env"] = {**self._environment(), **options.get("env", {})}
        process = subprocess.Popen([*before, sys.executable, str(RUNNER), json.dumps(request)], **options)
        self._runs.append(Run(container_id, process, self.state / "bundles" / container_id, status))
        return self._runs[-1]

    def _environment(self) -> dict[str, str]:
        """Ours, with the interceptor of crun in front, and with the import path of this process."""
        path = f"{self.bin}:{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    def run(self, *args: str, stdin: bytes = b"", **options: Any) -> Result:
        return self.start(*args, **options).finish(stdin)

    def intercept(self, verb: str, script: str) -> None:
        """From now on `crun ... verb ...` runs `script`, in which "$@" is the real call."""
        wrapper = self.bin / "crun"
        real = shutil.which("crun")
        wrapper.write_text(
            f'#!/bin/sh\nset -- {real} "$@"\ncase " $* " in *" {verb} "*) {script};; *) exec "$@";; esac\n'
        )
        wrapper.chmod(0o755)

    def left(self) -> list[str]:
        """What runs have left behind: files of the state folder, processes in the root or in the state folder."""
        files = [str(path) for folder in self.state.glob("*") for path in folder.iterdir()]
        return files + [f"process {pid}" for pid in os.listdir("/proc") if pid.isdecimal() and self._holds(pid)]

    def clear(self) -> None:
        """End what runs have left behind."""
        for run in self._runs:
            run.kill()
        for bundle in self.state.glob("bundles/*"):
            kill_leftover(self.state, bundle.name)

    def _holds(self, pid: str) -> bool:
        try:
            inside = os.path.samestat(os.stat(f"/proc/{pid}/root/"), os.stat(self.root))
            return inside or os.readlink(f"/proc/{pid}/cwd").startswith(str(self.state))
        except OSError:  # it ended, or is a zombie
            return False


@dataclass(frozen=True)
class Run:
    """A caller that is under way."""

    id: str
    process: subprocess.Popen[bytes]
    bundle: Path
    status: Path

    def read_line(self) -> str:
        """The next line of the command's output: the way to know how far it is."""
        assert self.process.stdout is not None
        return str(self.process.stdout.readline().decode().rstrip("\n"))

    def init_pid(self) -> int:
        return int((self.bundle / "init").read_text().split()[0])

    def finish(self, stdin: bytes = b"") -> Result:
        stdout, stderr = self.process.communicate(stdin)
        outcome = Outcome(**json.loads(self.status.read_text())) if self.status.exists() else None
        return Result(stdout or b"", stderr or b"", self.process.returncode, outcome)

    def kill(self) -> None:
        """Kill the caller, as the out-of-memory killer would."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream:
                stream.close()
