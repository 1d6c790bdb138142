"""Reading our binary objects strictly: a cursor whose every overrun is `Corrupt`, never a struct.error."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from dsec_store.errors import Corrupt


class Cursor:
    """Walks over `data`; `what` names the object in messages."""

    def __init__(self, data: bytes | memoryview, what: str) -> None:
        self._data = memoryview(data)
        self._what = what
        self._at = 0

    def magic(self, expected: bytes) -> None:
        """Take the bytes that every object of this kind begins with."""
        if self.take(len(expected)) != expected:
            raise Corrupt(f"{self._what}: not what its name says, or written by another release (no {expected!r})")

    def take(self, size: int) -> bytes:
        return bytes(self._slice(size))

    def unpack(self, layout: struct.Struct) -> tuple[Any, ...]:
        """Take one record."""
        return layout.unpack(self._slice(layout.size))

    def records(self, layout: struct.Struct, count: int) -> Iterator[tuple[Any, ...]]:
        """`count` records in a row; the room for all of them is checked first."""
        return layout.iter_unpack(self._slice(layout.size * count))

    @property
    def left(self) -> int:
        """Bytes not yet taken."""
        return len(self._data) - self._at

    def end(self) -> None:
        """Nothing may be left."""
        if self.left:
            raise Corrupt(f"{self._what}: {self.left} bytes too many")

    def _slice(self, size: int) -> memoryview:
        if size > self.left:
            raise Corrupt(f"{self._what}: cut short at byte {len(self._data)}")
        self._at += size
        return self._data[self._at - size : self._at]
