"""Same input, same digests: one image and one folder, again and again, in ever other surroundings and under load."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from corpus.images import images, keys_of
from corpus.report import Result
from tests.busy import busy

IMAGE: Final = "Debian with python3 and git"

LOCALES: Final = ("C", "C.UTF-8", "POSIX", "tr_TR.UTF-8")
ZONES: Final = ("UTC", "Pacific/Chatham", "UTC+11", "Asia/Kathmandu")
UMASKS: Final = (0o022, 0o077, 0, 0o027)
TMPFS: Final = Path("/dev/shm")
FILES: Final = 3000
"""Of the folder; some are large enough to be cut into chunks."""


def check(runs: int) -> list[Result]:
    image = images()[IMAGE]
    with tempfile.TemporaryDirectory(prefix="dsec-corpus-") as name, busy(os.cpu_count() or 1):
        folder = Path(name)
        converted = _same(
            "conversions of the Debian image", runs, folder, lambda _: ["convert", f"oci:{image}", "image"]
        )
        built = _same("builds of a folder", runs, folder, lambda run: _build(folder / f"folder {run}", run))
    return [converted, built]


def _build(folder: Path, run: int) -> list[str]:
    _fill(folder, run)
    return ["build", str(folder), "image", "--kind", "workspace"]


def _same(what: str, runs: int, folder: Path, arguments: Callable[[int], list[str]]) -> Result:
    result = Result("determinism", f"{what}, one digest")
    first: tuple[str, ...] = ()
    for run in range(runs):
        with _store(folder, run) as store:
            command = arguments(run)
            done = _run(run, [*command, "--store", f"file://{store}"], store.parent)
            found = (done.stdout.decode().split("\n")[0], *keys_of(store)) if done.returncode == 0 else ()
            first = first or found
            wrong = "" if found and found == first else f"{found[:1] or done.stderr!r}, the first run had {first[:1]}"
            result.check(f"run {run}", wrong, f"python -m corpus determinism --runs {runs}")
    return result


@contextmanager
def _store(folder: Path, run: int) -> Iterator[Path]:
    """A place for a new store: on tmpfs at every other run."""
    where = TMPFS if run % 2 and os.access(TMPFS, os.W_OK) else folder
    with tempfile.TemporaryDirectory(dir=where, prefix="dsec-corpus-") as place:
        yield Path(place) / "store"


def _run(run: int, arguments: Sequence[str], temporary: Path) -> subprocess.CompletedProcess[bytes]:
    processors = sorted(os.sched_getaffinity(0))
    environment = {
        **os.environ,
        "LC_ALL": LOCALES[run % len(LOCALES)],
        "TZ": ZONES[run // 2 % len(ZONES)],
        "PYTHONHASHSEED": str(run),
        "TMPDIR": str(temporary),
    }

    def prepare() -> None:
        os.umask(UMASKS[run // 3 % len(UMASKS)])
        os.sched_setaffinity(0, processors[: 1 + run % len(processors)])

    command = [sys.executable, "-m", "dsec_cli.image", *arguments]
    return subprocess.run(command, check=False, capture_output=True, env=environment, preexec_fn=prepare)


def _fill(folder: Path, run: int) -> None:
    """The same files, made in another order."""
    shutil.rmtree(folder, ignore_errors=True)
    numbers = list(range(FILES))
    random.Random(run).shuffle(numbers)
    for number in numbers:
        path = folder / f"{number % 7}/{number % 31}/{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(random.Random(number).randbytes(300_000 if number % 100 == 0 else number))
        path.chmod(0o644)
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            path.chmod(0o755)
        os.utime(path, (10**9, 10**9))
