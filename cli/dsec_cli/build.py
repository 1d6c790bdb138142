"""`dsec-image build`: one layer from a folder, a tar, a commit or a list of Python packages."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from dsec_cli.command import ENV, NAME, Checked, emit, json_option, say, size, store_option, verify_option
from dsec_cli.wiring import Settings, open_building
from dsec_store.descriptor import KINDS
from dsec_store.errors import Denied, Invalid, NotFound, StoreError
from dsec_store.inputs.git import SCHEME as GIT
from dsec_store.inputs.git import GitSource, parse_git
from dsec_store.inputs.ignore import Ignore
from dsec_store.inputs.python import SCHEME as PIP
from dsec_store.inputs.python import PythonSource, parse_python
from dsec_store.layer.local import LocalBuild, Source, build_local

_PROGRAM: Final = "dsec-image"


def _source(text: str) -> Source:
    if text.startswith(GIT):
        return parse_git(text)
    return parse_python(text) if text.startswith(PIP) else Path(text)


SOURCE = Checked("source", _source)


@click.command()
@click.argument("source", type=SOURCE, metavar="SRC")
@click.argument("name", type=NAME)
@click.option("--kind", type=click.Choice(KINDS), required=True, help="What the layer is for.")
@click.option("--prefix", default="/", show_default=True, help="Where the tree is to appear, as in /testbed.")
@click.option("--env", type=ENV, multiple=True, help="An environment variable that goes with the layer. Repeatable.")
@click.option("--path", "search", multiple=True, help="A folder in front of PATH, as in /opt/t/bin. Repeatable.")
@click.option("--keep-owner", is_flag=True, help="Keep uid and gid; without it, all is owned by 0:0.")
@click.option(
    "--clamp-mtime",
    type=int,
    envvar="SOURCE_DATE_EPOCH",
    metavar="SECONDS",
    help="No mtime is later than this [$SOURCE_DATE_EPOCH].",
)
@click.option("--ignore-file", type=click.Path(path_type=Path), help="Of a folder: leave out what these patterns name.")
@click.option("--history", is_flag=True, help="Of a commit: add a .git with its ancestors, and nothing else.")
@click.option("--python", metavar="X.Y", help="For pip: the Python of the base [this one].")
@click.option("--platform", metavar="TAG", help="For pip: as in manylinux_2_28_x86_64 [this machine, glibc 2.28].")
@verify_option
@store_option
@json_option
def build(
    source: Source,
    name: str,
    kind: str,
    prefix: str,
    env: tuple[tuple[str, str], ...],
    search: tuple[str, ...],
    keep_owner: bool,
    clamp_mtime: int | None,
    ignore_file: Path | None,
    history: bool,
    python: str | None,
    platform: str | None,
    verify: bool,
    store: str | None,
    as_json: bool,
) -> None:
    """Store SRC under NAME, as an image of one layer.

    SRC is one of

    \b
      PATH                    a folder, or a tar (plain, gzip or zstd)
      git:PATH[@REV]          the tree of a commit
      pip:FILE                the packages of a requirements file
      pip:NAME==1.2,OTHER>=3  these packages
    """
    try:
        source = _refined(source, history=history, python=python, platform=platform)
        ignore = _ignore(source, ignore_file)
        wanted = LocalBuild(kind, prefix, env, search, keep_owner, clamp_mtime, ignore)
    except StoreError as error:
        raise click.UsageError(str(error)) from None
    with open_building(Settings.of(store, None).store) as objects:
        built = build_local(objects, source, name, wanted, verify=verify)
    for notice in built.notices:
        say(_PROGRAM, notice)
    if as_json:
        emit(
            {
                "name": name,
                "image": str(built.image),
                "new_packs": built.layer.new_packs,
                "new_bytes": built.layer.new_bytes,
                "notices": list(built.notices),
            }
        )
        return
    click.echo(f"{name}: {built.image}")
    click.echo(f"{built.layer.new_packs} new packs, {size(built.layer.new_bytes)} of chunks added")


def _refined(source: Source, *, history: bool, python: str | None, platform: str | None) -> Source:
    """The source as its own options want it. Raises `Invalid` for an option of another kind of source."""
    if history and not isinstance(source, GitSource):
        raise Invalid("--history is for git:PATH[@REV]")
    if (python or platform) and not isinstance(source, PythonSource):
        raise Invalid("--python and --platform are for pip:...")
    if isinstance(source, GitSource):
        return GitSource(source.path, source.revision, history)
    if isinstance(source, PythonSource):
        return source.for_python(python, platform)
    return source


def _ignore(source: Source, path: Path | None) -> Ignore | None:
    if path is None:
        return None
    if not isinstance(source, Path) or not source.is_dir():
        raise Invalid("--ignore-file is for folders")
    try:
        return Ignore.parse(path.read_bytes(), str(path))
    except FileNotFoundError:
        raise NotFound(f"no ignore file {str(path)!r}") from None
    except OSError as error:
        raise Denied(f"{str(path)!r} cannot be read: {error.strerror}") from None
