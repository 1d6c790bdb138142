"""Several programs on one store, of which a test decides who makes the next request.

    clock = Clock()
    one = Actor(MemoryBlobs(clock), clock, lambda blobs, sleep: build(Objects(blobs), "demo", [(1,)]))
    one.step()          # its next request is made; on return it waits with the one after that, or has ended
    one.kill()          # it makes no more

Each runs in a thread of its own, and only while somebody waits in `step` for it.
"""

import threading
from collections.abc import Callable
from typing import TypeVar

from dsec_store.around import AroundBlobs, Request
from dsec_store.blobs import BlobStore
from dsec_store.errors import StoreError

T = TypeVar("T")

SLEEP = 25.0
"""Seconds that pass when a program sleeps, however short it wants to."""

_WITHIN = 30.0


class Clock:
    """Seconds since 1970 that pass when told to."""

    def __init__(self, now: float = 1_000_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Killed(BaseException):
    """What a killed program feels: it can do nothing about it."""


Sleep = Callable[[float], None]
Program = Callable[[BlobStore, Sleep], object]


class Actor:
    """One program. `outcome` is what it returned, or what it raised; None while it runs, and if it was killed."""

    def __init__(self, blobs: BlobStore, clock: Clock, program: Program) -> None:
        self._clock = clock
        self._turn = threading.Semaphore(0)
        self._waits = threading.Semaphore(0)
        self._killed = False
        self.ended = False
        self.outcome: object = None
        self._thread = threading.Thread(target=self._run, args=(_Stepped(blobs, self), program), daemon=True)
        self._thread.start()
        self._await()

    def step(self, count: int = 1) -> None:
        """Let it make `count` requests, or as many as it makes."""
        for _ in range(count):
            if self.ended:
                return
            self._turn.release()
            self._await()

    def finish(self) -> object:
        """Let it run to its end."""
        while not self.ended:
            self.step()
        self._thread.join(_WITHIN)
        return self.outcome

    def kill(self) -> None:
        """End it where it waits: this request is never made."""
        self._killed = True
        self.finish()

    def wait(self) -> None:
        """In the actor's thread: wait for the turn."""
        self._waits.release()
        self._turn.acquire()
        if self._killed:
            raise Killed

    def sleep(self, seconds: float) -> None:
        """What a program calls in place of time.sleep."""
        self.wait()
        self._clock.now += SLEEP

    def _await(self) -> None:
        assert self._waits.acquire(timeout=_WITHIN), "the actor waits for something else than its turn"

    def _run(self, blobs: BlobStore, program: Program) -> None:
        try:
            self.outcome = program(blobs, self.sleep)
        except StoreError as error:
            self.outcome = error
        except Killed:
            pass
        except BaseException as error:  # told by whoever looks at the outcome
            self.outcome = error
        finally:
            self.ended = True
            self._waits.release()


class _Stepped(AroundBlobs):
    def __init__(self, inner: BlobStore, actor: Actor) -> None:
        super().__init__(inner)
        self._actor = actor

    def _around(self, request: Request, call: Callable[[], T]) -> T:
        self._actor.wait()
        return call()
