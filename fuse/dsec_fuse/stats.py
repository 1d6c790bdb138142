"""Figures of a server: what was asked, how long it took, what went wrong."""

from __future__ import annotations

import errno
import threading
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from typing import Final

from dsec_fuse.protocol import Opcode, Request

READ_SECONDS: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Upper bounds of the classes in which READs are counted by duration; the last class has none."""


@dataclass(frozen=True, slots=True)
class ServerStats:
    """Since the daemon started. Fields of plain values: it becomes JSON by `dataclasses.asdict`."""

    requests: dict[str, int]
    """Served, by operation."""
    errors: dict[str, int]
    """Refused, by the name of the error. ENOENT and ENOSYS are everyday answers, EIO never is."""
    read_bytes: int
    read_durations: list[int]
    """READs by how long it took to find the bytes, waiting for a fetch thread included, in the classes of
    READ_SECONDS."""
    resent: int
    """Requests that a predecessor had read and not answered."""
    interrupted: int
    """Requests that were answered early, because their reader was being killed."""
    in_flight: int


class Counters:
    """What `ServerStats` is taken from. Safe for many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[int] = Counter()
        self._names: dict[int, str] = {}
        self._errors: Counter[int] = Counter()
        self._read_bytes = 0
        self._read_durations = [0] * (len(READ_SECONDS) + 1)
        self._resent = 0

    def count(self, request: Request, number: int, size: int, seconds: float) -> None:
        """`request` is about to be answered, after `seconds`: with errno `number`, or 0 and `size` bytes."""
        with self._lock:
            self._requests[request.opcode] += 1
            self._names.setdefault(request.opcode, request.name)
            self._resent += request.resent
            if number:
                self._errors[number] += 1
            if request.opcode == Opcode.READ:
                self._read_bytes += size
                self._read_durations[bisect_left(READ_SECONDS, seconds)] += 1

    def snapshot(self, *, in_flight: int, interrupted: int) -> ServerStats:
        with self._lock:
            return ServerStats(
                requests={self._names[opcode]: count for opcode, count in self._requests.items()},
                errors={errno.errorcode.get(number, str(number)): count for number, count in self._errors.items()},
                read_bytes=self._read_bytes,
                read_durations=list(self._read_durations),
                resent=self._resent,
                interrupted=interrupted,
                in_flight=in_flight,
            )
