"""`dsec-image check`: is all of an image, or of the whole store, there and undamaged?"""

from __future__ import annotations

from typing import Any

import click

from dsec_cli.command import NAME, emit, json_option, progress, size, store_option
from dsec_cli.wiring import PROMPT, Settings, open_objects
from dsec_store.check import Report, check_image, check_store
from dsec_store.objects import Objects


@click.command()
@click.argument("name", type=NAME, required=False)
@click.option("--deep", is_flag=True, help="Fetch and verify every chunk too, and make every tar again.")
@store_option
@json_option
def check(name: str | None, deep: bool, store: str | None, as_json: bool) -> None:
    """Verify that all of NAME, or of every name, is in the store and undamaged. Exit code 1 if it is not.

    Without NAME, indexes and lookups are looked at too. What several images share is read once.
    """
    objects = open_objects(Settings.of(store, None).store, policy=PROMPT)
    report = _check_store(objects, deep, as_json) if name is None else _check_image(objects, name, deep, as_json)
    if report.problems:
        raise SystemExit(1)


def _check_image(objects: Objects, name: str, deep: bool, as_json: bool) -> Report:
    reference = objects.references.read(name)
    with progress() as shown:
        report = check_image(objects, reference, deep=deep, progress=shown)
    if as_json:
        emit({"name": name, "image": str(reference.image), "deep": deep, **_facts(report)})
    else:
        _show(name, report, deep)
    return report


def _check_store(objects: Objects, deep: bool, as_json: bool) -> Report:
    with progress() as shown:
        report = check_store(objects, deep=deep, progress=shown)
    if as_json:
        names = [{"name": name, "problems": problems} for name, problems in report.names.items()]
        emit({"deep": deep, "names": names, **_facts(report.total)})
        return report.total
    for name, problems in report.names.items():
        if problems:
            click.echo(f"{name}: {len(problems)} problems")
    _show(f"{len(report.names)} names", report.total, deep)
    return report.total


def _facts(report: Report) -> dict[str, Any]:
    return {"layers": report.layers, "chunks": report.chunks, "bytes": report.bytes, "problems": report.problems}


def _show(what: str, report: Report, deep: bool) -> None:
    for problem in report.problems:
        click.echo(problem)
    read = f", {report.chunks} chunks ({size(report.bytes)}) read" if deep else ""
    click.echo(f"{what}: {len(report.problems)} problems in {report.layers} layers{read}")
