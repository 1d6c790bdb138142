"""Tar archives made by hand, for what no tar program would write.

Each function gives the bytes of one entry, or of one header that belongs to the next entry; `archive` joins them:

>>> archive(directory(b"a/"), pax({b"SCHILY.xattr.user.k": b"v"}), file(b"a/f", b"x", mode=0o600), symlink(b"s", b"f"))

Entries are root's, modified in 1970, 0644, directories 0755. A number that octal digits cannot hold becomes base-256.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypedDict, Unpack

BLOCK: Final = 512
END: Final = bytes(2 * BLOCK)
"""Two zero blocks, the end of an archive."""

POSIX: Final = b"ustar\x0000"
GNU: Final = b"ustar  \0"
V7: Final = bytes(8)
"""Magic and version of the three old families; PAX archives have POSIX's."""

Runs = Sequence[tuple[int, int]]
"""(offset, length) of the stored parts of a sparse file."""


class Fields(TypedDict, total=False):
    """Header fields that any entry may set. `prefix` goes before the path, as ustar has it."""

    mode: int
    uid: int
    gid: int
    mtime: int
    size: int
    link: bytes
    rdev: tuple[int, int]
    magic: bytes
    prefix: bytes


def archive(*entries: bytes, end: bytes = END) -> bytes:
    return b"".join(entries) + end


def header(path: bytes, typeflag: bytes, **fields: Unpack[Fields]) -> bytes:
    """One header block, its checksum included."""
    major, minor = fields.get("rdev", (0, 0))
    block = b"".join(
        (
            _field(path, 100),
            number(fields.get("mode", 0o644), 8),
            number(fields.get("uid", 0), 8),
            number(fields.get("gid", 0), 8),
            number(fields.get("size", 0), 12),
            number(fields.get("mtime", 0), 12),
            bytes(8),
            typeflag,
            _field(fields.get("link", b""), 100),
            fields.get("magic", POSIX),
            bytes(64),
            number(major, 8),
            number(minor, 8),
            _field(fields.get("prefix", b""), 155),
            bytes(12),
        )
    )
    return signed(block)


def file(path: bytes, data: bytes = b"", **fields: Unpack[Fields]) -> bytes:
    fields.setdefault("size", len(data))
    return header(path, b"0", **fields) + padded(data)


def directory(path: bytes, **fields: Unpack[Fields]) -> bytes:
    fields.setdefault("mode", 0o755)
    return header(path, b"5", **fields)


def symlink(path: bytes, target: bytes, **fields: Unpack[Fields]) -> bytes:
    fields.setdefault("mode", 0o777)
    fields.setdefault("link", target)
    return header(path, b"2", **fields)


def hardlink(path: bytes, target: bytes, **fields: Unpack[Fields]) -> bytes:
    fields.setdefault("link", target)
    return header(path, b"1", **fields)


def character_device(path: bytes, major: int, minor: int, **fields: Unpack[Fields]) -> bytes:
    fields.setdefault("rdev", (major, minor))
    return header(path, b"3", **fields)


def block_device(path: bytes, major: int, minor: int, **fields: Unpack[Fields]) -> bytes:
    fields.setdefault("rdev", (major, minor))
    return header(path, b"4", **fields)


def fifo(path: bytes, **fields: Unpack[Fields]) -> bytes:
    return header(path, b"6", **fields)


def pax(records: Mapping[bytes, bytes] | Iterable[tuple[bytes, bytes]], typeflag: bytes = b"x") -> bytes:
    """A PAX header for the next entry, or with typeflag `g` for all that follow. Pairs may repeat a keyword."""
    pairs = records.items() if isinstance(records, Mapping) else records
    data = b"".join(pax_record(keyword, value) for keyword, value in pairs)
    return extension(typeflag, data)


def pax_record(keyword: bytes, value: bytes) -> bytes:
    body = b" %s=%s\n" % (keyword, value)
    length = len(body)
    while length != len(str(length)) + len(body):
        length = len(str(length)) + len(body)
    return str(length).encode() + body


def extension(typeflag: bytes, data: bytes) -> bytes:
    """A header that says something about the next entry, in GNU's and everybody's form."""
    return header(b"././@Extension", typeflag, size=len(data)) + padded(data)


def long_path(path: bytes) -> bytes:
    """GNU's header for the next entry's path."""
    return extension(b"L", path + b"\0")


def long_link(target: bytes) -> bytes:
    """GNU's header for the next entry's link target."""
    return extension(b"K", target + b"\0")


def gnu_sparse(path: bytes, real_size: int, runs: Runs, data: bytes, **fields: Unpack[Fields]) -> bytes:
    """An old GNU sparse file of `real_size` bytes: `data` holds its runs (offset, length) one after another."""
    fields.setdefault("size", len(data))
    fields.setdefault("magic", GNU)
    block = bytearray(header(path, b"S", **fields))
    block[386:483] = _sparse_pairs(runs[:4], 4, more=len(runs) > 4)
    block[483:495] = number(real_size, 12)
    further = [
        padded(_sparse_pairs(runs[start : start + 21], 21, more=len(runs) > start + 21))
        for start in range(4, len(runs), 21)
    ]
    return signed(bytes(block)) + b"".join(further) + padded(data)


def number(value: int, width: int) -> bytes:
    """A number field: octal digits and a NUL, or base-256 where those do not suffice."""
    if 0 <= value < 8 ** (width - 1):
        return b"%0*o\0" % (width - 1, value)
    bits = 8 * width - 1
    return (1 << bits | value & ((1 << bits) - 1)).to_bytes(width, "big")


def signed(block: bytes) -> bytes:
    """The header block with its right checksum, for blocks that a test has changed."""
    summed = block[:148] + b" " * 8 + block[156:]
    return block[:148] + b"%06o\0 " % sum(summed) + block[156:]


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % BLOCK)


def _field(text: bytes, width: int) -> bytes:
    return text[:width].ljust(width, b"\0")


def _sparse_pairs(runs: Runs, count: int, *, more: bool) -> bytes:
    pairs = b"".join(number(offset, 12) + number(length, 12) for offset, length in runs)
    return pairs.ljust(24 * count, b"\0") + bytes([more])
