"""What all our commands share: options, argument types, one-line errors, output for people and for programs.

Exit codes: 0 success, 2 wrong usage, 1 failure (commands that run something have their own: `dsec run`). What only some
commands need, rich above all, is imported where it is used: a sandbox must not wait for it.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import click
from click.exceptions import NoArgsIsHelpError

from dsec_cli.wiring import DEFAULT_ROOT, DEFAULT_STORE
from dsec_store.descriptor import parse_env
from dsec_store.errors import StoreError
from dsec_store.references import check_name

FAILURE: Final = 1

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")

_F = TypeVar("_F", bound=Callable[..., Any])

store_option = click.option(
    "--store",
    metavar="URL",
    help=f"file:///folder or s3://bucket/prefix [$DSEC_STORE, {DEFAULT_STORE}]",
)
root_option = click.option("--root", metavar="DIR", help=f"The node's state [$DSEC_ROOT, {DEFAULT_ROOT}]")
verify_option = click.option(
    "--verify", is_flag=True, help="Read and verify what the store has already; what is damaged is stored anew."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


class Checked(click.ParamType[Any]):
    """An argument that a function of ours accepts or refuses; what it refuses is wrong usage."""

    def __init__(self, name: str, accept: Callable[[str], Any]) -> None:
        self.name = name
        self._accept = accept

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._accept(value)
        except StoreError as error:
            self.fail(str(error), param, ctx)


NAME: Final = Checked("name", check_name)
ENV: Final = Checked("K=V", parse_env)


@contextmanager
def failing(program: str, code: int = FAILURE) -> Iterator[None]:
    """Errors of ours become one line on stderr and exit code `code`."""
    try:
        yield
    except StoreError as error:
        say(program, str(error))
        sys.exit(code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nobody reads any more; Python's own flush must not complain
        sys.exit(code)


def say(program: str, text: str) -> None:
    """One line for people, on stderr."""
    click.echo(f"{program}: {' '.join(text.splitlines())}", err=True)


def run_group(group: click.Command, program: str) -> None:
    """Run a command line. An interrupt ends it with 130, as a shell does."""
    with failing(program):
        try:
            logging.lastResort = logging.NullHandler()  # stderr is for the outcome, not for what retries have to say
            sys.exit(group.main(prog_name=program, standalone_mode=False) or 0)
        except NoArgsIsHelpError as error:
            error.show()
            sys.exit(error.exit_code)
        except click.ClickException as error:
            command = _command_path(error, program)
            say(command, f"{error.format_message().rstrip('.')} (see '{command} --help')")
            sys.exit(error.exit_code)
        except (click.Abort, KeyboardInterrupt):
            say(program, "interrupted")
            sys.exit(130)


def _command_path(error: click.ClickException, program: str) -> str:
    """Which of our commands was used wrongly, as in "dsec node start"."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    return context.command_path if context else program


def emit(value: object) -> None:
    """One JSON document on stdout."""
    click.echo(json.dumps(value, indent=2))


def emit_each(values: Iterable[object]) -> None:
    """One JSON array on stdout, each value on a line of its own as it comes: for lists that are long."""
    separator = "["
    for value in values:
        click.echo(f"{separator}\n{json.dumps(value)}", nl=False)
        separator = ","
    click.echo("[]" if separator == "[" else "\n]")


def print_table(columns: list[str], rows: list[list[str]]) -> None:
    """Rows under headings; the last column takes the room that is left."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    console.print(table)


def size(count: int) -> str:
    """Bytes for people: "1.5 MiB"."""
    power = min(max(count.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    return f"{count} B" if power == 0 else f"{count / (1 << 10 * power):.1f} {_UNITS[power]}"


Shown = Callable[[str, int, int], None]
"""Shows how much is done of something that has a name: `shown("layer 2 of 5", done, total)`. From any thread."""


@contextmanager
def progress(*, in_bytes: bool = False) -> Iterator[Shown]:
    """A function that shows what is being done on a terminal, and is quiet elsewhere.

    Each name has a bar of its own until it is done; `in_bytes` shows amounts, rate and time left of bytes.
    """
    if not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    from rich import progress as rich
    from rich.console import Console

    count = rich.TextColumn("{task.completed}/{task.total}")
    amounts = [rich.DownloadColumn(binary_units=True), rich.TransferSpeedColumn()] if in_bytes else [count]
    columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), *amounts, rich.TimeRemainingColumn())
    lock = threading.Lock()
    tasks: dict[str, rich.TaskID] = {}

    def show(what: str, done: int, total: int) -> None:
        with lock:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)
            if done >= total:
                bars.remove_task(tasks.pop(what))

    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        yield show
