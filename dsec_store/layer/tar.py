"""A tar archive's entries as plain values, read as the archive arrives.

Problem: a layer's tar comes from anybody, and what is read here decides the layer's digest for ever. Python's tarfile
takes names and xattrs, which are bytes, for text, and many a damaged header for the end of the archive.

Choice: an own reader in two parts. What a header *says* is told by functions of bytes (`dsec_store.layer.tarheader`);
`TarReader` walks a stream with them and hands out contents piece by piece, so that an archive is read once and never
held. All other bytes, in their order, go to `keep`: with the contents they are the archive again, byte for byte.
Paths are given as the archive has them, neither cleaned nor trusted: that is for whoever builds a tree.

>>> reader = TarReader(stream)
>>> for entry in reader:
...     for piece in reader.content():      # optional: what is not asked for is passed over
...         ...
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final, NamedTuple, Protocol

from dsec_store.errors import Corrupt, Invalid
from dsec_store.layer.tarheader import (
    BLOCK_SIZE,
    EXTENSION_SIZE_MAX,
    GNU_MAGIC,
    SIGNED_64_MAX,
    SPARSE_MAP,
    Header,
    Records,
    Runs,
    checked_runs,
    integer,
    limit_runs,
    parse_gnu_sparse,
    parse_header,
    parse_number,
    parse_pax,
    parse_sparse_map,
    sparse_version,
    text,
    update_global,
    with_records,
    xattrs,
)
from dsec_store.layer.tree import ID_MAX, PATH_LENGTH_MAX, shown

PIECE: Final = 1 << 20
"""Bytes that are asked of the stream at once, and the most that a piece of content has."""

MAJOR_MAX: Final = 2**12 - 1
MINOR_MAX: Final = 2**20 - 1
"""Largest device numbers: Linux' dev_t has 12 and 20 bits for them."""

_ZERO_BLOCK: Final = bytes(BLOCK_SIZE)
_MAP_LINE_MAX: Final = 22
"""Bytes of a line of a sparse map: a number of 20 digits, its sign and the newline."""

_PAX_FLAGS: Final = b"xX"
_GLOBAL_FLAG: Final = b"g"
_LONG_PATH_FLAG: Final = b"L"
_LONG_LINK_FLAG: Final = b"K"
_VOLUME_FLAG: Final = b"V"
_DUMPDIR_FLAG: Final = b"D"
_SPARSE_FLAG: Final = b"S"
_EXTENSION_FLAGS: Final = frozenset(b"xXgLK")
_REFUSED_FLAGS: Final = {
    b"M": "the continuation of a file from another volume",
    b"N": "an obsolete GNU table of long names",
}


class TarKind(enum.Enum):
    """What an entry makes."""

    FILE = "file"
    DIRECTORY = "directory"
    SYMLINK = "symlink"
    HARDLINK = "hardlink"
    CHAR = "character device"
    BLOCK = "block device"
    FIFO = "fifo"


_KINDS: Final = {
    b"1": TarKind.HARDLINK,
    b"2": TarKind.SYMLINK,
    b"3": TarKind.CHAR,
    b"4": TarKind.BLOCK,
    b"5": TarKind.DIRECTORY,
    b"6": TarKind.FIFO,
    _DUMPDIR_FLAG: TarKind.DIRECTORY,
}
"""TarKind of each typeflag; every other one is a file, as POSIX asks."""

_LINKS: Final = (TarKind.SYMLINK, TarKind.HARDLINK)

_NO_XATTRS: Final[dict[bytes, bytes]] = {}


class TarEntry(NamedTuple):
    """One entry.

    path    as in the archive: may be absolute, hold `..`, end in `/`; no NUL
    mode    the 12 permission bits          mtime_ns  nanoseconds since 1970, negative before
    link    target of SYMLINK, HARDLINK     rdev      (major, minor) of CHAR, BLOCK; otherwise (0, 0)
    size    of a FILE in bytes, else 0      xattrs    full name -> value, both bytes; never changed by anybody
    offset  where the content of a FILE begins in the archive, in bytes; else 0
    runs    of a sparse FILE: the data that is stored, run after run from `offset`; zeros between. Otherwise None
    """

    path: bytes
    kind: TarKind
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    size: int
    link: bytes
    rdev: tuple[int, int]
    xattrs: dict[bytes, bytes]
    offset: int
    runs: Runs | None


class Readable(Protocol):
    """All that is asked of the input. Short reads are fine, b"" means the end."""

    def read(self, size: int, /) -> bytes: ...


Keep = Callable[[bytes], object]
"""Told of the bytes of the archive that are no content which was asked for, in order."""


def read_entries(archive: BinaryIO) -> Iterator[TarEntry]:
    """The entries of an uncompressed, seekable tar file from its byte 0, in their order; no content is read.

    Raises as `TarReader` does; also `Corrupt` where a content reaches beyond the end of the file.
    """
    size = archive.seek(0, os.SEEK_END)
    archive.seek(0)
    return iter(TarReader(archive, size=size))


class TarReader:
    """The entries of an uncompressed tar, in their order: iterate once.

    The archive ends at two zero blocks, or where the stream ends between two entries; what follows is not looked at
    (`finish` keeps it). Raises `Corrupt` for what is no tar, damaged or cut, `Invalid` for an entry that no layer can
    hold. With `size`, the stream is a file of so many bytes that can seek, and contents are not read to be passed over.
    """

    def __init__(self, stream: Readable | BinaryIO, keep: Keep | None = None, size: int | None = None) -> None:
        self._input = _Input(stream, keep, size)
        self._shared: Records = {}
        self._start = 0  # where the last entry begins
        self._stored = 0  # bytes of the last content that nobody has yet
        self._padded = 0  # bytes of the last content, whose padding comes next

    def __iter__(self) -> Iterator[TarEntry]:
        while True:
            self._start = self._input.position
            try:
                entry = self._next_entry()
            except (Corrupt, Invalid) as error:
                raise self._named(error) from error
            if entry is None:
                return
            yield entry
            if self._stored:
                self._pass_over()
            self._input.padding(self._padded)
            self._stored = self._padded = 0

    def content(self) -> Iterator[bytes]:
        """What is stored of the content of the FILE that came last, in pieces. Of a sparse one: its runs."""
        try:
            for piece in self._input.pieces(self._stored):
                self._stored -= len(piece)
                yield piece
        except Corrupt as error:
            raise self._named(error) from error

    def whole_content(self) -> bytes:
        """The same as one piece: for small ones."""
        size, self._stored = self._stored, 0
        try:
            return self._input.exactly(size)
        except Corrupt as error:
            raise self._named(error) from error

    def _pass_over(self) -> None:
        try:
            self._input.pass_over(self._stored)
        except Corrupt as error:
            raise self._named(error) from error

    def finish(self) -> None:
        """Read the stream to its end: all that is left is kept."""
        self._input.finish()

    def _named(self, error: Corrupt | Invalid) -> Corrupt | Invalid:
        """What is wrong with an entry is told with its place."""
        return type(error)(f"tar archive, entry at byte {self._start}: {error}")

    # -- entries ---------------------------------------------------------------------------------------------------

    def _next_entry(self) -> TarEntry | None:
        """The next entry, or None at the end. Global records are added to those in force."""
        own: _Extensions | None = None
        while block := self._input.header():
            header = parse_header(block)
            if header.typeflag[0] in _EXTENSION_FLAGS:
                own = own or _Extensions()
                own.take(header, self._input, self._shared)
            elif header.typeflag == _VOLUME_FLAG:
                self._input.check(header.size)
                self._input.pass_over(header.size)
                self._input.padding(header.size)
                own = None
            else:
                return self._entry(block, header, own or _NO_EXTENSIONS)
        if own:
            raise Corrupt("the archive ends after an extension header, without the entry it is for")
        return None

    def _entry(self, block: bytes, header: Header, own: _Extensions) -> TarEntry:
        records = {**self._shared, **own.records} if own.records else self._shared
        if records:
            header = with_records(header, records)
        if own.path or own.link:
            header = header._replace(path=own.path or header.path, link=own.link or header.link)
        path, mode, uid, gid, size, mtime_ns, flag, link, rdev = header
        kind = _kind(path, flag)
        _check(header, kind)
        offset, runs = 0, None
        if kind is TarKind.FILE:
            size, offset, runs = self._content(block, header, records)
        else:
            if flag == _DUMPDIR_FLAG:
                self._expect(size)
            size = 0
        return TarEntry(
            path,
            kind,
            mode & 0o7777,
            uid,
            gid,
            mtime_ns,
            size,
            link if kind in _LINKS else b"",
            rdev,
            xattrs(own.records or {}, self._shared) if records else _NO_XATTRS,
            offset,
            runs,
        )

    def _content(self, block: bytes, header: Header, records: Records) -> tuple[int, int, Runs | None]:
        """Size, offset in the archive and runs of a file."""
        version = sparse_version(records) if records else None
        if header.typeflag != _SPARSE_FLAG and not version:
            self._expect(header.size)
            return header.size, self._input.position, None
        begin = self._input.position
        stored = header.size
        if header.typeflag == _SPARSE_FLAG:
            size, pairs = self._gnu_sparse(block)
        else:
            size = integer(records.get(b"GNU.sparse.realsize") or records.get(b"GNU.sparse.size", b""), "real size")
            if version == b"1.0":
                pairs = self._sparse_map()
                stored -= self._input.position - begin
            else:
                numbers = records.get(SPARSE_MAP)
                pairs = parse_sparse_map(numbers.split(b",") if numbers else [])
        self._expect(stored)
        return size, self._input.position, checked_runs(pairs, size, stored)

    def _expect(self, stored: int) -> None:
        """A content of so many bytes comes next. What cannot be is refused before anything is read."""
        self._input.check(stored)
        self._stored = self._padded = stored

    def _gnu_sparse(self, block: bytes) -> tuple[int, list[tuple[int, int]]]:
        """Real size and runs of an old GNU sparse file: four in its header, 21 in each further block."""
        if block[257:265] != GNU_MAGIC:
            raise Invalid("a sparse file (typeflag S) in a form that is not GNU's")
        size = parse_number(block[483:495], "real size")
        pairs, more = parse_gnu_sparse(block[386:483])
        while more:
            further, more = parse_gnu_sparse(self._input.kept(BLOCK_SIZE))
            pairs += further
            limit_runs(len(pairs))
        return size, pairs

    def _sparse_map(self) -> list[tuple[int, int]]:
        """The map at the head of the content of a PAX 1.0 sparse file: lines of decimal numbers in whole blocks."""
        lines = bytearray(self._input.kept(BLOCK_SIZE))
        count = integer(bytes(lines.partition(b"\n")[0]), "number of sparse runs")
        limit_runs(count)
        wanted, found = 1 + 2 * count, lines.count(b"\n")
        while found < wanted:
            if len(lines) > wanted * _MAP_LINE_MAX:
                raise Corrupt("the sparse map has too few lines")
            block = self._input.kept(BLOCK_SIZE)
            lines += block
            found += block.count(b"\n")
        return parse_sparse_map(bytes(lines).split(b"\n")[1:wanted])


@dataclass(slots=True)
class _Extensions:
    """What extension headers say about the entry that follows them."""

    records: Records | None = None
    path: bytes | None = None
    link: bytes | None = None

    def take(self, header: Header, source: _Input, shared: Records) -> None:
        """Take in an extension header and its content."""
        if header.size > EXTENSION_SIZE_MAX:
            raise Invalid(f"an extension header of {header.size} bytes (at most {EXTENSION_SIZE_MAX})")
        source.check(header.size)
        data = source.kept(header.size)
        source.padding(header.size)
        flag = header.typeflag
        if flag in _PAX_FLAGS:
            self.records = parse_pax(data)
        elif flag == _GLOBAL_FLAG:
            update_global(shared, parse_pax(data))
        elif flag == _LONG_PATH_FLAG:
            self.path = text(data)
        else:
            self.link = text(data)


_NO_EXTENSIONS: Final = _Extensions()


def _kind(path: bytes, flag: bytes) -> TarKind:
    if flag == b"0":
        return TarKind.FILE
    if flag in _REFUSED_FLAGS:
        raise Invalid(f"{shown(path)}: {_REFUSED_FLAGS[flag]} (typeflag {flag.decode()})")
    if flag == b"\0" and path.endswith(b"/"):
        return TarKind.DIRECTORY
    return _KINDS.get(flag, TarKind.FILE)


def _check(header: Header, kind: TarKind) -> None:
    """Refuse what no layer can hold."""
    problem = None
    if not 0 <= header.uid <= ID_MAX or not 0 <= header.gid <= ID_MAX:
        problem = f"uid {header.uid}, gid {header.gid}: an id is not between 0 and {ID_MAX}"
    elif abs(header.mtime_ns) > SIGNED_64_MAX * 10**9:
        problem = f"mtime {header.mtime_ns // 10**9} s does not fit into 64 bits"
    elif len(header.path) > PATH_LENGTH_MAX or len(header.link) > PATH_LENGTH_MAX:
        problem = f"path or link target of more than {PATH_LENGTH_MAX} bytes"
    elif b"\0" in header.path or b"\0" in header.link:
        problem = "a NUL in its path or link target"
    elif not header.link and kind in _LINKS:
        problem = f"a {kind.value} without a target"
    elif header.rdev != (0, 0) and not (0 <= header.rdev[0] <= MAJOR_MAX and 0 <= header.rdev[1] <= MINOR_MAX):
        problem = f"device {header.rdev[0]}:{header.rdev[1]} is beyond {MAJOR_MAX}:{MINOR_MAX}"
    if problem:
        raise Invalid(f"{shown(header.path)}: {problem}")


# -- Input: the only part that reads -----------------------------------------------------------------------------------


class _Input:
    """Where we are in the archive. Bytes are handed out once: as content, or to `keep`."""

    def __init__(self, stream: Readable | BinaryIO, keep: Keep | None, size: int | None) -> None:
        self._stream = stream
        self._keep = keep or _forget
        self._size = size
        self._buffer = b""
        self._at = 0
        self._begin = 0

    @property
    def position(self) -> int:
        """Bytes of the archive that were handed out."""
        return self._begin + self._at

    def header(self) -> bytes:
        """The next header block, b"" at the end of the archive. A lone zero block is skipped."""
        block = self._block()
        if block == _ZERO_BLOCK:
            block = self._block()
        return b"" if block == _ZERO_BLOCK else block

    def some(self, most: int) -> bytes:
        """Some bytes of content, at most `most`; b"" at the end of the stream."""
        if self._at == len(self._buffer) and not self._fill():
            return b""
        at, end = self._at, min(self._at + most, len(self._buffer))
        self._at = end
        return self._buffer[at:end]

    def exactly(self, size: int) -> bytes:
        """`size` bytes of content. Raises `Corrupt` when there are fewer."""
        at, end = self._at, self._at + size
        if end <= len(self._buffer):
            self._at = end
            return self._buffer[at:end]
        return b"".join(self.pieces(size))

    def pieces(self, size: int) -> Iterator[bytes]:
        """The same in pieces, as they come."""
        left = size
        while left:
            piece = self.some(left)
            if not piece:
                raise Corrupt(f"{size} bytes of content, but the archive has {size - left} more")
            left -= len(piece)
            yield piece

    def kept(self, size: int) -> bytes:
        """`size` bytes that are no content."""
        data = self.exactly(size)
        self._keep(data)
        return data

    def padding(self, size: int) -> None:
        """Pass over what fills up a content of `size` bytes to whole blocks. At the end of the stream it may lack."""
        left = -size % BLOCK_SIZE
        if self._size is not None:
            self._seek(self.position + left)
            return
        while left and (part := self.some(left)):
            self._keep(part)
            left -= len(part)

    def pass_over(self, size: int) -> None:
        """Pass over a content of `size` bytes: it is kept."""
        if self._size is not None:
            self._seek(self.position + size)
            return
        for piece in self.pieces(size):
            self._keep(piece)

    def check(self, size: int) -> None:
        """Refuse a content that cannot be, before anything of it is read."""
        left = SIGNED_64_MAX if self._size is None else max(0, self._size - self.position)
        if not 0 <= size <= left:
            raise Corrupt(f"{size} bytes of content, but the archive has {left} more")

    def finish(self) -> None:
        while part := self.some(PIECE):
            self._keep(part)

    def _block(self) -> bytes:
        at, end = self._at, self._at + BLOCK_SIZE
        if end <= len(self._buffer):
            self._at = end
            block = self._buffer[at:end]
        else:
            block = self.some(BLOCK_SIZE)
            while 0 < len(block) < BLOCK_SIZE and (more := self.some(BLOCK_SIZE - len(block))):
                block += more
            if 0 < len(block) < BLOCK_SIZE:
                raise Corrupt(f"the archive ends within a header, after {len(block)} bytes of it")
        self._keep(block)
        return block

    def _fill(self) -> bool:
        self._begin += len(self._buffer)
        self._at = 0
        self._buffer = self._stream.read(PIECE)
        return bool(self._buffer)

    def _seek(self, position: int) -> None:
        if position <= self._begin + len(self._buffer):
            self._at = position - self._begin
            return
        self._stream.seek(position)  # type: ignore[union-attr]  # given with a size: it can
        self._begin, self._buffer, self._at = position, b"", 0


def _forget(data: bytes) -> None:
    """Nobody wants the archive back."""
