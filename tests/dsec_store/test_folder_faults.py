"""The folder store when things go wrong around it: killed writers, a full disk, a read-only mount, a lost folder."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsec_store.backends.folder import STALE_SECONDS, FolderBlobs
from dsec_store.blobs import BlobStore
from dsec_store.errors import Denied, NotFound, StoreError, Unavailable
from dsec_store.testing import USES, listed

OLD, NEW = b"o" * 1_000_000, b"n" * 2_000_000

ENDLESS_WRITER = """
import sys
from pathlib import Path
from dsec_store.backends.folder import FolderBlobs
store = FolderBlobs(Path(sys.argv[1]))
while True:
    store.put("refs/demo", b"n" * 2_000_000)
    print(flush=True)
    store.put("refs/demo", b"o" * 1_000_000)
"""

STUCK_WRITER = """
import os, sys, time
from pathlib import Path
from dsec_store.backends.folder import FolderBlobs

def stuck(*arguments, **settings):
    print(flush=True)
    time.sleep(600)

setattr({where}, stuck)
FolderBlobs(Path(sys.argv[1])).put("refs/demo", b"n" * 2_000_000)
"""


def kill_while_writing(program: str, path: Path, lines: int = 1) -> None:
    """Run a writer until it has printed some lines, then kill it at once."""
    command = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        for _ in range(lines):
            assert writer.stdout.readline() == b"\n"
        writer.kill()


def temporary_files(path: Path) -> list[Path]:
    return list((path / ".tmp").iterdir())


@pytest.mark.parametrize("where", ["os, 'fsync'", "Path, 'replace'"])
def test_a_writer_that_is_killed_before_the_rename_leaves_the_old_blob(tmp_path: Path, where: str) -> None:
    store = FolderBlobs(tmp_path)
    store.put("refs/demo", OLD)
    kill_while_writing(STUCK_WRITER.format(where=where), tmp_path)
    assert store.get("refs/demo") == OLD
    assert listed(store) == {"refs/demo": len(OLD)}
    assert len(temporary_files(tmp_path)) == 1


def test_a_writer_that_is_killed_anywhere_leaves_a_whole_blob(tmp_path: Path) -> None:
    store = FolderBlobs(tmp_path)
    for lines in range(1, 9):
        kill_while_writing(ENDLESS_WRITER, tmp_path, lines)
        assert store.get("refs/demo") in (OLD, NEW)
        assert list(listed(store)) == ["refs/demo"]
    store.put("refs/demo", b"later")
    assert store.get("refs/demo") == b"later"


def test_what_killed_writers_left_is_removed_when_it_is_a_day_old(tmp_path: Path) -> None:
    FolderBlobs(tmp_path).put("a", b"1")
    for name, age in (("stale", STALE_SECONDS + 60), ("young", STALE_SECONDS - 60)):
        (tmp_path / ".tmp" / name).write_bytes(b"half")
        os.utime(tmp_path / ".tmp" / name, times=(time.time() - age,) * 2)
    FolderBlobs(tmp_path).get("a")
    assert len(temporary_files(tmp_path)) == 2, "reading changes nothing"
    FolderBlobs(tmp_path).put("a", b"2")
    assert [path.name for path in temporary_files(tmp_path)] == ["young"]


def test_folders_that_another_process_made_are_on_the_disk_before_the_first_put_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one may have died between making a folder and flushing its name."""
    FolderBlobs(tmp_path).put("packs/ab/1", b"1")
    flushed: list[str] = []
    really = os.fsync

    def fsync(file: int) -> None:
        flushed.append(os.readlink(f"/proc/self/fd/{file}"))
        really(file)

    monkeypatch.setattr(os, "fsync", fsync)
    store = FolderBlobs(tmp_path)
    store.put("packs/ab/2", b"2")
    assert flushed[1:] == [f"{tmp_path}", f"{tmp_path}/packs", f"{tmp_path}/packs/ab"]
    flushed.clear()
    store.put("packs/ab/3", b"3")
    assert flushed[1:] == [f"{tmp_path}/packs/ab"]


# Disks


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    if os.geteuid() != 0:
        pytest.skip("not root: cannot mount a small file system")
    path = tmp_path / "disk"
    path.mkdir()
    try:
        mount("-t", "tmpfs", "-o", "size=1m", "none", str(path))
    except subprocess.CalledProcessError as error:
        pytest.skip(f"cannot mount a small file system: {error.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.mark.component
def test_a_full_disk_is_denied_and_leaves_everything_as_it_was(small_disk: Path) -> None:
    store = FolderBlobs(small_disk)
    store.put("refs/demo", b"old" * 1000)
    for key in ("refs/demo", "packs/new"):
        with pytest.raises(Denied, match=f"file://{small_disk} is full: make room there or choose another store"):
            store.put(key, bytes(2 << 20))
    assert store.get("refs/demo") == b"old" * 1000
    assert listed(store) == {"refs/demo": 3000}
    assert temporary_files(small_disk) == []
    store.put("refs/demo", bytes(500_000))
    assert store.get("refs/demo") == bytes(500_000)


@pytest.mark.component
def test_a_read_only_disk_can_be_read_and_refuses_the_rest(small_disk: Path) -> None:
    FolderBlobs(small_disk).put("refs/demo", b"old")
    mount("-o", "remount,ro", str(small_disk))
    store = FolderBlobs(small_disk)
    assert store.get("refs/demo") == b"old"
    assert listed(store) == {"refs/demo": 3}
    for change in (lambda: store.put("refs/demo", b"new"), lambda: store.delete("refs/demo")):
        with pytest.raises(Denied, match="is read-only: mount it writable or choose another store"):
            change()
    with pytest.raises(Denied):
        FolderBlobs(small_disk / "new", create=True)


# Errors of the system


@pytest.mark.parametrize(
    ("number", "expected", "text"),
    [
        (errno.ENOSPC, Denied, "is full"),
        (errno.EDQUOT, Denied, "quota"),
        (errno.EROFS, Denied, "read-only"),
        (errno.EACCES, Denied, "run as its owner"),
        (errno.EPERM, Denied, "run as its owner"),
        (errno.EIO, Unavailable, "a: Input/output error"),
        (errno.ESTALE, Unavailable, "a: Stale file handle"),
        (errno.EMFILE, Unavailable, "a: Too many open files"),
    ],
)
def test_errors_of_the_system_become_errors_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, expected: type[StoreError], text: str
) -> None:
    store = FolderBlobs(tmp_path)
    store.put("a", b"old")

    def fail(*_: object) -> None:
        raise OSError(number, "as the test wants it")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(expected, match=text):
            store.put("a", b"new")
    assert store.get("a") == b"old"
    assert temporary_files(tmp_path) == []


@pytest.mark.parametrize("use", USES)
def test_a_store_whose_folder_has_disappeared_is_unavailable_not_empty(
    tmp_path: Path, use: Callable[[BlobStore, str], object]
) -> None:
    """What was taken away must not look like a store without blobs."""
    store = FolderBlobs(tmp_path / "s", create=True)
    (tmp_path / "s").rmdir()
    with pytest.raises(Unavailable):
        use(store, "a")
    with pytest.raises(Unavailable):
        list(store.list(""))
    with pytest.raises(NotFound):
        FolderBlobs(tmp_path / "s")
