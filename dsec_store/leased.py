"""The store as a builder sees it: what gc has condemned is absent, until the builder says that it counts on it.

A builder looks whether an object exists, and then does not write it. gc may have decided meanwhile that nothing leads
to this object. Neither has a lock; so each tells what it is about to do *before* it looks what the other does:

    builder   writes the key into its lease   then looks whether a sweep is under way
    gc        announces the sweep             then reads the leases

One of both sees the other. If the builder sees the sweep, it takes the object for absent, and waits for the end of the
sweep before it puts it. If gc sees the key in the lease, it spares it. Proof: docs/decisions/0006-gc-leases.md.

    with build_lease(blobs) as lease:
        Objects(lease.blobs)

Cost: nothing but a set of the keys that were seen, as long as nothing is condemned that the builder asks for; else a
PUT and a LIST for each such key.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Final, TypeVar

from dsec_store import keys
from dsec_store.blobs import BlobStat, BlobStore
from dsec_store.condemned import Condemned, read_condemned
from dsec_store.errors import NotFound
from dsec_store.leases import GC, Clock, Lease, read_leases

T = TypeVar("T")

POLL: Final = 0.2
"""Seconds between two looks whether a sweep is over."""

_UNUSED_ONCE_READ: Final = ("indexes",)
"""Families that nothing leads to: who has read such an object does not need it any more."""


class LeasedBlobs:
    """See the module's text. Raises `Unavailable` at every put after the lease has lapsed."""

    def __init__(
        self,
        inner: BlobStore,
        lease: Lease,
        *,
        clock: Clock = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.inner = inner
        self._lease = lease
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._seen: set[str] = set()
        self._condemned: Mapping[str, Condemned] = {}
        self._hidden: frozenset[str] = frozenset()
        self._locators: dict[str, bytes | memoryview] = {}

    @property
    def location(self) -> str:
        return self.inner.location

    # -- condemnations -----------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Read what is condemned; the first time before anything else. Nothing is written when there is nothing."""
        found = read_condemned(self.inner, self._condemned)
        with self._lock:
            self._condemned = found
            self._hidden = frozenset(key for each in found.values() for key in each.keys)
            relied = self._hidden & self._seen
        if found or self._lease.record.acknowledged:
            self._lease.write(
                lambda record: replace(
                    record, acknowledged=tuple(sorted(found)), relies=tuple(sorted({*record.relies, *relied}))
                )
            )

    def refresh(self) -> None:
        """Renew the lease, and acknowledge what was condemned since."""
        self._lease.renew()
        self.look()

    # -- reading -----------------------------------------------------------------------------------------------------

    def get(self, key: str, limit: int | None = None) -> bytes:
        return self._read(key, lambda: self.inner.get(key, limit))

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        return self._read(key, lambda: self.inner.get_range(key, offset, length))

    def stat(self, key: str) -> BlobStat | None:
        try:
            return self._read(key, lambda: self._present(key))
        except NotFound:
            return None

    def list(self, prefix: str) -> Iterator[BlobStat]:
        """What is condemned is left out, unless we count on it."""
        stats = tuple(self.inner.list(prefix))
        with self._lock:
            visible = [stat for stat in stats if stat.key not in self._hidden or stat.key in self._seen]
            self._seen.update(stat.key for stat in visible if _counts(stat.key))
        return iter(visible)

    def _read(self, key: str, ask: Callable[[], T]) -> T:
        if not _collected(key):
            return ask()
        while True:
            if not self._visible(key):
                raise NotFound(f"{self.location}/{key} is being deleted by gc")
            answer = ask()
            with self._lock:
                if key in self._seen or key not in self._hidden:
                    if _counts(key):
                        self._seen.add(key)
                    return answer
            # It was condemned while we asked: it counts from now on, or it is absent.

    def _visible(self, key: str) -> bool:
        """Whether we may ask for it. A condemned key is ours if we say so before a sweep begins."""
        with self._lock:
            if key in self._seen or key not in self._hidden:
                return True
        self._lease.rely(key)
        if self._sweeping():
            return False
        with self._lock:
            self._seen.add(key)
        return True

    def _present(self, key: str) -> BlobStat:
        if (stat := self.inner.stat(key)) is None:
            raise NotFound(f"{self.location}/{key} does not exist")
        return stat

    # -- writing -----------------------------------------------------------------------------------------------------

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._lease.check()
        if _collected(key):
            self._claim(key)
        elif keys.family(key) == "refs":
            self._before_commit()
        self.inner.put(key, data)
        if keys.family(key) == "locators":
            with self._lock:
                self._locators[key] = data

    def delete(self, key: str) -> None:
        self.inner.delete(key)

    def _claim(self, key: str) -> None:
        """On return gc does not delete `key` for as long as our lease counts."""
        with self._lock:
            if key in self._seen or key not in self._hidden:
                self._seen.add(key)
                return
        self._lease.rely(key)
        while self._sweeping():
            self._sleep(POLL)
        self._lease.check()
        with self._lock:
            self._seen.add(key)

    def _before_commit(self) -> None:
        """Raise `Unavailable` unless all that we counted on was kept for us.

        gc changes a locator as it has read it. If ours came between its look and its put, ours is gone, and with it
        what we may have repaired. Another builder's is as good as ours, but cannot be told from gc's.
        """
        self._lease.confirm()
        with self._lock:
            ours, self._locators = self._locators, {}
        for key, data in ours.items():
            with suppress(NotFound):
                if self.inner.get(key) == data:
                    continue
            self.inner.put(key, data)

    def _sweeping(self) -> bool:
        now = self._clock()
        return any(lease.sweeps(now) for lease in read_leases(self.inner, GC))


def _collected(key: str) -> bool:
    return keys.family(key) in keys.COLLECTED


def _counts(key: str) -> bool:
    """Whether who has seen this object may count on it later."""
    return _collected(key) and keys.family(key) not in _UNUSED_ONCE_READ
