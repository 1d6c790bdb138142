"""`dsec-image gc`: free what no name leads to."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any, Final

import click

from dsec_cli.command import Checked, emit, json_option, print_table, progress, say, size, store_option
from dsec_cli.wiring import Settings, open_objects
from dsec_store.errors import Invalid
from dsec_store.gc import DEFAULT_MIN_AGE, Count, GcReport, collect
from dsec_store.leases import LeaseRecord

_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION: Final = re.compile(r"(\d{1,9})([smhd]?)")


def parse_duration(text: str) -> int:
    """Seconds: a number, perhaps with one of the units s, m, h and d. Raises `Invalid`."""
    if not (found := _DURATION.fullmatch(text)):
        raise Invalid(f"not a duration: {text!r} (expected a number of s, m, h or d, as in 90s, 12h)")
    return int(found[1]) * _SECONDS[found[2] or "s"]


DURATION: Final = Checked("duration", parse_duration)


@click.command("gc")
@click.option("--dry-run", is_flag=True, help="Only tell what would be done.")
@click.option(
    "--min-age",
    type=DURATION,
    default=int(DEFAULT_MIN_AGE),
    metavar="DURATION",
    help="Leave alone what was stored later than this, as in 90s, 12h or 0 [1h].",
)
@store_option
@json_option
def gc(dry_run: bool, min_age: int, store: str | None, as_json: bool) -> None:
    """Free what no name and no mount leads to; make packs that are mostly dead smaller; merge indexes.

    May run beside builds and mounts on any machine, and may be killed. What a build may still count on is freed by a
    later run.
    """
    objects = open_objects(Settings.of(store, None).store)
    with progress() as shown:
        report = collect(objects, dry_run=dry_run, min_age=min_age, progress=shown)
    if as_json:
        emit(_facts(report))
        return
    _show(report)


def _facts(report: GcReport) -> dict[str, Any]:
    counts = {name: getattr(report, name) for name in ("live", "freed", "condemned", "young")}
    return {
        "dry_run": report.dry_run,
        **{name: {"objects": count.objects, "bytes": count.bytes} for name, count in counts.items()},
        "relied_on": report.relied_on,
        "rewritten": {
            "packs": report.rewritten.packs,
            "into": report.rewritten.into,
            "copied_bytes": report.rewritten.copied,
        },
        "indexes": {"before": report.indexes[0], "after": report.indexes[1]},
        "waiting": [
            {"lease": lease.key, "pid": lease.owner.pid if lease.owner else None, "since": lease.created}
            for lease in report.waiting
        ],
        "problems": list(report.problems),
    }


def _show(report: GcReport) -> None:
    rows = [
        _row("would be freed" if report.dry_run else "freed", report.freed),
        _row("waits for builds", report.condemned),
        _row("kept: young", report.young),
        _row("in use", report.live),
    ]
    print_table(["", "OBJECTS", "BYTES"], [row for row in rows if row is not None])
    packs, copied = report.rewritten.packs, size(report.rewritten.copied)
    if packs and report.dry_run:
        click.echo(f"{packs} packs would be rewritten, {copied} copied")
    elif packs:
        click.echo(f"{packs} packs rewritten into {report.rewritten.into}, {copied} copied")
    if report.indexes[0] != report.indexes[1]:
        click.echo(f"{report.indexes[0]} indexes merged into {report.indexes[1]}")
    if report.relied_on:
        click.echo(f"{report.relied_on} objects stay for builds under way: run gc again later")
    for lease in report.waiting:
        click.echo(f"waiting for {_described(lease)}: run gc again when it has gone on for a minute, or has ended")
    for problem in report.problems:
        say("dsec-image", problem)


def _row(name: str, count: Count) -> list[str] | None:
    return [name, str(count.objects), size(count.bytes)] if count.objects or name in ("freed", "in use") else None


def _described(lease: LeaseRecord) -> str:
    since = datetime.fromtimestamp(lease.created, UTC).strftime("%Y-%m-%d %H:%M UTC")
    owner = f"process {lease.owner.pid} of its machine, " if lease.owner else ""
    return f"a build ({owner}lease {lease.key}, since {since})"
