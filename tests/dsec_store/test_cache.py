"""The node cache: right bytes or none, and never over its quota."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsec_store import cache as module
from dsec_store.cache import MIN_QUOTA, SEGMENTS, NodeCache
from dsec_store.digest import Digest
from tests.dsec_store.blobmaker import in_threads
from tests.dsec_store.cachemaker import CHUNK, IN_ALL, SEGMENT, Open, chunk, has, on_disk, put, segments

# -- what it keeps ---------------------------------------------------------------------------------------------------


def test_what_is_put_is_got(cache: NodeCache) -> None:
    assert not has(cache, 1)
    put(cache, 1, 2, 1)
    assert has(cache, 1)
    assert has(cache, 2)
    assert not has(cache, 3)
    figures = cache.figures()
    assert (figures.chunks, figures.admitted, figures.bytes) == (2, 2, 2 * CHUNK)


def test_a_wrong_size_is_a_miss(cache: NodeCache) -> None:
    put(cache, 1)
    assert cache.get(Digest.of(chunk(1)).raw, CHUNK - 1) is None


def test_a_wrong_size_costs_no_other_reader_the_chunk(cache: NodeCache) -> None:
    put(cache, 1)
    cache.get(Digest.of(chunk(1)).raw, CHUNK + 1)
    assert has(cache, 1)
    assert cache.figures().damaged == 0


def test_it_outlives_its_process(opened: Open) -> None:
    first = opened()
    put(first, *range(10))
    first.close()
    second = opened()
    assert all(has(second, number) for number in range(10))
    assert (second.figures().chunks, second.figures().bytes, second.figures().admitted) == (10, 10 * CHUNK, 0)
    put(second, 10)
    assert len({segment.name for segment in segments(second._path)}) == 3  # the last segment was filled up


def test_a_closed_cache_has_and_takes_nothing(cache: NodeCache) -> None:
    put(cache, 1)
    cache.close()
    put(cache, 2)
    assert not has(cache, 1)
    assert cache.figures().chunks == 0
    cache.close()


def test_a_chunk_larger_than_a_segment_is_not_kept(cache: NodeCache) -> None:
    put(cache, 1, size=SEGMENT + 1)
    put(cache, 2, size=SEGMENT)
    assert not has(cache, 1, SEGMENT + 1)
    assert has(cache, 2, SEGMENT)
    assert cache.figures().failed_writes == 0


def test_small_quotas_count_as_the_smallest(opened: Open) -> None:
    assert opened(quota=1).figures().quota == MIN_QUOTA


# -- room ------------------------------------------------------------------------------------------------------------


def test_the_quota_is_never_exceeded(cache: NodeCache, path: Path) -> None:
    for number in range(IN_ALL + 100):
        put(cache, number, size=CHUNK - number)
        assert cache.figures().bytes <= MIN_QUOTA
        assert on_disk(path) <= MIN_QUOTA
    assert cache.figures().bytes > MIN_QUOTA - 2 * SEGMENT
    assert cache.figures().chunks <= len([n for n in range(IN_ALL + 100) if has(cache, n, CHUNK - n)])


def test_the_quota_is_never_exceeded_by_many_threads(cache: NodeCache) -> None:
    def fill(thread: int) -> int:
        most = 0
        for number in range(thread * 1000, thread * 1000 + 60):
            put(cache, number)
            assert has(cache, number) or True
            most = max(most, cache.figures().bytes)
        return most

    peaks = in_threads([lambda thread=thread: fill(thread) for thread in range(8)])  # type: ignore[misc]
    assert all(isinstance(peak, int) and peak <= MIN_QUOTA for peak in peaks)
    figures = cache.figures()
    assert (figures.admitted, figures.failed_writes, figures.damaged) == (480, 0, 0)
    assert figures.bytes + figures.evicted_bytes == 480 * CHUNK


def test_the_segment_that_was_not_used_for_longest_goes(cache: NodeCache) -> None:
    put(cache, *range(IN_ALL))
    assert has(cache, 0)  # the first segment is the one used last now
    put(cache, IN_ALL)
    assert [has(cache, number) for number in range(8)] == [True] * 4 + [False] * 4
    assert cache.figures().evicted_bytes == SEGMENT
    assert cache.figures().chunks == IN_ALL - 4 + 1


def test_what_was_used_is_remembered_by_segment_age_after_a_restart(opened: Open) -> None:
    first = opened()
    put(first, *range(IN_ALL))
    first.close()
    second = opened()
    put(second, IN_ALL)
    assert not has(second, 0)
    assert has(second, IN_ALL - 1)


def test_a_smaller_quota_holds_from_the_start(opened: Open, path: Path) -> None:
    large = opened(quota=4 * MIN_QUOTA)
    put(large, *range(3 * IN_ALL))
    large.close()
    small = opened()
    assert small.figures().bytes <= MIN_QUOTA
    assert on_disk(path) <= MIN_QUOTA
    put(small, -1)
    assert has(small, -1)


def test_an_evicted_segment_is_read_to_its_end(cache: NodeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    put(cache, 0)
    read = module._read

    def evict_first(*arguments: object) -> bytes:
        monkeypatch.setattr(module, "_read", read)
        put(cache, *range(1, IN_ALL + 10))
        return read(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_read", evict_first)
    assert has(cache, 0)
    assert not has(cache, 0)


def test_descriptors_are_bounded(cache: NodeCache) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for number in range(3 * IN_ALL):
        put(cache, number)
        assert len(os.listdir("/proc/self/fd")) - before <= SEGMENTS + 1
    cache.close()
    assert len(os.listdir("/proc/self/fd")) < before
