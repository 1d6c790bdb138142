"""The server under the real kernel: mounts, readers in processes of their own, and daemons that are killed."""

import contextlib
import errno
import mmap
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dsec_fuse.blobfs import BlobFileSystem, node_of
from dsec_fuse.connection import Connection
from dsec_fuse.protocol import MAX_READAHEAD, MAX_REQUEST, WANTED, Feature, Negotiated
from dsec_fuse.server import FETCHERS, Server
from dsec_store import ipc
from dsec_store.digest import Digest
from dsec_store.errors import NotFound, StoreError, Unavailable
from dsec_store.fdholder import Holder
from dsec_store.layer.erofs import Device, write_image
from dsec_store.layer.tree import Address, Directory, Inode
from tests.dsec_fuse.mounting import erofs_mounted, fuse_mounted, set_readahead

pytestmark = pytest.mark.component

PATIENCE = 20.0
"""Seconds after which something is taken to hang. Nothing here takes a tenth of it."""

READ_ONLY, IO_ERROR = (rf"\[Errno {number}\]" for number in (errno.EROFS, errno.EIO))

DATA = random.Random(7).randbytes((12 << 20) + 123)
HEX = Digest.of(DATA).hex
EMPTY = Digest.of(b"").hex
CACHED = DATA[: 3 << 20]
CACHED_HEX = Digest.of(CACHED).hex
HERE = Path(__file__).parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), *filter(None, sys.path)])}


@dataclass
class ScriptedBlobs:
    """Blobs in memory, whose reads a test can watch, hold up and make fail. Those in `cached` need no store."""

    blobs: dict[str, bytes] = field(default_factory=lambda: {HEX: DATA, EMPTY: b""})
    before_read: Callable[[int, int], None] = lambda offset, length: None
    reads: list[tuple[int, int]] = field(default_factory=list)
    cached: set[str] = field(default_factory=set)

    def open(self, hex: str) -> "ScriptedBlob":
        if hex not in self.blobs:
            raise NotFound(f"no blob {hex}")
        return ScriptedBlob(self, hex, self.blobs[hex])

    def at_hand(self, hex: str) -> "ScriptedBlob":
        return self.open(hex)

    def names(self) -> list[str]:
        return sorted(self.blobs)


@dataclass
class ScriptedBlob:
    blobs: ScriptedBlobs
    hex: str
    data: bytes

    @property
    def size(self) -> int:
        return len(self.data)

    def read(self, offset: int, length: int) -> bytes:
        self.blobs.reads.append((offset, length))
        self.blobs.before_read(offset, length)
        return self.data[offset : offset + length]

    def cached(self, offset: int, length: int) -> bytes | None:
        return self.data[offset : offset + length] if self.hex in self.blobs.cached else None


class Gate:
    """Holds reads up until it is opened, and tells how many wait."""

    def __init__(self) -> None:
        self.arrived = threading.Semaphore(0)
        self.opened = threading.Event()

    def __call__(self, offset: int, length: int) -> None:
        self.arrived.release()
        assert self.opened.wait(PATIENCE)


@dataclass
class Served:
    path: Path
    blobs: ScriptedBlobs
    server: Server
    negotiated: list[Negotiated]

    @property
    def file(self) -> Path:
        return self.path / f"{HEX}.blob"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """A mount that this process serves. No page fault may be waited for here: it would hold Python's lock."""
    blobs = ScriptedBlobs()
    negotiated: list[Negotiated] = []
    with fuse_mounted(tmp_path / "mnt") as device:
        server = Server(Connection(device.fileno()), BlobFileSystem(blobs), remember=negotiated.append)
        server.start()
        yield Served(tmp_path / "mnt", blobs, server, negotiated)
    assert not server.wait().aborted


def eventually(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def read_range(path: Path, offset: int, length: int, flags: int = 0) -> bytes:
    """One read(2), not through the page cache if flags say O_DIRECT."""
    fd = os.open(path, os.O_RDONLY | flags)
    with contextlib.closing(mmap.mmap(-1, length)) as buffer:
        try:
            return buffer[: os.preadv(fd, [buffer], offset)]
        finally:
            os.close(fd)


def start_reader(path: Path, original: Path, how: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(HERE / "reader.py"), str(path), str(original), how]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


# What is there


def test_listing_and_attributes(served: Served) -> None:
    assert sorted(os.listdir(served.path)) == sorted([f"{HEX}.blob", f"{EMPTY}.blob"])
    status = served.file.stat()
    assert (status.st_size, status.st_ino, status.st_mode) == (len(DATA), node_of(HEX), 0o100400)
    assert (status.st_mtime, status.st_uid, status.st_nlink) == (0, 0, 1)
    assert os.statvfs(served.path).f_files == 2


def test_a_new_blob_is_seen_at_once(served: Served) -> None:
    data = b"new"
    hex = Digest.of(data).hex
    assert not (served.path / f"{hex}.blob").exists()
    assert len(os.listdir(served.path)) == 2
    served.blobs.blobs[hex] = data
    assert (served.path / f"{hex}.blob").read_bytes() == data
    assert len(os.listdir(served.path)) == 3


def test_a_listing_of_many_blobs_is_whole(served: Served) -> None:
    names = {Digest.of(bytes([number & 255, number >> 8])).hex for number in range(3000)}
    served.blobs.blobs = dict.fromkeys(names, b"x")
    assert {name.removesuffix(".blob") for name in os.listdir(served.path)} == names


def test_nothing_can_be_changed_and_nothing_else_exists(served: Served) -> None:
    for attempt in (lambda: served.file.open("wb"), served.file.unlink, (served.path / "x").touch):
        with pytest.raises(OSError, match=READ_ONLY):
            attempt()
    with pytest.raises(FileNotFoundError):
        (served.path / "x").stat()


def test_the_kernel_is_told_what_we_want(served: Served) -> None:
    served.file.stat()
    (negotiated,) = served.negotiated
    assert negotiated.features & Feature.ASYNC_READ
    assert negotiated.features | WANTED == WANTED


# Reads


def test_a_sequential_read(served: Served) -> None:
    assert served.file.read_bytes() == DATA
    assert (served.path / f"{EMPTY}.blob").read_bytes() == b""


@pytest.mark.parametrize("flags", [0, os.O_DIRECT], ids=["cached", "direct"])
def test_random_reads(served: Served, flags: int) -> None:
    chance = random.Random(11)
    for _ in range(60):
        offset, length = chance.randrange(len(DATA) + 5000), chance.randrange(1, 3 << 20)
        assert read_range(served.file, offset, length, flags) == DATA[offset : offset + length]


def test_what_was_read_is_kept_and_not_asked_for_again(served: Served) -> None:
    served.file.read_bytes()
    reads = len(served.blobs.reads)
    assert served.file.read_bytes() == DATA
    assert len(served.blobs.reads) == reads
    assert served.server.stats().read_bytes == len(DATA)


def test_requests_grow_to_a_mebibyte(served: Served) -> None:
    set_readahead(served.path, MAX_READAHEAD)
    assert served.file.read_bytes() == DATA
    sizes = [length for _, length in served.blobs.reads]
    assert max(sizes) == MAX_REQUEST
    assert sizes.count(MAX_REQUEST) >= len(DATA) // MAX_REQUEST - 2
    assert read_range(served.file, 0, 4 << 20, os.O_DIRECT) == DATA[: 4 << 20]
    assert sorted(served.blobs.reads[-4:]) == [(number << 20, MAX_REQUEST) for number in range(4)]


@pytest.mark.parametrize("flags", [0, os.O_DIRECT], ids=["cached", "direct"])
def test_a_read_that_fails_is_an_error_and_is_forgotten(served: Served, flags: int) -> None:
    def fail(offset: int, length: int) -> None:
        raise Unavailable("the store is down")

    served.blobs.before_read = fail
    with pytest.raises(OSError, match=IO_ERROR):
        read_range(served.file, 4096, 8192, flags)
    served.blobs.before_read = lambda offset, length: None
    assert read_range(served.file, 4096, 8192, flags) == DATA[4096:12288]
    assert served.server.stats().errors["EIO"] >= 1


def test_a_fault_in_our_code_is_an_error_of_that_read_only(served: Served) -> None:
    def fail(offset: int, length: int) -> None:
        raise ZeroDivisionError

    served.blobs.before_read = fail
    for _ in range(20):  # more than there are threads
        with pytest.raises(OSError, match=IO_ERROR):
            read_range(served.file, 0, 4096, os.O_DIRECT)
    served.blobs.before_read = lambda offset, length: None
    assert served.file.read_bytes() == DATA


def test_reads_that_wait_run_side_by_side(served: Served) -> None:
    together = threading.Barrier(8)

    def meet(offset: int, length: int) -> None:
        together.wait(PATIENCE)  # fails, and the read with it, unless all eight are in here at once

    served.blobs.before_read = meet
    results: list[bytes] = []
    threads = [
        threading.Thread(target=lambda place=number << 20: results.append(read_range(served.file, place, 4096)))
        for number in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(results) == sorted(DATA[number << 20 :][:4096] for number in range(8))


@contextlib.contextmanager
def store_silent(served: Served, readers: int) -> Iterator[None]:
    """That many processes' worth of read-ahead waits for the store meanwhile, and more than there are fetch threads."""
    gate = Gate()
    served.blobs.before_read = gate
    set_readahead(served.path, MAX_READAHEAD)
    files = [os.open(served.file, os.O_RDONLY | os.O_DIRECT) for _ in range(readers)]

    def read(fd: int) -> None:
        with contextlib.closing(mmap.mmap(-1, MAX_READAHEAD)) as buffer:
            os.preadv(fd, [buffer], 0)

    threads = [threading.Thread(target=read, args=(fd,)) for fd in files]
    for thread in threads:
        thread.start()
    eventually(lambda: served.server.stats().in_flight == readers * MAX_READAHEAD // MAX_REQUEST > FETCHERS)
    for _ in range(FETCHERS):
        assert gate.arrived.acquire(timeout=PATIENCE)
    try:
        yield
        assert not gate.arrived.acquire(blocking=False)
    finally:
        gate.opened.set()
        for thread in threads:
            thread.join(PATIENCE)
        for fd in files:
            os.close(fd)
    assert not any(thread.is_alive() for thread in threads)
    eventually(lambda: served.server.stats().in_flight == 0)


def test_neither_metadata_nor_cached_reads_wait_for_reads_that_wait_for_the_store(served: Served) -> None:
    served.blobs.blobs[CACHED_HEX] = CACHED
    served.blobs.cached.add(CACHED_HEX)
    other = served.path / f"{CACHED_HEX}.blob"
    with store_silent(served, readers=10):
        commands = (["ls", str(served.path)], ["stat", str(other)], ["stat", "-f", str(other)], ["cat", str(other)])
        outputs = [subprocess.run(command, capture_output=True, check=True, timeout=5).stdout for command in commands]
    assert CACHED_HEX in outputs[0].decode()
    assert outputs[-1] == CACHED


def test_a_killed_reader_that_waits_for_a_fetch_thread_leaves_and_nothing_is_fetched_for_it(served: Served) -> None:
    served.blobs.blobs[CACHED_HEX] = CACHED
    with store_silent(served, readers=10):
        in_flight = served.server.stats().in_flight
        command = [sys.executable, "-c", READ_ONCE, str(served.path / f"{CACHED_HEX}.blob"), "mapped"]
        with subprocess.Popen(command) as process:
            eventually(lambda: served.server.stats().in_flight == in_flight + 1)
            process.kill()
            assert process.wait(PATIENCE) == -signal.SIGKILL
        assert served.server.stats().interrupted == 1
        served.blobs.reads.clear()
    assert (4096, 4096) not in served.blobs.reads


def test_cached_reads_wait_in_the_backlog_and_metadata_does_not(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    served.blobs.cached.add(HEX)
    read = ScriptedBlob.cached

    def slow(blob: ScriptedBlob, offset: int, length: int) -> bytes | None:
        gate(offset, length)
        return read(blob, offset, length)

    monkeypatch.setattr(ScriptedBlob, "cached", slow)
    readers = [
        threading.Thread(target=read_range, args=(served.file, number << 16, 4096, os.O_DIRECT)) for number in range(20)
    ]
    for reader in readers:
        reader.start()
    eventually(lambda: served.server.stats().in_flight == 20)
    assert len(os.listdir(served.path)) == 2
    assert served.server.stats().in_flight == 20
    gate.opened.set()
    for reader in readers:
        reader.join(PATIENCE)
        assert not reader.is_alive()
    eventually(lambda: served.server.stats().in_flight == 0)
    assert not served.blobs.reads


# Readers that are killed, or only disturbed

READ_ONCE = """
import mmap, os, signal, sys
signal.signal(signal.SIGUSR1, lambda *_: None)
path, how = sys.argv[1:]
fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if how == "direct" else 0))
if how == "mapped":
    pages = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    pages.madvise(mmap.MADV_RANDOM)
    data = pages[4096:12288]
else:
    buffer = mmap.mmap(-1, 8192)
    data = buffer[:os.preadv(fd, [buffer], 4096)]
sys.stdout.buffer.write(data)
"""
"""Only "mapped" is read synchronously: a page fault without read-ahead. The others wait for pages or for direct I/O."""


def start_read(served: Served, how: str) -> tuple[subprocess.Popen[bytes], Gate]:
    """A process in the middle of a read that does not end before the gate is opened."""
    gate = Gate()
    served.blobs.before_read = gate
    command = [sys.executable, "-c", READ_ONCE, str(served.file), how]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert gate.arrived.acquire(timeout=PATIENCE)
    return process, gate


@pytest.mark.parametrize("how", ["cached", "mapped"])
def test_a_killed_reader_leaves_although_its_read_goes_on(served: Served, how: str) -> None:
    process, gate = start_read(served, how)
    with process:
        process.kill()
        assert process.wait(PATIENCE) == -signal.SIGKILL
    gate.opened.set()
    eventually(lambda: served.server.stats().in_flight == 0)
    assert served.file.read_bytes() == DATA


@pytest.mark.parametrize("how", ["cached", "mapped", "direct"])
def test_another_signal_does_not_disturb_a_read(served: Served, how: str) -> None:
    process, gate = start_read(served, how)
    with process:
        process.send_signal(signal.SIGUSR1)
        if how == "mapped":
            eventually(lambda: "INTERRUPT" in served.server.stats().requests)
        gate.opened.set()
        output, _ = process.communicate(timeout=PATIENCE)
    assert output == DATA[4096:12288]
    assert served.server.stats().interrupted == 0


def test_a_reader_that_got_another_signal_can_still_be_killed(served: Served) -> None:
    process, gate = start_read(served, "mapped")
    with process:
        process.send_signal(signal.SIGUSR1)
        eventually(lambda: "INTERRUPT" in served.server.stats().requests)
        process.kill()
        assert process.wait(PATIENCE) == -signal.SIGKILL
    assert served.server.stats().interrupted == 1
    gate.opened.set()


# Daemons that are killed


class Supervised:
    """A daemon over the files of a folder, which can be killed and started again."""

    def __init__(self, root: Path, holder: Holder, delay: float) -> None:
        self.folder = root / "blobs"
        self.control = root / "data.sock"
        self._command = [sys.executable, "-m", "tests.dsec_fuse.folder_daemon"]
        self._command += [str(self.folder), str(holder.path), "blobs/0", str(self.control), str(delay)]
        self.process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(self._command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)

    def stats(self) -> dict[str, Any]:
        """Empty while it does not answer."""
        try:
            found: dict[str, Any] = ipc.call(self.control, "stats", timeout=PATIENCE)
        except (OSError, StoreError):
            return {}
        return found if found["pid"] == self.process.pid else {}

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def restart(self) -> None:
        self.process = self._start()


@dataclass
class Daemon:
    path: Path
    original: Path
    holder: Holder
    supervised: Supervised
    unmount: Callable[[], None]

    @property
    def file(self) -> Path:
        return self.path / self.original.name

    def reads_right(self) -> bool:
        return read_range(self.file, 4096, MAX_REQUEST, os.O_DIRECT) == DATA[4096:][:MAX_REQUEST]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """What a node does: holder, mount, slot, daemon."""
    (tmp_path / "blobs").mkdir()
    original = tmp_path / "blobs" / f"{HEX}.blob"
    original.write_bytes(DATA)
    holder = Holder.spawn(tmp_path / "holder.sock")
    with contextlib.ExitStack() as processes, contextlib.ExitStack() as mounted:
        processes.callback(holder.quit)
        device = mounted.enter_context(fuse_mounted(tmp_path / "mnt"))
        holder.put("blobs/0", device.fileno(), b"")
        device.close()
        supervised = Supervised(tmp_path, holder, delay=0.03)
        processes.callback(supervised.kill)
        yield Daemon(tmp_path / "mnt", original, holder, supervised, mounted.close)


def is_reading(daemon: Daemon, *, resent: bool) -> bool:
    """Whether the daemon is in the middle of reads, and has served some that its predecessor had begun."""
    stats = daemon.supervised.stats()
    return bool(stats) and stats["in_flight"] >= 2 and (stats["resent"] > 0 or not resent)


def test_no_reader_notices_that_the_daemon_is_killed(daemon: Daemon) -> None:
    readers = [start_reader(daemon.file, daemon.original, how) for how in ("cached", "direct") * 2]
    for resent in [False] + [True] * 9:
        eventually(partial(is_reading, daemon, resent=resent))
        daemon.supervised.kill()
        assert all(reader.poll() is None for reader in readers)
        daemon.supervised.restart()
    eventually(lambda: daemon.supervised.stats().get("read_bytes", 0) > len(DATA))
    outcomes = [reader.communicate("", PATIENCE)[0] for reader in readers]
    assert [reader.returncode for reader in readers] == [0, 0, 0, 0], outcomes
    assert all(int(outcome) > 0 for outcome in outcomes)
    assert "EIO" not in daemon.supervised.stats()["errors"]


def test_a_daemon_that_dies_before_the_first_answer(daemon: Daemon) -> None:
    """Whoever comes next gets the kernel's INIT, or finds in the slot what came of it."""
    daemon.supervised.kill()
    daemon.supervised.restart()
    assert daemon.reads_right()
    fd, state = daemon.holder.get("blobs/0")
    os.close(fd)
    assert Negotiated.from_bytes(state).minor >= 31


def test_init_that_was_read_and_not_answered_is_read_again(tmp_path: Path) -> None:
    with fuse_mounted(tmp_path / "mnt") as device:
        assert Connection(device.fileno()).receive(bytearray(8192)).name == "INIT"  # and dies
        successor = Connection(device.fileno())
        if not successor.resend():
            pytest.skip("this kernel cannot resend")
        server = Server(successor, BlobFileSystem(ScriptedBlobs()))
        server.start()
        assert (tmp_path / "mnt" / f"{HEX}.blob").read_bytes() == DATA


def test_sigterm_ends_the_daemon_and_not_the_mount(daemon: Daemon) -> None:
    assert daemon.reads_right()
    daemon.supervised.process.terminate()
    output, _ = daemon.supervised.process.communicate(timeout=PATIENCE)
    assert (daemon.supervised.process.returncode, output.strip()) == (0, "terminated")
    daemon.supervised.restart()
    assert daemon.reads_right()


def test_unmounting_ends_the_daemon(daemon: Daemon) -> None:
    assert daemon.reads_right()
    daemon.unmount()
    output, _ = daemon.supervised.process.communicate(timeout=PATIENCE)
    assert (daemon.supervised.process.returncode, output.strip()) == (0, "unmounted")
    assert not daemon.supervised.control.exists()


def test_a_holder_that_died_can_be_replaced(daemon: Daemon) -> None:
    assert daemon.reads_right()
    os.kill(daemon.holder.pid(), signal.SIGKILL)
    eventually(lambda: not daemon.holder.running())
    Holder.spawn(daemon.holder.path)
    ipc.call(daemon.supervised.control, "keep", timeout=PATIENCE)
    daemon.supervised.kill()
    daemon.supervised.restart()
    assert daemon.reads_right()


def test_the_control_socket_tells_figures_of_both_sides(daemon: Daemon) -> None:
    assert daemon.reads_right()
    assert ipc.call(daemon.supervised.control, "ping", timeout=PATIENCE) == daemon.supervised.process.pid
    figures = daemon.supervised.stats()
    assert figures["blobs"] == [HEX]
    assert figures["read_bytes"] == MAX_REQUEST
    assert sum(figures["read_durations"]) == figures["requests"]["READ"]


# EROFS above it


BLOCKS = -(-len(DATA) // 4096)
BLOB = DATA.ljust(BLOCKS * 4096, b"\0")
BLOB_HEX = Digest.of(BLOB).hex


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A metadata image with one file, DATA, whose bytes are those of BLOB."""
    file = Inode(stat.S_IFREG | 0o644, size=len(DATA), address=Address(0, 0))
    root = Directory(Inode(stat.S_IFDIR | 0o755), {b"file": file})
    image = tmp_path / "layer.erofs"
    with image.open("wb") as out:
        write_image(root, [Device(BLOB_HEX, BLOCKS)], out)
    return image


def test_erofs_above_reads_right_bytes_while_the_daemon_is_killed(daemon: Daemon, image: Path, tmp_path: Path) -> None:
    (daemon.supervised.folder / f"{BLOB_HEX}.blob").write_bytes(BLOB)
    with erofs_mounted(tmp_path / "erofs", image, daemon.path / f"{BLOB_HEX}.blob"):
        reader = start_reader(tmp_path / "erofs" / "file", daemon.original, "cached")
        for _ in range(5):
            eventually(lambda: daemon.supervised.stats().get("in_flight", 0) >= 1)
            daemon.supervised.kill()
            assert reader.poll() is None
            daemon.supervised.restart()
        eventually(lambda: daemon.supervised.stats().get("read_bytes", 0) > len(DATA))
        outcome, _ = reader.communicate("", PATIENCE)
        assert reader.returncode == 0, outcome
        assert int(outcome) > 0


def test_a_killed_reader_of_erofs_leaves_although_the_read_below_goes_on(
    served: Served, image: Path, tmp_path: Path
) -> None:
    served.blobs.blobs[BLOB_HEX] = BLOB
    with erofs_mounted(tmp_path / "erofs", image, served.path / f"{BLOB_HEX}.blob"):
        gate = Gate()
        served.blobs.before_read = gate
        with subprocess.Popen(["cat", tmp_path / "erofs" / "file"], stdout=subprocess.DEVNULL) as process:
            assert gate.arrived.acquire(timeout=PATIENCE)
            process.kill()
            assert process.wait(PATIENCE) == -signal.SIGKILL
        gate.opened.set()
        assert (tmp_path / "erofs" / "file").read_bytes() == DATA
