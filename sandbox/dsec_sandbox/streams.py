"""Standard streams that are handed to a container and come back as they were.

The command gets the caller's own descriptors 0, 1 and 2, so that no byte passes through Python. Two traps lie in that:

* crun gives what they are open on to the container's user (fchown(2) in `maybe_chown_std_streams`), so that a plain
  user can reopen /dev/stdout. For a pipe that is right. For a file it would change the owner of the caller's data, even
  of an input.
* A descriptor that the caller closed is free: the next file that anybody opens gets its number, and with it the
  command.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import subprocess
from collections.abc import Iterator
from typing import Final, TypedDict

STANDARD: Final = (0, 1, 2)


class Streams(TypedDict):
    """Arguments of subprocess.Popen."""

    stdin: int | None
    stdout: int | None
    stderr: int | None


NONE: Final[Streams] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
"""Streams of a process that has nothing to read or say."""


def inherited() -> Streams:
    """The caller's streams; /dev/null for one that is closed."""
    stdin, stdout, stderr = (None if is_open(number) else subprocess.DEVNULL for number in STANDARD)
    return {"stdin": stdin, "stdout": stdout, "stderr": stderr}


def is_open(descriptor: int) -> bool:
    """Whether a child would inherit `descriptor`.

    One that is closed on exec is a file of this program, which got the number of a stream that the caller had closed.
    """
    try:
        return not fcntl.fcntl(descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    except OSError:
        return False


@contextlib.contextmanager
def owners_kept() -> Iterator[None]:
    """Give files and devices behind the standard streams back to their owners at the end of the block."""
    before = {number: os.fstat(number) for number in STANDARD if is_open(number)}
    try:
        yield
    finally:
        for number, then in before.items():
            if not _is_passing(then.st_mode):
                _give_back(number, then)


def _is_passing(mode: int) -> bool:
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def _give_back(number: int, then: os.stat_result) -> None:
    now = os.fstat(number)
    if (now.st_uid, now.st_gid) != (then.st_uid, then.st_gid):
        with contextlib.suppress(OSError):  # a read-only file system: then nobody has changed it either
            os.fchown(number, then.st_uid, then.st_gid)
