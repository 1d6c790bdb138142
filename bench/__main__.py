"""`python -m bench [conversion|warm|cold ...]`: measure on this machine; as root, since it mounts.

What a benchmark mounts, starts and writes is gone after it, also when it fails or is interrupted.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NoReturn

import click

from bench import cold, collapse, conversion, dedup, machine, warm
from bench.measure import Failed
from bench.report import Section, as_markdown, as_text
from scripts.inputs import make_image

PROGRAM: Final = "bench"
NEEDED: Final = ("umoci", "mmdebstrap", "crun", "mkfs.ext4")

PARTS: Final[dict[str, tuple[Callable[[int], Section], int]]] = {
    "conversion": (conversion.measure, conversion.SAMPLES),
    "warm": (warm.measure, warm.SAMPLES),
    "cold": (cold.measure, cold.SAMPLES),
    "collapse": (collapse.measure, collapse.SAMPLES),
    "dedup": (dedup.measure, dedup.SAMPLES),
}
"""How each is measured, and how many samples it takes by default."""


@click.command()
@click.argument("parts", nargs=-1, type=click.Choice(list(PARTS)))
@click.option("--samples", type=click.IntRange(min=1), help="Of everything [conversion 3, warm 9, cold 3].")
@click.option("--markdown", is_flag=True, help="Print Markdown, as in docs/benchmarks.md.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write every sample to this file.")
def main(parts: tuple[str, ...], samples: int | None, markdown: bool, json_file: Path | None) -> None:
    """Measure PARTS (all of them if none is named): ours beside a control, in the same run."""
    _check()
    signal.signal(signal.SIGTERM, _leave)
    facts = {"date": datetime.now(UTC).date().isoformat(), **machine.facts()}
    with redirect_stdout(sys.stderr):
        make_image()
    print(_heading(facts, parts) if markdown else "\n".join(f"{name}: {value}" for name, value in facts.items()) + "\n")
    sections = {}
    for part in parts or PARTS:
        measure, default = PARTS[part]
        sections[part] = measure(samples or default)
        print((as_markdown if markdown else as_text)(sections[part]), flush=True)
    if json_file:
        found = {part: section.samples for part, section in sections.items()}
        json_file.write_text(json.dumps({"facts": facts, **found}, indent=2) + "\n", encoding="utf-8")


def _check() -> None:
    """Say in one line what is lacking, before anything is made."""
    if os.geteuid() != 0:
        raise Failed("mounting needs root; run it as root (sudo make bench)")
    if missing := [program for program in NEEDED if shutil.which(program) is None]:
        raise Failed(f"not installed: {', '.join(missing)} (make setup-demo installs them)")


def _leave(*_: object) -> NoReturn:
    """SIGTERM ends a benchmark as an interrupt does: what was made is taken down."""
    raise KeyboardInterrupt


def _heading(facts: Mapping[str, str], parts: Sequence[str]) -> str:
    lines = ["# Benchmarks", "", f"Made by `{' '.join(('python -m bench --markdown', *parts))}`:", ""]
    return "\n".join([*lines, "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items()), ""])


if __name__ == "__main__":
    try:
        main(prog_name=PROGRAM, standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except Failed as error:
        sys.exit(f"{PROGRAM}: {error}")
    except (KeyboardInterrupt, click.Abort):
        sys.exit(130)
