"""One connection to the kernel: a file descriptor of /dev/fuse, shared by all threads of the server.

Problem: the descriptor outlives this process (the holder has it too), and requests that were read here are answered by
the successor if we die. Choice: one open file for all threads and all daemons, read and written without any buffer of
our own. Not FUSE_DEV_IOC_CLONE, which gives each thread a queue: closing a clone, as death does, aborts what was read
through it. Cost: all threads wait in one queue of the kernel; a read of 4 KiB still takes no more than 30 us in all.

A trap: if a process is being killed while the kernel copies to or from its memory, a page that must first be faulted in
makes the copy fail, and the kernel answers the reader with EIO. So buffers and answers are anonymous memory that was
just touched, never a map of a file.
"""

from __future__ import annotations

import errno
import logging
import os
from typing import Final

from dsec_fuse import protocol

_log: Final = logging.getLogger(__name__)

_TRY_AGAIN: Final = frozenset({errno.EINTR, errno.EAGAIN, errno.ENOENT})
"""Of read(2): a signal, nothing there, or the request was withdrawn while it was copied."""

_NOT_WAITED_FOR: Final = frozenset({errno.ENOENT, errno.ENODEV, errno.ECONNABORTED})
"""Of write(2): answered before (by us or another daemon), withdrawn, or the connection ended. Nobody is harmed."""


class Ended(Exception):
    """The connection is over: unmounted, or aborted (then mounts above it fail until they are unmounted)."""

    def __init__(self, *, aborted: bool) -> None:
        super().__init__("aborted" if aborted else "unmounted")
        self.aborted = aborted


class Connection:
    """Requests come out of it, answers go in. Safe for any number of threads."""

    def __init__(self, fd: int) -> None:
        """`fd` has a file system mounted on it. It stays the caller's, and open while this is in use."""
        self._fd = fd

    def receive(self, buffer: bytearray) -> protocol.Request:
        """The next request, read into `buffer` (BUFFER_SIZE bytes, one per thread, kept). Raises `Ended`."""
        while True:
            try:
                size = os.readv(self._fd, [buffer])
            except OSError as error:
                if error.errno in _TRY_AGAIN:
                    continue
                if error.errno in (errno.ENODEV, errno.ECONNABORTED):
                    raise Ended(aborted=error.errno == errno.ECONNABORTED) from None
                raise
            return protocol.parse_request(memoryview(buffer)[:size])

    def reply(self, unique: int, body: bytes = b"") -> None:
        self._write(protocol.header(unique, len(body)), body)

    def refuse(self, unique: int, number: int) -> None:
        """Answer with an errno."""
        self._write(protocol.header(unique, 0, number))

    def resend(self) -> bool:
        """Have the kernel queue again what was read and not answered; False when it cannot (before Linux 6.9)."""
        try:
            os.write(self._fd, protocol.resend_notification())
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            if error.errno not in _NOT_WAITED_FOR:
                raise
        return True

    def _write(self, *parts: bytes) -> None:
        try:
            os.writev(self._fd, parts)
        except OSError as error:
            if error.errno not in _NOT_WAITED_FOR:
                _log.error("the kernel did not take an answer of %d bytes: %s", sum(map(len, parts)), error)
