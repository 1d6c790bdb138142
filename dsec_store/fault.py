"""A blob store that misbehaves on demand: for tests of everything that must survive a bad one.

Faults follow a plan, which is either scripted (these faults, in this order) or drawn from a seed, so that a failing
test fails again. Below `VerifyBlobs` and `RetryBlobs` in the wrap order, they arrive as from a real backend.

    FaultBlobs(store, scripted(Fault.SHORT, None, Fault.UNAVAILABLE))
    FaultBlobs(store, seeded(7, rate=0.2))
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from enum import Enum, auto
from typing import Final, TypeVar

from dsec_store.around import AroundBlobs, Operation, Request
from dsec_store.blobs import BlobStore
from dsec_store.errors import Denied, Unavailable

T = TypeVar("T")


class Fault(Enum):
    """What can go wrong with one request."""

    UNAVAILABLE = auto()
    """The request fails, without effect."""
    LOST = auto()
    """The request takes effect, its answer is lost: `Unavailable`."""
    DENIED = auto()
    """The backend refuses."""
    SLOW = auto()
    """The answer is right, but late."""
    SHORT = auto()
    """The last byte is missing."""
    LONG = auto()
    """A byte too many."""
    FLIPPED = auto()
    """One bit differs. (An empty blob has none: it gets a byte.)"""
    STALE = auto()
    """The bytes of another blob, or zeros where there is none."""
    WRONG_RANGE = auto()
    """The bytes beside those that were asked for."""


_IN_BYTES: Final = {
    Fault.SHORT: (Operation.GET, Operation.GET_RANGE),
    Fault.LONG: (Operation.GET, Operation.GET_RANGE),
    Fault.FLIPPED: (Operation.GET, Operation.GET_RANGE),
    Fault.STALE: (Operation.GET, Operation.GET_RANGE),
    Fault.WRONG_RANGE: (Operation.GET_RANGE,),
}
"""Faults in the bytes of an answer, and the operations whose answers they can hit. Other faults hit every operation."""

Plan = Callable[[Request], Fault | None]
"""Chooses the fault of a request. Called by one thread at a time."""


def hits(fault: Fault | None, request: Request) -> bool:
    """Whether `fault` can happen to `request`."""
    return fault not in _IN_BYTES or request.operation in _IN_BYTES[fault]


def scripted(*faults: Fault | None) -> Plan:
    """Deal `faults` in order, each to the first request that it can hit (None: that request succeeds); then no more."""
    script = list(faults)

    def plan(request: Request) -> Fault | None:
        return script.pop(0) if script and hits(script[0], request) else None

    return plan


def seeded(seed: int, rate: float, faults: Iterable[Fault] = Fault) -> Plan:
    """Let a share `rate` of the requests fail, each with one of those `faults` that can hit it."""
    source = random.Random(seed)
    choices = tuple(faults)

    def plan(request: Request) -> Fault | None:
        possible = [fault for fault in choices if hits(fault, request)]
        return source.choice(possible) if possible and source.random() < rate else None

    return plan


class FaultBlobs(AroundBlobs):
    """Injects the faults of `plan`; `injected` counts them."""

    def __init__(
        self, inner: BlobStore, plan: Plan, *, delay: float = 0.05, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        """`delay` is what `Fault.SLOW` adds, in seconds."""
        super().__init__(inner)
        self._plan = plan
        self._delay = delay
        self._sleep = sleep
        self._lock = threading.Lock()
        self._injected: Counter[Fault] = Counter()

    @property
    def injected(self) -> Counter[Fault]:
        """How often each fault was injected so far."""
        with self._lock:
            return self._injected.copy()

    def _around(self, request: Request, call: Callable[[], T]) -> T:
        fault = self._draw(request)
        what = f"{self.location}/{request.key}: injected fault"
        if fault is Fault.UNAVAILABLE:
            raise Unavailable(what)
        if fault is Fault.DENIED:
            raise Denied(what)
        if fault is Fault.SLOW:
            self._sleep(self._delay)
        answer = call()
        if fault is Fault.LOST:
            raise Unavailable(f"{what}, the answer was lost")
        if fault in _IN_BYTES and isinstance(answer, bytes):
            return self._damaged(fault, request, answer)  # type: ignore[return-value]  # T is bytes here
        return answer

    def _draw(self, request: Request) -> Fault | None:
        with self._lock:
            fault = self._plan(request)
            if fault is not None:
                self._injected[fault] += 1
            return fault

    def _damaged(self, fault: Fault, request: Request, data: bytes) -> bytes:
        match fault:
            case Fault.SHORT:
                return data[:-1]
            case Fault.LONG:
                return data + b"\0"
            case Fault.STALE:
                return self._other_bytes(request)
            case Fault.WRONG_RANGE:
                start = request.offset - 1 if request.offset else 1
                return _window(self.inner.get(request.key), start, request.length)
            case _:
                return bytes([data[0] ^ 1]) + data[1:] if data else b"\0"

    def _other_bytes(self, request: Request) -> bytes:
        others = (each.key for each in self.inner.list("") if each.key != request.key)
        other = next(others, None)
        data = b"" if other is None else self.inner.get(other)
        return _window(data, request.offset, request.length) if request.operation is Operation.GET_RANGE else data


def _window(data: bytes, start: int, length: int) -> bytes:
    """`length` bytes from `start` on, filled up with zeros."""
    return data[start : start + length].ljust(length, b"\0")
