"""Processes of the node die by SIGKILL, alone and together, while programs read and run."""

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from tests.dsec_snapshotter.nodes import until
from tests.flows import images
from tests.flows.world import PIPES, Sandbox, World, assert_lost, ended

pytestmark = pytest.mark.flow

READER: Final = Path(__file__).with_name("reader.py")
ROUNDS: Final = 5
"""Deaths of the data daemon in a row. More would mostly be waiting: the pause before a successor doubles."""

WAITING: Final = ("big", "--", "sh", "-c", "echo ready; read line; sha256sum /big0")
"""A command that reads a file when it is told to go on."""


@pytest.fixture
def target(big: World) -> Path:
    """Where the image is mounted."""
    target = big.make("target")
    big.ok("dsec-image", "mount", "big", str(target))
    return target


@pytest.fixture(scope="module")
def digests() -> dict[str, str]:
    return {name: hashlib.sha256(data).hexdigest() for name, data in images.big_files().items()}


@contextmanager
def readers(target: Path, digests: dict[str, str]) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """A process for each big file that reads it all the time. None of them may fail or see a wrong byte."""
    with ExitStack() as stack:
        started = []
        for name, digest in digests.items():
            process = subprocess.Popen([sys.executable, str(READER), str(target / name), digest], **PIPES)
            started.append(stack.enter_context(process))
            stack.callback(process.kill)
        yield started
        for process in started:
            done = ended(process)
            assert (done.code, done.errors, {*done.lines} - {"ok"}) == (0, [], set())


def next_round(reader: "subprocess.Popen[bytes]") -> None:
    """Wait until this reader has read its file once more."""
    assert reader.stdout is not None
    assert reader.stdout.readline() == b"ok\n"


def kill_daemon(world: World) -> None:
    """And wait for its successor."""
    before = world.asked()["daemon_pid"]
    world.kill("daemon")
    until(lambda: world.asked()["daemon_pid"] not in (None, before))


def resumed(sandbox: Sandbox, digests: dict[str, str]) -> None:
    """A waiting sandbox goes on and reads what it should."""
    done = sandbox.finish(b"go\n")
    assert (done.code, done.errors, done.lines) == (0, [], [f"{digests['big0']}  /big0"])


def what_is_mounted(status: Any) -> Any:
    return status["layers"], status["compositions"]


def read(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_no_reader_notices_that_the_data_daemon_dies(big: World, target: Path, digests: dict[str, str]) -> None:
    """Ten times in the middle of cold reads, half of them under a node that took over from a dead one."""
    with readers(target, digests) as reading:
        for _ in range(2):
            for number in range(ROUNDS):
                next_round(reading[number % len(reading)])
                kill_daemon(big)
            big.kill("node")
            big.ok("dsec", "node", "start")
    assert big.status()["problems"] == []
    assert big.stats()["failures"] == {}


@pytest.mark.parametrize("names", [("node",), ("node", "daemon"), ("node", "holder")])
def test_a_new_node_takes_over(big: World, target: Path, digests: dict[str, str], names: tuple[str, ...]) -> None:
    sandbox = big.sandbox(*WAITING)
    before = big.status()
    big.kill(*names)
    big.ok("dsec", "node", "start")
    after = big.status()
    assert after["node_pid"] != before["node_pid"]
    assert what_is_mounted(after) == what_is_mounted(before)
    assert after["problems"] == []
    assert read(target / "big1") == digests["big1"]
    resumed(sandbox, digests)
    big.ok("dsec-image", "umount", str(target))
    assert big.compositions() == []
    big.ok("dsec", "node", "stop")
    assert big.mounts() == []


def test_the_holder_alone_dies(big: World, target: Path, digests: dict[str, str]) -> None:
    """Nothing fails, and another one has its place: the data daemon may die after it."""
    before = big.status()["holder_pid"]
    with readers(target, digests) as reading:
        next_round(reading[0])
        big.kill("holder")
        until(lambda: big.asked()["holder_pid"] not in (None, before))
        next_round(reading[1])
        kill_daemon(big)
        next_round(reading[2])
    assert big.status()["problems"] == []


def test_all_die_and_a_new_node_starts_over(big: World, target: Path, digests: dict[str, str]) -> None:
    """What was mounted is lost, and said to be; readers get errors and no wrong bytes; all else works again."""
    sandbox = big.sandbox(*WAITING)
    with (target / "big2").open("rb") as file:
        assert len(file.read(1)) == 1
        big.kill("node", "daemon", "holder")
        with pytest.raises(OSError, match="Input/output error"):
            (target / "big3").read_bytes()
        big.ok("dsec", "node", "start")
        status = big.status()
        assert what_is_mounted(status) == ([], [])
        assert [problem for problem in status["problems"] if str(target) in problem]
    assert_lost(sandbox)
    big.ok("dsec-image", "mount", "big", str(target))
    assert read(target / "big3") == digests["big3"]
    resumed(big.sandbox(*WAITING), digests)
