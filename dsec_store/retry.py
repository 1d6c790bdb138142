"""Repeat what failed in passing, so that a blip of the network is no failed build.

Waits grow exponentially and are drawn at random from zero up to their limit ("full jitter"), so that a thousand nodes
that lost the same server do not come back in step. All operations may be repeated: put and delete say only what holds
afterwards.

An answer that does not match its digest may come from a bad proxy or a bad cache on the way, so reads that are
`Corrupt` get another try too, but only few: what is damaged at rest stays damaged.

    RetryBlobs(VerifyBlobs(S3Blobs(...)))               # outside of VerifyBlobs, else damage is found too late
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from dsec_store.around import AroundBlobs, Operation, Request
from dsec_store.blobs import BlobStore
from dsec_store.errors import Corrupt, StoreError

T = TypeVar("T")

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how long. Times are in seconds."""

    attempts: int = 8
    """Calls in all, the first one included; corrupt answers are counted apart."""

    corrupt_attempts: int = 3
    """Calls in all of a read whose answers are corrupt."""

    first_delay: float = 0.1
    """Upper limit of the first wait; it doubles with each further one."""

    max_delay: float = 10.0
    """No wait is longer."""

    deadline: float = 60.0
    """No attempt starts later than this after the first one started."""

    def attempts_for(self, error: StoreError, request: Request) -> int:
        """How often a request may fail like this before that is its outcome."""
        if isinstance(error, Corrupt) and request.operation in (Operation.GET, Operation.GET_RANGE):
            return self.corrupt_attempts
        return 1 if error.permanent else self.attempts

    def delay_limit(self, attempt: int) -> float:
        """Longest wait after attempt number `attempt`, counted from 1."""
        return min(self.max_delay, self.first_delay * 2.0 ** (attempt - 1))


class RetryBlobs(AroundBlobs):
    """Repeats failed requests after `policy`. The last error is raised, with the number of tries in its text."""

    def __init__(
        self,
        inner: BlobStore,
        policy: RetryPolicy = RetryPolicy(),
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        super().__init__(inner)
        self._policy = policy
        self._sleep = sleep
        self._clock = clock
        self._jitter = jitter

    def _around(self, request: Request, call: Callable[[], T]) -> T:
        deadline = self._clock() + self._policy.deadline
        failures: Counter[type[StoreError]] = Counter()
        while True:
            try:
                return call()
            except StoreError as error:
                failures[type(error)] += 1
                attempt = failures.total()
                delay = self._jitter() * self._policy.delay_limit(attempt)
                spent = failures[type(error)] >= self._policy.attempts_for(error, request)
                if spent or self._clock() + delay > deadline:
                    if attempt == 1:
                        raise
                    raise type(error)(f"{error} (tried {attempt} times)") from error
                _log.warning("%s; attempt %d, the next in %.2f s", error, attempt, delay)
                self._sleep(delay)
