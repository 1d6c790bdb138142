"""Count what a blob store is asked for: requests, failures and bytes of each operation.

The numbers behind the metrics, and behind tests that say "this reads at most so much". Place it inside of the retry
wrapper to count what goes over the wire, outside to count what the callers want.

    metered = MeteredBlobs(store)
    before = metered.snapshot();  work();  cost = metered.snapshot().total - before.total
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from dsec_store.around import AroundBlobs, Operation, Request, bytes_received
from dsec_store.blobs import BlobStore

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Counts since the store was wrapped. `requests` includes `failures`; bytes count when a request succeeds."""

    requests: int = 0
    failures: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.requests + other.requests,
            self.failures + other.failures,
            self.bytes_sent + other.bytes_sent,
            self.bytes_received + other.bytes_received,
        )

    def __sub__(self, other: Traffic) -> Traffic:
        return self + Traffic(-other.requests, -other.failures, -other.bytes_sent, -other.bytes_received)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The traffic of every operation at one moment."""

    by_operation: Mapping[Operation, Traffic]

    @property
    def total(self) -> Traffic:
        return sum(self.by_operation.values(), Traffic())


class MeteredBlobs(AroundBlobs):
    """Counts, and changes nothing."""

    def __init__(self, inner: BlobStore) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._traffic = dict.fromkeys(Operation, Traffic())

    def snapshot(self) -> Snapshot:
        """All counts, taken together."""
        with self._lock:
            return Snapshot(MappingProxyType(dict(self._traffic)))

    def _around(self, request: Request, call: Callable[[], T]) -> T:
        try:
            answer = call()
        except Exception:
            self._count(request, Traffic(requests=1, failures=1))
            raise
        self._count(request, Traffic(1, 0, request.sent, bytes_received(answer)))
        return answer

    def _count(self, request: Request, traffic: Traffic) -> None:
        with self._lock:
            self._traffic[request.operation] += traffic
