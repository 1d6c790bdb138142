"""Processes of one node: requests, errors and credentials over a socket, and what is left when one side dies."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsec_store import errors, ipc
from dsec_store.ipc import Client, Json, Peer, Server
from tests.dsec_store.blobmaker import PATIENCE, eventually, in_threads


class OwnError(errors.Denied):
    """An error of a component, derived from one of the store."""


ERRORS = [errors.NotFound, errors.Corrupt, errors.Unavailable, errors.Denied, errors.Invalid, errors.StoreError]


class Handlers:
    """What the server of these tests can do."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.go_on = threading.Event()

    def echo(self, request: Json, _: Peer) -> Any:
        return request["value"]

    def who(self, _: Json, peer: Peer) -> list[int]:
        return [peer.pid, peer.uid]

    def raises(self, request: Json, _: Peer) -> None:
        raise {cls.__name__: cls for cls in [*ERRORS, OwnError, ZeroDivisionError]}[request["kind"]](request["text"])

    def unwritable(self, _: Json, __: Peer) -> object:
        return object()

    def large(self, request: Json, _: Peer) -> str:
        return "x" * int(request["size"])

    def waits(self, _: Json, __: Peer) -> str:
        self.entered.release()
        assert self.go_on.wait(PATIENCE)
        return "done"

    def hung_up(self, _: Json, peer: Peer) -> bool:
        self.entered.release()
        return peer.connection.recv(1, socket.MSG_PEEK) == b""

    def table(self) -> dict[str, ipc.Handler]:
        names = ("echo", "who", "raises", "unwritable", "large", "waits", "hung_up")
        return {name: getattr(self, name) for name in names}


@pytest.fixture
def handlers() -> Handlers:
    return Handlers()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A socket whose path is longer than the kernel takes."""
    folder = tmp_path / ("long" * 40) / ("longer" * 10)
    folder.mkdir(parents=True)
    assert len(str(folder)) > 200
    return folder / "test.sock"


@pytest.fixture
def server(path: Path, handlers: Handlers) -> Iterator[Server]:
    with Server(path, handlers.table()) as server:
        yield server


@pytest.mark.usefixtures("server")
class TestRequests:
    @pytest.mark.parametrize("value", [None, True, 5, -1.5, "text", "ü\n\0\ud800", [], [1, [2]], {"a": {"b": None}}])
    def test_values_travel(self, path: Path, value: Any) -> None:
        assert ipc.call(path, "echo", PATIENCE, value=value) == value

    def test_many_requests_on_one_connection(self, path: Path) -> None:
        with Client(path, PATIENCE) as client:
            assert [client.call("echo", value=n) for n in range(100)] == list(range(100))

    def test_many_connections_at_once(self, path: Path) -> None:
        calls = [lambda n=n: ipc.call(path, "echo", PATIENCE, value=n) for n in range(64)]
        assert in_threads(calls) == list(range(64))

    def test_the_peer_is_who_it_is(self, path: Path) -> None:
        assert ipc.call(path, "who", PATIENCE) == [os.getpid(), os.getuid()]
        code = f"from dsec_store import ipc; from pathlib import Path; print(ipc.call(Path({str(path)!r}), 'who', 30))"
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None
            assert other.stdout.read().strip() == f"[{other.pid}, {os.getuid()}]"

    @pytest.mark.parametrize("kind", ERRORS)
    def test_errors_travel(self, path: Path, kind: type[errors.StoreError]) -> None:
        with pytest.raises(errors.StoreError, match=r"^what and why$") as caught:
            ipc.call(path, "raises", PATIENCE, kind=kind.__name__, text="what and why")
        assert type(caught.value) is kind
        assert caught.value.permanent == kind.permanent

    def test_an_error_of_a_component_travels_as_what_it_derives_from(self, path: Path) -> None:
        with pytest.raises(errors.Denied, match="own"):
            ipc.call(path, "raises", PATIENCE, kind="OwnError", text="own")

    def test_a_fault_of_a_handler_is_an_error_and_the_connection_goes_on(
        self, path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with Client(path, PATIENCE) as client:
            with pytest.raises(errors.StoreError, match="ZeroDivisionError: oops"):
                client.call("raises", kind="ZeroDivisionError", text="oops")
            with pytest.raises(errors.StoreError, match="TypeError"):
                client.call("unwritable")
            with pytest.raises(errors.StoreError, match="KeyError"):
                client.call("echo")
            assert client.call("echo", value=1) == 1
        assert caplog.text.count("request failed") == 3

    def test_an_unknown_request_tells_of_releases(self, path: Path) -> None:
        with pytest.raises(errors.Invalid, match="unknown request 'nope': the two sides are of different releases"):
            ipc.call(path, "nope", PATIENCE)

    def test_messages_of_the_largest_size(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ipc, "MAX_MESSAGE", 10_000)
        with Client(path, PATIENCE) as client:
            assert len(client.call("large", size=10_000 - len('{"ok": ""}\n'))) > 9_900
            with pytest.raises(errors.Invalid, match="an answer of 10001 bytes, at most 10000"):
                client.call("large", size=10_001 - len('{"ok": ""}\n'))
            room = 10_000 - len('{"op": "echo", "value": ""}\n')
            assert client.call("echo", value="x" * (room - 20)) == "x" * (room - 20)
            with pytest.raises(errors.Invalid, match="echo: a request of 10001 bytes, at most 10000"):
                client.call("echo", value="x" * (room + 1))
            assert client.call("echo", value=1) == 1

    @pytest.mark.parametrize("line", [b"?\n", b"[]\n", b"5\n", b'{"value": 1}\n', b'{"op": []}\n', b"\xff\n", b"\n"])
    def test_nonsense_is_answered(self, path: Path, line: bytes) -> None:
        with ipc.connect(path, PATIENCE) as connection:
            connection.sendall(line)
            assert b'"Invalid"' in connection.recv(1000)

    def test_an_endless_line_is_hung_up_on(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ipc, "MAX_MESSAGE", 1000)
        with ipc.connect(path, PATIENCE) as connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(b"x" * 2000)
            assert connection.recv(1000) == b""
        assert ipc.call(path, "echo", PATIENCE, value=1) == 1

    def test_a_handler_learns_that_its_peer_hung_up(self, path: Path, handlers: Handlers) -> None:
        with ipc.connect(path, PATIENCE) as connection:
            connection.sendall(b'{"op": "hung_up"}\n')
            assert handlers.entered.acquire(timeout=PATIENCE)
        eventually(lambda: not conversations())


def conversations() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "_converse" in thread.name]


def test_the_socket_is_for_its_owner_only(server: Server, path: Path) -> None:
    assert path.stat().st_mode & 0o777 == 0o600
    assert server.start is not None


def test_nobody_listens(path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        ipc.call(path, "echo", value=1)
    path.touch()
    with pytest.raises(OSError, match="refused"):
        ipc.call(path, "echo", value=1)


def test_the_socket_of_a_dead_process_is_replaced(path: Path, handlers: Handlers) -> None:
    ipc.listen(path).close()
    with Server(path, handlers.table()):
        assert ipc.call(path, "echo", PATIENCE, value=1) == 1
    assert not path.exists()


def test_a_name_that_is_too_long_leaks_nothing(path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="too long"):
        ipc.listen(path.with_name("x" * 108))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_successor_keeps_its_socket(path: Path, handlers: Handlers) -> None:
    first = Server(path, handlers.table()).start()
    with Server(path, handlers.table()):
        first.close()
        assert ipc.call(path, "echo", PATIENCE, value=1) == 1


def test_a_closing_server_answers_what_is_under_way_and_hangs_up(path: Path, handlers: Handlers) -> None:
    server = Server(path, handlers.table()).start()
    with Client(path, PATIENCE) as idle, Client(path, PATIENCE) as busy:
        assert idle.call("echo", value=1) == 1
        results: list[object] = []
        caller = threading.Thread(target=lambda: results.append(busy.call("waits")))
        caller.start()
        assert handlers.entered.acquire(timeout=PATIENCE)
        server.close()
        handlers.go_on.set()
        caller.join(PATIENCE)
        assert results == ["done"]
        for client in (idle, busy):
            with pytest.raises(errors.Unavailable, match=r"test.sock: echo: "):
                client.call("echo", value=1)
    eventually(lambda: not conversations())


def test_a_late_answer_is_not_taken_for_the_next(server: Server, path: Path, handlers: Handlers) -> None:
    assert server is not None
    with Client(path, 0.01) as client:
        with pytest.raises(errors.Unavailable, match="waits: timed out"):
            client.call("waits")
        handlers.go_on.set()
        with pytest.raises(errors.Unavailable):
            client.call("echo", value=1)


@pytest.mark.parametrize("answer", [b"?\n", b"\xff\n", b"", b'{"ok": 1}'])
def test_an_answer_that_is_none_is_unavailable(path: Path, answer: bytes) -> None:
    def serve_once(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(answer)

    with ipc.listen(path) as listener:
        thread = threading.Thread(target=serve_once, args=(listener,))
        thread.start()
        with pytest.raises(errors.Unavailable):
            ipc.call(path, "echo", PATIENCE, value=1)
        thread.join(PATIENCE)


def test_a_server_that_dies_is_unavailable(path: Path) -> None:
    code = f"""
import os, time
from pathlib import Path
from dsec_store.ipc import Server
Server(Path({str(path)!r}), {{"ping": lambda *_: 1, "die": lambda *_: os.kill(os.getpid(), 9)}}).start()
print("ready", flush=True)
time.sleep({PATIENCE})
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with Client(path, PATIENCE) as client:
            assert client.call("ping") == 1
            with pytest.raises(errors.Unavailable, match=r"test.sock: die: "):
                client.call("die")
        process.wait(PATIENCE)
        with pytest.raises(ConnectionRefusedError):
            ipc.call(path, "ping")


class Exhausted:
    """A listener that cannot accept at first."""

    def __init__(self, listener: socket.socket, failures: int) -> None:
        self._listener = listener
        self._failures = failures

    def accept(self) -> tuple[socket.socket, Any]:
        if self._failures:
            self._failures -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return self._listener.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listener, name)


def test_a_server_without_descriptors_goes_on_when_it_has_some(
    path: Path, handlers: Handlers, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ipc, "_PAUSE", 0.001)
    server = Server(path, handlers.table())
    monkeypatch.setattr(server, "_listener", Exhausted(server._listener, 3))
    with server:
        assert ipc.call(path, "echo", PATIENCE, value=1) == 1
    assert caplog.text.count("no connection can be accepted: [Errno 24]") == 3


def test_a_server_without_threads_hangs_up_and_goes_on(
    server: Server, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server is not None

    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(errors.Unavailable):
            ipc.call(path, "echo", PATIENCE, value=1)
    assert ipc.call(path, "echo", PATIENCE, value=1) == 1
