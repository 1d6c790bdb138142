"""One lock per key, made when somebody wants it and gone when nobody does.

>>> locks = KeyLocks[str]()
>>> with locks("ab3d"):
...     ...  # nobody else is in here for "ab3d"
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)

FOREVER: Final = -1.0
"""What `Lock.acquire` takes for no timeout."""


class KeyLocks(Generic[K]):
    """Not re-entrant: a thread that holds a key waits for itself when it asks for it again."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: dict[K, tuple[threading.Lock, int]] = {}  # with the number of threads that hold it or wait

    @contextmanager
    def __call__(self, key: K, within: float = FOREVER) -> Iterator[None]:
        """Raises TimeoutError when somebody else holds the key for more than `within` seconds."""
        with self._guard:
            lock, users = self._locks.get(key, (threading.Lock(), 0))
            self._locks[key] = (lock, users + 1)
        try:
            if not lock.acquire(timeout=within):
                raise TimeoutError(f"{key} is held by somebody else")
            try:
                yield
            finally:
                lock.release()
        finally:
            with self._guard:
                lock, users = self._locks.pop(key)
                if users > 1:
                    self._locks[key] = (lock, users - 1)
