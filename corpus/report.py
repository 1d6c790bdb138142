"""What a part of the corpora found, as a value and as a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

_HEAD: Final = ("collection", "what", "cases", "passed", "refused as they should", "failed")


@dataclass(frozen=True, slots=True)
class Failure:
    """A case that failed: its name, what was found, and a command that shows it again."""

    case: str
    why: str
    again: str


@dataclass(slots=True)
class Result:
    """A row of the table. `refused` counts cases that were refused with the reason that is expected of them."""

    collection: str
    what: str
    passed: int = 0
    refused: int = 0
    failures: list[Failure] = field(default_factory=list)

    @property
    def cases(self) -> int:
        return self.passed + self.refused + len(self.failures)

    def fail(self, case: str, why: str, again: str) -> None:
        self.failures.append(Failure(case, why, again))

    def check(self, case: str, wrong: str, again: str) -> None:
        """Count a case: passed if nothing is wrong."""
        if wrong:
            self.fail(case, wrong, again)
        else:
            self.passed += 1


def as_table(results: Iterable[Result], *, markdown: bool) -> str:
    rows = [_HEAD, *(_cells(result) for result in results)]
    if markdown:
        lines = [f"| {' | '.join(row)} |" for row in rows]
        return "\n".join([lines[0], "|---|---|---:|---:|---:|---:|", *lines[1:]])
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    return "\n".join("  ".join(map(_padded, row, widths)).rstrip() for row in rows)


def failures(results: Iterable[Result]) -> list[str]:
    """Each failure in two lines."""
    return [
        f"FAILED {result.collection}: {each.case}: {each.why}\n  again: {each.again}"
        for result in results
        for each in result.failures
    ]


def _cells(result: Result) -> Sequence[str]:
    counts = (result.cases, result.passed, result.refused, len(result.failures))
    return (result.collection, result.what, *map(str, counts))


def _padded(text: str, width: int) -> str:
    return text.rjust(width) if text.isdigit() else text.ljust(width)
