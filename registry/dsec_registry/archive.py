"""The files in a tar, plain or compressed, read in place: nothing is extracted.

Problem: the tar comes from anybody. Its members may have names that lead out of it, links in circles or to `/etc`, and
the same name twice. Choice: the members are indexed in one scan; links are followed inside of that index only, by the
rules that hold where a tar is extracted into an empty folder. Cost: a compressed archive is unpacked once, into an
unnamed temporary file.

    member            what it is in the index
    /a, ./a, a//      a
    a/../b            nothing: nobody can ask for it
    a, and a again    the last one
    a hardlink        what its target is at that place in the tar
    a symlink         itself; followed, in folders too, when somebody asks

>>> with contextlib.closing(Archive(Path("image.tar"))) as archive:
...     archive.find("0123abcd/layer.tar")
Member(offset=2048, size=10240)
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from dsec_registry.files import errors_about
from dsec_registry.images import BLOCK_SIZE, ByteStream
from dsec_registry.jsondoc import quoted
from dsec_store.errors import Invalid
from dsec_store.layer.decompress import open_decompressed
from dsec_store.layer.tar import TarEntry, TarKind, read_entries

MEMBERS_MAX: Final = 1 << 18
"""Members of an archive; each costs some 300 bytes of memory. An image has a few for each layer."""

NAMES_MAX: Final = 64 << 20
"""Bytes of all names and link targets of an archive's members together."""

LINKS_MAX: Final = 40
"""Links on the way to one file, as for Linux (path_resolution(7)): more are taken for a circle."""

NAME_MAX: Final = 4095
"""Bytes of a path in the archive: Linux' PATH_MAX without its NUL."""


@dataclass(frozen=True, slots=True)
class Member:
    """Where a file's content lies in the plain tar: `size` bytes from byte `offset`. A sparse one has holes there."""

    offset: int
    size: int
    sparse: bool = False


@dataclass(frozen=True, slots=True)
class _Link:
    """A symlink: its target, as in the tar."""

    target: bytes


_Index = dict[bytes, Member | _Link]


class Archive:
    """See the module's text. Threads may read side by side: no read moves the file's position."""

    def __init__(self, path: Path) -> None:
        """Reads the whole tar once. `NotFound` when there is none, `Invalid` or `Corrupt` when it is none."""
        self.path = path
        with errors_about(str(path)), contextlib.ExitStack() as held:
            self._file = held.enter_context(_open_tar(path))
            self._index = _scan(self._file)
            self._held = held.pop_all()

    def find(self, name: str) -> Member | None:
        """The file that `name` leads to, with all links followed; None when there is none.

        `Invalid` when it leads out of the archive, in a circle, or to a file that the tar has as a sparse one.
        """
        try:
            member = _follow(self._index, name.encode())
        except Invalid as error:
            raise Invalid(f"{self.path}: {quoted(name)} {error}") from None
        if member and member.sparse:
            raise Invalid(f"{self.path}: {quoted(name)} is a sparse file (pack the archive without --sparse)")
        return member

    def open(self, name: str) -> ByteStream | None:
        """The bytes of the file that `name` leads to, None when there is none; errors as of `find`."""
        member = self.find(name)
        return self.open_member(member) if member else None

    def open_member(self, member: Member) -> ByteStream:
        return _Section(self._file, member.offset, member.size)

    def close(self) -> None:
        self._held.close()


class _Section:
    """A part of a file. Many can be read at the same time: none moves the file's position."""

    def __init__(self, file: BinaryIO, offset: int, size: int) -> None:
        self._file, self._offset, self._end = file, offset, offset + size

    def read(self, size: int, /) -> bytes:
        data = os.pread(self._file.fileno(), min(size, self._end - self._offset), self._offset)
        self._offset += len(data)
        return data

    def close(self) -> None:
        """The file stays open: it belongs to the archive."""


def _open_tar(path: Path) -> BinaryIO:
    """The tar at `path`, or an unnamed temporary file with its uncompressed bytes."""
    with contextlib.ExitStack() as on_error:
        file: BinaryIO = on_error.enter_context(path.open("rb"))
        if not _is_tar(file):
            unpacked: BinaryIO = on_error.enter_context(tempfile.TemporaryFile())
            file.seek(0)
            with file, open_decompressed(file) as plain:
                shutil.copyfileobj(plain, unpacked, BLOCK_SIZE)
            file = unpacked
        file.seek(0)
        on_error.pop_all()
        return file


def _is_tar(file: BinaryIO) -> bool:
    """Whether the first header has the mark of POSIX.1-1988 and later (tar(5)); a file without it may be compressed."""
    file.seek(257)
    return file.read(5) == b"ustar"


def _scan(archive: BinaryIO) -> _Index:
    """The files and symlinks in a tar, by their names."""
    index: _Index = {}
    names = 0
    for entry in read_entries(archive):
        parts = _parts(entry.path)
        names += len(entry.path) + len(entry.link)
        if names > NAMES_MAX or len(index) >= MEMBERS_MAX:
            raise Invalid(f"more than {MEMBERS_MAX} members, or {NAMES_MAX} bytes of their names")
        if b".." in parts:
            continue
        found = _indexed(entry, index)
        if found:
            index[b"/".join(parts)] = found
        else:  # a folder, a device: it takes the place of a file
            index.pop(b"/".join(parts), None)
    return index


def _indexed(entry: TarEntry, index: _Index) -> Member | _Link | None:
    if entry.kind is TarKind.FILE:
        return Member(entry.offset, entry.size, sparse=entry.runs is not None)
    if entry.kind is TarKind.SYMLINK:
        return _Link(entry.link)
    if entry.kind is TarKind.HARDLINK:
        return index.get(b"/".join(_parts(entry.link)))
    return None


def _follow(index: _Index, name: bytes) -> Member | None:
    """The file that `name` leads to. `Invalid`, as the end of a sentence, when it leads nowhere that is allowed."""
    ahead, links = _steps(name), 0
    behind: list[bytes] = []  # the folder where we are, and before it those above: paths from the archive's root
    found: Member | _Link | None = None
    while ahead:
        step = ahead.pop()
        if step == b"..":
            if not behind:
                raise Invalid("leads out of the archive")
            behind.pop()
            found = None
            continue
        path = behind[-1] + b"/" + step if behind else step
        if len(path) > NAME_MAX:
            return None
        found = index.get(path)
        if isinstance(found, _Link):
            links += 1
            if links > LINKS_MAX:
                raise Invalid(f"leads over more than {LINKS_MAX} links, perhaps in a circle")
            ahead += _steps(found.target)
        else:
            behind.append(path)
    return found if isinstance(found, Member) else None


def _steps(path: bytes) -> list[bytes]:
    """The segments of a relative path, the first one last."""
    if path.startswith(b"/"):
        raise Invalid("leads out of the archive, by an absolute path")
    return _parts(path)[::-1]


def _parts(path: bytes) -> list[bytes]:
    return [part for part in path.split(b"/") if part not in (b"", b".")]
