"""What only the kernel knows about processes: who is whose, who is still who, and who ever executed anything.

Three questions for which Python has no binding or a racy one:

* *Who reaps a container's init?* A runtime makes it and exits. As a child subreaper (prctl(2)) we become its parent,
  get its raw wait status, and its pid stays ours until we have read that.
* *Is this still the process that was recorded?* A pid is used again; a pid with its start time is not
  (proc_pid_stat(5)).
* *Did its execve(2) succeed?* A runtime's init that cannot execute the command exits like a command that failed. But
  the kernel marks a process that forked and never executed (PF_FORKNOEXEC), and the mark can be read until it is
  reaped.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_PR_SET_CHILD_SUBREAPER: Final = 36
_PF_FORKNOEXEC: Final = 0x40  # include/linux/sched.h

# Fields of /proc/<pid>/stat behind the command name, which is in parentheses and may hold anything: field 3 is index 0.
_FLAGS: Final = 9 - 3
_START_TIME: Final = 22 - 3

_libc: Final = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Process:
    """A process and when it started (clock ticks since boot): together they name one process for ever."""

    pid: int
    started: int

    @staticmethod
    def of(pid: int) -> Process:
        """The process that has `pid` now. Raises FileNotFoundError or ProcessLookupError when there is none."""
        return Process(pid, int(_stat(pid)[_START_TIME]))

    def __str__(self) -> str:
        return f"{self.pid} {self.started}"

    @staticmethod
    def parse(text: str) -> Process | None:
        """The inverse of str; None for what was not written to its end."""
        match text.split(" "):
            case [pid, started] if text.endswith("\n"):
                return Process(int(pid), int(started))
        return None


def become_subreaper() -> None:
    """From now on, orphans among the descendants of this process become its children."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def never_executed(pid: int) -> bool:
    """Whether the child `pid`, alive or a zombie, has not called execve(2) with success since it was forked."""
    return bool(int(_stat(pid)[_FLAGS]) & _PF_FORKNOEXEC)


def ends_within(pid: int, timeout: float | None) -> bool:
    """Whether the child `pid` ends in so many seconds (None: however long). It stays to be reaped.

    `subprocess.Popen.wait` with a timeout polls, which costs milliseconds.
    """
    descriptor = os.pidfd_open(pid)
    try:
        return _ends_within(descriptor, timeout)
    finally:
        os.close(descriptor)


def ends_or_rings(pid: int, bell: int) -> bool:
    """Wait until the child `pid` has ended, or the descriptor `bell` is readable. True if it has ended."""
    descriptor = os.pidfd_open(pid)
    try:
        return descriptor in _readable(None, descriptor, bell)
    finally:
        os.close(descriptor)


def kill(target: Process) -> None:
    """End `target` with SIGKILL and wait until it is gone; fine when it is gone already.

    When the init of a pid namespace is gone, so is everybody in that namespace (pid_namespaces(7)).
    """
    try:
        descriptor = os.pidfd_open(target.pid)
    except ProcessLookupError:
        return
    try:
        if Process.of(target.pid) != target:
            return
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        _ends_within(descriptor, None)
    except (ProcessLookupError, FileNotFoundError):
        return
    finally:
        os.close(descriptor)
    with contextlib.suppress(ChildProcessError):  # it is ours to reap only if it came to us
        os.waitpid(target.pid, 0)


def using(folder: Path, file: Path) -> Iterator[Process]:
    """The processes that have `folder` as their working directory or hold `file` open."""
    try:
        identity = os.stat(file)
    except FileNotFoundError:
        identity = None
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError):  # it ended while we looked
            if os.readlink(entry / "cwd") == str(folder) or (identity and _holds(entry / "fd", file, identity)):
                yield Process.of(int(entry.name))


def _ends_within(pidfd: int, timeout: float | None) -> bool:
    return bool(_readable(timeout, pidfd))


def _readable(timeout: float | None, *descriptors: int) -> list[int]:
    """poll(2), because select(2) takes no descriptor above 1023."""
    waiting = select.poll()
    for descriptor in descriptors:
        waiting.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in waiting.poll(None if timeout is None else timeout * 1000)]


def _holds(descriptors: Path, file: Path, identity: os.stat_result) -> bool:
    """Compare names first: stat(2) of an arbitrary descriptor may hang, on a dead network file system for one.

    Only the end of the name counts: seen from the mounts of a process that has left ours, the path begins elsewhere.
    """
    end = f"/{file.parent.name}/{file.name}"
    return any(
        os.readlink(link).endswith(end) and os.path.samestat(os.stat(link), identity) for link in descriptors.iterdir()
    )


def _stat(pid: int) -> list[str]:
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return text.rpartition(")")[2].split()
