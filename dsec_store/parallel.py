"""The same work on several things at once, in threads that never keep the process from ending."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TypeVar

T = TypeVar("T")


def in_parallel(work: Callable[[T], object], things: Sequence[T], threads: int) -> None:
    """Call `work` once for each thing, in up to `threads` threads. On return all calls have ended, well or not.

    Raises the first exception that was raised; things that nobody has begun with by then are left out.
    """
    waiting: SimpleQueue[T] = SimpleQueue()
    for thing in things:
        waiting.put(thing)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            while not errors:
                work(waiting.get_nowait())
        except Empty:
            return
        except BaseException as error:
            errors.append(error)

    crew = [threading.Thread(target=run, daemon=True) for _ in range(min(threads, len(things)))]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    if errors:
        raise errors[0]
