"""Many at once, or one alone: composing and releasing share the node, `gc` and `stop` have it for themselves.

Who waits to be alone goes before who comes later, so that a busy node can be stopped. A closed gate lets nobody in.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dsec_store.errors import Unavailable


class Gate:
    """Not re-entrant."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._alone = False
        self.closed = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Raises `Unavailable` when the gate is closed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._alone or self.closed)
            if self.closed:
                raise Unavailable("the node is stopping; repeat the command to start it anew")
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self, within: float | None = None, *, anyway: bool = False) -> Iterator[None]:
        """Wait until nobody is inside; whoever comes meanwhile waits for us.

        After `within` seconds raise `Unavailable`, or go in `anyway`, with those who are inside for too long.
        """
        deadline = None if within is None else time.monotonic() + within
        with self._changed:
            if not self._await(lambda: not self._alone, deadline) and not anyway:
                raise _busy()
            self._alone = True
            if not self._await(lambda: not self._inside, deadline) and not anyway:
                self._leave()
                raise _busy()
        try:
            yield
        finally:
            with self._changed:
                self._leave()

    def close(self) -> None:
        """Nobody enters `shared` any more, until `open`."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def open(self) -> None:
        with self._changed:
            self.closed = False

    def _await(self, condition: Callable[[], bool], deadline: float | None) -> bool:
        return self._changed.wait_for(condition, None if deadline is None else max(0.0, deadline - time.monotonic()))

    def _leave(self) -> None:
        self._alone = False
        self._changed.notify_all()


def _busy() -> Unavailable:
    return Unavailable("requests are still under way: try again later, or stop with --force and they fail")
