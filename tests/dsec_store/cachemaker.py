"""What tests of the node cache need again and again: numbered chunks, a clock that is told, the files of a cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dsec_store.cache import MIN_QUOTA, SEGMENTS, NodeCache
from dsec_store.digest import Digest
from tests.dsec_store.blobmaker import noise

SEGMENT = MIN_QUOTA // SEGMENTS
CHUNK = SEGMENT // 4
IN_ALL = MIN_QUOTA // CHUNK
"""Chunks of size `CHUNK` that fill the smallest cache."""
TINY = 512


class Clock:
    """Time that passes when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def chunk(number: int, size: int = CHUNK) -> bytes:
    return noise(size, f"chunk {number}")


def put(cache: NodeCache, *numbers: int, size: int = CHUNK) -> None:
    for number in numbers:
        data = chunk(number, size)
        cache.put(Digest.of(data).raw, data)


def has(cache: NodeCache, number: int, size: int = CHUNK) -> bool:
    """Whether the cache has this chunk; what it gives is right."""
    data = chunk(number, size)
    found = cache.get(Digest.of(data).raw, size)
    assert found in (None, data)
    return found is not None


def segments(path: Path) -> list[Path]:
    return sorted((path / "data").iterdir())


def on_disk(path: Path) -> int:
    return sum(segment.stat().st_size for segment in segments(path))


Open = Callable[..., NodeCache]
