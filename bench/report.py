"""Results in three forms: for a terminal, as Markdown, as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as they are shown. The first column names the row."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Section:
    """One benchmark: under which conditions, the tables with a line above each, and every sample."""

    title: str
    conditions: str
    tables: Mapping[str, Table]
    samples: Mapping[str, Any] = field(default_factory=dict)


def as_text(section: Section) -> str:
    return "\n".join([f"== {section.title}", section.conditions, *chain(*map(_text_table, *_parts(section))), ""])


def as_markdown(section: Section) -> str:
    return "\n".join(
        [f"## {section.title}", "", section.conditions, *chain(*map(_markdown_table, *_parts(section))), ""]
    )


def _parts(section: Section) -> tuple[Sequence[str], Sequence[Table]]:
    return list(section.tables), list(section.tables.values())


def _text_table(heading: str, table: Table) -> Iterator[str]:
    yield f"\n{heading}"
    widths = [max(map(len, column)) for column in zip(table.columns, *table.rows, strict=True)]
    for row in (table.columns, *table.rows):
        first, *others = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join([first, *others]).rstrip()


def _markdown_table(heading: str, table: Table) -> Iterator[str]:
    yield f"\n{heading}\n"
    yield _markdown_row(table.columns)
    yield _markdown_row(("---", *["--:"] * (len(table.columns) - 1)))
    yield from map(_markdown_row, table.rows)


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")
