"""A command on a terminal, seen from the caller's terminal."""

import fcntl
import os
import pty
import signal
import struct
import subprocess
import termios
from collections.abc import Iterator
from typing import Any

import pytest

from dsec_sandbox.outcome import exited
from tests.dsec_sandbox.box import Box, Run

pytestmark = pytest.mark.component


class Screen:
    """The terminal that a person sits at: `slave` is the caller's, `master` is the person."""

    def __init__(self) -> None:
        self.master, self.slave = pty.openpty()
        self.resize(33, 77)

    @property
    def popen(self) -> dict[str, Any]:
        return {"stdin": self.slave, "stdout": self.slave, "stderr": self.slave}

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def read_until(self, text: bytes) -> bytes:
        seen = b""
        while text not in seen:
            seen += os.read(self.master, 1 << 16)
        return seen


@pytest.fixture
def screen() -> Iterator[Screen]:
    screen = Screen()
    yield screen
    os.close(screen.master)
    os.close(screen.slave)


def start(box: Box, screen: Screen, script: str) -> Run:
    return box.start("sh", "-c", script, terminal=True, popen=screen.popen)


def test_the_command_has_a_terminal_of_its_own_in_our_size(box: Box, screen: Screen) -> None:
    caller = start(box, screen, "tty; stty size; echo $TERM; ls -l /dev/console | cut -c1; exit 3")
    assert screen.read_until(b"c\r\n").split() == [b"/dev/pts/0", b"33", b"77", b"xterm", b"c"]
    assert caller.finish().outcome == exited(3)


def test_typing_reaches_the_command_and_the_screen_is_as_before(box: Box, screen: Screen) -> None:
    before = termios.tcgetattr(screen.slave)
    caller = start(box, screen, "read name; echo hello $name")
    screen.type(b"you\n")
    assert b"hello you\r\n" in screen.read_until(b"hello you\r\n")
    assert caller.finish().outcome == exited(0)
    assert termios.tcgetattr(screen.slave) == before


def test_control_c_interrupts_what_runs_in_front(box: Box, screen: Screen) -> None:
    caller = start(box, screen, "trap : INT; sh -c 'echo ready; exec sleep 1000'; echo after $?")
    screen.read_until(b"ready")
    screen.type(b"\x03")
    screen.read_until(b"after 130")
    assert caller.finish().outcome == exited(0)


def test_a_new_size_is_handed_on(box: Box, screen: Screen) -> None:
    caller = start(box, screen, "trap 'stty size; exit 4' WINCH; echo ready; while :; do sleep 0.02; done")
    screen.read_until(b"ready")
    screen.resize(50, 132)
    caller.process.send_signal(signal.SIGWINCH)
    screen.read_until(b"50 132")
    assert caller.finish().outcome == exited(4)


def test_the_screen_is_restored_when_the_command_is_killed(box: Box, screen: Screen) -> None:
    before = termios.tcgetattr(screen.slave)
    caller = start(box, screen, "echo ready; exec sleep 1000")
    screen.read_until(b"ready")
    caller.process.send_signal(signal.SIGTERM)
    caller.process.send_signal(signal.SIGINT)
    result = caller.finish()
    assert result.outcome is not None
    assert result.outcome.signal == signal.SIGKILL
    assert termios.tcgetattr(screen.slave) == before


def test_without_a_screen_input_ends_and_output_comes(box: Box) -> None:
    result = box.run("sh", "-c", "cat; seq 20000; exit 2", stdin=b"line\n", terminal=True)
    lines = result.stdout.decode().splitlines()
    assert result.outcome == exited(2)
    assert lines.count("line") == 2  # the terminal's echo, and cat
    assert lines[-20000:] == [str(number) for number in range(1, 20001)]


def test_a_command_that_does_not_read_can_still_be_seen(box: Box) -> None:
    """More is typed than its terminal takes, while it writes more than a pipe holds."""
    script = "stty -echo raw; echo ready; seq 20000; echo done; exit 2"
    caller = box.start("sh", "-c", script, terminal=True, popen={"bufsize": 0})
    result = caller.finish(b"x" * (1 << 18))
    assert result.outcome == exited(2)
    assert b"done" in result.stdout


def test_closed_output_does_not_stop_the_command(box: Box) -> None:
    caller = box.start("sh", "-c", "seq 20000; exit 7", terminal=True, popen={"stdout": subprocess.PIPE})
    assert caller.process.stdout is not None
    caller.process.stdout.close()
    assert caller.process.wait() == 7
    assert caller.process.stdin is not None
    caller.process.stdin.close()
    assert caller.process.stderr is not None
    caller.process.stderr.close()
