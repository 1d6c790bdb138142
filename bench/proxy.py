"""An HTTP proxy in front of the S3 server: makes it as far away as a setting says, and counts what passes.

    with DelayProxy(server.endpoint) as proxy:
        proxy.delay = 0.020                                # seconds before each answer
        before = proxy.traffic();  work();  cost = proxy.traffic() - before

It is a process of its own, so that its work is not in the way of a client in ours. Requests and answers pass as they
are, with `Host` and so with valid signatures. TCP_NODELAY is set: Nagle's algorithm would add 40 ms to an answer.
"""

from __future__ import annotations

import http.client
import multiprocessing
import os
import signal
import socket
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from typing import Final, Self, cast
from urllib.parse import urlsplit

ADDRESS: Final = "127.0.0.1"
BACKLOG: Final = 128
PIECE: Final = 256 << 10

_START_SECONDS: Final = 30.0
_HOP: Final = frozenset({"connection", "keep-alive", "transfer-encoding"})
"""Headers that are about one connection and not about what passes."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests, how many of them were GETs, and bytes of the bodies that were answered."""

    requests: int
    gets: int
    bytes: int

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.requests - other.requests, self.gets - other.gets, self.bytes - other.bytes)


@dataclass(frozen=True)
class _Shared:
    """What both processes see."""

    delay: Synchronized[float]
    requests: Synchronized[int]
    gets: Synchronized[int]
    bytes: Synchronized[int]


class DelayProxy:
    """The running proxy; a context manager."""

    def __init__(self, upstream: str) -> None:
        """`upstream` is the server as "http://host:port"."""
        context = multiprocessing.get_context("spawn")
        values = [cast("Synchronized[int]", context.Value("q", 0)) for _ in range(3)]
        self._shared = _Shared(cast("Synchronized[float]", context.Value("d", 0.0)), *values)
        self._ready, theirs = context.Pipe()
        self._process = context.Process(target=_main, args=(upstream, self._shared, theirs), daemon=True)

    def __enter__(self) -> Self:
        self._process.start()
        if not self._ready.poll(_START_SECONDS):
            raise TimeoutError("the proxy did not start")
        self.endpoint = f"http://{ADDRESS}:{self._ready.recv()}"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()

    @property
    def delay(self) -> float:
        """Seconds that every answer is late."""
        return self._shared.delay.value

    @delay.setter
    def delay(self, seconds: float) -> None:
        self._shared.delay.value = seconds

    def traffic(self) -> Traffic:
        """Since the start."""
        shared = self._shared
        return Traffic(shared.requests.value, shared.gets.value, shared.bytes.value)


class _Relay(BaseHTTPRequestHandler):
    """One connection of a client, with one of its own to the server."""

    protocol_version = "HTTP/1.1"
    wbufsize = PIECE
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._upstream = http.client.HTTPConnection(self.server.upstream)

    def finish(self) -> None:
        self._upstream.close()
        super().finish()

    def relay(self) -> None:
        self.server.count(self.command)
        time.sleep(self.server.shared.delay.value)
        try:
            self._ask()
            self._answer(self._upstream.getresponse())
        except (OSError, http.client.HTTPException):
            self.close_connection = True  # whichever side is gone: the other one sees a lost connection

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = relay  # noqa: N815 (the names are the base class's)

    def _ask(self) -> None:
        self._upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in _HOP:
                self._upstream.putheader(name, value)
        length = int(self.headers.get("Content-Length") or 0)
        self._upstream.endheaders(self.rfile.read(length) if length else None)

    def _answer(self, answer: http.client.HTTPResponse) -> None:
        self.send_response_only(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() not in _HOP:
                self.send_header(name, value)
        whole = b""
        if answer.length is None:  # the server sends it in chunks: a listing or an error, which is short
            whole = answer.read()
            self.send_header("Content-Length", str(len(whole)))
        self.end_headers()
        self._send(whole)
        while piece := answer.read(PIECE):
            self._send(piece)
        self.wfile.flush()

    def _send(self, piece: bytes) -> None:
        """Counted first: who has got all has been counted."""
        self.server.count_bytes(len(piece))
        self.wfile.write(piece)

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads it."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = BACKLOG

    def __init__(self, upstream: str, shared: _Shared) -> None:
        super().__init__((ADDRESS, 0), _Relay)
        self.upstream = urlsplit(upstream).netloc
        self.shared = shared

    def count(self, command: str) -> None:
        _add(self.shared.requests, 1)
        if command == "GET":
            _add(self.shared.gets, 1)

    def count_bytes(self, length: int) -> None:
        _add(self.shared.bytes, length)


def _add(value: Synchronized[int], amount: int) -> None:
    with value.get_lock():
        value.value += amount


def _main(upstream: str, shared: _Shared, ready: Connection) -> None:
    """The proxy's process: it lives as long as the one that started it, which an interrupt is for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = _Server(upstream, shared)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    ready.send(server.server_address[1])
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(0)
