"""The size checks that every blob store makes, so that all of them make the same ones with the same words.

Sizes that are asked for are checked before anything is read, sizes that are promised when the answer is there.
"""

from __future__ import annotations

from dsec_store.errors import Corrupt, Invalid, Unavailable


def check_range(offset: int, length: int) -> None:
    """Raise `Invalid` unless the range begins at or after byte 0 and holds at least one byte."""
    if offset < 0 or length <= 0:
        raise Invalid(f"not a range: {length} bytes from offset {offset}")


def check_limit(what: str, size: int, limit: int | None) -> None:
    """Raise `Corrupt` when a blob of `size` bytes is larger than the reader allows; `what` names it."""
    if limit is not None and size > limit:
        raise Corrupt(f"{what}: {size} bytes, expected at most {limit}")


def check_end(what: str, size: int, offset: int, length: int) -> None:
    """Raise `Corrupt` when a blob of `size` bytes ends before the range does."""
    if offset + length > size:
        raise Corrupt(f"{what}: ends at byte {size}, expected {length} bytes from {offset} on")


def check_length(what: str, data: bytes, length: int) -> bytes:
    """`data` itself, if it has exactly `length` bytes; else `Unavailable`: the answer was cut short or is not ours."""
    if len(data) != length:
        raise Unavailable(f"{what}: {len(data)} bytes came, {length} were promised")
    return data
