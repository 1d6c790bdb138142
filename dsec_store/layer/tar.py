"""A tar archive's entries as plain values.

Problem: a layer's tar comes from anybody, and what is read here decides the layer's digest for ever. Python's tarfile
takes names and xattrs, which are bytes, for text, and many a damaged header for the end of the archive.

Choice: an own reader in two parts. What a header *says* is told by functions of bytes (`parse_header`, `parse_pax`,
`parse_gnu_sparse`, `parse_sparse_map`); `read_entries` walks an archive file with them, and skips content instead of
reading it. It knows the v7, ustar, star, PAX and GNU forms; where they leave a choice, docs/format/tar.md tells ours.
Paths are given as the archive has them, neither cleaned nor trusted: that is for whoever builds a tree.

>>> for entry in read_entries(archive):
...     archive.seek(entry.offset)      # allowed: the reader seeks before each read of its own
"""

from __future__ import annotations

import base64
import binascii
import enum
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import BinaryIO, Final, NamedTuple
from urllib.parse import unquote_to_bytes

from dsec_store.errors import Corrupt, Invalid
from dsec_store.layer.tree import ID_MAX

BLOCK_SIZE: Final = 512
"""Bytes: headers are one block, contents are padded to whole blocks."""

EXTENSION_SIZE_MAX: Final = 1 << 20
"""Bytes of one PAX header or GNU long name, and of all global records in force. containerd (Go) has the same limit."""

GLOBAL_RECORDS_MAX: Final = 1000
"""Global PAX records in force: every later entry pays for each of them."""

PATH_LENGTH_MAX: Final = 4095
"""Bytes of a path or link target: Linux' PATH_MAX without its NUL."""

SPARSE_RUNS_MAX: Final = 1 << 18
"""Runs of one sparse file; each costs about 150 bytes of memory."""

SIGNED_64_MAX: Final = 2**63 - 1
"""The largest file size in bytes, and the longest time before or after 1970 in seconds."""

MAJOR_MAX: Final = 2**12 - 1
MINOR_MAX: Final = 2**20 - 1
"""Largest device numbers: Linux' dev_t has 12 and 20 bits for them."""

SHOWN_LENGTH: Final = 200
"""Bytes of a path that an error shows."""

Records = dict[bytes, bytes]
"""PAX records: keyword -> value."""

Runs = tuple[tuple[int, int], ...]
"""(offset in the file, length more than 0) of stored data, in bytes; ascending, never overlapping."""

_ZERO_BLOCK: Final = bytes(BLOCK_SIZE)
_CHECKSUM: Final = slice(148, 156)

_POSIX_MAGIC: Final = b"ustar\0"
_GNU_MAGIC: Final = b"ustar  \0"
_STAR_MAGIC: Final = b"tar\0"

_PAX_FLAGS: Final = b"xX"
_GLOBAL_FLAG: Final = b"g"
_LONG_PATH_FLAG: Final = b"L"
_LONG_LINK_FLAG: Final = b"K"
_VOLUME_FLAG: Final = b"V"
_DUMPDIR_FLAG: Final = b"D"
_SPARSE_FLAG: Final = b"S"
_REFUSED_FLAGS: Final = {
    b"M": "the continuation of a file from another volume",
    b"N": "an obsolete GNU table of long names",
}

_SCHILY_XATTR: Final = b"SCHILY.xattr."
_LIBARCHIVE_XATTR: Final = b"LIBARCHIVE.xattr."
_SPARSE_OFFSET: Final = b"GNU.sparse.offset"
_SPARSE_LENGTH: Final = b"GNU.sparse.numbytes"
_SPARSE_MAP: Final = b"GNU.sparse.map"
_SPARSE_MAJOR: Final = b"GNU.sparse.major"
_SPARSE_MINOR: Final = b"GNU.sparse.minor"
_SPARSE_NAME: Final = b"GNU.sparse.name"
_SPARSE_VERSIONS: Final = {b"0.0", b"0.1", b"1.0"}

_OCTAL: Final = re.compile(rb"[ \0]*([0-7]*) *(?:\0.*)?", re.DOTALL)
_DECIMAL: Final = re.compile(rb"-?[0-9]{1,20}")
_MAP_LINE_MAX: Final = 22
_TIME: Final = re.compile(rb"(-?)([0-9]{1,20})(?:\.([0-9]*))?")
_PAX_LENGTH: Final = re.compile(rb"([0-9]{1,7}) ")


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


@dataclass(frozen=True, slots=True)
class TarEntry:
    """One entry.

    path    as in the archive: may be absolute, hold `..`, end in `/`; no NUL
    mode    the 12 permission bits          mtime_ns  nanoseconds since 1970, negative before
    link    target of SYMLINK, HARDLINK     rdev      (major, minor) of CHAR, BLOCK; otherwise (0, 0)
    size    of a FILE in bytes, else 0      xattrs    full name -> value, both bytes
    offset  where the content of a FILE begins in the archive file, in bytes; else 0
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


def read_entries(archive: BinaryIO) -> Iterator[TarEntry]:
    """The entries of an uncompressed, seekable tar file from its byte 0, in their order.

    The archive ends at two zero blocks, or where the file ends between two entries; what follows is not looked at.
    Raises `Corrupt` for what is no tar, damaged or cut, `Invalid` for an entry that no layer can hold.
    """
    blocks = _Blocks(archive)
    shared: Records = {}
    while True:
        start = blocks.position
        try:
            entry = _next_entry(blocks, shared)
        except (Corrupt, Invalid) as error:
            raise type(error)(f"tar archive, entry at byte {start}: {error}") from error
        if entry is None:
            return
        yield entry


def shown(path: bytes) -> str:
    """A path for a message: one line of ASCII in quotes, cut to `SHOWN_LENGTH` bytes."""
    return repr(path[:SHOWN_LENGTH])[1:] + ("…" if len(path) > SHOWN_LENGTH else "")


# -- The walk: the only part that reads --------------------------------------------------------------------------------


class _Blocks:
    """Where we are in the archive file. Every size is held against the end of the file before anything is read."""

    def __init__(self, archive: BinaryIO) -> None:
        self._archive = archive
        self._end = archive.seek(0, os.SEEK_END)
        self.position = 0

    def header(self) -> bytes:
        """The next header block, b"" at the end of the archive. A lone zero block is skipped."""
        self._archive.seek(self.position)
        block = self._block()
        if block == _ZERO_BLOCK:
            block = self._block()
        return b"" if block == _ZERO_BLOCK else block

    def take(self, size: int) -> bytes:
        """`size` bytes of content; the position moves behind their padding."""
        self._archive.seek(self.skip(size))
        return self._archive.read(size)

    def skip(self, size: int) -> int:
        """Move behind `size` bytes of content and their padding, and say where the content begins."""
        start = self.position
        if not 0 <= size <= self._end - start:
            raise Corrupt(f"{size} bytes of content, but the archive has {max(0, self._end - start)} more")
        self.position = start + size + -size % BLOCK_SIZE
        return start

    def _block(self) -> bytes:
        block = self._archive.read(BLOCK_SIZE)
        self.position += len(block)
        if 0 < len(block) < BLOCK_SIZE:
            raise Corrupt(f"the archive ends within a header, after {len(block)} bytes of it")
        return block


@dataclass(slots=True)
class _Extensions:
    """What extension headers say about the entry that follows them."""

    records: Records | None = None
    path: bytes | None = None
    link: bytes | None = None

    def take(self, header: Header, blocks: _Blocks, shared: Records) -> bool:
        """Take in an extension header and its content; False for a header of any other type."""
        flag = header.typeflag
        if flag in _PAX_FLAGS:
            self.records = parse_pax(_extension(header, blocks))
        elif flag == _GLOBAL_FLAG:
            _update_global(shared, parse_pax(_extension(header, blocks)))
        elif flag == _LONG_PATH_FLAG:
            self.path = _text(_extension(header, blocks))
        elif flag == _LONG_LINK_FLAG:
            self.link = _text(_extension(header, blocks))
        else:
            return False
        return True


def _next_entry(blocks: _Blocks, shared: Records) -> TarEntry | None:
    """The next entry, or None at the end. Global records are added to `shared`."""
    own = _Extensions()
    while block := blocks.header():
        header = parse_header(block)
        if own.take(header, blocks, shared):
            continue
        if header.typeflag == _VOLUME_FLAG:
            blocks.skip(header.size)
            own = _Extensions()
            continue
        return _entry(block, header, own, blocks, shared)
    if own != _Extensions():
        raise Corrupt("the archive ends after an extension header, without the entry it is for")
    return None


def _entry(block: bytes, header: Header, own: _Extensions, blocks: _Blocks, shared: Records) -> TarEntry:
    records = {**shared, **own.records} if own.records else shared
    if records:
        header = _with_records(header, records)
    if own.path or own.link:
        header = header._replace(path=own.path or header.path, link=own.link or header.link)
    kind = _kind(header)
    _check(header, kind)
    size, offset, runs = 0, 0, None
    if kind is TarKind.FILE:
        size, offset, runs = _content(block, header, records, blocks)
    elif header.typeflag == _DUMPDIR_FLAG:
        blocks.skip(header.size)
    return TarEntry(
        path=header.path,
        kind=kind,
        mode=header.mode & 0o7777,
        uid=header.uid,
        gid=header.gid,
        mtime_ns=header.mtime_ns,
        size=size,
        link=header.link if kind in (TarKind.SYMLINK, TarKind.HARDLINK) else b"",
        rdev=header.rdev,
        xattrs=_xattrs(own.records or {}, shared) if records else {},
        offset=offset,
        runs=runs,
    )


def _content(block: bytes, header: Header, records: Records, blocks: _Blocks) -> tuple[int, int, Runs | None]:
    """Size, offset in the archive and runs of a file; the position moves behind it."""
    version = _sparse_version(records)
    if header.typeflag != _SPARSE_FLAG and not version:
        return header.size, blocks.skip(header.size), None
    begin = blocks.position
    stored = header.size
    if header.typeflag == _SPARSE_FLAG:
        size, pairs = _gnu_sparse(block, blocks)
    else:
        size = _integer(records.get(b"GNU.sparse.realsize") or records.get(b"GNU.sparse.size", b""), "real size")
        if version == b"1.0":
            pairs = _sparse_map(blocks)
            stored -= blocks.position - begin
        else:
            text = records.get(_SPARSE_MAP)
            pairs = parse_sparse_map(text.split(b",") if text else [])
    return size, blocks.skip(stored), _checked_runs(pairs, size, stored)


def _gnu_sparse(block: bytes, blocks: _Blocks) -> tuple[int, list[tuple[int, int]]]:
    """Real size and runs of an old GNU sparse file: four in its header, 21 in each further block."""
    if block[257:265] != _GNU_MAGIC:
        raise Invalid("a sparse file (typeflag S) in a form that is not GNU's")
    size = _number(block[483:495], "real size")
    pairs, more = parse_gnu_sparse(block[386:483])
    while more:
        further, more = parse_gnu_sparse(blocks.take(BLOCK_SIZE))
        pairs += further
        _limit_runs(len(pairs))
    return size, pairs


def _sparse_map(blocks: _Blocks) -> list[tuple[int, int]]:
    """The map at the head of the content of a PAX 1.0 sparse file: lines of decimal numbers in whole blocks."""
    text = bytearray(blocks.take(BLOCK_SIZE))
    count = _integer(bytes(text.partition(b"\n")[0]), "number of sparse runs")
    _limit_runs(count)
    wanted, lines = 1 + 2 * count, text.count(b"\n")
    while lines < wanted:
        if len(text) > wanted * _MAP_LINE_MAX:
            raise Corrupt("the sparse map has too few lines")
        block = blocks.take(BLOCK_SIZE)
        text += block
        lines += block.count(b"\n")
    return parse_sparse_map(bytes(text).split(b"\n")[1:wanted])


def _extension(header: Header, blocks: _Blocks) -> bytes:
    if header.size > EXTENSION_SIZE_MAX:
        raise Invalid(f"an extension header of {header.size} bytes (at most {EXTENSION_SIZE_MAX})")
    return blocks.take(header.size)


# -- Headers: functions of bytes ---------------------------------------------------------------------------------------


class Header(NamedTuple):
    """What one header block says, before extension headers are applied and anything but the syntax is checked."""

    path: bytes
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    typeflag: bytes
    link: bytes
    rdev: tuple[int, int]


def parse_header(block: bytes) -> Header:
    """The fields of a header block of 512 bytes. Raises `Corrupt` for a wrong checksum or a malformed number."""
    _verify_checksum(block)
    path, typeflag = _text(block[:100]), block[156:157]
    if block.startswith(_POSIX_MAGIC, 257) and block[345]:
        path = _text(block[345:476] if block.endswith(_STAR_MAGIC) else block[345:500]) + b"/" + path
    device = typeflag in b"34"
    return Header(
        path,
        _number(block[100:108], "mode"),
        _number(block[108:116], "uid"),
        _number(block[116:124], "gid"),
        _number(block[124:136], "size"),
        _number(block[136:148], "mtime") * 10**9,
        typeflag,
        _text(block[157:257]),
        (_number(block[329:337], "device"), _number(block[337:345], "device")) if device else (0, 0),
    )


def _verify_checksum(block: bytes) -> None:
    """The sum of all bytes, with those of the checksum itself taken as spaces. Some old tars summed signed bytes."""
    expected = _number(block[_CHECKSUM], "checksum")
    unsigned = sum(block) - sum(block[_CHECKSUM]) + 8 * 0x20
    if unsigned == expected:
        return
    rest = block[: _CHECKSUM.start] + block[_CHECKSUM.stop :]
    if unsigned - 256 * sum(byte > 0x7F for byte in rest) != expected:
        raise Corrupt("the header's checksum is wrong")


@lru_cache(maxsize=1024)  # the headers of an archive repeat most of their numbers
def _number(field: bytes, what: str) -> int:
    """Octal digits between spaces and NULs (none: 0), or GNU's base-256 where the top bit is set."""
    if field[0] & 0x80:
        bits = 8 * len(field) - 1
        value = int.from_bytes(field, "big") & ((1 << bits) - 1)
        return value - (1 << bits) if value >> (bits - 1) else value
    match = _OCTAL.fullmatch(field)
    if not match:
        raise Corrupt(f"the header's {what} is no number: {field!r}")
    return int(match[1] or b"0", 8)


def _text(field: bytes) -> bytes:
    return field.partition(b"\0")[0]


def _kind(header: Header) -> TarKind:
    if header.typeflag in _REFUSED_FLAGS:
        raise Invalid(f"{shown(header.path)}: {_REFUSED_FLAGS[header.typeflag]} (typeflag {header.typeflag.decode()})")
    if header.typeflag == b"\0" and header.path.endswith(b"/"):
        return TarKind.DIRECTORY
    return _KINDS.get(header.typeflag, TarKind.FILE)


def _check(header: Header, kind: TarKind) -> None:
    """Refuse what no layer can hold."""
    problem = None
    if not 0 <= header.uid <= ID_MAX or not 0 <= header.gid <= ID_MAX:
        problem = f"uid {header.uid}, gid {header.gid}: an id is not between 0 and {ID_MAX}"
    elif abs(header.mtime_ns) > SIGNED_64_MAX * 10**9:
        problem = f"mtime {header.mtime_ns // 10**9} s does not fit into 64 bits"
    elif max(len(header.path), len(header.link)) > PATH_LENGTH_MAX:
        problem = f"path or link target of more than {PATH_LENGTH_MAX} bytes"
    elif b"\0" in header.path or b"\0" in header.link:
        problem = "a NUL in its path or link target"
    elif kind in (TarKind.SYMLINK, TarKind.HARDLINK) and not header.link:
        problem = f"a {kind.value} without a target"
    elif not (0 <= header.rdev[0] <= MAJOR_MAX and 0 <= header.rdev[1] <= MINOR_MAX):
        problem = f"device {header.rdev[0]}:{header.rdev[1]} is beyond {MAJOR_MAX}:{MINOR_MAX}"
    if problem:
        raise Invalid(f"{shown(header.path)}: {problem}")


# -- PAX records -------------------------------------------------------------------------------------------------------


def parse_pax(data: bytes) -> Records:
    """The records of a PAX header: `length keyword=value\\n`, the length being that of the whole record.

    The last of several records for one keyword counts. The pairs of sparse version 0.0, which repeat their keywords,
    are given as the one map of version 0.1.
    """
    records: Records = {}
    pairs: list[bytes] = []
    position = 0
    while position < len(data):
        length = _PAX_LENGTH.match(data, position)
        end = position + int(length[1]) if length else 0
        if not length or not length.end() < end <= len(data) or data[end - 1 : end] != b"\n":
            raise Corrupt(f"a malformed PAX record: {shown(data[position : position + 40])}")
        keyword, equals, value = data[length.end() : end - 1].partition(b"=")
        if not keyword or not equals:
            raise Corrupt(f"a PAX record without keyword and value: {shown(keyword)}")
        if keyword in (_SPARSE_OFFSET, _SPARSE_LENGTH):
            if (keyword == _SPARSE_LENGTH) != len(pairs) % 2:
                raise Corrupt("sparse offsets and lengths do not alternate")
            pairs.append(value)
        else:
            records[keyword] = value
        position = end
    if pairs:
        records[_SPARSE_MAP] = b",".join(pairs)
    return records


def parse_time(text: bytes) -> int:
    """Nanoseconds of a PAX time: decimal seconds, perhaps negative, digits beyond the ninth cut off."""
    match = _TIME.fullmatch(text)
    if not match:
        raise Corrupt(f"a PAX time that is no number: {shown(text)}")
    sign, seconds, fraction = match.groups()
    value = int(seconds) * 10**9 + int((fraction or b"")[:9].ljust(9, b"0"))
    return -value if sign else value


def _update_global(shared: Records, records: Records) -> None:
    """Put global records in force; an empty value ends the one that was."""
    for keyword, value in records.items():
        if value:
            shared[keyword] = value
        else:
            shared.pop(keyword, None)
    size = sum(len(keyword) + len(value) for keyword, value in shared.items())
    if len(shared) > GLOBAL_RECORDS_MAX or size > EXTENSION_SIZE_MAX:
        limit = f"at most {GLOBAL_RECORDS_MAX} of {EXTENSION_SIZE_MAX} bytes"
        raise Invalid(f"{len(shared)} global PAX records of {size} bytes ({limit})")


def _with_records(header: Header, records: Records) -> Header:
    """The header as PAX records change it. An empty value leaves the header's own field."""
    mtime = records.get(b"mtime")
    return header._replace(
        path=records.get(_SPARSE_NAME) or records.get(b"path") or header.path,
        link=records.get(b"linkpath") or header.link,
        size=_decimal(records, b"size", header.size),
        uid=_decimal(records, b"uid", header.uid),
        gid=_decimal(records, b"gid", header.gid),
        mtime_ns=parse_time(mtime) if mtime else header.mtime_ns,
    )


def _decimal(records: Records, keyword: bytes, default: int) -> int:
    text = records.get(keyword)
    return _integer(text, keyword.decode()) if text else default


def _integer(text: bytes, what: str) -> int:
    if not _DECIMAL.fullmatch(text):
        raise Corrupt(f"the {what} is no number: {shown(text)}")
    return int(text)


def _xattrs(own: Records, shared: Records) -> dict[bytes, bytes]:
    """The xattrs in both writings; SCHILY's, which is the exact one, wins.

    An empty value in an entry's own records is an empty xattr (as GNU tar writes it), unless it ends a global record.
    """
    found: dict[bytes, bytes] = {}
    exact: dict[bytes, bytes] = {}
    for keyword, value in {**shared, **own}.items():
        if not value and keyword in shared:
            continue
        if keyword.startswith(_SCHILY_XATTR):
            # GNU tar writes these two bytes of a name so, because a keyword cannot hold "=".
            name = keyword.removeprefix(_SCHILY_XATTR).replace(b"%3D", b"=").replace(b"%25", b"%")
            exact[name] = value
        elif keyword.startswith(_LIBARCHIVE_XATTR):
            found[unquote_to_bytes(keyword.removeprefix(_LIBARCHIVE_XATTR))] = _base64(value)
    return found | exact


def _base64(text: bytes) -> bytes:
    digits = text.rstrip(b"=")  # libarchive writes no padding
    try:
        return base64.b64decode(digits + b"=" * (-len(digits) % 4), validate=True)
    except binascii.Error as error:
        raise Corrupt(f"an xattr value is no base64: {shown(text)}") from error


# -- Sparse files ------------------------------------------------------------------------------------------------------


def parse_gnu_sparse(field: bytes) -> tuple[list[tuple[int, int]], bool]:
    """(offset, length) pairs up to the first empty one, and whether the byte behind the last says that more follow."""
    count = len(field) // 24
    pairs = []
    for start in range(0, count * 24, 24):
        if not field[start + 12]:
            break
        offset = _number(field[start : start + 12], "sparse offset")
        pairs.append((offset, _number(field[start + 12 : start + 24], "sparse length")))
    return pairs, bool(field[count * 24])


def parse_sparse_map(numbers: list[bytes]) -> list[tuple[int, int]]:
    """(offset, length) pairs from decimal texts."""
    if len(numbers) % 2:
        raise Corrupt(f"a sparse map of {len(numbers)} numbers, which is odd")
    values = [_integer(text, "sparse map") for text in numbers]
    return list(zip(values[::2], values[1::2], strict=True))


def _sparse_version(records: Records) -> bytes | None:
    """Version of a sparse file that PAX records describe, None if they describe none."""
    if _SPARSE_MAJOR not in records and _SPARSE_MAP not in records:
        return None
    version = records.get(_SPARSE_MAJOR, b"0") + b"." + records.get(_SPARSE_MINOR, b"1")
    if version not in _SPARSE_VERSIONS:
        raise Invalid(f"a sparse file of the unknown version {shown(version)}")
    return version


def _limit_runs(count: int) -> None:
    if not 0 <= count <= SPARSE_RUNS_MAX:
        raise Invalid(f"a sparse file of {count} runs (at most {SPARSE_RUNS_MAX})")


def _checked_runs(pairs: Iterable[tuple[int, int]], size: int, stored: int) -> Runs:
    """The runs that hold data, once they are known to ascend, to stay within `size` and to add up to `stored`."""
    end, total, runs = 0, 0, []
    for offset, length in pairs:
        if offset < end or length < 0:
            raise Corrupt(f"sparse runs overlap or go back at offset {offset}")
        end = offset + length
        total += length
        if length:
            runs.append((offset, length))
    if not end <= size <= SIGNED_64_MAX or total != stored:
        raise Corrupt(f"sparse runs end at {end} of {size} bytes and hold {total} bytes, but {stored} are stored")
    return tuple(runs)
