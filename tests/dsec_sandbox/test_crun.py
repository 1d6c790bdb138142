"""Callers that are killed at any point of a run leave nothing that `kill_leftover` does not end."""

import pytest

from dsec_sandbox.run import kill_leftover
from tests.dsec_sandbox.box import Box, Run

pytestmark = pytest.mark.component

HOLD = "echo held >/proc/$PPID/fd/1; exec sleep 1000"
"""A call of crun stops here and says so on its caller's output: then the caller is killed."""


def killed_when_it_says(caller: Run, word: str) -> None:
    assert caller.read_line() == word
    caller.kill()


def test_while_the_command_runs(box: Box) -> None:
    caller = box.start("sh", "-c", "sleep 1000 & echo ready; exec sleep 1000")
    killed_when_it_says(caller, "ready")
    assert box.left()
    kill_leftover(box.state, caller.id)


@pytest.mark.parametrize(
    ("verb", "script"),
    [
        ("create", HOLD),  # nothing made yet
        ("create", f'"$@"; {HOLD}'),  # made, and the caller does not know it
        ("start", HOLD),  # known, not started
        ("start", f'"$@"; {HOLD}'),  # started
    ],
    ids=["before create", "after create", "before start", "after start"],
)
def test_while_crun_is_at_work(box: Box, verb: str, script: str) -> None:
    box.intercept(verb, script)
    caller = box.start("sleep", "1000")
    killed_when_it_says(caller, "held")
    assert box.left()
    kill_leftover(box.state, caller.id)


def test_it_may_be_repeated_and_may_come_too_late(box: Box) -> None:
    kill_leftover(box.state, "never-was")
    caller = box.start("sh", "-c", "echo ready; exec sleep 1000")
    killed_when_it_says(caller, "ready")
    kill_leftover(box.state, caller.id)
    kill_leftover(box.state, caller.id)


def test_a_record_of_another_process_kills_nobody(box: Box) -> None:
    """The pid of an init that ended long ago may be somebody else's by now."""
    bystander = box.start("sh", "-c", "echo ready; read answer; exit 8")
    assert bystander.read_line() == "ready"
    stale = box.state / "bundles" / "stale"
    stale.mkdir()
    (stale / "init").write_text(f"{bystander.init_pid()} 1\n")
    kill_leftover(box.state, "stale")
    assert bystander.finish(b"go\n").returncode == 8
