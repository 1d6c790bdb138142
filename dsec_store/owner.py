"""Who holds a lease, told so that another process can find out whether that one still lives.

A process is named by the boot of its machine, its pid namespace, its process id and its start time. Only who shares the
first two can look it up in /proc; for everybody else it may live, and its lease counts until it expires.

    Owner.of_this_process().is_dead()       # False
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dsec_store.document import Fields

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE: Final = "/proc/self/ns/pid"
_ENDED: Final = (b"X", b"Z")
"""States of a process that runs no more: dead, and dead but not taken leave of (proc(5))."""


@dataclass(frozen=True, slots=True)
class Owner:
    """One process, for good. `started` is in clock ticks since boot (field 22 of /proc/<pid>/stat)."""

    boot: str
    namespace: str
    pid: int
    started: int

    @classmethod
    def of_this_process(cls) -> Owner | None:
        """None where /proc is not to be had: then nobody can look us up either."""
        try:
            boot, namespace = _here()
            started = _started(os.getpid())
        except OSError:
            return None
        return None if started is None else cls(boot, namespace, os.getpid(), started)

    def is_dead(self) -> bool:
        """Whether this process is certain to have ended. False when that cannot be seen from here."""
        try:
            return _here() == (self.boot, self.namespace) and _started(self.pid) != self.started
        except OSError:
            return False

    def as_json(self) -> dict[str, Any]:
        return {"boot": self.boot, "namespace": self.namespace, "pid": self.pid, "started": self.started}

    @classmethod
    def from_fields(cls, fields: Fields) -> Owner:
        return cls(
            fields.take("boot", str), fields.take("namespace", str), fields.number("pid"), fields.number("started")
        )

    def __str__(self) -> str:
        return f"process {self.pid}"


def _here() -> tuple[str, str]:
    return _BOOT_ID.read_text().strip(), os.readlink(_PID_NAMESPACE)


def _started(pid: int) -> int | None:
    """When the process with this id started; None if none lives."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()  # the second field, a name, may hold blanks and brackets
    # A killed process may have threads that still finish a system call, such as the deletion of a file.
    return None if fields[0] in _ENDED and int(fields[17]) <= 1 else int(fields[19])
