"""Processes that are not our children: their identity, their start and their end.

Problem: holder and data daemon outlive the node that started them, the owners of compositions were never its
children, and process ids are used again. Choice: a process is its id *and* its start time (field 22 of
/proc/<pid>/stat, proc(5)); its end is awaited through a pidfd (pidfd_open(2)), which works for any process and cannot
be mistaken for another. Cost: one open descriptor per watched process, and one thread for all of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_ENDED: Final = (b"X", b"Z")
"""States of a process that runs no more: dead, and dead but not taken leave of."""

_PAUSE: Final = 0.1
"""Seconds between two tries to tell of an end while the process has no descriptor or thread left."""

_log: Final = logging.getLogger(__name__)

_LAST_LINE: Final = 4096
"""Bytes at the end of a log in which its last line is looked for."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process, for good: `started` is in clock ticks since boot."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """The living process with this id, if there is one. A zombie is not living."""
        state, process = _look(pid)
        return None if state in _ENDED else process

    def alive(self) -> bool:
        return Process.of(self.pid) == self

    def as_json(self) -> dict[str, Any]:
        return {"pid": self.pid, "started": self.started}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Process:
        return cls(int(value["pid"]), int(value["started"]))


Ended = Callable[[Process], None]


def _look(pid: int) -> tuple[bytes, Process | None]:
    """State and identity of a process from /proc/<pid>/stat, whose second field may hold blanks and brackets.

    Raises OSError when that cannot be read for another reason than that there is no such process.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return _ENDED[0], None
    fields = stat[stat.rindex(b")") + 2 :].split()
    return fields[0], Process(pid, int(fields[19]))


def spawn(argv: Sequence[str], log: Path, env: Mapping[str, str]) -> Process:
    """Start a program detached (setsid(2)), standard output and error appended to `log`. It may end at any time.

    Raises OSError when it cannot be started. We are its parent until we end: `reap` it when it does first.
    """
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log), append, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    pid = os.posix_spawnp(argv[0], list(argv), dict(env), file_actions=actions, setsid=True)
    _, process = _look(pid)
    if process is None:
        raise ChildProcessError(f"{argv[0]}: somebody else took leave of it")
    return process


def reap(pid: int) -> None:
    """Take leave of a child that has ended; of any other process, nothing."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def kill_child(process: Process) -> None:
    """End a child that was just spawned, without a descriptor or a thread. On return it is gone."""
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(process.pid, signal.SIGKILL)
        os.waitpid(process.pid, 0)


def terminate(process: Process, patience: float) -> None:
    """Have `process` end: SIGTERM, and SIGKILL after `patience` seconds. On return it has ended."""
    for number, timeout in ((signal.SIGTERM, patience), (signal.SIGKILL, None)):
        pidfd = _open(process)
        if pidfd is None:
            break
        with contextlib.suppress(ProcessLookupError), _closing(pidfd):
            signal.pidfd_send_signal(pidfd, number)
            _ended(pidfd, timeout)
    reap(process.pid)


def wait_ended(process: Process, timeout: float) -> bool:
    """Whether `process` has ended within `timeout` seconds."""
    pidfd = _open(process)
    if pidfd is not None:
        with _closing(pidfd):
            if not _ended(pidfd, timeout):
                return False
    reap(process.pid)
    return True


def _ended(pidfd: int, timeout: float | None) -> bool:
    """Whether the process has ended within `timeout` seconds; None waits. (poll(2): numbers may be beyond select's.)"""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(None if timeout is None else timeout * 1000))


def try_lock(descriptor: int) -> bool:
    """Whether the file is ours alone now (flock(2)): as long as this open file lives, and with this process at most."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def _closing(descriptor: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(descriptor)


def last_line(log: Path) -> str:
    """The last line of a log that is not empty: what a process that died had to say."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_LINE))
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


def _open(process: Process) -> int | None:
    """A pidfd of exactly this process; None when it has ended."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    if process.alive():
        return pidfd
    os.close(pidfd)
    return None


class ExitWatch:
    """Calls back, each time in a thread of its own, when a process has ended. One call per process."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._lock = threading.Lock()
        self._pidfds: dict[Process, int] = {}
        self._watched: dict[int, tuple[Process, Ended]] = {}  # by pidfd
        threading.Thread(target=self._run, name="exit-watch", daemon=True).start()

    def watch(self, process: Process, ended: Ended) -> None:
        """Call `ended(process)` once it has ended, at once if it has. Nothing new if it is watched already."""
        with self._lock:
            if process in self._pidfds:
                return
            pidfd = _open(process)
            if pidfd is None:
                _start(process, ended)
                return
            try:
                self._poll.register(pidfd, select.EPOLLIN)
            except OSError:
                os.close(pidfd)
                raise
            self._pidfds[process] = pidfd
            self._watched[pidfd] = (process, ended)

    def forget(self, process: Process) -> None:
        """Do not call back for this process, unless that is under way."""
        with self._lock:
            self._drop(process)

    def _drop(self, process: Process) -> None:
        pidfd = self._pidfds.pop(process, None)
        if pidfd is not None:
            del self._watched[pidfd]
            self._poll.unregister(pidfd)
            os.close(pidfd)

    def _run(self) -> None:
        while True:
            try:
                for pidfd, _ in self._poll.poll():
                    self._tell(pidfd)
            except Exception:  # no thread or descriptor is left: who has ended is found again
                _log.exception("the end of a process cannot be told yet")
                time.sleep(_PAUSE)

    def _tell(self, pidfd: int) -> None:
        with self._lock:
            process, ended = self._watched.get(pidfd, (None, None))
            # Between poll and here the number may have been given up, or come to stand for another process.
            if process is None or ended is None or process.alive():
                return
            _start(process, ended)
            self._drop(process)


def _start(process: Process, ended: Ended) -> None:
    reap(process.pid)
    threading.Thread(target=ended, args=(process,), name=f"ended-{process.pid}", daemon=True).start()
