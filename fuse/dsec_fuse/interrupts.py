"""Lets readers die: answers a request early when the thread that waits for it is being killed.

Problem: a request that the daemon has read can be left by its reader only when it is answered; a killed process stays
in the kernel until then (fs/fuse/dev.c, request_wait_answer). The kernel tells us by INTERRUPT, but sends one for *any*
signal, once, and not what signal it was. To answer EINTR to all of them would be wrong: a read(2) of a file does not
fail because a child ended or a timer rang, and a page fault that fails is SIGBUS. Choice: an interrupted request is
watched, and answered with EINTR as soon as its thread has SIGKILL pending, which the kernel sets in every thread of a
process that dies. Cost: a look at /proc every POLL_SECONDS while interrupted requests are under way.

Only what the kernel asks synchronously is concerned: metadata, page faults without read-ahead, pages whose read-ahead
failed. Whoever waits for read-ahead, or for EROFS above us, waits for a page, and leaves without our help.
"""

from __future__ import annotations

import errno
import signal
import threading
from typing import Final

from dsec_fuse.connection import Connection
from dsec_fuse.inflight import InFlight

POLL_SECONDS: Final = 0.1

_SIGKILL: Final = 1 << (signal.SIGKILL - 1)


def is_dying(tid: int) -> bool:
    """Whether thread `tid` has SIGKILL pending or is gone. False for 0: a thread of the kernel, or hidden from us."""
    if not tid:
        return False
    try:
        with open(f"/proc/{tid}/status", encoding="ascii", errors="replace") as status:
            pending = next(line for line in status if line.startswith("SigPnd:"))
    except (OSError, StopIteration):
        return True
    return bool(int(pending.split()[1], 16) & _SIGKILL)


class Interrupts:
    """Watches interrupted requests in a thread of its own."""

    def __init__(self, connection: Connection, inflight: InFlight) -> None:
        self.answered = 0
        """Requests that were answered early."""
        self._connection = connection
        self._inflight = inflight
        self._watched: set[int] = set()
        self._changed = threading.Condition()

    def start(self) -> None:
        threading.Thread(target=self._watch, name="fuse-interrupts", daemon=True).start()

    def interrupt(self, message: int, unique: int) -> None:
        """INTERRUPT number `message` came for request `unique`."""
        if self._inflight.find(unique) is None:
            # Answered by now, and then the kernel ignores this; or the thread that read it has not come to admit it
            # yet, and then the kernel interrupts again.
            self._connection.refuse(message, errno.EAGAIN)
            return
        with self._changed:
            self._watched.add(unique)
            self._changed.notify()

    def _watch(self) -> None:
        while True:
            with self._changed:
                self._changed.wait(POLL_SECONDS if self._watched else None)
                watched = list(self._watched)
            done = {unique for unique in watched if self._settle(unique)}
            with self._changed:
                self._watched -= done

    def _settle(self, unique: int) -> bool:
        """Whether `unique` needs no more watching."""
        request = self._inflight.find(unique)
        if request is None:
            return True
        if not is_dying(request.pid):
            return False
        if self._inflight.claim(unique):
            self.answered += 1
            self._connection.refuse(unique, errno.EINTR)
        return True
