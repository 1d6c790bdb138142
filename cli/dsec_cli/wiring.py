"""The composition root: which parts are put around which, written once.

    commands, data daemon    retry(verify(backend))             verify is inside: damage on the way is asked for again
    node process             retry(verify(meter(backend)))      what is metered are requests as they were made
    what adds to a store     leased(retry(verify(backend)))     what a build looks for and puts is safe from gc

Settings come from options, then from the environment, then from the defaults below.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec_store.blobs import BlobStore
from dsec_store.cache import DEFAULT_QUOTA
from dsec_store.errors import Invalid
from dsec_store.leases import build_lease
from dsec_store.locate import open_store
from dsec_store.meter import MeteredBlobs
from dsec_store.objects import Objects
from dsec_store.retry import RetryBlobs, RetryPolicy
from dsec_store.verify import VerifyBlobs

LOG_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
"""Of the logs of node process and data daemon."""

PATIENT: Final = RetryPolicy()
"""Of the processes of a node and of conversions: half a minute of outage must not end what has run for hours."""

PROMPT: Final = RetryPolicy(attempts=5, deadline=15.0)
"""Of commands whose answer somebody waits for: about a second where the store refuses, 20 where it is silent."""

DEFAULT_STORE: Final = "file:///var/lib/dsec-store"
DEFAULT_ROOT: Final = "/var/lib/dsec"


@dataclass(frozen=True, slots=True)
class Settings:
    """Which store, where this node keeps its state, and how many bytes its cache may have."""

    store: str
    root: Path
    cache_bytes: int

    @classmethod
    def of(cls, store: str | None, root: str | None, cache_bytes: int | None = None) -> Settings:
        return cls(
            store or os.environ.get("DSEC_STORE") or DEFAULT_STORE,
            Path(os.path.abspath(root or os.environ.get("DSEC_ROOT") or DEFAULT_ROOT)),
            cache_bytes or _cache_bytes(os.environ.get("DSEC_CACHE_BYTES") or str(DEFAULT_QUOTA)),
        )


def _cache_bytes(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise Invalid(f"DSEC_CACHE_BYTES={text!r} is not a number of bytes")
    return int(text)


def wrap(backend: BlobStore, policy: RetryPolicy) -> BlobStore:
    """The wrap order."""
    return RetryBlobs(VerifyBlobs(backend), policy)


def open_objects(store: str, *, create: bool = False, policy: RetryPolicy = PATIENT) -> Objects:
    """The objects of the store at this URL. `create`: a folder that does not exist is made."""
    return Objects(wrap(open_store(store, create=create), policy))


@contextmanager
def open_building(store: str, *, policy: RetryPolicy = PATIENT) -> Iterator[Objects]:
    """The objects of the store at this URL, to add to: under a lease, which keeps gc off what is looked for and put.

    A folder that does not exist is made. Raises `StoreError` when the store cannot be written.
    """
    with build_lease(wrap(open_store(store, create=True), policy)) as lease:
        yield Objects(lease.blobs)


def metered_objects(store: str) -> tuple[Objects, Callable[[], dict[str, int]]]:
    """As `open_objects`, and a function that tells the requests made and bytes received so far."""
    meter = MeteredBlobs(open_store(store))

    def traffic() -> dict[str, int]:
        total = meter.snapshot().total
        return {"requests": total.requests, "wire_bytes": total.bytes_received}

    return Objects(wrap(meter, PATIENT)), traffic


def process(module: str, *arguments: str) -> list[str]:
    """The command line of one of our own processes, with this interpreter.

    Without `-P`, Python would import from the working directory first: whatever lies in a workspace, as root.
    """
    return [sys.executable, "-P", "-m", module, *arguments]
