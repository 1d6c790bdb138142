"""What the kernel is asked about processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsec_sandbox import process
from dsec_sandbox.process import Process

pytestmark = pytest.mark.component


def test_a_process_survives_being_written_down() -> None:
    me = Process.of(os.getpid())
    assert Process.parse(f"{me}\n") == me


@pytest.mark.parametrize("torn", ["", "12", "12 ", "12 34", "12 34 56\n"])
def test_a_torn_record_names_nobody(torn: str) -> None:
    assert Process.parse(torn) is None


def test_who_executed_is_known_until_it_is_reaped() -> None:
    """A child that exits with 1 before and one that exits with 1 after execve(2) look alike, but not to us."""
    forked = (
        "import os,sys; sys.path[:] = sys.argv[2:]; from dsec_sandbox.process import never_executed as n; p = os.fork()"
    )
    script = (
        f"{forked}\n"
        "if p == 0:\n"
        "    if sys.argv[1] == 'exec': os.execv('/bin/sh', ['sh', '-c', 'exit 1'])\n"
        "    os._exit(1)\n"
        "os.waitid(os.P_PID, p, os.WEXITED | os.WNOWAIT); print(n(p), os.waitpid(p, 0)[1])"
    )
    for how, said in (("exec", b"False 256\n"), ("exit", b"True 256\n")):
        assert subprocess.check_output([sys.executable, "-c", script, how, *sys.path]) == said


def test_only_the_process_that_was_meant_is_killed() -> None:
    child = subprocess.Popen(["sleep", "1000"])
    me = Process.of(child.pid)
    process.kill(Process(child.pid, me.started + 1))
    assert child.poll() is None
    process.kill(me)
    process.kill(me)
    with pytest.raises(FileNotFoundError):
        Process.of(child.pid)
    child.wait()


def test_users_of_a_folder_and_of_a_pipe_are_found(tmp_path: Path) -> None:
    pipe = tmp_path / "state" / "exec.fifo"
    pipe.parent.mkdir()
    os.mkfifo(pipe)
    held = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    children = [
        subprocess.Popen(["sleep", "1000"], cwd=tmp_path),
        subprocess.Popen(["sleep", "1000"], stdin=held),
        subprocess.Popen(["sleep", "1000"]),
    ]
    os.close(held)
    found = sorted(one.pid for one in process.using(tmp_path, pipe))
    for child in children:
        child.kill()
        child.wait()
    assert found == sorted(child.pid for child in children[:2])
    assert list(process.using(tmp_path, tmp_path / "gone")) == []
