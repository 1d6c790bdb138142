"""Serves one connection with two pools of threads.

Problem: a READ may wait for the store, for as long as that is retried, and nothing else may wait with it. Choice:
threads that all read the same device, each serving what it reads (`inflight` keeps one of them reading) from what the
node has; a READ that needs the store goes over to the fetch threads. Metadata is answered by whoever read it. Cost: a
fetched chunk is looked up twice. When FETCHERS reads wait, further ones that need the store wait for them; they would
ask the same silent store.

Python runs one thread at a time, but a waiting fetch, a read of the cache and the copy to the kernel run without its
lock. What a READ costs outside of them, about 15 us, bounds a daemon at one core; more daemons, each with a mount of
its own, are the way beyond.

Nothing that a predecessor did has to be known: requests name blobs by node ids that derive from digests, files need no
OPEN, and the kernel resends what was read and not answered.
"""

from __future__ import annotations

import errno
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from dsec_fuse import protocol
from dsec_fuse.blobfs import BlobFileSystem, Refused, WouldWait
from dsec_fuse.connection import Connection, Ended
from dsec_fuse.inflight import InFlight
from dsec_fuse.interrupts import Interrupts
from dsec_fuse.protocol import Negotiated, Opcode, Request
from dsec_fuse.stats import Counters, ServerStats
from dsec_store.errors import Invalid

_log: Final = logging.getLogger(__name__)

THREADS: Final = 16
"""Threads of one server that read the device; one less is how many READs it serves at once from what the node has. A
thread costs 8 KiB and its stack."""

FETCHERS: Final = 64
"""READs that wait for the store at once, each on a thread that is started when first needed."""

_Answer = Callable[[BlobFileSystem, Request, bool], bytes]
"""What to send; the last argument says whether it may wait for the store (else `WouldWait`)."""


def _lookup(files: BlobFileSystem, request: Request, wait: bool) -> bytes:
    return protocol.entry_reply(files.lookup(request.node, protocol.parse_name(request.body), wait=wait))


def _read(files: BlobFileSystem, request: Request, wait: bool) -> bytes:
    offset, size = protocol.parse_read(request.body)
    return files.read(request.node, offset, size, wait=wait)


def _readdir(files: BlobFileSystem, request: Request, wait: bool) -> bytes:
    after, size = protocol.parse_read(request.body)
    return protocol.directory_reply(files.entries(after), size)


_ANSWERS: Final[Mapping[int, _Answer]] = {
    Opcode.READ: _read,
    Opcode.LOOKUP: _lookup,
    Opcode.GETATTR: lambda files, it, wait: protocol.attributes_reply(files.attributes(it.node, wait=wait)),
    Opcode.OPENDIR: lambda files, it, wait: protocol.open_reply(keep_cache=False),
    Opcode.READDIR: _readdir,
    Opcode.RELEASEDIR: lambda files, it, wait: b"",
    Opcode.RELEASE: lambda files, it, wait: b"",
    Opcode.STATFS: lambda files, it, wait: protocol.statfs_reply(files.count()),
}
"""What is not here is answered by ENOSYS, and the kernel does not ask again. That includes OPEN (NO_OPEN_SUPPORT)."""


class Server:
    """One connection's threads. Use: start, then wait."""

    def __init__(
        self,
        connection: Connection,
        files: BlobFileSystem,
        *,
        remember: Callable[[Negotiated], None] = lambda negotiated: None,
        threads: int = THREADS,
    ) -> None:
        """`remember` is called when the kernel negotiates, before it gets its answer."""
        self._connection = connection
        self._files = files
        self._remember = remember
        self._threads = threads
        self._inflight = InFlight(threads - 1)
        self._fetchers = ThreadPoolExecutor(FETCHERS, thread_name_prefix="fuse-fetch")
        self._interrupts = Interrupts(connection, self._inflight)
        self._counters = Counters()
        self._ends: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        self._inline: dict[int, Callable[[Request], None]] = {  # what concerns the connection, and no file
            Opcode.INIT: self._negotiate,
            Opcode.INTERRUPT: self._interrupt,
            Opcode.FORGET: self._forget,
            Opcode.BATCH_FORGET: self._forget,
            Opcode.DESTROY: self._destroy,
        }

    def start(self) -> None:
        self._interrupts.start()
        for number in range(self._threads):
            threading.Thread(target=self._run, name=f"fuse-{number}", daemon=True).start()

    def wait(self) -> Ended:
        """Until the connection ends. Raises what a thread failed with, if one did."""
        end = self._ends.get()
        if isinstance(end, Ended):
            return end
        raise end

    def stats(self) -> ServerStats:
        return self._counters.snapshot(in_flight=len(self._inflight), interrupted=self._interrupts.answered)

    def _run(self) -> None:
        buffer = bytearray(protocol.BUFFER_SIZE)
        try:
            while True:
                self._dispatch(self._connection.receive(buffer))
        except Exception as end:  # whatever it is, `wait` tells who started us
            self._ends.put(end)

    def _dispatch(self, request: Request) -> None:
        inline = self._inline.get(request.opcode)
        if inline is not None:
            inline(request)
            self._counters.count(request, 0, 0, 0.0)
        elif request.opcode != Opcode.READ:
            self._inflight.enter(request)
            self._serve(request, time.perf_counter())
        elif self._inflight.admit(request):
            self._work(request)

    def _forget(self, request: Request) -> None:
        """There is nothing to forget, and no answer is expected."""

    def _interrupt(self, request: Request) -> None:
        self._interrupts.interrupt(request.unique, protocol.parse_interrupt(request.body))

    def _destroy(self, request: Request) -> None:
        self._connection.reply(request.unique)

    def _negotiate(self, request: Request) -> None:
        """Answer INIT. The result is kept elsewhere first: after the answer the kernel will not say it again."""
        try:
            negotiated = Negotiated.from_offer(protocol.parse_init(request.body))
        except Invalid:
            self._connection.refuse(request.unique, errno.EPROTO)  # else whoever looks at the mount waits for ever
            raise
        self._remember(negotiated)
        self._connection.reply(request.unique, protocol.init_reply(negotiated))
        _log.info("FUSE 7.%d, features %#x", negotiated.minor, negotiated.features)

    def _work(self, first: Request) -> None:
        request: Request | None = first
        while request is not None:
            self._serve(request, time.perf_counter())
            request = self._inflight.next()

    def _serve(self, request: Request, started: float, *, wait: bool = False) -> None:
        """Answer `request`; if that needs the store and is not to `wait` for it, a fetch thread will."""
        try:
            number, body = self._answer(request, wait)
        except WouldWait:
            self._fetchers.submit(self._fetch, request, started)
            return
        self._counters.count(request, number, len(body), time.perf_counter() - started)
        if self._inflight.claim(request.unique):
            if number:
                self._connection.refuse(request.unique, number)
            else:
                self._connection.reply(request.unique, body)

    def _fetch(self, request: Request, started: float) -> None:
        """On a fetch thread."""
        if self._inflight.find(request.unique) is None:
            return  # answered while it waited for this thread: its reader was being killed
        try:
            self._serve(request, started, wait=True)
        except Exception as end:  # as in `_run`
            self._ends.put(end)

    def _answer(self, request: Request, wait: bool) -> tuple[int, bytes]:
        """An errno and nothing, or 0 and what to send."""
        answer = _ANSWERS.get(request.opcode)
        if answer is None:
            return errno.ENOSYS, b""
        try:
            return 0, answer(self._files, request, wait)
        except Refused as refused:
            return refused.number, b""
        except WouldWait:
            raise
        except Exception:  # a fault of ours must reach the reader as an error, and the other readers not at all
            _log.exception("%s failed", request.name)
            return errno.EIO, b""
