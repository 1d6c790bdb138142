"""What holds for every test run: it leaves no mount, loop device, process and temporary file behind.

All of them outlive the process that made them, and pile up on a developer's machine until something unrelated fails. So
the whole run is checked. It has temporary folders of its own, and its processes are known by a variable that they
inherit however far they detach themselves; so runs beside each other do not blame each other.
"""

import os
import shutil
import signal
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, sleep

import pytest

pytest_plugins = ["tests.fixtures_s3"]

FILESYSTEMS = ("erofs", "fuse", "overlay")
"""Types of file systems that tests mount. `fuse` stands for `fuse.<name>` and `fuseblk` too."""

GONE_WITHIN = 5.0
"""Seconds that the kernel may take to finish a lazy unmount or to free a loop device."""


def mounts_of(mountinfo: str, places: tuple[Path, ...]) -> frozenset[str]:
    """Our kinds of mounts below `places` in the text of /proc/<pid>/mountinfo, as "mount id type target"."""
    found = set()
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        filesystem = after.split(" ", 1)[0]
        mount_id, _, _, _, target, *_ = before.split(" ")
        if filesystem.startswith(FILESYSTEMS) and any(Path(target).is_relative_to(place) for place in places):
            found.add(f"mount {mount_id} {filesystem} {target}")
    return frozenset(found)


def current_mounts(places: tuple[Path, ...]) -> frozenset[str]:
    return mounts_of(Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape"), places)


def loop_devices(places: tuple[Path, ...]) -> frozenset[str]:
    """Loop devices that are bound to a file below `places`, with that file."""
    found = set()
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            file = backing.read_text().rstrip()
        except OSError:  # freed while we looked
            continue
        if any(Path(file).is_relative_to(place) for place in places):
            found.add(f"loop device /dev/{backing.parts[3]} {file}")
    return frozenset(found)


def processes_with(variable: str) -> frozenset[str]:
    """Other processes that have `variable` ("NAME=value") in their environment, as "process id command"."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int(folder.name) != os.getpid() and variable.encode() in (folder / "environ").read_bytes().split(b"\0"):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.add(f"process {folder.name} {command}")
        except OSError:  # it has just ended
            continue
    return frozenset(found)


def left_over(look: Callable[[], frozenset[str]]) -> list[str]:
    """What `look` shows once it has had GONE_WITHIN seconds to go away."""
    deadline = monotonic() + GONE_WITHIN
    while (extra := look()) and monotonic() < deadline:
        sleep(0.05)
    return sorted(extra)


@pytest.fixture(scope="session", autouse=True)
def usual_signals() -> None:
    """Who runs the tests in the background ignores some signals, and so would every process that they start."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


@pytest.fixture(scope="session", autouse=True)
def leaves_nothing_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where pytest's own folder lies is settled first: it is removed, or kept for a failure, by pytest."""
    base = tmp_path_factory.getbasetemp()
    temporary = Path(tempfile.mkdtemp(prefix="dsec-tests-"))
    temporary.chmod(0o755)  # some tests run commands as another user
    run = str(uuid.uuid4())
    os.environ.update(TMPDIR=str(temporary), DSEC_TEST_RUN=run)
    tempfile.tempdir = str(temporary)
    yield
    places = (base, temporary)
    extra = [
        *left_over(lambda: current_mounts(places)),
        *left_over(lambda: loop_devices(places)),
        *left_over(lambda: processes_with(f"DSEC_TEST_RUN={run}")),
        *left_over(lambda: frozenset(f"temporary {path}" for path in temporary.iterdir())),
    ]
    shutil.rmtree(temporary, ignore_errors=True)
    if extra:
        pytest.fail("this run leaves behind:\n  " + "\n  ".join(extra), pytrace=False)
