"""The common part of all wrappers: a blob store around a blob store.

What concerns every operation alike (count it, delay it, repeat it) is written once, in `_around`; what concerns one
operation overrides that method.

A listing passes through `_around` as a whole: it is read to its end before the first entry is handed out, since a
half-consumed listing could not be repeated without entries coming twice. 100,000 entries take some 20 MB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from dsec_store.blobs import BlobStat, BlobStore

T = TypeVar("T")


class Operation(StrEnum):
    """The methods of a blob store."""

    PUT = "put"
    GET = "get"
    GET_RANGE = "get_range"
    STAT = "stat"
    LIST = "list"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class Request:
    """One call of a method: its key (or prefix), the bytes it hands over (put) and where it reads (get_range)."""

    operation: Operation
    key: str
    sent: int = 0
    offset: int = 0
    length: int = 0


class AroundBlobs:
    """Forwards everything to `inner`, through `_around`."""

    def __init__(self, inner: BlobStore) -> None:
        self.inner = inner

    def _around(self, request: Request, call: Callable[[], T]) -> T:
        """Answer `request`; `call` asks the inner store, as often as it is called."""
        return call()

    @property
    def location(self) -> str:
        return self.inner.location

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._around(Request(Operation.PUT, key, sent=memoryview(data).nbytes), lambda: self.inner.put(key, data))

    def get(self, key: str, limit: int | None = None) -> bytes:
        return self._around(Request(Operation.GET, key), lambda: self.inner.get(key, limit))

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        request = Request(Operation.GET_RANGE, key, offset=offset, length=length)
        return self._around(request, lambda: self.inner.get_range(key, offset, length))

    def stat(self, key: str) -> BlobStat | None:
        return self._around(Request(Operation.STAT, key), lambda: self.inner.stat(key))

    def list(self, prefix: str) -> Iterator[BlobStat]:
        return iter(self._around(Request(Operation.LIST, prefix), lambda: tuple(self.inner.list(prefix))))

    def delete(self, key: str) -> None:
        self._around(Request(Operation.DELETE, key), lambda: self.inner.delete(key))


def bytes_received(answer: object) -> int:
    """Size of an answer that consists of a blob's bytes; other answers count as 0."""
    return len(answer) if isinstance(answer, bytes) else 0
