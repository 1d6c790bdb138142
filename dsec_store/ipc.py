"""How the processes of one node talk: one JSON object a line over a unix socket.

A request is `{"op": name, ...arguments}`, its answer `{"ok": value}` or `{"error": {"type": class name, "text": ...}}`;
one connection carries any number of them in turn. Sockets lie in a folder that only root may enter.

The path of a unix socket ends at 107 bytes, and DSEC_ROOT may be longer: both sides go through `/proc/self/fd`.

    with Server(root / "node.sock", {"status": lambda request, peer: {...}}) as server: ...
    call(root / "node.sock", "status", timeout=5.0)
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dsec_store import errors

Json = dict[str, Any]

_log: Final = logging.getLogger(__name__)

MAX_MESSAGE: Final = 16 << 20
"""Bytes of one request or answer, its newline included; more is refused."""

_BACKLOG: Final = 512
_PAUSE: Final = 0.1
"""Seconds between two tries to accept while the process has no descriptor or thread left."""

_ERRORS: Final = {
    cls.__name__: cls
    for cls in (errors.NotFound, errors.Corrupt, errors.Unavailable, errors.Denied, errors.Invalid, errors.StoreError)
}


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end, as the kernel tells it, and a way to learn that it hung up."""

    pid: int
    uid: int
    connection: socket.socket


Handler = Callable[[Json, Peer], Any]
"""Answers one request with a JSON value, or raises: a `StoreError` reaches the client as the same error."""


@contextlib.contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """An address for bind(2) or connect(2) that stands for `path`, however long that is."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def listen(path: Path) -> socket.socket:
    """A listening socket at `path`; a socket file left by a dead process is replaced."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with socket_address(path) as address:
            listener.bind(address)
        path.chmod(0o600)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def connect(path: Path, timeout: float | None) -> socket.socket:
    """A connection to the process that listens at `path`. Raises OSError when nobody does."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout)
    try:
        with socket_address(path) as address:
            connection.connect(address)
    except OSError:
        connection.close()
        raise
    return connection


class Client:
    """A connection that is kept: the server sees it close when this process ends, however it ends.

    For one thread at a time. A call that failed in passing closes the connection: its answer, come late, would be taken
    for that of the next call.
    """

    def __init__(self, path: Path, timeout: float | None = None) -> None:
        self._path = path
        self._socket = connect(path, timeout)
        self._lines = self._socket.makefile("rb")

    def call(self, op: str, **arguments: Any) -> Any:
        """The answer to one request.

        Raises the store error that the server raised, `Unavailable` when it went away or took too long, `Invalid` for a
        request that is too large.
        """
        request = _line({"op": op, **arguments})
        if len(request) > MAX_MESSAGE:
            raise errors.Invalid(f"{op}: a request of {len(request)} bytes, at most {MAX_MESSAGE} are accepted")
        answer = self._exchange(op, request)
        if "error" in answer:
            raise _ERRORS.get(answer["error"]["type"], errors.StoreError)(answer["error"]["text"])
        return answer["ok"]

    def close(self) -> None:
        self._lines.close()
        self._socket.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _exchange(self, op: str, request: bytes) -> Json:
        try:
            self._socket.sendall(request)
            line = self._lines.readline(MAX_MESSAGE)
            if line.endswith(b"\n"):
                answer: Json = json.loads(line)
                return answer
            fault = "the connection closed before an answer came"
        except (OSError, ValueError) as error:  # ValueError: nonsense came, or we have closed the connection
            fault = str(error)
        self.close()
        raise errors.Unavailable(f"{self._path.name}: {op}: {fault}")


def call(path: Path, op: str, timeout: float | None = None, **arguments: Any) -> Any:
    """One request on a connection of its own. Raises like `Client.call`; OSError when nobody listens."""
    with Client(path, timeout) as client:
        return client.call(op, **arguments)


class Server:
    """Serves each connection in a thread of its own until `close`."""

    def __init__(self, path: Path, handlers: Mapping[str, Handler]) -> None:
        self._handlers = handlers
        self._path = path
        self._listener = listen(path)
        self._identity = _identity(path)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._connections: set[socket.socket] = set()
        self._thread = threading.Thread(target=self._accept, name=path.name, daemon=True)

    def start(self) -> Server:
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop accepting, remove the socket, hang up. A request under way is answered first, by its own thread.

        The socket of a successor that listens at the same path already is left alone.
        """
        if _identity(self._path) == self._identity:
            self._path.unlink(missing_ok=True)
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RD)

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if not self._closing.wait(_PAUSE):
                    _log.warning("%s: no connection can be accepted: %s", self._path.name, error)
                continue
            with self._lock:
                self._connections.add(connection)
            try:
                threading.Thread(target=self._converse, args=(connection,), daemon=True).start()
            except RuntimeError as error:
                _log.warning("%s: a connection is refused: %s", self._path.name, error)
                self._hang_up(connection)

    def _converse(self, connection: socket.socket) -> None:
        try:
            peer = _peer(connection)
            with contextlib.suppress(OSError), connection.makefile("rb") as lines:
                while not self._closing.is_set() and (line := lines.readline(MAX_MESSAGE)).endswith(b"\n"):
                    connection.sendall(self._answer(line, peer))
        finally:
            self._hang_up(connection)

    def _hang_up(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.discard(connection)
        connection.close()

    def _answer(self, line: bytes, peer: Peer) -> bytes:
        try:
            answer = _line({"ok": self._handle(line, peer)})
            if len(answer) > MAX_MESSAGE:
                raise errors.Invalid(f"an answer of {len(answer)} bytes, at most {MAX_MESSAGE} are sent")
        except errors.StoreError as error:
            return _failure(next(cls.__name__ for cls in type(error).__mro__ if cls.__name__ in _ERRORS), str(error))
        except Exception as error:  # the peer must learn of a fault of ours, and the connection must live on
            _log.exception("request failed: %.200r", line)
            return _failure("StoreError", f"{type(error).__name__}: {error}")
        return answer

    def _handle(self, line: bytes, peer: Peer) -> Any:
        try:
            request = json.loads(line)
            op = request["op"]
        except (ValueError, TypeError, KeyError, RecursionError):
            raise errors.Invalid("not a request") from None
        if (handler := self._handlers.get(str(op))) is None:
            raise errors.Invalid(f"unknown request {op!r}: the two sides are of different releases")
        return handler(request, peer)


def _line(message: Json) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _failure(kind: str, text: str) -> bytes:
    return _line({"error": {"type": kind, "text": text}})


def _peer(connection: socket.socket) -> Peer:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", credentials)
    return Peer(pid, uid, connection)


def _identity(path: Path) -> tuple[int, int] | None:
    """Which file `path` is just now."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino
