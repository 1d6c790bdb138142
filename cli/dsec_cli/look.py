"""`dsec-image ls`, `cat`, `tree` and `diff`: the files of stored images, without a mount."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, BinaryIO, Final

import click

from dsec_cli.command import Checked, emit, emit_each, json_option, print_table, progress, say, size, store_option
from dsec_cli.wiring import PROMPT, Settings, open_objects
from dsec_store.browse import Entry, Files, LayerTrees, kind, shown_xattrs
from dsec_store.chunks import ChunkCache
from dsec_store.difference import CHANGED, Change, Sharing, differences, shared_chunks
from dsec_store.errors import Invalid, StoreError
from dsec_store.layer.export import RecentChunks
from dsec_store.layer.tree import Inode
from dsec_store.objects import Objects
from dsec_store.quoting import escaped, shell_quoted
from dsec_store.references import Reference, check_name
from dsec_store.usage import Amount

PROGRAM: Final = "dsec-image"

RECENT: Final = 128 << 20
"""Bytes of chunks that are kept while contents are compared, and between two files that are printed."""

_SHORT: Final = len("blake3:") + 12
_SIGNS: Final = {"added": b"+", "removed": b"-", "changed": b"~"}
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class ImagePath:
    """NAME or NAME:/PATH. The path begins at the first `:/`, which no name holds, and is any bytes."""

    name: str
    path: bytes | None = None

    @classmethod
    def parse(cls, text: str) -> ImagePath:
        name, found, path = text.partition(":/")
        return cls(check_name(name), b"/" + os.fsencode(path) if found else None)

    @property
    def where(self) -> bytes:
        """The path, or that of the root."""
        return self.path or b"/"


def parse_file(text: str) -> ImagePath:
    """As `ImagePath.parse`, and there must be a path."""
    parsed = ImagePath.parse(text)
    if parsed.path is None:
        raise Invalid(f"no path in {text!r} (expected NAME:/PATH)")
    return parsed


IMAGE_PATH: Final = Checked("NAME[:/PATH]", ImagePath.parse)
IMAGE_FILE: Final = Checked("NAME:/PATH", parse_file)


def open_files(objects: Objects, name: str, trees: LayerTrees | None = None, cache: ChunkCache | None = None) -> Files:
    """The files of the image of this name."""
    image = objects.image(objects.references.get(name))
    return Files(objects, image.mounted, trees=trees, cache=cache)


# -- ls ----------------------------------------------------------------------------------------------------------------


@click.command("ls")
@click.argument("where", type=IMAGE_PATH, metavar="[NAME[:/PATH]]", required=False)
@click.option("-R", "--recursive", is_flag=True, help="List all that lies below, by path.")
@store_option
@json_option
def ls(where: ImagePath | None, recursive: bool, store: str | None, as_json: bool) -> None:
    """List the names in the store, or the files of an image.

    With NAME:/PATH, a line for each file as by `ls -l`: type and mode, links, owner, size, time (UTC), name. A symlink
    at the end of PATH is shown itself; with a slash behind it, what it leads to. On a terminal, names are quoted where
    a shell needs it; elsewhere they are written as they are.
    """
    objects = open_objects(Settings.of(store, None).store, policy=PROMPT)
    if where is None:
        if recursive:
            raise click.UsageError("--recursive is for the files of an image: give a NAME")
        _list_names(objects, as_json)
        return
    files = open_files(objects, where.name)
    top = files.lookup(where.where, follow=False)
    found = _listed(files, top, recursive)
    if as_json:
        emit_each(_entry_facts(files, top, entry) for entry in found)
    else:
        _print_lines(_lines(files, top, found))


def _list_names(objects: Objects, as_json: bool) -> None:
    rows = []
    for name in objects.references.names():
        reference = objects.references.read(name)
        rows.append({"name": name, "image": str(reference.image), **_summary(objects, reference)})
    if as_json:
        emit(rows)
        return
    print_table(
        ["NAME", "KIND", "LAYERS", "SOURCE", "IMAGE"],
        [
            [row["name"], row["kind"], str(row["layers"]), size(row["source_bytes"]), row["image"][:_SHORT]]
            for row in rows
        ],
    )


def _summary(objects: Objects, reference: Reference) -> dict[str, Any]:
    """One damaged image does not hide the others."""
    try:
        image = objects.image(reference.image)
    except StoreError as error:
        return {"kind": "damaged", "layers": 0, "source_bytes": 0, "problem": str(error)}
    return {"kind": image.kind, "layers": len(image.layers), "source_bytes": reference.origin.source_bytes}


def _listed(files: Files, top: Entry, recursive: bool) -> Iterable[Entry]:
    if not top.inode.is_directory:
        return [top]
    return files.walk(top) if recursive else files.entries(top)


def _relative(top: Entry, entry: Entry) -> bytes:
    """The path of an entry as seen from the one that was asked for; that one's own name for itself."""
    return entry.path[len(top.path) :].lstrip(b"/") or entry.name


def _entry_facts(files: Files, top: Entry, entry: Entry) -> dict[str, Any]:
    inode = entry.inode
    facts = {
        "path": escaped(_relative(top, entry)),
        "type": kind(inode),
        "mode": f"{stat.S_IMODE(inode.mode):04o}",
        "links": files.links(entry),
        "uid": inode.uid,
        "gid": inode.gid,
        "size": _size(inode),
        "mtime_ns": inode.mtime_ns,
        "xattrs": {escaped(name): escaped(value) for name, value in sorted(shown_xattrs(inode).items())},
        "layer": str(files.layers[entry.layer]) if files.layers else None,
    }
    if stat.S_ISLNK(inode.mode):
        facts["target"] = escaped(inode.target)
    if stat.S_ISCHR(inode.mode) or stat.S_ISBLK(inode.mode):
        facts["device"] = list(inode.rdev)
    return facts


def _size(inode: Inode) -> int | None:
    """Bytes of a file or of a symlink's target; a directory has no size that means anything."""
    if stat.S_ISLNK(inode.mode):
        return len(inode.target)
    return inode.size if stat.S_ISREG(inode.mode) else None


def _lines(files: Files, top: Entry, found: Iterable[Entry]) -> Iterator[bytes]:
    shown = _for_output()
    for entry in found:
        inode = entry.inode
        device = "{}, {}".format(*inode.rdev) if stat.S_ISCHR(inode.mode) or stat.S_ISBLK(inode.mode) else "-"
        amount = _size(inode)
        columns = (
            f"{stat.filemode(inode.mode)} {files.links(entry):3} {inode.uid:5} {inode.gid:5} "
            f"{device if amount is None else amount:>10} {_time(inode.mtime_ns)} "
        )
        target = b" -> " + shown(inode.target) if stat.S_ISLNK(inode.mode) else b""
        yield columns.encode() + shown(_relative(top, entry)) + target


def _time(mtime_ns: int) -> str:
    """To the second, in UTC; the bare seconds where the calendar ends."""
    seconds = mtime_ns // 1_000_000_000
    try:
        return (_EPOCH + timedelta(seconds=seconds)).strftime("%Y-%m-%d %H:%M:%S")
    except OverflowError:
        return f"{seconds:>19}"


def _for_output() -> Callable[[bytes], bytes]:
    """How names are written to stdout."""
    return (lambda name: shell_quoted(name).encode()) if sys.stdout.isatty() else (lambda name: name)


def _print_lines(lines: Iterable[bytes]) -> None:
    out = _stdout()
    for line in lines:
        out.write(line + b"\n")
    out.flush()


def _stdout() -> BinaryIO:
    return sys.stdout.buffer


# -- cat ---------------------------------------------------------------------------------------------------------------


@click.command()
@click.argument("paths", type=IMAGE_FILE, metavar="NAME:/PATH...", nargs=-1, required=True)
@store_option
def cat(paths: tuple[ImagePath, ...], store: str | None) -> None:
    """Write the contents of files to stdout, one behind the other, fetched straight from the store.

    Symlinks are followed as inside the image. What cannot be written is told on stderr, and the exit code is 1. There
    is no --json: contents are bytes.
    """
    objects = open_objects(Settings.of(store, None).store, policy=PROMPT)
    opened: dict[str, Files] = {}
    trees, cache = LayerTrees(objects), RecentChunks(RECENT)
    failed = False
    for path in paths:
        try:
            if path.name not in opened:
                opened[path.name] = open_files(objects, path.name, trees, cache)
            _copy(opened[path.name], path.where)
        except StoreError as error:
            say(PROGRAM, f"{path.name}: {error}")
            failed = True
    if failed:
        raise SystemExit(1)


def _copy(files: Files, path: bytes) -> None:
    out = _stdout()
    for piece in files.read(files.lookup(path)):
        out.write(piece)
    out.flush()


# -- tree --------------------------------------------------------------------------------------------------------------


@click.command()
@click.argument("where", type=IMAGE_PATH, metavar="NAME[:/PATH]")
@click.option("--depth", type=click.IntRange(min=1), metavar="N", help="Show at most N levels.")
@store_option
@json_option
def tree(where: ImagePath, depth: int | None, store: str | None, as_json: bool) -> None:
    """Show the files of an image as a tree; PATH must lead to a directory."""
    objects = open_objects(Settings.of(store, None).store, policy=PROMPT)
    files = open_files(objects, where.name)
    top = files.lookup(where.where + b"/")
    if as_json:
        emit_each(_entry_facts(files, top, entry) for entry in files.walk(top, depth))
        return
    _print_lines(_drawn(files, top, depth))


def _drawn(files: Files, top: Entry, depth: int | None) -> Iterator[bytes]:
    """A line for each file, with branches in front of its name."""
    shown = _for_output()
    yield shown(b"/" + top.path)
    stack = [(_last_marked(files.entries(top)), "")]
    while stack:
        entries, indent = stack[-1]
        following = next(entries, None)
        if following is None:
            stack.pop()
            continue
        entry, last = following
        target = b" -> " + shown(entry.inode.target) if stat.S_ISLNK(entry.inode.mode) else b""
        yield (indent + ("└── " if last else "├── ")).encode() + shown(entry.name) + target
        if entry.inode.is_directory and (depth is None or len(stack) < depth):
            stack.append((_last_marked(files.entries(entry)), indent + ("    " if last else "│   ")))


def _last_marked(entries: Iterator[Entry]) -> Iterator[tuple[Entry, bool]]:
    """Each entry, and whether it is the last one."""
    entry = next(entries, None)
    while entry is not None:
        following = next(entries, None)
        yield entry, following is None
        entry = following


# -- diff --------------------------------------------------------------------------------------------------------------


@click.command()
@click.argument("first", type=IMAGE_PATH, metavar="A[:/PATH]")
@click.argument("second", type=IMAGE_PATH, metavar="B[:/PATH]")
@click.option("--exit-code", is_flag=True, help="Exit with 1 if any path differs.")
@store_option
@json_option
def diff(first: ImagePath, second: ImagePath, exit_code: bool, store: str | None, as_json: bool) -> None:
    """Show which files differ from image A to image B, and how many bytes they share.

    A line for each path: + only in B, - only in A, ~ in both, with what differs: type, content, target, device, mode,
    owner, mtime, xattrs. Chunks are those of the whole images. Exit code 0, whether something differs or not.
    """
    objects = open_objects(Settings.of(store, None).store, policy=PROMPT)
    trees, cache = LayerTrees(objects), RecentChunks(RECENT)
    images = [objects.image(objects.references.get(one.name)) for one in (first, second)]
    sides = [Files(objects, image.mounted, trees=trees, cache=cache) for image in images]
    tops = [files.lookup(one.where) for files, one in zip(sides, (first, second), strict=True)]
    with progress() as shown:
        found = differences(sides[0], tops[0], sides[1], tops[1], shown)
        sharing = shared_chunks(objects, images[0].layers, images[1].layers)
    if as_json:
        emit({"changes": [_change_facts(change) for change in found], "chunks": _sharing_facts(sharing)})
    else:
        _print_lines(_changes(found, sharing))
    if exit_code and found:
        raise SystemExit(1)


def _changes(found: Iterable[Change], sharing: Sharing) -> Iterator[bytes]:
    shown = _for_output()
    for change in found:
        what = f" ({', '.join(change.what)})".encode() if change.kind == CHANGED else b""
        yield _SIGNS[change.kind] + b" " + shown(b"/" + change.path) + what
    for title, amount in (("in both", sharing.both), ("only in A", sharing.first), ("only in B", sharing.second)):
        yield f"chunks {title}: {amount.chunks}, {size(amount.stored)} stored, {size(amount.plain)} plain".encode()


def _change_facts(change: Change) -> dict[str, Any]:
    return {
        "path": escaped(change.path),
        "kind": change.kind,
        "what": list(change.what),
        "before": _inode_facts(change.before),
        "after": _inode_facts(change.after),
    }


def _inode_facts(inode: Inode | None) -> dict[str, Any] | None:
    if inode is None:
        return None
    return {
        "type": kind(inode),
        "mode": f"{stat.S_IMODE(inode.mode):04o}",
        "uid": inode.uid,
        "gid": inode.gid,
        "size": _size(inode),
        "mtime_ns": inode.mtime_ns,
    }


def _sharing_facts(sharing: Sharing) -> dict[str, Any]:
    def facts(amount: Amount) -> dict[str, int]:
        return {"chunks": amount.chunks, "plain_bytes": amount.plain, "stored_bytes": amount.stored}

    return {"both": facts(sharing.both), "first": facts(sharing.first), "second": facts(sharing.second)}
