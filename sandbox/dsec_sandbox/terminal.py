"""A terminal for a command: crun makes it inside, and this process is its other end.

With a terminal the command's streams are a pseudo-terminal of the sandbox (never the caller's own, into which a command
could push input for the caller's shell). crun sends its master end over a unix socket, `--console-socket`. What is
typed goes there and what comes is shown: this is the one kind of run in which bytes pass through Python. The caller's
terminal is in raw mode meanwhile, so that Ctrl-C is a byte for the command's terminal, and changes of its size are
handed on.

    with Console(bundle / CONSOLE_SOCKET) as console:
        ...  # crun create --console-socket=...
        console.connect()
        ...  # crun start
        console.pump(signals)
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import struct
import termios
import threading
import tty
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dsec_sandbox import streams
from dsec_sandbox.forwarding import Forwarding
from dsec_store import ipc

CONSOLE_SOCKET: Final = "console.sock"

CONNECT_WITHIN: Final = 10.0
"""Seconds in which the master end must have come once `crun create` is done: it was sent by then."""

_BLOCK: Final = 1 << 16
"""Bytes that are moved at once; also what is read ahead for a command that does not read."""

_END_OF_INPUT: Final = b"\x04"
"""What a terminal takes for the end of input (termios(3), VEOF)."""

_INPUT, _OUTPUT, _ERROR = streams.STANDARD


class Console:
    """The caller's side of a command's terminal."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._listener = ipc.listen(path)
        self._master = -1

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self._path.unlink(missing_ok=True)
        if self._master >= 0:
            os.close(self._master)

    def connect(self) -> None:
        """Take the master end that crun has sent, and give the terminal the size of the caller's."""
        self._listener.settimeout(CONNECT_WITHIN)
        connection, _ = self._listener.accept()
        with connection:
            _, descriptors, _, _ = socket.recv_fds(connection, _BLOCK, 1)
        if not descriptors:
            raise OSError("crun has sent no terminal")
        (self._master,) = descriptors
        os.set_inheritable(self._master, False)
        os.set_blocking(self._master, False)
        self._copy_size()

    def pump(self, signals: Forwarding) -> None:
        """Move bytes both ways until nobody in the sandbox has the terminal open any more."""
        with self._resizing(), _raw_input():
            self._move(signals)

    def _move(self, signals: Forwarding) -> None:
        typed, reading = b"", streams.is_open(_INPUT)
        while True:
            sources = [self._master, signals.bell, *([_INPUT] if reading and not typed else [])]
            readable, writable, _ = select.select(sources, [self._master] if typed else [], [])
            if signals.bell in readable:
                signals.answer()
            if self._master in readable:
                shown = self._read()
                if not shown:
                    return
                _show(shown)
            if _INPUT in readable:
                block = _type()
                reading = bool(block)
                typed = block or _END_OF_INPUT
            if writable:
                typed = typed[self._write(typed) :]

    def _read(self) -> bytes | None:
        """What the command wrote; nothing at the end, which for a master is EIO."""
        try:
            return os.read(self._master, _BLOCK)
        except OSError:
            return None

    def _write(self, typed: bytes) -> int:
        try:
            return os.write(self._master, typed)
        except BlockingIOError:
            return 0
        except OSError:  # nobody is there to read it
            return len(typed)

    @contextlib.contextmanager
    def _resizing(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        former = signal.signal(signal.SIGWINCH, lambda _number, _frame: self._copy_size())
        self._copy_size()  # it may have changed before we listened
        try:
            yield
        finally:
            signal.signal(signal.SIGWINCH, former)

    def _copy_size(self) -> None:
        """Where none of our streams is a terminal, the size stays as it is (ioctl_tty(2))."""
        for descriptor in streams.STANDARD:
            with contextlib.suppress(OSError):
                size = fcntl.ioctl(descriptor, termios.TIOCGWINSZ, bytes(struct.calcsize("4H")))
                fcntl.ioctl(self._master, termios.TIOCSWINSZ, size)
                return


@contextlib.contextmanager
def _raw_input() -> Iterator[None]:
    """Standard input passes every byte at once and echoes nothing, if it is a terminal; restored at the end."""
    if not os.isatty(_INPUT):
        yield
        return
    former = termios.tcgetattr(_INPUT)
    tty.setraw(_INPUT, termios.TCSADRAIN)  # keeps what was typed ahead
    try:
        yield
    finally:
        termios.tcsetattr(_INPUT, termios.TCSADRAIN, former)


def _type() -> bytes:
    """What the caller typed; nothing at the end, or when the caller's terminal is gone."""
    try:
        return os.read(_INPUT, _BLOCK)
    except OSError:
        return b""


def _show(shown: bytes) -> None:
    """Write to the caller's output. When that is closed the command goes on unseen, as it does with a pipe."""
    view = memoryview(shown)
    with contextlib.suppress(OSError):
        while view:
            view = view[os.write(_OUTPUT, view) :]
