"""`python -m corpus [tars|images|sequences|determinism|entries ...]`: run the wide corpora; as root, since it mounts.

What is fetched and made for them is kept in `.demo/`; all else is gone afterwards.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from typing import Final

import click

from corpus import determinism, entries, images, sequences, tars
from corpus.report import Result, as_table, failures
from corpus.sources import Failed

NEEDED: Final = ("umoci", "mmdebstrap", "busybox", "tar")
SEQUENCES: Final = 2000
RUNS: Final = 20
SEED: Final = 1
PARTS: Final = ("tars", "images", "sequences", "determinism", "entries")


@click.command()
@click.argument("parts", nargs=-1, type=click.Choice(PARTS))
@click.option("--sequences", "count", default=SEQUENCES, show_default=True, help="Random sequences of layers.")
@click.option("--seed", default=SEED, show_default=True, help="Which ones.")
@click.option("--runs", default=RUNS, show_default=True, help="How often an image is converted and a folder built.")
@click.option("--markdown", is_flag=True, help="Print Markdown, as in docs/corpus.md.")
def main(parts: tuple[str, ...], count: int, seed: int, runs: int, markdown: bool) -> None:
    """Run PARTS of the wide corpora (all of them if none is named). Exit code 1 if anything failed."""
    _check()
    checks: Mapping[str, Callable[[], list[Result]]] = {
        "tars": tars.check,
        "images": images.check,
        "sequences": lambda: sequences.check(count, seed),
        "determinism": lambda: determinism.check(runs),
        "entries": entries.check,
    }
    results: list[Result] = []
    for part in parts or PARTS:
        print(f"corpus: {part}", file=sys.stderr, flush=True)
        results += checks[part]()
    print(as_table(results, markdown=markdown))
    if failed := failures(results):
        print("\n".join(["", *failed]))
        sys.exit(1)


def _check() -> None:
    """Say in one line what is lacking, before anything is made."""
    if os.geteuid() != 0:
        raise Failed("owners, devices and mounts need root; run it as root (sudo make corpus)")
    if missing := [program for program in NEEDED if shutil.which(program) is None]:
        raise Failed(f"not installed: {', '.join(missing)} (make setup-test installs them)")


if __name__ == "__main__":
    try:
        main(prog_name="corpus", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except Failed as error:
        sys.exit(f"corpus: {error}")
    except (KeyboardInterrupt, click.Abort):
        sys.exit(130)
