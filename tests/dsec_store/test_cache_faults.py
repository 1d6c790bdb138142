"""The node cache under damage, crashes, reboots, and disks that are full or fail: it loses chunks, and nothing else."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsec_store import cache as module
from dsec_store.cache import MIN_QUOTA, RETRY_SECONDS, NodeCache
from dsec_store.cacheindex import is_sound
from dsec_store.digest import Digest
from dsec_store.errors import Denied
from tests.dsec_store.blobmaker import PATIENCE, flipped, in_threads, noise
from tests.dsec_store.cachemaker import CHUNK, IN_ALL, TINY, Clock, Open, chunk, has, on_disk, put, segments
from tests.kernel import mount, unmountable

# -- damage of the data ----------------------------------------------------------------------------------------------


def test_a_damaged_chunk_is_dropped_counted_and_healed(cache: NodeCache, path: Path) -> None:
    put(cache, 0, 1)
    (segment,) = segments(path)
    segment.write_bytes(flipped(segment.read_bytes(), 100))
    assert not has(cache, 0)
    assert has(cache, 1)
    assert (cache.figures().damaged, cache.figures().chunks) == (1, 1)
    assert not has(cache, 0)
    assert cache.figures().damaged == 1
    put(cache, 0)
    assert has(cache, 0)


def truncated(path: Path) -> None:
    for segment in segments(path):
        os.truncate(segment, CHUNK + 5)


def zeroed(path: Path) -> None:
    for segment in segments(path):
        segment.write_bytes(bytes(segment.stat().st_size))


def swapped(path: Path) -> None:
    first, second, *_ = segments(path)
    first.rename(path / "other")
    second.rename(first)
    (path / "other").rename(second)


def deleted(path: Path) -> None:
    for segment in segments(path)[1:]:
        segment.unlink()


def all_deleted(path: Path) -> None:
    shutil.rmtree(path / "data")


def strangers(path: Path) -> None:
    for name in ("README", "9" * 10, "0000000001.bak", "12", "٣"):
        (path / "data" / name).write_bytes(b"?")
    (path / "data" / "0000000099").mkdir()


def replaced_by_a_file(path: Path) -> None:
    shutil.rmtree(path / "data")
    (path / "data").write_bytes(b"?")


DAMAGES = [truncated, zeroed, swapped, deleted, all_deleted, strangers, replaced_by_a_file]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_segments_cost_chunks_and_nothing_else(
    opened: Open, path: Path, damage: Callable[[Path], None]
) -> None:
    first = opened()
    put(first, *range(12))
    first.close()
    damage(path)
    second = opened()
    for number in range(12):
        has(second, number)
    put(second, *range(20))
    assert all(has(second, number) for number in range(20))
    assert second.figures().chunks == 20


# -- damage of the index ---------------------------------------------------------------------------------------------

MANY = 1500


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed cache whose index has many pages."""
    path = tmp_path_factory.mktemp("template") / "cache"
    cache = NodeCache(path, MIN_QUOTA)
    put(cache, *range(MANY), size=TINY)
    cache.close()
    return path


@pytest.fixture(params=["closed", "open"])
def many(template: Path, path: Path, request: pytest.FixtureRequest) -> Path:
    """The index file of a copy of it at `path`: closed in order, or as a killed process leaves it."""
    shutil.copytree(template, path)
    if request.param == "open":
        (path / "state").write_text(module._BOOT_ID.read_text().strip())
    return path / "index" / "data.mdb"


def survives(cache: NodeCache) -> int:
    """The cache works, and never lies; how many chunks it still has."""
    kept = sum(has(cache, number, TINY) for number in range(MANY))
    put(cache, *range(MANY), size=TINY)
    assert all(has(cache, number, TINY) for number in range(MANY))
    assert cache.figures().damaged == 0
    return kept


def test_a_sound_index_is_kept(many: Path, opened: Open) -> None:
    assert is_sound(many.parent)
    assert survives(opened()) == MANY


@pytest.mark.parametrize("share", [0, 0.01, 0.25, 0.5, 0.9])
def test_a_truncated_index_starts_empty(many: Path, opened: Open, share: float) -> None:
    """LMDB maps the file: a read beyond its end would kill the process by SIGBUS."""
    os.truncate(many, int(many.stat().st_size * share))
    assert not is_sound(many.parent)
    assert survives(opened()) == 0


def test_the_walk_may_die_of_it_and_we_do_not(many: Path) -> None:
    """That the guard is needed: the walk itself is killed."""
    os.truncate(many, many.stat().st_size // 2)
    walk = [
        sys.executable,
        "-c",
        f"from dsec_store.cacheindex import _walk; _walk(__import__('pathlib').Path({str(many.parent)!r}))",
    ]
    killed = subprocess.run(walk, check=False, stderr=subprocess.DEVNULL, timeout=PATIENCE)
    assert killed.returncode == -signal.SIGBUS


@pytest.mark.parametrize("seed", range(6))
def test_a_garbled_index_starts_empty_or_works(many: Path, opened: Open, seed: int) -> None:
    source, pages = random.Random(seed), many.stat().st_size // 4096
    with open(many, "r+b") as file:
        for page in source.sample(range(pages), max(1, pages // 4)):
            file.seek(page * 4096)
            file.write(source.randbytes(4096))
    survives(opened())


def test_an_index_of_garbage_starts_empty(many: Path, opened: Open) -> None:
    many.write_bytes(noise(many.stat().st_size))
    assert survives(opened()) == 0


def test_a_deleted_index_starts_empty(many: Path, opened: Open) -> None:
    many.unlink()
    assert survives(opened()) == 0


def test_a_file_where_the_index_should_be(many: Path, opened: Open) -> None:
    shutil.rmtree(many.parent)
    many.parent.write_bytes(b"?")
    assert survives(opened()) == 0


def test_an_index_of_nonsense_that_lmdb_can_read(many: Path, opened: Open) -> None:
    """Entries of a wrong length and segments that are no numbers."""
    import lmdb

    with (
        lmdb.open(str(many.parent), max_dbs=2, lock=False, map_size=1 << 24) as env,
        env.begin(write=True) as transaction,
    ):
        transaction.put(Digest.of(chunk(0, TINY)).raw, b"?", db=env.open_db(b"digest", transaction))
        transaction.put(b"?", b"", db=env.open_db(b"segment", transaction))
    assert is_sound(many.parent)
    assert survives(opened()) == 0


def test_without_a_process_for_the_check_the_cache_waits(
    template: Path, path: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is thrown away for want of a process: the next write tries again."""
    clock = Clock()
    shutil.copytree(template, path)
    (path / "state").write_text(module._BOOT_ID.read_text().strip())
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/nonexistent")
        cache = opened(clock=clock)
    assert not has(cache, 0, TINY)
    put(cache, -1)
    assert cache.figures().failed_writes == 1
    clock.now += RETRY_SECONDS
    put(cache, -1)
    assert survives(cache) == MANY


def test_an_index_that_fails_while_open_starts_empty(cache: NodeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    import lmdb

    put(cache, 1)

    def fail(_: bytes) -> None:
        raise lmdb.CorruptedError("page 7")

    monkeypatch.setattr(cache._index, "get", fail)
    assert not has(cache, 1)
    put(cache, 1, 2)
    assert has(cache, 1)
    assert cache.figures().chunks == 2


# -- crashes and reboots ---------------------------------------------------------------------------------------------

WRITER = """
import sys
from pathlib import Path
from dsec_store.cache import NodeCache
from tests.dsec_store.cachemaker import TINY, put
cache = NodeCache(Path(sys.argv[1]), 0)
for number in range(1_000_000):
    put(cache, number, size=TINY)
    print(number, flush=True)
"""


def start(script: str, path: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [*sys.path, os.getcwd()]))}
    command = [sys.executable, "-c", script, str(path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def test_a_killed_writer_leaves_what_it_had_written(opened: Open, path: Path) -> None:
    for upto in (50, 500):
        with start(WRITER, path) as writer:
            assert writer.stdout is not None
            for line in writer.stdout:
                if int(line) == upto:
                    writer.kill()
                    break
        cache = opened()
        assert all(has(cache, number, TINY) for number in range(upto + 1))
        assert cache.figures().damaged == 0
        cache.close()


def test_a_second_process_is_refused(opened: Open, path: Path) -> None:
    with start(WRITER, path) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        with pytest.raises(Denied, match="in use by another data daemon"):
            opened()
        owner.kill()
    assert has(opened(), 0, TINY)


def test_a_second_cache_in_the_same_process_is_refused(cache: NodeCache, opened: Open) -> None:
    with pytest.raises(Denied):
        opened()
    cache.close()
    opened()


@pytest.fixture
def boot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file that tells which boot this is."""
    path = tmp_path / "boot_id"
    path.write_text("first-boot\n")
    monkeypatch.setattr(module, "_BOOT_ID", path)
    return path


def test_a_cache_closed_in_order_survives_a_reboot(boot: Path, opened: Open) -> None:
    cache = opened()
    put(cache, 1)
    cache.close()
    boot.write_text("second-boot\n")
    assert has(opened(), 1)


@pytest.mark.parametrize("state", ["first-boot", "", "closed", "closed ", f"closed {'0' * 64}", "\xff"])
def test_a_cache_that_was_open_at_a_reboot_starts_empty(boot: Path, opened: Open, path: Path, state: str) -> None:
    cache = opened()
    assert (path / "state").read_text() == "first-boot"
    put(cache, 1)
    cache.close()
    (path / "state").write_text(state)  # as if it had not been closed
    boot.write_text("second-boot\n")
    again = opened()
    assert not has(again, 1)
    assert again.figures().bytes == on_disk(path) == 0
    put(again, 1)
    assert has(again, 1)


def test_a_cache_that_was_open_in_this_boot_is_kept(boot: Path, opened: Open, path: Path) -> None:
    cache = opened()
    put(cache, 1)
    cache.close()
    (path / "state").write_text("first-boot")
    assert has(opened(), 1)


# -- full and failing disks ------------------------------------------------------------------------------------------

needs_tmpfs = pytest.mark.skipif(bool(unmountable("tmpfs")), reason=unmountable("tmpfs") or "can be mounted")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    target = tmp_path / "disk"
    target.mkdir()
    with mount("tmpfs", target, "tmpfs", "size=8m", flags=0):
        yield target


@pytest.mark.component
@needs_tmpfs
def test_a_full_disk_is_served_around_and_healed(small_disk: Path) -> None:
    clock, filler = Clock(), small_disk / "filler"
    cache = NodeCache(small_disk / "cache", MIN_QUOTA, clock=clock)
    try:
        put(cache, 0)
        fill(filler)
        put(cache, *range(1, 10))
        assert cache.figures().failed_writes == 1  # then it did not try again
        assert not any(has(cache, number) for number in range(1, 10))
        assert has(cache, 0)
        filler.unlink()
        put(cache, 1)
        assert not has(cache, 1)
        clock.now += RETRY_SECONDS
        put(cache, 1)
        assert has(cache, 1)
    finally:
        cache.close()


@pytest.mark.component
@needs_tmpfs
def test_a_quota_larger_than_the_disk_goes_on_turning_over(small_disk: Path) -> None:
    clock = Clock()
    cache = NodeCache(small_disk / "cache", MIN_QUOTA, clock=clock)
    try:
        for number in range(2 * IN_ALL):
            put(cache, number)
            clock.now += RETRY_SECONDS
        assert cache.figures().failed_writes > 0
        assert cache.figures().damaged == 0
        assert sum(has(cache, number) for number in range(2 * IN_ALL - 40, 2 * IN_ALL)) > 20
    finally:
        cache.close()


@pytest.mark.component
@needs_tmpfs
def test_a_disk_that_is_full_at_the_start(small_disk: Path) -> None:
    (small_disk / "cache").mkdir()
    (small_disk / "cache" / "lock").touch()
    fill(small_disk / "filler")
    clock = Clock()
    cache = NodeCache(small_disk / "cache", MIN_QUOTA, clock=clock)
    try:
        put(cache, 1)
        assert not has(cache, 1)
        assert cache.figures().failed_writes == 1
        (small_disk / "filler").unlink()
        clock.now += RETRY_SECONDS
        put(cache, 1)
        assert has(cache, 1)
    finally:
        cache.close()


def fill(path: Path) -> None:
    """Leave not a byte on the disk."""
    with open(path, "wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue


def test_a_place_that_takes_nothing_is_refused_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Denied, match="choose another DSEC_ROOT"):
        NodeCache(tmp_path / "file" / "cache")


def test_a_write_that_fails_is_counted_and_not_raised(cache: NodeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(module, "_write", fail)
    put(cache, 1, 2, 3)
    assert cache.figures().failed_writes == 1
    assert not has(cache, 1)


def test_a_disk_that_cannot_be_read_is_a_miss(cache: NodeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    put(cache, 1)

    def fail(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", fail)
        assert not has(cache, 1)
    put(cache, 1)
    assert has(cache, 1)


def test_closing_under_readers_and_writers(opened: Open) -> None:
    cache, stop = opened(), threading.Event()

    def use(thread: int) -> None:
        for number in range(1000):
            put(cache, number % 50, size=TINY)
            has(cache, (number + thread) % 50, size=TINY)
            if stop.is_set():
                return

    def close() -> None:
        while cache.figures().admitted < 40:
            pass
        cache.close()
        stop.set()

    assert in_threads([lambda: use(1), lambda: use(2), close]) == [None] * 3
