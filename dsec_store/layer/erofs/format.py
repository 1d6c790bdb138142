"""EROFS on disk: bytes to values and back, without I/O and without a tree.

Problem: the kernel serves a layer from a metadata image in EROFS, a format with a dozen layouts, of which we need few.
Choice:  one form of each thing: 4 KiB blocks, 64-byte ("extended") inodes, inline xattrs, one 8-byte chunk index for a
         file's content on a blob device, and for the data of directories and symlinks either *inline* (behind the
         inode, in the same block) or *plain* (whole blocks). Any kernel from 5.16 on reads this; from 6.12 on without
         a loop device.
Source:  Linux `fs/erofs/erofs_fs.h`, names of fields in the comments are its names; docs/format/metadata-image.md.

Packing raises `Invalid` for what the format cannot hold, unpacking raises `Corrupt` for what this module would not
write. All integers are little-endian.
"""

from __future__ import annotations

import itertools
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Final, NamedTuple, Self

from dsec_store.errors import Corrupt, Invalid

BLOCK_BITS: Final = 12
BLOCK: Final = 1 << BLOCK_BITS
"""Bytes of a block. The kernel maps metadata page by page, so anything but its page size would cost."""

BLOCK_ADDRESS_MAX: Final = 2**32 - 2
"""Last usable block number of a device: 2**32-1 marks a hole."""

NID_SIZE: Final = 32
"""An inode is named by its offset divided by this: its *nid*."""

ROOT_NID_MAX: Final = 2**16 - 1
"""The superblock has 16 bits for the root's nid (newer kernels know a wider form, older ones refuse it)."""

NAME_MAX: Final = 255
"""Bytes of a file name, and of a full xattr name."""

TARGET_MAX: Final = 4095
"""Bytes of a symlink's target: the kernel's PATH_MAX without the closing NUL."""


def round_up(size: int, unit: int) -> int:
    """`size` rounded up to a multiple of `unit`."""
    return -(-size // unit) * unit


def valid_name(name: bytes) -> bool:
    """Whether a directory entry may have this name (`.` and `..` excluded)."""
    return 0 < len(name) <= NAME_MAX and b"/" not in name and b"\0" not in name and name not in {b".", b".."}


def valid_target(target: bytes) -> bool:
    """Whether a symlink may have this target."""
    return 0 < len(target) <= TARGET_MAX and b"\0" not in target


# --- Superblock and device table -------------------------------------------------------------------------------------

SUPER_OFFSET: Final = 1024
SUPER_MAGIC: Final = 0xE0F5E1E2
FEATURE_COMPAT_MTIME: Final = 0x2
"""The inodes' time stamps are modification times."""
FEATURE_INCOMPAT_CHUNKED_FILE: Final = 0x4
FEATURE_INCOMPAT_DEVICE_TABLE: Final = 0x8
DEVICE_FEATURES: Final = FEATURE_INCOMPAT_CHUNKED_FILE | FEATURE_INCOMPAT_DEVICE_TABLE
"""Set together when the image has blob devices; no other incompatible feature is ever set."""

_SUPERBLOCK: Final = Struct(
    "<I4xI"  # magic, (checksum), feature_compat
    "BBHQ12x"  # blkszbits, sb_extslots, root_nid, inos, (build_time, build_time_nsec)
    "III32x"  # blocks, meta_blkaddr, xattr_blkaddr, (uuid, volume_name)
    "I2xHHBB36x"  # feature_incompat, (u1), extra_devices, devt_slotoff, dirblkbits, xattr_prefix_count, (the rest)
)
_DEVICE: Final = Struct("<64sII56x")  # tag, blocks, mapped_blkaddr, (reserved)
TAG_MAX: Final = 64
NOT_MAPPED: Final = 2**32 - 1
"""`mapped_blkaddr` of every device. A mount without `device=` options succeeds, and takes content from the image itself
at this block plus the chunk's: far behind its end, so that reads give EIO. With 0 here they gave the image's bytes."""
DEVICE_TABLE_OFFSET: Final = SUPER_OFFSET + _SUPERBLOCK.size


@dataclass(frozen=True, slots=True)
class Device:
    """A blob device: a tag for people and tools (1 to 64 ASCII characters, e.g. a digest in hex), its size in blocks.

    The kernel takes devices by the order of the mount's `device=` options and looks neither at tag nor size.
    """

    tag: str
    blocks: int

    def __post_init__(self) -> None:
        if not 0 < len(self.tag) <= TAG_MAX or not self.tag.isascii() or "\0" in self.tag:
            raise Invalid(f"blob device tag {self.tag!r}: not 1 to {TAG_MAX} ASCII characters")
        if not 0 <= self.blocks <= BLOCK_ADDRESS_MAX + 1:
            raise Invalid(f"blob device {self.tag}: {self.blocks} blocks, EROFS addresses {BLOCK_ADDRESS_MAX + 1}")

    def holds(self, offset: int, size: int) -> bool:
        """Whether `size` bytes at `offset` lie on the device and start on a block."""
        return offset >= 0 and offset % BLOCK == 0 and offset + size <= self.blocks * BLOCK

    def pack(self) -> bytes:
        return _DEVICE.pack(self.tag.encode("ascii"), self.blocks, NOT_MAPPED)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """From the bytes of one slot."""
        tag, blocks, mapped = _DEVICE.unpack(data)
        if mapped != NOT_MAPPED:
            raise Corrupt("metadata image: a blob device that is mapped into the image")
        try:
            return cls(tag.rstrip(b"\0").decode("latin-1"), blocks)
        except Invalid as error:
            raise Corrupt(f"metadata image: {error}") from None


def device_table_end(devices: int) -> int:
    """Offset behind the device table: the first byte that is free for inodes."""
    return DEVICE_TABLE_OFFSET + devices * _DEVICE.size


def unpack_devices(table: bytes) -> tuple[Device, ...]:
    """The devices of a table of whole slots."""
    return tuple(Device.unpack(table[at : at + _DEVICE.size]) for at in range(0, len(table), _DEVICE.size))


@dataclass(frozen=True, slots=True)
class Superblock:
    """What differs from image to image: everything else in the superblock is fixed or zero, for determinism."""

    root_nid: int
    inodes: int
    blocks: int
    devices: int

    def pack(self) -> bytes:
        features = DEVICE_FEATURES if self.devices else 0
        return _SUPERBLOCK.pack(
            *(SUPER_MAGIC, FEATURE_COMPAT_MTIME, BLOCK_BITS, 0, self.root_nid, self.inodes, self.blocks, 0, 0),
            *(features, self.devices, DEVICE_TABLE_OFFSET // _DEVICE.size if self.devices else 0, 0, 0),
        )

    @classmethod
    def unpack(cls, image: bytes | memoryview) -> Self:
        """From the first bytes of an image (all of it may be given)."""
        if len(image) < DEVICE_TABLE_OFFSET:
            raise Corrupt(f"metadata image: {len(image)} bytes hold no superblock")
        fields = _SUPERBLOCK.unpack_from(image, SUPER_OFFSET)
        magic, _, _, _, root_nid, inodes, blocks, _, _, _, devices, *_ = fields
        if magic != SUPER_MAGIC:
            raise Corrupt("metadata image: no EROFS superblock")
        found = cls(root_nid, inodes, blocks, devices)
        if _SUPERBLOCK.unpack(found.pack()) != fields:
            raise Corrupt("metadata image: a block size, feature or table that this version does not write")
        return found


# --- Inodes ----------------------------------------------------------------------------------------------------------

PLAIN: Final = 0
"""Data in whole blocks from block `union` on (or none at all)."""
INLINE: Final = 2
"""Data directly behind the inode and its xattrs, in the same block."""
CHUNKED: Final = 4
"""Data on a blob device, named by one chunk index behind the inode and its xattrs, 8-byte aligned."""

FILE_TYPES: Final = {
    stat.S_IFREG: 1,
    stat.S_IFDIR: 2,
    stat.S_IFCHR: 3,
    stat.S_IFBLK: 4,
    stat.S_IFIFO: 5,
    stat.S_IFSOCK: 6,
    stat.S_IFLNK: 7,
}
"""Type bits of a mode -> `file_type` of a directory entry."""


def valid_mode(mode: int) -> bool:
    """Whether a mode has 16 bits and names a type of file."""
    return 0 <= mode < 2**16 and stat.S_IFMT(mode) in FILE_TYPES


_EXTENDED: Final = 1
_INODE: Final = Struct("<HHH2xQIIIIqII16x")
INODE_SIZE: Final = _INODE.size
SECONDS_MAX: Final = 2**63 - 1
NANOSECONDS: Final = 10**9


class RawInode(NamedTuple):
    """The fields of `struct erofs_inode_extended`, in order.

    layout       PLAIN, INLINE or CHUNKED           union    first data block, device number or chunk format
    xattr_count  size of the xattr body, encoded    number   a running number, for 32-bit programs only
    seconds      since 1970, negative before        links    names of a file; 2 + subdirectories of a directory
    """

    layout: int
    xattr_count: int
    mode: int
    size: int
    union: int
    number: int
    uid: int
    gid: int
    seconds: int
    nanoseconds: int
    links: int

    def pack_into(self, image: bytearray, offset: int) -> None:
        _INODE.pack_into(image, offset, self.layout << 1 | _EXTENDED, *self[1:])

    @classmethod
    def unpack(cls, data: bytes) -> RawInode:
        """From INODE_SIZE bytes."""
        form, *rest = _INODE.unpack(data)
        if form & 1 != _EXTENDED or form >> 1 not in {PLAIN, INLINE, CHUNKED}:
            raise Corrupt(f"metadata image: an inode of unknown format {form:#x}")
        return cls(form >> 1, *rest)


def encode_rdev(major: int, minor: int) -> int:
    """A device number in the kernel's 32-bit form (`new_encode_dev`)."""
    if not (0 <= major < 2**12 and 0 <= minor < 2**20):
        raise Invalid(f"device number {major}:{minor}: Linux has 12 bits and 20 bits")
    return minor & 0xFF | major << 8 | (minor & ~0xFF) << 12


def decode_rdev(number: int) -> tuple[int, int]:
    """(major, minor) of the kernel's 32-bit form."""
    return number >> 8 & 0xFFF, number & 0xFF | number >> 12 & ~0xFF


# --- Chunk index: where a file's content lies ------------------------------------------------------------------------

_CHUNK: Final = Struct("<2xHI")  # (advise), device_id, blkaddr
CHUNK_SIZE: Final = _CHUNK.size
_CHUNK_INDEXES: Final = 0x20
FILE_SIZE_MAX: Final = BLOCK << 31
"""8 TiB: the largest chunk, and our files have exactly one."""


def chunk_format(size: int) -> int:
    """The `union` of a file of `size` bytes: its chunk is the smallest power of two of blocks that holds it."""
    if not 0 < size <= FILE_SIZE_MAX:
        raise Invalid(f"file of {size} bytes: EROFS has chunks of up to {FILE_SIZE_MAX} bytes")
    return (-(-size // BLOCK) - 1).bit_length() | _CHUNK_INDEXES


def chunk_offset(xattr_bytes: int) -> int:
    """Where the chunk index stands, counted from its inode, behind an xattr body of `xattr_bytes`."""
    return round_up(INODE_SIZE + xattr_bytes, CHUNK_SIZE)


def pack_chunk(device: int, offset: int) -> bytes:
    """The index of content at byte `offset` of blob device `device` (0 for the first; on disk 0 is the image)."""
    return _CHUNK.pack(device + 1, offset // BLOCK)


def unpack_chunk(data: bytes) -> tuple[int, int]:
    """(device, byte offset); the device is -1 where the index names the image itself."""
    device, block = _CHUNK.unpack(data)
    return device - 1, block * BLOCK


# --- Directories -----------------------------------------------------------------------------------------------------

_DIRENT: Final = Struct("<QHBx")  # nid, nameoff, file_type


class Dirent(NamedTuple):
    """One directory entry; `kind` is a value of FILE_TYPES."""

    name: bytes
    nid: int
    kind: int


def _pages(names: Sequence[bytes]) -> Iterator[tuple[int, int, int]]:
    """How names fill blocks: (first, behind last, bytes used) for each block, as many names in each as go in."""
    first = used = 0
    for index, name in enumerate(names):
        need = _DIRENT.size + len(name)
        if used + need > BLOCK:
            yield first, index, used
            first, used = index, 0
        used += need
    yield first, len(names), used


def directory_size(names: Sequence[bytes]) -> int:
    """Bytes of a directory with these names, `.` and `..` among them: full blocks and what the last one uses."""
    *full, (_, _, used) = _pages(names)
    return len(full) * BLOCK + used


def pack_directory(entries: Sequence[Dirent]) -> bytes:
    """The data of a directory. `entries` are sorted by name as bytes, `.` and `..` among them."""
    blocks = []
    for first, stop, _ in _pages([entry.name for entry in entries]):
        page = entries[first:stop]
        name_offset = len(page) * _DIRENT.size
        heads = []
        for name, nid, kind in page:
            heads.append(_DIRENT.pack(nid, name_offset, kind))
            name_offset += len(name)
        blocks.append(b"".join(heads) + b"".join([entry.name for entry in page]))
    return b"".join([*(block.ljust(BLOCK, b"\0") for block in blocks[:-1]), blocks[-1]])


def unpack_directory(data: bytes) -> list[Dirent]:
    """The entries of a directory's data, names checked for length and order only."""
    entries = []
    for start in range(0, len(data), BLOCK):
        entries += _unpack_page(data[start : start + BLOCK])
    if any(left.name >= right.name for left, right in itertools.pairwise(entries)):
        raise Corrupt("metadata image: directory names out of order")
    return entries


def _unpack_page(page: bytes) -> list[Dirent]:
    """The entries of one directory block; `page` ends where the directory does."""
    if len(page) < _DIRENT.size:
        raise Corrupt("metadata image: a directory block too small for an entry")
    heads_end = _DIRENT.unpack_from(page)[1]
    if heads_end % _DIRENT.size or not 0 < heads_end <= len(page):
        raise Corrupt("metadata image: a directory block without a whole number of entries")
    heads = list(_DIRENT.iter_unpack(page[:heads_end]))
    ends = [head[1] for head in heads[1:]] + [len(page)]
    entries = []
    for (nid, start, kind), end in zip(heads, ends, strict=True):
        if not start < end <= len(page):
            raise Corrupt("metadata image: a directory entry without a name")
        entries.append(Dirent(page[start:end], nid, kind))
    last = entries[-1]
    entries[-1] = last._replace(name=last.name.rstrip(b"\0"))
    return entries


# --- Xattrs ----------------------------------------------------------------------------------------------------------

_XATTR_HEADER: Final = Struct("<12x")  # (h_name_filter, h_shared_count, reserved): all xattrs are inline
_XATTR_ENTRY: Final = Struct("<BBH")  # e_name_len, e_name_index, e_value_size
_XATTR_UNIT: Final = 4
XATTR_VALUE_MAX: Final = 65535
XATTR_BODY_MAX: Final = _XATTR_HEADER.size + (2**16 - 2) * _XATTR_UNIT
"""Bytes of all xattrs of an inode: `i_xattr_icount` counts units in 16 bits."""

_XATTR_PREFIXES: Final = {
    b"user.": 1,
    b"system.posix_acl_access": 2,
    b"system.posix_acl_default": 3,
    b"trusted.": 4,
    b"security.": 6,
}
"""Name prefix -> `e_name_index`. The two ACL names are whole: nothing follows them."""
_XATTR_PREFIX_OF: Final = {index: prefix for prefix, index in _XATTR_PREFIXES.items()}


def _split_xattr_name(name: bytes) -> tuple[int, bytes] | None:
    """(index, rest) of a full xattr name, None for a name that EROFS cannot hold."""
    if len(name) > NAME_MAX or b"\0" in name:
        return None
    for prefix, index in _XATTR_PREFIXES.items():
        if name.startswith(prefix) and (len(name) > len(prefix)) == prefix.endswith(b"."):
            return index, name[len(prefix) :]
    return None


def _pack_xattr(name: bytes, value: bytes) -> bytes:
    split = _split_xattr_name(name)
    if split is None:
        raise Invalid(f"xattr {name!r}: not a name of user, trusted, security or posix_acl, up to {NAME_MAX} bytes")
    if len(value) > XATTR_VALUE_MAX:
        raise Invalid(f"xattr {name!r}: value of {len(value)} bytes, the limit is {XATTR_VALUE_MAX}")
    index, rest = split
    entry = _XATTR_ENTRY.pack(len(rest), index, len(value)) + rest + value
    return entry.ljust(round_up(len(entry), _XATTR_UNIT), b"\0")


def pack_xattrs(xattrs: Mapping[bytes, bytes]) -> bytes:
    """The body behind an inode, entries sorted by full name; nothing where there are no xattrs."""
    if not xattrs:
        return b""
    body = _XATTR_HEADER.pack() + b"".join([_pack_xattr(name, value) for name, value in sorted(xattrs.items())])
    if len(body) > XATTR_BODY_MAX:
        raise Invalid(f"xattrs of {len(body)} bytes, the limit for one inode is {XATTR_BODY_MAX}")
    return body


def xattr_count(size: int) -> int:
    """`i_xattr_icount` for a body of `size` bytes: its units behind the header, plus one for the header."""
    return (size - _XATTR_HEADER.size) // _XATTR_UNIT + 1 if size else 0


def xattr_body_size(count: int) -> int:
    """The inverse of `xattr_count`."""
    return _XATTR_HEADER.size + (count - 1) * _XATTR_UNIT if count else 0


def unpack_xattrs(body: bytes) -> dict[bytes, bytes]:
    """The xattrs of a body of `xattr_body_size` bytes."""
    if not body:
        return {}
    if any(body[: _XATTR_HEADER.size]):
        raise Corrupt("metadata image: shared or filtered xattrs, which this version does not write")
    xattrs: dict[bytes, bytes] = {}
    at = _XATTR_HEADER.size
    while at < len(body):  # the body's size is a multiple of the unit, so an entry's head is never cut
        name_size, index, value_size = _XATTR_ENTRY.unpack_from(body, at)
        value_at = at + _XATTR_ENTRY.size + name_size
        end = value_at + value_size
        rest = body[at + _XATTR_ENTRY.size : value_at]
        name = _XATTR_PREFIX_OF.get(index, b"") + rest
        if end > len(body) or name in xattrs or _split_xattr_name(name) != (index, rest):
            raise Corrupt(f"metadata image: an xattr with a bad size or name ({name!r})")
        xattrs[name] = body[value_at:end]
        at = round_up(end, _XATTR_UNIT)
    return xattrs
