"""Make a near store behave like a far one: each request takes a while, and all share one link.

For benchmarks: a local server answers in a tenth of the time that a store across a data centre takes, and what hides
latency (read-ahead, coalescing) shows its worth only with latency.

    ThrottleBlobs(store, delay=0.020, bandwidth=100e6)      # 20 ms a request, 100 MB/s for all threads together
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from dsec_store.around import AroundBlobs, Request, bytes_received
from dsec_store.blobs import BlobStore

T = TypeVar("T")


class ThrottleBlobs(AroundBlobs):
    """Adds `delay` seconds to every request, and lets at most `bandwidth` bytes a second pass (None: no limit)."""

    def __init__(
        self,
        inner: BlobStore,
        *,
        delay: float = 0.0,
        bandwidth: float | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(inner)
        self._delay = delay
        self._bandwidth = bandwidth
        self._sleep = sleep
        self._clock = clock
        self._lock = threading.Lock()
        self._link_free_at = 0.0

    def _around(self, request: Request, call: Callable[[], T]) -> T:
        answer = call()
        self._sleep(self._delay + self._transfer_time(request.sent + bytes_received(answer)))
        return answer

    def _transfer_time(self, size: int) -> float:
        """Seconds until `size` bytes are through, behind all that other threads have put on the link before."""
        if self._bandwidth is None:
            return 0.0
        with self._lock:
            now = self._clock()
            self._link_free_at = max(now, self._link_free_at) + size / self._bandwidth
            return self._link_free_at - now
