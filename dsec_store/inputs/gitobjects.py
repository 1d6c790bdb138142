"""Objects of a git repository, read and verified; nothing in the repository is run, followed to the network or trusted.

Problem: a repository comes from anybody. Its configuration can name programs and remotes, its references can replace
objects, and git itself does not hold an object that it reads from a pack against its id.

Choice: two questions to git (which commit, which objects), in an environment without the machine's configuration,
protocols, hooks, replacements and grafts. What comes back is hashed here, and parsed by functions of bytes. git checks
nothing out, so filters and attributes have no say.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, NamedTuple, TypeVar

from dsec_store.errors import Corrupt, Denied, Invalid, NotFound, StoreError, Unavailable
from dsec_store.layer.tree import shown

if TYPE_CHECKING:
    from hashlib import _Hash

PIECE: Final = 1 << 20
"""Bytes that are read at once from an object."""

PIPE_BUFFER: Final = 256 << 10
"""Bytes that are read ahead of git's answers."""

PARSED_SIZE_MAX: Final = 256 << 20
"""Bytes of one commit or tree: those are held in memory. A tree of a million files has some 50 MiB."""

ASKED_AHEAD: Final = 60
"""Objects that git is asked for at once: as many ids as the smallest pipe takes, so that neither side can block."""

ID_SIZES: Final = {"sha1": 20, "sha256": 32}
"""Bytes of an object id in each object format of git."""

TREE_MODE: Final = 0o040000
LINK_MODE: Final = 0o120000
SUBMODULE_MODE: Final = 0o160000
FILE_MODES: Final = {0o100644: 0o100644, 0o100664: 0o100644, 0o100755: 0o100755}
"""Modes of files in trees, and what each means: the second was written by early versions of git."""

_E = TypeVar("_E", bound=StoreError)

_MESSAGE_MAX: Final = 4096
_MODE: Final = re.compile(rb"[0-7]{5,6}")
_COMMITTER: Final = re.compile(rb"^committer [^\n]*> ([0-9]{1,19}) [+-][0-9]{1,6}$", re.MULTILINE)
_SAFETY: Final = {
    "safe.directory": "*",  # git refuses other users' repositories because of what these options turn off
    "core.hooksPath": os.devnull,
    "core.fsmonitor": "false",
    "core.commitGraph": "false",
    "core.warnAmbiguousRefs": "false",
    "advice.graftFileDeprecated": "false",
}
_ENVIRONMENT: Final = {
    "LC_ALL": "C",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_GRAFT_FILE": os.devnull,
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_ALLOW_PROTOCOL": "none",  # older versions do not know the line above
}


class TreeEntry(NamedTuple):
    """One name in a tree object: a mode as git has it, the name, the id of the object."""

    mode: int
    name: bytes
    object_id: bytes


class Commit(NamedTuple):
    """What a commit object says: ids of its tree and parents, the committer's time in seconds since 1970 if readable.

    Some old commits have no time that can be read; as ancestors they are as good as any other.
    """

    tree: bytes
    parents: tuple[bytes, ...]
    time: int | None


# -- Objects as bytes --------------------------------------------------------------------------------------------------


def parse_tree(data: bytes, id_size: int) -> list[TreeEntry]:
    """The entries of a tree object in its order, names as they are: see `check_names`. Raises `Corrupt`."""
    entries: list[TreeEntry] = []
    position = 0
    while position < len(data):
        space = data.find(b" ", position)
        start = data.find(b"\0", space) + 1
        mode = _mode(data[position:space])
        if space < 0 or not start or mode is None or len(data) - start < id_size:
            raise Corrupt(f"a malformed tree, at byte {position} of {len(data)}")
        position = start + id_size
        entries.append(TreeEntry(mode, data[space + 1 : start - 1], data[start:position]))
    return entries


@lru_cache(maxsize=64)
def _mode(text: bytes) -> int | None:
    """The number of a mode in a tree, None for what is none."""
    return int(text, 8) if _MODE.fullmatch(text) else None


def check_names(entries: list[TreeEntry], path: bytes) -> None:
    """Raise `Invalid` for names of the directory `path` that no folder may have.

    A `.git` would be a repository of the author's making, with configuration that runs programs.
    """
    for name in (entry.name for entry in entries):
        if name in (b"", b".", b"..") or b"/" in name or name.lower() == b".git":
            raise Invalid(f"{shown(path or b'.')}: the name {shown(name)}, which git does not check out either")
    if len({entry.name for entry in entries}) != len(entries):
        raise Invalid(f"{shown(path or b'.')}: one name twice in a tree")


def parse_commit(data: bytes) -> Commit:
    """Tree, parents and time of a commit object. Raises `Corrupt`."""
    head = data.partition(b"\n\n")[0]
    lines = head.split(b"\n")
    parents = []
    for line in lines[1:]:
        if not line.startswith(b"parent "):
            break
        parents.append(_id_from(line, b"parent "))
    time = _COMMITTER.search(head)
    return Commit(_id_from(lines[0], b"tree "), tuple(parents), int(time[1]) if time else None)


def _id_from(line: bytes, keyword: bytes) -> bytes:
    text = line.removeprefix(keyword)
    if text == line or not re.fullmatch(rb"[0-9a-f]{40}|[0-9a-f]{64}", text):
        raise Corrupt(f"a malformed commit: no id in {shown(line)}")
    return bytes.fromhex(text.decode())


# -- The repository ----------------------------------------------------------------------------------------------------


class Repository:
    """A repository on this machine: a work tree's top folder or a bare repository. Nothing is written to it."""

    def __init__(self, path: Path) -> None:
        """Raises `NotFound` when there is no repository, `Denied` without git, `Invalid` for an unknown format."""
        self.path = path
        self._problem = ""
        program = shutil.which("git")
        if program is None:
            raise Denied("git is not installed; install it (version 2.38 or later)")
        self._command = [program, "--no-optional-locks", "--no-pager", "--no-replace-objects"]
        for key, value in _SAFETY.items():
            self._command += ["-c", f"{key}={value}"]
        self._command += ["-C", os.path.abspath(path)]
        if not path.is_dir():
            raise NotFound(f"no git repository {str(path)!r}")
        found = self._ask("rev-parse", "--show-object-format")
        if found is None:
            raise NotFound(f"no git repository {str(path)!r}: {self._problem}")
        self.object_format = found
        if found not in ID_SIZES:
            raise Invalid(f"{str(path)!r}: unknown object format {found!r} (known: {', '.join(ID_SIZES)})")

    def commit(self, revision: str) -> bytes:
        """The id of the commit that `revision` names: branch, tag, id, whatever git rev-parse takes. `NotFound`."""
        found = self._ask("rev-parse", "--verify", "--end-of-options", revision)
        if found is not None:  # a question of its own, since `:/text` takes all that follows for its text
            found = self._ask("rev-parse", "--verify", "--end-of-options", found + "^{commit}")
        if found is None:
            raise NotFound(f"no commit {revision!r} in {str(self.path)!r}: {self._problem}")
        return bytes.fromhex(found)

    def shallow(self) -> frozenset[bytes]:
        """Ids of the commits whose parents the repository does not have, since it was cloned without them."""
        name = self._ask("rev-parse", "--git-path", "shallow")
        if name is None:
            raise Unavailable(f"{str(self.path)!r}: {self._problem}")
        try:
            lines = (self.path / name).read_bytes().split()
        except FileNotFoundError:
            return frozenset()
        except OSError as error:
            raise Denied(f"{str(self.path / name)!r} cannot be read: {error.strerror}") from None
        return frozenset(_id_from(b"shallow " + line, b"shallow ") for line in lines)

    @contextmanager
    def objects(self) -> Iterator[Objects]:
        """Reading of objects, inside the `with` statement."""
        with (
            tempfile.TemporaryFile() as problems,
            subprocess.Popen(
                [*self._command, "cat-file", "--batch"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=problems,
                bufsize=PIPE_BUFFER,
                env=self._environment(),
            ) as process,
        ):
            assert process.stdin is not None, "it is a pipe"
            assert process.stdout is not None, "it is a pipe"
            try:
                yield Objects(process.stdin, process.stdout, problems, self.object_format, str(self.path))
            finally:
                process.kill()  # also when it waits for a reader that has given up
                with suppress(BrokenPipeError):  # a question that a dead git did not take
                    process.stdin.close()

    def _ask(self, *arguments: str) -> str | None:
        """The one line that git answers with; None, and why in `_problem`, when it fails."""
        result = subprocess.run(
            [*self._command, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=self._environment(),
            check=False,
        )
        if result.returncode:
            self._problem = _one_line(result.stderr)
            return None
        return os.fsdecode(result.stdout.removesuffix(b"\n"))

    def _environment(self) -> Mapping[str, str]:
        """Without what a caller's git settings would change. No repository around `path` is taken for it."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        ceiling = os.path.dirname(os.path.realpath(self.path))
        return {**kept, **_ENVIRONMENT, "GIT_CEILING_DIRECTORIES": ceiling}


class Objects:
    """Objects by id, each with its id verified."""

    def __init__(
        self, asks: IO[bytes], answers: IO[bytes], problems: IO[bytes], object_format: str, repository: str
    ) -> None:
        self._asks, self._answers, self._problems = asks, answers, problems
        self._format = object_format
        self._repository = repository

    @property
    def id_size(self) -> int:
        """Bytes of an id."""
        return ID_SIZES[self._format]

    def hasher(self) -> _Hash:
        """A fresh hasher of the repository's object format."""
        return hashlib.new(self._format, usedforsecurity=False)

    def commit(self, object_id: bytes) -> Commit:
        """A commit, parsed. Raises as `read_each`."""
        (data,) = self.read_each([object_id], b"commit")
        try:
            return parse_commit(data)
        except Corrupt as error:
            raise self._error(Corrupt, object_id, str(error)) from error

    def tree(self, data: bytes, object_id: bytes) -> list[TreeEntry]:
        """The entries of the tree `object_id`, whose bytes are `data`."""
        try:
            return parse_tree(data, self.id_size)
        except Corrupt as error:
            raise self._error(Corrupt, object_id, str(error)) from error

    def read_each(self, object_ids: Iterable[bytes], kind: bytes) -> Iterator[bytes]:
        """Whole objects of type `kind` (`commit`, `tree`). Raises as `stream_each`; `Invalid` for too large ones."""
        for object_id, size, pieces in self.stream_each(object_ids, kind):
            if size > PARSED_SIZE_MAX:
                raise self._error(Invalid, object_id, f"a {kind.decode()} of {size} bytes (at most {PARSED_SIZE_MAX})")
            yield b"".join(pieces)

    def stream_each(self, object_ids: Iterable[bytes], kind: bytes) -> Iterator[tuple[bytes, int, Iterator[bytes]]]:
        """Id, size and bytes of objects of type `kind`, in their order. The bytes must be read before the next object.

        git is asked for some objects ahead, so nothing else can be asked until the last one is read. Raises `NotFound`
        when the repository does not have an object, `Corrupt` when it is damaged or of another type; for bytes that are
        not those of the id, that comes after the last of them.
        """
        asked = iter(object_ids)
        while batch := list(islice(asked, ASKED_AHEAD)):
            try:
                self._asks.write(b"".join(b"%s\n" % object_id.hex().encode() for object_id in batch))
                self._asks.flush()
            except BrokenPipeError:
                raise self._ended(batch[0]) from None
            for object_id in batch:
                size = self._header(object_id, kind)
                yield object_id, size, self._pieces(object_id, kind, size)

    def _header(self, object_id: bytes, kind: bytes) -> int:
        """The size of the object that git answers with."""
        answer = self._answers.readline()
        found, _, rest = answer.rstrip(b"\n").partition(b" ")
        if not answer.endswith(b"\n"):
            raise self._ended(object_id)
        if rest == b"missing":
            problem = "it is not there; the repository is a partial clone or damaged (git fetch --refetch gets all)"
            raise self._error(NotFound, object_id, problem)
        found_kind, _, size = rest.partition(b" ")
        if found != object_id.hex().encode() or found_kind != kind or not size.isdigit():
            raise self._error(Corrupt, object_id, f"not a {kind.decode()}: {shown(rest)}")
        return int(size)

    def _pieces(self, object_id: bytes, kind: bytes, size: int) -> Iterator[bytes]:
        hasher = self.hasher()
        hasher.update(b"%s %d\0" % (kind, size))
        left = size
        while left:
            piece = self._answers.read(min(left, PIECE))
            if not piece:
                raise self._ended(object_id)
            left -= len(piece)
            hasher.update(piece)
            yield piece
        if self._answers.read(1) != b"\n":
            raise self._ended(object_id)
        if hasher.digest() != object_id:
            raise self._error(Corrupt, object_id, "its bytes have another id; git fsck tells more")

    def _ended(self, object_id: bytes) -> Corrupt:
        """The error for a git that has given up: on damage it writes why, and ends."""
        self._problems.seek(0)
        return self._error(Corrupt, object_id, _one_line(self._problems.read(_MESSAGE_MAX)))

    def _error(self, kind: type[_E], object_id: bytes, problem: str) -> _E:
        return kind(f"git object {object_id.hex()} in {self._repository!r}: {problem}")


def _one_line(text: bytes) -> str:
    """What git says, on one line."""
    lines = text[:_MESSAGE_MAX].decode(errors="replace").splitlines()
    return "; ".join(line.strip() for line in lines if line.strip()) or "git ended without a message"
