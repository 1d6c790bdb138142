"""The holder as a process: what it keeps, and what it survives."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec_store import ipc
from dsec_store.errors import Invalid, NotFound, Unavailable
from dsec_store.fdholder import Holder
from dsec_store.fdholder_main import MAX_STATE


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Holder]:
    folder = tmp_path / ("deep" * 40)  # far beyond what a socket address can hold
    folder.mkdir()
    holder = Holder.spawn(folder / "holder.sock")
    yield holder
    if holder.running():
        holder.quit()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    for fd in (reading, writing):
        try:
            os.close(fd)
        except OSError:
            continue


def descriptors(holder: Holder) -> int:
    """How many it has open, once the connections of those that asked are closed."""
    folder = Path(f"/proc/{holder.pid()}/fd")

    def count() -> tuple[int, int]:
        targets = [os.readlink(path) for path in folder.iterdir()]
        return len(targets), sum(target.startswith("socket:") for target in targets)

    deadline = time.monotonic() + 10
    while (found := count())[1] > 1 and time.monotonic() < deadline:
        time.sleep(0.005)
    return found[0]


def test_a_descriptor_outlives_its_owner(holder: Holder, pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    holder.put("end", writing, b"state")
    os.close(writing)
    os.set_blocking(reading, False)
    with pytest.raises(BlockingIOError):  # not the end of the file: somebody could still write
        os.read(reading, 1)
    fd, state = holder.get("end")
    assert not os.get_inheritable(fd)
    os.write(fd, b"x")
    os.close(fd)
    assert (os.read(reading, 9), state) == (b"x", b"state")
    holder.drop("end")
    assert os.read(reading, 9) == b""


def test_names(holder: Holder, pipe: tuple[int, int]) -> None:
    assert holder.names() == []
    holder.put("b", pipe[0], b"")
    holder.put("a/0", pipe[0], b"")
    assert holder.names() == ["a/0", "b"]
    holder.drop("b")
    holder.drop("b")
    assert holder.names() == ["a/0"]
    with pytest.raises(NotFound):
        holder.get("b")


def test_replacing_and_reading_leaves_no_descriptor_behind(holder: Holder, pipe: tuple[int, int]) -> None:
    holder.put("name", pipe[0], b"1")
    before = descriptors(holder)
    for number in range(20):
        holder.put("name", pipe[0], str(number).encode())
        os.close(holder.get("name")[0])
    assert holder.get("name")[1] == b"19"
    assert descriptors(holder) == before


def test_the_largest_state_comes_back(holder: Holder, pipe: tuple[int, int]) -> None:
    state = os.urandom(MAX_STATE)
    holder.put("name", pipe[0], state)
    fd, kept = holder.get("name")
    os.close(fd)
    assert kept == state
    for name, too_much in [("name", state + b"x"), ("", b""), ("a\nb", b""), ("é" * 200, b"")]:
        with pytest.raises(Invalid):
            holder.put(name, pipe[0], too_much)


def test_peers_that_misbehave_do_no_harm(holder: Holder, pipe: tuple[int, int]) -> None:
    holder.put("name", pipe[0], b"")
    for message in (b"", b"PUT", b"\xff" * 12, b"NOPE" + bytes(8)):
        with ipc.connect(holder.path, 5.0) as connection:
            connection.sendall(message)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(100)
    with ipc.connect(holder.path, 5.0) as connection:  # a descriptor with half a frame
        socket.send_fds(connection, [b"PUT"], [pipe[0]])
    before = descriptors(holder)
    assert holder.names() == ["name"]
    assert descriptors(holder) == before


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGPIPE, signal.SIGUSR1])
def test_it_survives(holder: Holder, number: signal.Signals) -> None:
    pid = holder.pid()
    os.kill(pid, number)
    assert holder.pid() == pid


def test_it_is_nobodys_child_and_small(holder: Holder) -> None:
    pid = holder.pid()
    assert os.getsid(pid) != os.getsid(0)
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    assert int(status["RssAnon"].split()[0]) < 8 << 10


def test_quitting_closes_everything(holder: Holder, pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    holder.put("end", writing, b"")
    os.close(writing)
    holder.quit()
    assert os.read(reading, 1) == b""
    assert not holder.path.exists()
    assert not holder.running()
    with pytest.raises(Unavailable):
        holder.names()
