"""What the headers of a tar say: functions of bytes, without I/O.

Known are the v7, ustar, star, PAX and GNU forms; where they leave a choice, docs/format/tar.md tells ours.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable
from functools import lru_cache
from struct import Struct
from typing import Final, NamedTuple
from urllib.parse import unquote_to_bytes
from zlib import adler32

from dsec_store.errors import Corrupt, Invalid
from dsec_store.layer.tree import shown

BLOCK_SIZE: Final = 512
"""Bytes: headers are one block, contents are padded to whole blocks."""

EXTENSION_SIZE_MAX: Final = 1 << 20
"""Bytes of one PAX header or GNU long name, and of all global records in force. containerd (Go) has the same limit."""

GLOBAL_RECORDS_MAX: Final = 1000
"""Global PAX records in force: every later entry pays for each of them."""

SPARSE_RUNS_MAX: Final = 1 << 18
"""Runs of one sparse file; each costs about 150 bytes of memory."""

SIGNED_64_MAX: Final = 2**63 - 1
"""The largest file size in bytes, and the longest time before or after 1970 in seconds."""

Records = dict[bytes, bytes]
"""PAX records: keyword -> value."""

Runs = tuple[tuple[int, int], ...]
"""(offset in the file, length more than 0) of stored data, in bytes; ascending, never overlapping."""


_POSIX_MAGIC: Final = b"ustar\0"
GNU_MAGIC: Final = b"ustar  \0"
_STAR_MAGIC: Final = b"tar\0"

_SCHILY_XATTR: Final = b"SCHILY.xattr."
_LIBARCHIVE_XATTR: Final = b"LIBARCHIVE.xattr."
_SPARSE_OFFSET: Final = b"GNU.sparse.offset"
_SPARSE_LENGTH: Final = b"GNU.sparse.numbytes"
SPARSE_MAP: Final = b"GNU.sparse.map"
_SPARSE_MAJOR: Final = b"GNU.sparse.major"
_SPARSE_MINOR: Final = b"GNU.sparse.minor"
_SPARSE_NAME: Final = b"GNU.sparse.name"
_SPARSE_VERSIONS: Final = {b"0.0", b"0.1", b"1.0"}

_OCTAL: Final = re.compile(rb"[ \0]*([0-7]*) *(?:\0.*)?", re.DOTALL)
_DECIMAL: Final = re.compile(rb"(-?)0*([0-9]{1,20})")
_TIME: Final = re.compile(rb"(-?)([0-9]{1,20})(?:\.([0-9]*))?")
_PAX_LENGTH: Final = re.compile(rb"([0-9]{1,7}) ")

_FIELDS: Final = Struct("100s8s8s8s12s12s8sc100s255x").unpack
"""path, mode, uid, gid, size, mtime, checksum, typeflag, link."""

_HALF: Final = BLOCK_SIZE // 2
_CHECKSUM: Final = slice(148, 156)
_BLANK: Final = 8 * 0x20
"""What the bytes of the checksum count for while it is made."""


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
    path, mode, uid, gid, size, mtime, checksum, typeflag, link = _FIELDS(block)
    if _sum(block) - sum(checksum) + _BLANK != parse_number(checksum, "checksum"):
        _verify_signed_checksum(block)
    path = text(path)
    if block[345] and block.startswith(_POSIX_MAGIC, 257):
        path = text(block[345:476] if block.endswith(_STAR_MAGIC) else block[345:500]) + b"/" + path
    device = typeflag in b"34"
    return Header(
        path,
        _repeated(mode, "mode"),
        _repeated(uid, "uid"),
        _repeated(gid, "gid"),
        parse_number(size, "size"),
        _repeated(mtime, "mtime") * 10**9,
        typeflag,
        text(link) if link[0] else b"",
        (parse_number(block[329:337], "device"), parse_number(block[337:345], "device")) if device else (0, 0),
    )


def _sum(block: bytes) -> int:
    """The sum of a block's bytes. The lower half of Adler-32 is 1 + the sum modulo 65521; half a block has less."""
    return (adler32(block[:_HALF]) & 0xFFFF) + (adler32(block[_HALF:]) & 0xFFFF) - 2


def _verify_signed_checksum(block: bytes) -> None:
    """Some old tars summed signed bytes. The bytes of the checksum itself count as spaces."""
    rest = block[: _CHECKSUM.start] + block[_CHECKSUM.stop :]
    signed = sum(rest) - 256 * sum(byte > 0x7F for byte in rest) + _BLANK
    if signed != parse_number(block[_CHECKSUM], "checksum"):
        raise Corrupt("the header's checksum is wrong")


def parse_number(field: bytes, what: str) -> int:
    """Octal digits between spaces and NULs (none: 0), or GNU's base-256 where the top bit is set."""
    digits = field.strip(b" \0")
    if digits.isdigit() and b"8" not in digits and b"9" not in digits:
        return int(digits, 8)
    if field[0] & 0x80:
        bits = 8 * len(field) - 1
        value = int.from_bytes(field, "big") & ((1 << bits) - 1)
        return value - (1 << bits) if value >> (bits - 1) else value
    match = _OCTAL.fullmatch(field)
    if not match:
        raise Corrupt(f"the header's {what} is no number: {field!r}")
    return int(match[1] or b"0", 8)


_repeated: Final = lru_cache(maxsize=1024)(parse_number)
"""For fields that most headers of an archive have alike."""


def text(field: bytes) -> bytes:
    """The bytes before the first NUL."""
    return field.partition(b"\0")[0]


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
        records[SPARSE_MAP] = b",".join(pairs)
    return records


def parse_time(text: bytes) -> int:
    """Nanoseconds of a PAX time: decimal seconds, perhaps negative, digits beyond the ninth cut off."""
    match = _TIME.fullmatch(text)
    if not match:
        raise Corrupt(f"a PAX time that is no number: {shown(text)}")
    sign, seconds, fraction = match.groups()
    value = int(seconds) * 10**9 + int((fraction or b"")[:9].ljust(9, b"0"))
    return -value if sign else value


def update_global(shared: Records, records: Records) -> None:
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


def with_records(header: Header, records: Records) -> Header:
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
    return integer(text, keyword.decode()) if text else default


def integer(text: bytes, what: str) -> int:
    match = _DECIMAL.fullmatch(text)
    if not match:
        raise Corrupt(f"the {what} is no number: {shown(text)}")
    return int(match[1] + match[2])


def xattrs(own: Records, shared: Records) -> dict[bytes, bytes]:
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
        offset = parse_number(field[start : start + 12], "sparse offset")
        pairs.append((offset, parse_number(field[start + 12 : start + 24], "sparse length")))
    return pairs, bool(field[count * 24])


def parse_sparse_map(numbers: list[bytes]) -> list[tuple[int, int]]:
    """(offset, length) pairs from decimal texts."""
    if len(numbers) % 2:
        raise Corrupt(f"a sparse map of {len(numbers)} numbers, which is odd")
    values = [integer(text, "sparse map") for text in numbers]
    return list(zip(values[::2], values[1::2], strict=True))


def sparse_version(records: Records) -> bytes | None:
    """Version of a sparse file that PAX records describe, None if they describe none."""
    if _SPARSE_MAJOR not in records and SPARSE_MAP not in records:
        return None
    version = records.get(_SPARSE_MAJOR, b"0") + b"." + records.get(_SPARSE_MINOR, b"1")
    if version not in _SPARSE_VERSIONS:
        raise Invalid(f"a sparse file of the unknown version {shown(version)}")
    return version


def limit_runs(count: int) -> None:
    if not 0 <= count <= SPARSE_RUNS_MAX:
        raise Invalid(f"a sparse file of {count} runs (at most {SPARSE_RUNS_MAX})")


def checked_runs(pairs: Iterable[tuple[int, int]], size: int, stored: int) -> Runs:
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
