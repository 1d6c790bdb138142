"""The contract of `dsec_store.blobs`, as tests that every implementation runs, the wrappers included.

    class TestFolderBlobs(BlobStoreContract):
        @pytest.fixture
        def store(self, tmp_path: Path) -> BlobStore:
            return FolderBlobs(tmp_path)

`store` is empty at the start of each test. What a backend once got wrong becomes a test here, so that none gets it
wrong again. This is the only module of the package that needs pytest.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest

from dsec_store.blobs import MAX_KEY_LENGTH, BlobStat, BlobStore
from dsec_store.errors import Corrupt, Invalid, NotFound

BIG = bytes(range(256)) * (8 << 20 >> 8)
"""8 MiB: more than any buffer on the way."""

GOOD_KEYS = [
    "a",
    "0",
    "_",
    "parts/ab/" + "ab12" * 16,
    "refs/team%2Fdemo%3Alatest",  # a percent sign stays what it is, however the backend spells it
    "refs/100%",
    "refs/a..b",
    "refs/a.",
    "refs/a-b_c.D",
    "x" * 255,
    "/".join(["segment-" + "x" * 81] * 10)[:MAX_KEY_LENGTH],
]

BAD_KEYS = [
    "",
    "/",
    "/a",
    "a/",
    "a//b",
    ".",
    "..",
    "a/../b",
    "a/./b",
    ".hidden",
    "a/.hidden",
    "-a",
    "a b",
    "a\nb",
    "a\n",
    "a\\b",
    "a\0b",
    "ä",
    "a:b",
    "a?b",
    "x" * 256,
    "/".join(["x" * 99] * 10),
]

BAD_PREFIXES = ["parts", "/", "/parts/", "parts//", "../", ".tmp/", "pa rts/"]

Use = Callable[[BlobStore, str], object]
"""One way to use a store with a key."""

CLOCKS_DIFFER = 60.0
"""Seconds by which the clock of a backend may differ from ours, its rounding included."""

READS: list[Use] = [
    lambda store, key: store.get(key),
    lambda store, key: store.get(key, 10),
    lambda store, key: store.get_range(key, 0, 1),
]
USES: list[Use] = [
    *READS,
    lambda store, key: store.put(key, b""),
    lambda store, key: store.stat(key),
    lambda store, key: store.delete(key),
]


def listed(store: BlobStore, prefix: str = "") -> dict[str, int]:
    """Key -> size of what `store` lists; fails when a key comes twice."""
    found = list(store.list(prefix))
    assert len({each.key for each in found}) == len(found), "a key was listed twice"
    return {each.key: each.size for each in found}


class BlobStoreContract:
    """Subclass it and give it a fixture `store`."""

    rounds = 60
    """How often the tests with several threads repeat what they do; less for a slow backend."""

    @pytest.fixture
    def store(self) -> BlobStore:
        raise NotImplementedError("the subclass gives the store")

    # What was put is there, and nothing else.

    @pytest.mark.parametrize("data", [b"", b"\0", b"hello", BIG], ids=["empty", "zero", "some", "8 MiB"])
    def test_what_was_put_comes_back(self, store: BlobStore, data: bytes) -> None:
        store.put("refs/demo", data)
        assert store.get("refs/demo") == data
        assert store.stat("refs/demo") == BlobStat("refs/demo", len(data))
        assert listed(store) == {"refs/demo": len(data)}

    @pytest.mark.parametrize("key", GOOD_KEYS)
    def test_every_legal_key_works_in_every_method(self, store: BlobStore, key: str) -> None:
        store.put(key, key.encode())
        assert store.get(key) == key.encode()
        assert store.get_range(key, 0, 1) == key.encode()[:1]
        assert store.stat(key) == BlobStat(key, len(key))
        assert listed(store) == {key: len(key)}
        store.delete(key)
        assert store.stat(key) is None

    def test_keys_that_look_alike_differ(self, store: BlobStore) -> None:
        keys = ["refs/a", "refs/A", "refs/a%2Fb", "refs/a%2fb", "refs/a%252Fb", "refs/a.", "refs/a%20", "refs/a-b"]
        for key in keys:
            store.put(key, key.encode())
        assert [store.get(key).decode() for key in keys] == keys
        assert set(listed(store)) == set(keys)

    def test_a_memoryview_can_be_put(self, store: BlobStore) -> None:
        store.put("a", memoryview(b"0123456789")[2:5])
        assert store.get("a") == b"234"

    def test_later_changes_of_a_buffer_do_not_reach_the_blob(self, store: BlobStore) -> None:
        buffer = bytearray(b"before")
        store.put("a", memoryview(buffer))
        buffer[:] = b"after!"
        assert store.get("a") == b"before"

    def test_put_replaces(self, store: BlobStore) -> None:
        for data in (b"long and old", b"new", b"", b"longer than ever"):
            store.put("refs/demo", data)
            assert store.get("refs/demo") == data
            assert listed(store) == {"refs/demo": len(data)}

    def test_put_may_be_repeated(self, store: BlobStore) -> None:
        store.put("a", b"same")
        store.put("a", b"same")
        assert store.get("a") == b"same"

    def test_when_a_blob_was_stored_last_is_told(self, store: BlobStore) -> None:
        for data in (b"first", b"second"):
            before = time.time()
            store.put("refs/demo", data)
            (listed_at,) = [each.modified for each in store.list("refs/")]
            stat = store.stat("refs/demo")
            assert stat is not None
            for modified in (stat.modified, listed_at):
                assert modified is not None
                assert before - CLOCKS_DIFFER <= modified <= time.time() + CLOCKS_DIFFER

    # Absence is said, never shown as something empty.

    @pytest.mark.parametrize("use", READS)
    def test_reading_what_is_absent_is_not_found(self, store: BlobStore, use: Use) -> None:
        store.put("parts/ab/cd", b"x")
        for key in ("none", "parts/none", "parts", "parts/ab", "parts/ab/cd/ef"):
            with pytest.raises(NotFound, match=key):
                use(store, key)

    def test_stat_of_what_is_absent_is_none(self, store: BlobStore) -> None:
        store.put("parts/ab/cd", b"x")
        assert [store.stat(key) for key in ("none", "parts", "parts/ab", "parts/ab/c", "parts/ab/cd/ef")] == [None] * 5

    def test_delete_makes_absent_and_may_be_repeated(self, store: BlobStore) -> None:
        store.put("parts/a", b"x")
        store.put("parts/ab", b"y")
        for _ in range(2):
            store.delete("parts/a")
            assert store.stat("parts/a") is None
            with pytest.raises(NotFound):
                store.get("parts/a")
            assert listed(store) == {"parts/ab": 1}

    def test_delete_of_a_folder_deletes_nothing(self, store: BlobStore) -> None:
        store.put("parts/ab/cd", b"x")
        store.delete("parts")
        store.delete("parts/ab")
        store.delete("parts/ab/cd/ef")
        assert listed(store) == {"parts/ab/cd": 1}

    def test_a_deleted_blob_can_be_put_again(self, store: BlobStore) -> None:
        store.put("a", b"first")
        store.delete("a")
        store.put("a", b"second")
        assert store.get("a") == b"second"

    # Sizes are bounded, ranges exact.

    def test_get_reads_at_most_limit(self, store: BlobStore) -> None:
        store.put("a", b"12345")
        assert store.get("a", 5) == b"12345"
        assert store.get("a", 100) == b"12345"
        for limit in (4, 0):
            with pytest.raises(Corrupt, match="a: 5 bytes"):
                store.get("a", limit)
        store.put("a", b"")
        assert store.get("a", 0) == b""

    @pytest.mark.parametrize(
        ("offset", "length"),
        [(0, 1), (0, len(BIG)), (len(BIG) - 1, 1), (1, len(BIG) - 1), (4095, 4098), (5 << 20, 3 << 20)],
    )
    def test_a_range_is_exactly_what_was_asked_for(self, store: BlobStore, offset: int, length: int) -> None:
        store.put("parts/big", BIG)
        assert store.get_range("parts/big", offset, length) == BIG[offset : offset + length]

    @pytest.mark.parametrize(("offset", "length"), [(0, 6), (4, 2), (5, 1), (6, 1), (1 << 40, 1 << 20)])
    def test_a_range_beyond_the_end_is_corrupt(self, store: BlobStore, offset: int, length: int) -> None:
        store.put("a", b"12345")
        with pytest.raises(Corrupt, match=r"a: ends at byte 5"):
            store.get_range("a", offset, length)

    def test_an_empty_blob_has_no_range(self, store: BlobStore) -> None:
        store.put("a", b"")
        with pytest.raises(Corrupt):
            store.get_range("a", 0, 1)

    @pytest.mark.parametrize(("offset", "length"), [(0, 0), (0, -1), (-1, 1)])
    def test_what_is_no_range_is_invalid(self, store: BlobStore, offset: int, length: int) -> None:
        store.put("a", b"12345")
        with pytest.raises(Invalid):
            store.get_range("a", offset, length)

    # Listings go by folder.

    def test_a_listing_shows_the_folder_and_no_neighbour(self, store: BlobStore) -> None:
        for key in ("parts/a/1", "parts/a/b/2", "parts/ab/3", "parts/a1", "parts-old/a/4", "refs/a/5"):
            store.put(key, b"x" * int(key[-1]))
        assert listed(store, "parts/a/") == {"parts/a/1": 1, "parts/a/b/2": 2}
        assert listed(store, "parts/") == {"parts/a/1": 1, "parts/a/b/2": 2, "parts/ab/3": 3, "parts/a1": 1}
        assert listed(store, "parts/a/b/") == {"parts/a/b/2": 2}
        assert len(listed(store, "")) == 6

    def test_a_listing_may_be_empty(self, store: BlobStore) -> None:
        assert listed(store) == {}
        store.put("parts/a", b"x")
        assert listed(store, "parts/a/") == {}
        assert listed(store, "none/at/all/") == {}

    def test_every_blob_is_listed_once_while_others_come_and_go(self, store: BlobStore) -> None:
        lasting = {f"parts/{i:02}/lasting": i for i in range(40)}
        for key, size in lasting.items():
            store.put(key, bytes(size))

        def churn(stop: threading.Event) -> None:
            while not stop.is_set():
                store.put("parts/07/passing", b"x")
                store.put("parts/new/passing", b"x")
                store.put("parts/07/lasting", bytes(7))
                store.delete("parts/07/passing")

        with beside(churn):
            for _ in range(5):
                assert listed(store, "parts/").items() >= lasting.items()

    # Wrong input is refused by every method, before anything happens.

    @pytest.mark.parametrize("key", BAD_KEYS)
    def test_a_bad_key_is_invalid(self, store: BlobStore, key: str) -> None:
        for use in USES:
            with pytest.raises(Invalid):
                use(store, key)
        assert listed(store) == {}

    @pytest.mark.parametrize("prefix", BAD_PREFIXES)
    def test_a_bad_prefix_is_invalid(self, store: BlobStore, prefix: str) -> None:
        with pytest.raises(Invalid):
            list(store.list(prefix))

    # Many threads.

    def test_readers_never_see_a_torn_blob(self, store: BlobStore) -> None:
        versions = [bytes([i]) * (100_000 + i) for i in range(4)]
        store.put("refs/demo", versions[0])

        def write(data: bytes, stop: threading.Event) -> None:
            while not stop.is_set():
                store.put("refs/demo", data)

        with beside(*(partial(write, data) for data in versions)):
            for _ in range(self.rounds):
                assert store.get("refs/demo") in versions
                assert len(set(store.get_range("refs/demo", 10, 90_000))) == 1
                stat = store.stat("refs/demo")
                assert stat is not None
                assert stat.size in map(len, versions)
        assert store.get("refs/demo") in versions

    def test_threads_do_not_disturb_each_other(self, store: BlobStore) -> None:
        def work(number: int) -> None:
            key, data = f"parts/{number % 3}/{number}", bytes([number]) * (1000 * number)
            store.put(key, data)
            assert store.get(key) == data
            if number % 2:
                store.delete(key)

        numbers = range(1, self.rounds)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, numbers))
        assert listed(store) == {f"parts/{n % 3}/{n}": 1000 * n for n in numbers if n % 2 == 0}

    # What it is called.

    def test_the_location_is_one_line_and_stays(self, store: BlobStore) -> None:
        before = store.location
        store.put("a", b"x")
        assert before
        assert before.isprintable()
        assert store.location == before


@contextmanager
def beside(*tasks: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run each task in a thread while the body runs; its event is set at the end. Raises what a task raised."""
    stop = threading.Event()
    with ThreadPoolExecutor(len(tasks)) as pool:
        running = [pool.submit(task, stop) for task in tasks]
        try:
            yield
        finally:
            stop.set()
    for task in running:
        task.result()
