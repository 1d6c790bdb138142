"""How a command ended, as a value: what it did itself, or why it never ran.

A process has one small number to say how it ended, and a sandbox needs more: a command that exits with 127 and a
command that was not found must not look alike, and neither may a fault of the platform. So the typed `Outcome` is the
truth, and the exit code is made from it by the one table below (POSIX shell, "Exit Status for Commands"; env(1) and
docker-run(1) use the same numbers). `--status-file` gives the typed form to callers that must tell the cases apart.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal

Kind = Literal["exited", "signaled", "not-found", "not-executable", "platform"]

PLATFORM: Final = 125
"""Exit code of a command that did not run, or whose end is not known, by a fault that is not its own."""

NOT_EXECUTABLE: Final = 126
"""Exit code of a command that exists and cannot be executed."""

NOT_FOUND: Final = 127
"""Exit code of a command that does not exist, or whose interpreter does not."""

SIGNALED: Final = 128
"""Added to the number of the signal that ended a command."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one command ended. `text` is one line for people, empty when the command speaks for itself."""

    kind: Kind
    exit_code: int
    signal: int | None = None
    text: str = ""

    def to_json(self) -> str:
        """One JSON object with the four fields, on a line of its own."""
        return json.dumps(asdict(self)) + "\n"


class NotStartedError(Exception):
    """The command did not start: `outcome` says why."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.text)
        self.outcome = outcome


def exited(code: int) -> Outcome:
    """The command ended by itself."""
    return Outcome("exited", code)


def signaled(number: int, text: str = "") -> Outcome:
    """The command was ended by a signal."""
    return Outcome("signaled", SIGNALED + number, number, text or f"killed by {_signal_name(number)}")


def not_found(text: str) -> Outcome:
    """There is no such command, or its interpreter is missing."""
    return Outcome("not-found", NOT_FOUND, text=text)


def not_executable(text: str) -> Outcome:
    """The command is there, and the kernel cannot execute it."""
    return Outcome("not-executable", NOT_EXECUTABLE, text=text)


def platform(text: str) -> Outcome:
    """Something of ours failed: says nothing about the command."""
    return Outcome("platform", PLATFORM, text=text)


def of_wait_status(status: int) -> Outcome:
    """The outcome behind a raw status of waitpid(2)."""
    code = os.waitstatus_to_exitcode(status)
    return exited(code) if code >= 0 else signaled(-code)


def write_status_file(path: Path, outcome: Outcome) -> None:
    """Write `outcome` to `path` so that a reader sees all of it or nothing of it. Raises OSError.

    A file is replaced as a whole. What is no file (a pipe, a terminal, /dev/null) is written to and never replaced.
    """
    if _is_special(path):
        path.write_text(outcome.to_json(), encoding="utf-8")
        return
    target = Path(os.path.realpath(path))
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(outcome.to_json())
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


def _is_special(path: Path) -> bool:
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return False


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no names
        return f"signal {number}"
