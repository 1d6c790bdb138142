"""Samples: seconds, what a child process used, medians, and taking turns."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar

MIB: Final = 1 << 20
GIB: Final = 1 << 30

_CHILD: Final = Path(__file__).with_name("child.py")

_T = TypeVar("_T")


class Failed(Exception):
    """A benchmark cannot go on; the text is one line for people."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What one child process took: wall and CPU seconds, and its largest resident set in bytes."""

    seconds: float
    cpu: float
    rss: int


class Stopwatch(AbstractContextManager["Stopwatch"]):
    """`with Stopwatch() as watch: ...`, then `watch.seconds`."""

    def __enter__(self) -> Self:
        self._started = time.perf_counter()
        self.seconds = 0.0
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.seconds = time.perf_counter() - self._started


def seconds_of(work: Callable[[], object]) -> float:
    with Stopwatch() as watch:
        work()
    return watch.seconds


def run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """The output of a command that must succeed; what it complains of is shown when it does not."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        words = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise Failed(f"{Path(command[0]).name} ended with {done.returncode}: {' '.join(words)}")
    return done.stdout


def run_measured(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Usage:
    """Run a command and tell what it took. Its own output is lost."""
    return Usage(**json.loads(run([sys.executable, "-I", "-S", str(_CHILD), *command], environment)))


def take_turns(tasks: Mapping[str, Callable[[int], _T]], samples: int) -> dict[str, list[_T]]:
    """`samples` results of each task, called with the number of the sample; a round begins one task later each time."""
    names = list(tasks)
    taken: dict[str, list[_T]] = {name: [] for name in names}
    for number in range(samples):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            taken[name].append(tasks[name](number))
    return taken


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range of some samples."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, samples: Iterable[float]) -> Spread:
        values = list(samples)
        return cls(statistics.median(values), min(values), max(values))

    def show(self, digits: int = 0, unit: str = "") -> str:
        """ "12.1 (11.8-13.0)"; one figure when all samples agree to the last digit."""
        median, least, most = (f"{value:,.{digits}f}{unit}" for value in (self.median, self.least, self.most))
        return median if least == most else f"{median} ({least}-{most})"
