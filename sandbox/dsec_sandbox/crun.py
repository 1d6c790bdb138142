"""One container of crun, from a bundle to nothing.

crun is called three times: `create` makes namespaces and mounts and an init that waits, `start` lets it execute the
command, `delete` removes crun's record. In between we are the parent of the init (`process.become_subreaper`) and get
its wait status from the kernel, not in a runtime's words. Whatever crun itself reports is a fault of the platform,
because what can be the command's fault was looked at before (`executable.find_executable`) or is told by the kernel
after (`Ending.executed`).

What was learnt about crun 1.8.1, from its source and by trial:

* It refuses hybrid cgroups when version 2 has controllers, even with cgroups disabled. On such hosts `create` runs in a
  mount namespace of its own, in which /sys/fs/cgroup/unified is not mounted (2.7 ms; util-linux and sh, since a
  multi-threaded process must not fork Python code). The host's mounts are slaves there: nothing leaks back.
* Variables are orders: LISTEN_FDS hands descriptors to the container, NOTIFY_SOCKET mounts a socket in it. It gets PATH
  only.
* Its command socket paths are relative to the bundle, which is its working directory: a long state path does not
  matter.
* It writes errors to its log and to standard error, which is the command's. An init that cannot execute says so there
  too.
* `start` waits for ever for an init that died meanwhile: hence START_WITHIN.

Who dies when: every step leaves on disk what the next one needs. `init` in the bundle names the init before it executes
anything, so `kill_leftover` can end a container at whatever point its caller was killed.

On disk: `<state>/bundles/<id>/` is the bundle, `<state>/crun/<id>/` belongs to crun. Both are gone after a run.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec_sandbox import outcome, process, streams
from dsec_sandbox.bundle import Document
from dsec_sandbox.outcome import NotStartedError
from dsec_sandbox.process import Process
from dsec_sandbox.streams import Streams
from dsec_store.errors import Invalid

START_WITHIN: Final = 60.0
"""Seconds for calls of crun that only write a few files."""

MAX_LOG: Final = 2000
"""Characters of crun's log that an error repeats."""

_CONFIG: Final = "config.json"
_PID: Final = "pid"
_INIT: Final = "init"
_LOG: Final = "crun.log"
_FIFO: Final = "exec.fifo"
"""crun's file in its state folder that a created init holds open until it executes the command."""

_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_UNIFIED: Final = Path("/sys/fs/cgroup/unified")


@dataclass(frozen=True, slots=True)
class Ending:
    """How an init ended: its raw wait status, and whether it ever executed the command."""

    status: int
    executed: bool


class Container:
    """Entering makes the bundle's folder; leaving ends and removes whatever there is."""

    def __init__(self, state: Path, container_id: str) -> None:
        if not _ID.fullmatch(container_id):
            raise Invalid(f"not a container id: {container_id!r}")
        state = Path(os.path.realpath(state))
        self._id = container_id
        self._state = state / "crun"
        self.bundle = state / "bundles" / container_id
        self._init = 0
        self._ended = False

    def __enter__(self) -> Container:
        self._state.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.bundle.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            self.bundle.mkdir(mode=0o700)
        except FileExistsError:
            raise Invalid(f"container {self._id} exists already") from None
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def create(self, document: Document, console: str | None = None) -> int:
        """Make the container and return the pid of its init, a child of ours that waits for `start`.

        `console` is the path of a console socket, relative to the bundle; without one the standard streams are ours.
        Raises `NotStartedError` with a platform outcome.
        """
        (self.bundle / _CONFIG).write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")
        process.become_subreaper()
        arguments = ["create", f"--pid-file={_PID}", *([f"--console-socket={console}"] if console else []), self._id]
        with streams.owners_kept():
            self._call(arguments, streams.NONE if console else streams.inherited(), launcher=_launcher())
        self._init = int((self.bundle / _PID).read_text())
        (self.bundle / _INIT).write_text(f"{Process.of(self._init)}\n")
        return self._init

    def start(self) -> None:
        """Let the init execute the command. Raises `NotStartedError` with a platform outcome."""
        self._call(["start", self._id], streams.NONE, timeout=START_WITHIN)

    def reap(self) -> Ending:
        """How the init ended; once it has, and once. Until then its pid stays its own."""
        executed = not process.never_executed(self._init)
        _, status = os.waitpid(self._init, 0)
        self._ended = True
        return Ending(status, executed)

    def remove(self) -> None:
        """End everything of this container, at whatever point it is, and leave nothing. Fine when there is nothing."""
        if not self._ended:
            self._end()
        if (self._state / self._id).exists():
            with contextlib.suppress(NotStartedError):
                self._call(["delete", "--force", self._id], streams.NONE, timeout=START_WITHIN)
        shutil.rmtree(self._state / self._id, ignore_errors=True)
        shutil.rmtree(self.bundle, ignore_errors=True)

    def _end(self) -> None:
        """Kill crun's processes that are making the container, then its init."""
        while making := list(process.using(self.bundle, self._state / self._id / _FIFO)):
            for one in making:
                process.kill(one)
        with contextlib.suppress(FileNotFoundError):
            if (init := Process.parse((self.bundle / _INIT).read_text())) is not None:
                process.kill(init)
        self._ended = True

    def _call(
        self, arguments: Sequence[str], std: Streams, *, launcher: Sequence[str] = (), timeout: float | None = None
    ) -> None:
        if (crun := shutil.which("crun")) is None:
            raise NotStartedError(outcome.platform("crun is not installed: run scripts/setup"))
        command = [*launcher, crun, "--cgroup-manager=disabled", f"--root={self._state}", f"--log={_LOG}", *arguments]
        environment = {"PATH": os.environ.get("PATH", os.defpath)}
        with subprocess.Popen(command, cwd=self.bundle, env=environment, start_new_session=True, **std) as running:
            if late := not process.ends_within(running.pid, timeout):
                running.kill()
        if running.returncode != 0:
            how = f"no end after {timeout} s" if late else f"exit code {running.returncode}"
            raise NotStartedError(outcome.platform(f"crun {arguments[0]} failed: {self._log() or how}"))

    def _log(self) -> str:
        try:
            text = (self.bundle / _LOG).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""
        return "; ".join(text.split("\n")).strip("; ")[:MAX_LOG]


def kill_leftover(state: Path, container_id: str) -> None:
    """End and remove the container of a caller that was killed, and wait until it is gone. May be repeated."""
    Container(state, container_id).remove()


def _launcher() -> tuple[str, ...]:
    """The command line in front of `crun create`: empty but on a host with hybrid cgroups."""
    try:
        refused = bool((_UNIFIED / "cgroup.controllers").read_bytes())
    except FileNotFoundError:
        refused = False
    if not refused:
        return ()
    return ("unshare", "--mount", "--propagation=slave", "sh", "-c", 'umount -l "$0" && exec "$@"', str(_UNIFIED))
