"""Blobs in a dictionary: for tests, and for what need not outlive the process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Final

from dsec_store.blobs import BlobStat, check_key, check_prefix
from dsec_store.bounds import check_end, check_limit, check_range
from dsec_store.errors import NotFound

_numbers: Final = count(1)


class MemoryBlobs:
    """An empty store of its own, gone with the object. `clock` tells when a blob was stored."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._blobs: dict[str, bytes] = {}
        self._modified: dict[str, float] = {}
        self._location = f"memory:{next(_numbers)}"

    @property
    def location(self) -> str:
        return self._location

    def put(self, key: str, data: bytes | memoryview) -> None:
        check_key(key)
        copy = bytes(data)
        with self._lock:
            self._blobs[key] = copy
            self._modified[key] = self._clock()

    def get(self, key: str, limit: int | None = None) -> bytes:
        data = self._find(key)
        check_limit(self._name(key), len(data), limit)
        return data

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        check_range(offset, length)
        data = self._find(key)
        check_end(self._name(key), len(data), offset, length)
        return data[offset : offset + length]

    def stat(self, key: str) -> BlobStat | None:
        check_key(key)
        with self._lock:
            data, modified = self._blobs.get(key), self._modified.get(key)
        return None if data is None else BlobStat(key, len(data), modified)

    def list(self, prefix: str) -> Iterator[BlobStat]:
        check_prefix(prefix)
        with self._lock:
            found = [
                BlobStat(key, len(data), self._modified[key])
                for key, data in self._blobs.items()
                if key.startswith(prefix)
            ]
        return iter(found)

    def delete(self, key: str) -> None:
        check_key(key)
        with self._lock:
            self._blobs.pop(key, None)
            self._modified.pop(key, None)

    def _find(self, key: str) -> bytes:
        check_key(key)
        with self._lock:
            data = self._blobs.get(key)
        if data is None:
            raise NotFound(f"{self._name(key)} does not exist")
        return data

    def _name(self, key: str) -> str:
        return f"{self._location}/{key}"
