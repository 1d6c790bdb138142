"""Outcomes: the table of exit codes, and the status file."""

import json
import os
import signal
import stat
import threading
from pathlib import Path

import pytest

from dsec_sandbox import outcome
from dsec_sandbox.outcome import Outcome, write_status_file


@pytest.mark.parametrize(
    ("made", "kind", "code"),
    [
        (outcome.exited(0), "exited", 0),
        (outcome.exited(127), "exited", 127),
        (outcome.signaled(signal.SIGTERM), "signaled", 143),
        (outcome.not_found("x"), "not-found", 127),
        (outcome.not_executable("x"), "not-executable", 126),
        (outcome.platform("x"), "platform", 125),
    ],
)
def test_each_kind_has_its_exit_code(made: Outcome, kind: str, code: int) -> None:
    assert (made.kind, made.exit_code) == (kind, code)


def test_a_wait_status_tells_exit_from_signal() -> None:
    assert outcome.of_wait_status(7 << 8) == outcome.exited(7)
    assert outcome.of_wait_status(9) == Outcome("signaled", 137, 9, "killed by SIGKILL")
    assert outcome.of_wait_status(35).text == "killed by signal 35"


def test_the_status_file_is_replaced_as_a_whole_and_through_symlinks(tmp_path: Path) -> None:
    target, link = tmp_path / "status", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write_status_file(link, outcome.exited(3))
    assert json.loads(target.read_text()) == {"kind": "exited", "exit_code": 3, "signal": None, "text": ""}
    assert link.is_symlink()
    assert sorted(tmp_path.iterdir()) == [link, target]


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_status_file(tmp_path / "status", outcome.exited(0))
    assert list(tmp_path.iterdir()) == []


def test_a_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_status_file(pipe, outcome.exited(3))
    reader.join()
    assert json.loads(read[0])["exit_code"] == 3
    assert stat.S_ISFIFO(pipe.stat().st_mode)
