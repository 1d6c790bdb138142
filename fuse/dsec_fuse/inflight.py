"""Which requests are being served, by how many threads, and who may answer each.

Three rules, all under one lock:

* One thread always goes on reading. All threads read the device; one that gets a READ serves it, unless all others are
  busy already: then it leaves the READ in the backlog, for the first that becomes free. So neither an INTERRUPT nor
  metadata is stuck behind reads, and no request is handed to another thread while there is an idle one.
* Whoever claims a request answers it. A worker claims when it is done, an interrupt whenever it likes; the other one
  gets nothing, and its answer is dropped.
* A claimed request that still waits, in the backlog or for a fetch thread, is forgotten.
"""

from __future__ import annotations

import threading
from collections import deque

from dsec_fuse.protocol import Request


class InFlight:
    def __init__(self, workers: int) -> None:
        """`workers` READs are served at once; one thread more than that must read."""
        self._workers = workers
        self._busy = 0
        self._lock = threading.Lock()
        self._open: dict[int, Request] = {}
        self._backlog: deque[Request] = deque()

    def enter(self, request: Request) -> None:
        """The thread that read `request` serves it at once, whatever the others do."""
        with self._lock:
            self._open[request.unique] = request

    def admit(self, request: Request) -> bool:
        """Whether the thread that read `request` should serve it; if not, another one will."""
        with self._lock:
            self._open[request.unique] = request
            if self._busy < self._workers:
                self._busy += 1
                return True
            self._backlog.append(request)
            return False

    def next(self) -> Request | None:
        """What the thread that was admitted serves next; None: it reads again."""
        with self._lock:
            while self._backlog:
                request = self._backlog.popleft()
                if request.unique in self._open:
                    return request
            self._busy -= 1
            return None

    def claim(self, unique: int) -> bool:
        """Whether the caller answers `unique`. True once for each request."""
        with self._lock:
            return self._open.pop(unique, None) is not None

    def find(self, unique: int) -> Request | None:
        """The request, while nobody has claimed it."""
        return self._open.get(unique)

    def __len__(self) -> int:
        return len(self._open)
