"""A commit of a git repository as a canonical tar, exactly as it is in git; with its history, if that is asked for.

    with open_git(parse_git("git:src@v1.2")) as tree:
        for piece in tree.tar: ...

Nothing is checked out: no filter, attribute, hook or line-end rule has a say, and LFS pointers stay pointers. Modes are
0644, 0755 and symlinks, directories 0755, all of 0:0 and of the commit's time. Submodules are empty directories.

Without history there is no `.git`. With it there is one that holds the commit, what it consists of, and its ancestors,
and nothing else: later commits, other branches, tags, stashes, reflogs, remotes and alternates could give away what
happened after the commit, which may be the answer to a task. Its bytes depend on the commit and on how deep the clone
is, not on versions of git and zlib, nor on how the objects lay in the repository. docs/inputs.md has the rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec_store.errors import Corrupt, Invalid, NotFound
from dsec_store.inputs.gitfiles import IndexEntry
from dsec_store.inputs.gitfolder import Files, git_folder
from dsec_store.inputs.githistory import read_history
from dsec_store.inputs.gitobjects import (
    FILE_MODES,
    LINK_MODE,
    SUBMODULE_MODE,
    TREE_MODE,
    Objects,
    Repository,
    check_names,
)
from dsec_store.layer.tar import TarKind
from dsec_store.layer.tarwriter import END, NANOSECONDS, header, padding, refuse_marker
from dsec_store.layer.tree import PATH_LENGTH_MAX, shown

SCHEME: Final = "git:"

FILES_MAX: Final = 4_000_000
"""Names in the tree of one commit: a few objects that hold each other many times over could ask for any number."""

_GIT: Final = b".git"
_DIRECTORY_MODE: Final = 0o755
_LINK_PERMISSIONS: Final = 0o777
_FILE_PERMISSIONS: Final = 0o644


@dataclass(frozen=True, slots=True)
class GitSource:
    """A commit: the repository's folder, a revision as git rev-parse takes it, whether its history comes along."""

    path: Path
    revision: str = "HEAD"
    history: bool = False


def parse_git(text: str, *, history: bool = False) -> GitSource:
    """`git:PATH` or `git:PATH@REV`.

    The whole is the path if that exists; else the last `@` splits whose left side exists (`git:src@main@{1}`). Raises
    `Invalid` without `git:` or PATH, `NotFound` when there is no such folder.
    """
    rest = text.removeprefix(SCHEME)
    if rest == text or not rest:
        raise Invalid(f"not a commit: {text!r}; write git:PATH or git:PATH@REV")
    path, revision = rest, ""
    end = len(rest)
    while not Path(path).exists():
        end = rest.rfind("@", 1, end)
        if end < 0:
            raise NotFound(f"{text!r}: no folder {rest.partition('@')[0] or rest!r}")
        path, revision = rest[:end], rest[end + 1 :]
    if path != rest and not revision:
        raise Invalid(f"{text!r}: nothing behind the last @; write git:PATH@REV")
    return GitSource(Path(path), revision or "HEAD", history)


@dataclass(frozen=True, slots=True)
class GitTree:
    """A commit's tree. `tar` is read once, inside the `with` statement that gave it.

    commit      its id in hexadecimal digits      seconds  the committer's time since 1970
    submodules  paths of the directories that are empty because the repository does not have what is in them
    """

    commit: str
    seconds: int
    submodules: tuple[bytes, ...]
    tar: Iterator[bytes]


@contextmanager
def open_git(source: GitSource) -> Iterator[GitTree]:
    """The tree of a commit, as a canonical tar with a root entry.

    Raises `NotFound` for a repository, revision or object that is not there, `Corrupt` for a damaged one, `Invalid` for
    names and modes that no layer can hold, `Denied` without git or room for the history. Each may come while `tar` is
    read: what was read until then is of no use.
    """
    repository = Repository(source.path)
    commit_id = repository.commit(source.revision)
    with repository.objects() as objects, ExitStack() as kept:
        commit = objects.commit(commit_id)
        if commit.time is None:
            raise Corrupt(f"commit {commit_id.hex()} in {str(source.path)!r} has no committer's time")
        files = _walk(objects, commit.tree)
        own: Files = ()
        if source.history:
            history = read_history(objects, commit_id, repository.shallow())
            staged = [file for file in files if file.mode != TREE_MODE]
            own = git_folder(kept, objects, repository.object_format, history, staged)
        yield GitTree(
            commit_id.hex(),
            commit.time,
            tuple(file.path for file in files if file.mode == SUBMODULE_MODE),
            _tar(objects, files, own, commit.time * NANOSECONDS),
        )


def _walk(objects: Objects, root: bytes) -> list[IndexEntry]:
    """Every name of a commit's tree, parents first, names in byte order (git's own order is another one).

    It is read level by level, each tree object once a level: objects may hold each other any number of times.
    """
    files: list[IndexEntry] = []
    level = [IndexEntry(b"", TREE_MODE, root)]
    while level:
        ids = list(dict.fromkeys(file.object_id for file in level))
        trees = {id_: objects.tree(data, id_) for id_, data in zip(ids, objects.read_each(ids, b"tree"), strict=True)}
        below: list[IndexEntry] = []
        for file in level:
            entries = trees[file.object_id]
            check_names(entries, file.path)
            base = file.path + b"/" if file.path else b""
            found = [IndexEntry(base + name, _mode(mode, base + name), object_id) for mode, name, object_id in entries]
            files += found
            below += (one for one in found if one.mode == TREE_MODE)
            if len(files) > FILES_MAX:
                raise Invalid(f"the commit has more than {FILES_MAX} files")
        level = below
    files.sort(key=lambda file: file.path.replace(b"/", b"\0"))
    return files


def _mode(mode: int, path: bytes) -> int:
    if len(path) > PATH_LENGTH_MAX:
        raise Invalid(f"{shown(path)}: a path of more than {PATH_LENGTH_MAX} bytes")
    refuse_marker(path)
    if mode in (TREE_MODE, LINK_MODE, SUBMODULE_MODE):
        return mode
    if mode not in FILE_MODES:
        raise Invalid(f"{shown(path)}: mode {mode:o} is none that git knows")
    return FILE_MODES[mode]


# -- The tar -----------------------------------------------------------------------------------------------------------


def _tar(objects: Objects, files: Sequence[IndexEntry], own: Files, mtime_ns: int) -> Iterator[bytes]:
    yield header(b".", TarKind.DIRECTORY, mode=_DIRECTORY_MODE, mtime_ns=mtime_ns)
    split = next((at for at, file in enumerate(files) if file.path.partition(b"/")[0] > _GIT), len(files))
    blobs = objects.stream_each(
        (file.object_id for file in files if file.mode not in (TREE_MODE, SUBMODULE_MODE)), b"blob"
    )
    for file in files[:split]:
        yield from _entry(blobs, file, mtime_ns)
    for path, content, size in own:
        if path.endswith(b"/"):
            yield header(path[:-1], TarKind.DIRECTORY, mode=_DIRECTORY_MODE, mtime_ns=mtime_ns)
        else:
            yield header(path, TarKind.FILE, mode=_FILE_PERMISSIONS, mtime_ns=mtime_ns, size=size)
            yield from content
            yield padding(size)
    for file in files[split:]:
        yield from _entry(blobs, file, mtime_ns)
    yield END


def _entry(blobs: Iterator[tuple[bytes, int, Iterator[bytes]]], file: IndexEntry, mtime_ns: int) -> Iterator[bytes]:
    """One entry; the content of a file or symlink is the next of `blobs`."""
    if file.mode in (TREE_MODE, SUBMODULE_MODE):
        yield header(file.path, TarKind.DIRECTORY, mode=_DIRECTORY_MODE, mtime_ns=mtime_ns)
        return
    _, size, pieces = next(blobs)
    if file.mode == LINK_MODE:
        if size > PATH_LENGTH_MAX:
            raise Invalid(f"{shown(file.path)}: a symlink to a target of {size} bytes (at most {PATH_LENGTH_MAX})")
        target = b"".join(pieces)
        yield header(file.path, TarKind.SYMLINK, mode=_LINK_PERMISSIONS, mtime_ns=mtime_ns, link=target)
        return
    yield header(file.path, TarKind.FILE, mode=file.mode & 0o777, mtime_ns=mtime_ns, size=size)
    yield from pieces
    yield padding(size)
