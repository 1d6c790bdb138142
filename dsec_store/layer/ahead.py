"""Reading ahead on a thread: decompressing and hashing go on while the pieces that came before are worked on.

with ReadAhead(pieces) as stream:
    while piece := stream.read(PIECE): ...
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable
from typing import Final

DEPTH: Final = 8
"""Pieces that may wait: at most 8 MiB."""

_STOP_EVERY: Final = 0.1
"""Seconds after which a thread that waits for room looks whether anybody still wants it."""


class ReadAhead:
    """The pieces of an iterable as a stream. Its errors come out of `read`; after one, and at the end, it is over."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._queue: queue.Queue[bytes | BaseException] = queue.Queue(DEPTH)
        self._stopped = threading.Event()
        self._over: bytes | BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(pieces,), name="read-ahead")
        self._thread.start()

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def read(self, size: int, /) -> bytes:
        """The next piece, whatever its size is; b"" at the end."""
        item = self._queue.get() if self._over is None else self._over
        if isinstance(item, BaseException):
            self._over = item
            raise item
        if not item:
            self._over = item
        return item

    def _run(self, pieces: Iterable[bytes]) -> None:
        try:
            for piece in pieces:
                if piece and not self._put(piece):
                    return
        except BaseException as error:
            self._put(error)
            return
        self._put(b"")

    def _put(self, item: bytes | BaseException) -> bool:
        """False when nobody wants it any more."""
        while not self._stopped.is_set():
            try:
                self._queue.put(item, timeout=_STOP_EVERY)
            except queue.Full:
                continue
            return True
        return False
