"""A node cache, for tests of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsec_store.cache import MIN_QUOTA, NodeCache
from tests.dsec_store.cachemaker import Clock, Open


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def opened(path: Path) -> Iterator[Open]:
    """Opens the cache at `path` (or elsewhere), and closes in the end what is open."""
    caches: list[NodeCache] = []

    def open_(quota: int = MIN_QUOTA, where: Path = path, clock: Callable[[], float] | None = None) -> NodeCache:
        caches.append(NodeCache(where, quota, clock=clock or Clock()))
        return caches[-1]

    yield open_
    for cache in caches:
        cache.close()


@pytest.fixture
def cache(opened: Open) -> NodeCache:
    return opened()
