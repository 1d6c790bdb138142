"""Our commands with a store and a node state of their own, and folders that are gone afterwards."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.measure import run
from scripts.inputs import DEMO

SCRATCH_BYTES: Final = 64 << 30
"""Of a file system that a benchmark works on; it takes as much as is written to it."""

LATE_SECONDS: Final = 5.0
"""How long a node is waited for whose start was interrupted."""

_STOP: Final = ("dsec", "node", "stop", "--force")


@dataclass(frozen=True, slots=True)
class Commands:
    """`dsec` and `dsec-image` as a user would call them, with these variables."""

    environment: Mapping[str, str]

    @classmethod
    def of(cls, store: str, root: Path, extra: Mapping[str, str] | None = None) -> Commands:
        return cls({**os.environ, **(extra or {}), "DSEC_STORE": store, "DSEC_ROOT": str(root)})

    def __call__(self, *arguments: str) -> str:
        return run(command_line(*arguments), self.environment)

    def json(self, *arguments: str) -> Any:
        return json.loads(self(*arguments, "--json"))


def command_line(program: str, *arguments: str) -> list[str]:
    """The command of ours that belongs to this interpreter."""
    return [str(Path(sys.executable).with_name(program)), *arguments]


@contextmanager
def running_node(commands: Commands) -> Iterator[None]:
    """A node that runs meanwhile. With it goes all that was mounted."""
    try:
        commands("dsec", "node", "start")
    except BaseException:
        _stop_late(commands)
        raise
    try:
        yield
    finally:
        commands(*_STOP)


def _stop_late(commands: Commands) -> None:
    """A start that was interrupted may leave a node that does not answer yet; `stop` says so while none does."""
    deadline = time.monotonic() + LATE_SECONDS
    while commands(*_STOP) and time.monotonic() < deadline:
        time.sleep(0.1)


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for one benchmark, on a new file system: ext4 makes files slowly where many were deleted lately."""
    DEMO.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=DEMO) as name:
        image, folder = Path(name, "disk"), Path(name, "d")
        folder.mkdir()
        with image.open("wb") as file:
            file.truncate(SCRATCH_BYTES)
        run(["mkfs.ext4", "-q", str(image)])
        run(["mount", "-o", "loop,noinit_itable", str(image), str(folder)])
        try:
            yield folder
        finally:
            run(["umount", "--lazy", str(folder)])
