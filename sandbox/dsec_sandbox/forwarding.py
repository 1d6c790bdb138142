"""Signals that the caller of a run receives go on to the command.

Before the command runs there is nobody to tell: the run is called off instead. Then each signal is passed on as it is.
The command is pid 1 of its namespace, and the kernel drops a signal that pid 1 has not asked for (pid_namespaces(7)):
so that a command which ignores Ctrl-C can be ended all the same, the second SIGINT or SIGTERM becomes SIGKILL.

A signal that the caller ignores (nohup(1), a job in the background) stays ignored; but an ignored signal would be so
for the command too, through every execve(2), and one that is caught is not. So it is caught and dropped. SIGCHLD must
not be ignored either: the kernel would throw away how our children end.

Python delivers signals to the main thread only; a run in another thread forwards nothing. And it delivers them between
two of its instructions: one that comes just before a blocking call does not interrupt that call, and would wait as long
as the command runs. So every signal rings a *bell* as well, a pipe that whoever waits must wait for too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final

from dsec_sandbox import outcome, process
from dsec_sandbox.outcome import NotStartedError

FORWARDED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

_RINGS: Final = 4096
"""Rings that are taken off the bell at once: one a signal."""

_STOPPING: Final = frozenset({signal.SIGINT, signal.SIGTERM})


class Forwarding:
    """While it is entered, FORWARDED signals are kept, or sent to the process that it is aimed at."""

    def __init__(self) -> None:
        self._target: int | None = None
        self._kept: list[int] = []
        self._stops = 0
        self._former: dict[signal.Signals, Any] = {}
        self._former_bell = -1
        self.bell, self._rope = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        """`bell` is readable when a signal has come; its handler has run by then. `answer` makes it quiet."""

    def __enter__(self) -> Forwarding:
        if threading.current_thread() is threading.main_thread():
            self._former_bell = signal.set_wakeup_fd(self._rope, warn_on_full_buffer=False)
            for number in FORWARDED:
                ignored = signal.getsignal(number) == signal.SIG_IGN
                self._former[number] = signal.signal(number, _drop if ignored else self._receive)
            if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
                self._former[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        if self._former:
            signal.set_wakeup_fd(self._former_bell)
        os.close(self.bell)
        os.close(self._rope)

    def answer(self) -> None:
        """Silence the bell."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.bell, _RINGS)

    def wait(self, pid: int) -> None:
        """Return when the child `pid` has ended; it stays to be reaped. Signals are handled meanwhile."""
        while not process.ends_or_rings(pid, self.bell):
            self.answer()

    def check(self) -> None:
        """Raise `NotStartedError` when a signal has come already."""
        if self._kept:
            raise NotStartedError(outcome.signaled(self._kept[0], "stopped before the command started"))

    @contextlib.contextmanager
    def aimed_at(self, pid: int) -> Iterator[None]:
        """Send signals to `pid`, those that were kept first. It must be a child that is not reaped within the block."""
        self._target = pid
        while self._kept:
            self._send(pid, self._kept.pop(0))
        try:
            yield
        finally:
            self._target = None

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if self._target is None:
            self._kept.append(number)
        else:
            self._send(self._target, number)

    def _send(self, pid: int, number: int) -> None:
        if number in _STOPPING:
            self._stops += 1
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if self._stops > 1 and number in _STOPPING else number)


def _drop(_number: int, _frame: FrameType | None) -> None:
    """For a signal that is ignored."""
