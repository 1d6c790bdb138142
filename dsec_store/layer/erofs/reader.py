"""Reads a metadata image back into a tree.

Problem: tools (export, merge, check, read-ahead by file extents) need the tree of a layer without a mount, and the
         image comes from a store, so it may be made to harm: loops, names of names, sizes that lie.
Choice:  read exactly what `writer` writes and refuse the rest as `Corrupt`. Every byte of the image belongs to at most
         one thing: whatever is read is *claimed* first, and a second claim is refused. So there are no loops, and
         time and memory stay proportional to the image's size.
Source:  docs/format/metadata-image.md.

>>> image = read_image(Path("layer.erofs").read_bytes())
>>> image.root.find(b"usr/bin/python3")
"""

from __future__ import annotations

import mmap
import stat
from dataclasses import dataclass
from typing import BinaryIO

from dsec_store.errors import Corrupt
from dsec_store.layer.erofs import format as erofs
from dsec_store.layer.erofs.format import BLOCK, CHUNKED, INLINE, INODE_SIZE, NID_SIZE, PLAIN, Device, Dirent, RawInode
from dsec_store.layer.tree import ID_MAX, Address, Directory, Inode, inode_of


@dataclass(frozen=True, slots=True)
class Image:
    """A tree and its blob devices. Files have addresses, no contents; hardlinks are the same `Inode` object."""

    root: Directory
    devices: tuple[Device, ...]


def read_image(source: bytes | bytearray | memoryview | mmap.mmap | BinaryIO) -> Image:
    """The tree of a whole metadata image; a file is read from its position to its end.

    Raises `Corrupt` for anything that `write_image` would not have written in substance.
    """
    whole = source if isinstance(source, bytes | bytearray | memoryview | mmap.mmap) else source.read()
    with memoryview(whole).cast("B") as view:  # released at once, so that the caller can close a map
        return _Reading(view).image()


@dataclass(slots=True)
class _Found:
    """An inode that was read: its node, the links that it claims to have, those that were met."""

    node: Inode | Directory
    links: int
    met: int


@dataclass(slots=True)
class _Pending:
    """A directory whose entries are still to be read."""

    found: _Found
    directory: Directory
    data: bytes
    nid: int
    parent: int


class _Reading:
    """One pass over an image."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._superblock = erofs.Superblock.unpack(self._view)
        if self._superblock.blocks * BLOCK != len(self._view):
            raise Corrupt(f"metadata image: {len(self._view)} bytes, not the {self._superblock.blocks} blocks it names")
        self._claimed = bytearray(len(self._view) // NID_SIZE)
        self._claim(0, erofs.DEVICE_TABLE_OFFSET)
        table = self._claim(erofs.DEVICE_TABLE_OFFSET, erofs.device_table_end(self._superblock.devices))
        self._devices = erofs.unpack_devices(table)
        self._found: dict[int, _Found] = {}
        self._pending: list[_Pending] = []

    def image(self) -> Image:
        """Read the tree and check the counts."""
        root_nid = self._superblock.root_nid
        root = self._read_inode(root_nid, parent=root_nid).node
        if not isinstance(root, Directory):
            raise Corrupt("metadata image: the root is no directory")
        while self._pending:
            self._read_entries(self._pending.pop())
        if len(self._found) != self._superblock.inodes:
            raise Corrupt(f"metadata image: {len(self._found)} inodes, not {self._superblock.inodes}")
        if any(found.links != found.met for found in self._found.values()):
            raise Corrupt("metadata image: a wrong link count")
        return Image(root, self._devices)

    # --- Bytes ---

    def _claim(self, start: int, end: int) -> bytes:
        """The bytes from `start` to `end`, which nothing else may use; both ends are widened to whole nid units."""
        first, last = start // NID_SIZE, -(-end // NID_SIZE)
        if last > len(self._claimed):
            raise Corrupt(f"metadata image: {start}+{end - start} lies outside the image")
        if 1 in self._claimed[first:last]:
            raise Corrupt(f"metadata image: {start}+{end - start} is used twice")
        self._claimed[first:last] = b"\1" * (last - first)
        return bytes(self._view[start:end])

    def _read_raw(self, offset: int) -> RawInode:
        if offset + INODE_SIZE > len(self._view):
            raise Corrupt(f"metadata image: an inode at {offset}, outside the image")
        return RawInode.unpack(bytes(self._view[offset : offset + INODE_SIZE]))

    # --- Inodes ---

    def _read_inode(self, nid: int, parent: int) -> _Found:
        """Read the inode `nid`, met for the first time, in the directory `parent`."""
        offset = nid * NID_SIZE
        raw = self._read_raw(offset)
        xattrs_end = INODE_SIZE + erofs.xattr_body_size(raw.xattr_count)
        record = self._claim(offset, offset + _record_length(raw, xattrs_end))
        inode = _attributes(raw, erofs.unpack_xattrs(record[INODE_SIZE:xattrs_end]))
        found = _Found(inode, raw.links, met=1)
        if stat.S_ISREG(raw.mode):
            inode.size = raw.size
            inode.address = self._address(raw, record)
        elif raw.layout == CHUNKED:
            raise Corrupt("metadata image: a chunk index of what is no regular file")
        elif stat.S_ISLNK(raw.mode):
            inode.target = self._data(raw, record, xattrs_end)
            if not erofs.valid_target(inode.target):
                raise Corrupt("metadata image: a bad symlink target")
        elif stat.S_ISDIR(raw.mode):
            found.node = directory = Directory(inode)
            found.met = 2
            data = self._data(raw, record, xattrs_end)
            self._pending.append(_Pending(found, directory, data, nid, parent))
        elif raw.size or raw.layout != PLAIN:
            raise Corrupt("metadata image: a special file with data")
        self._found[nid] = found
        return found

    def _data(self, raw: RawInode, record: bytes, xattrs_end: int) -> bytes:
        """The data of a directory or symlink."""
        if raw.layout == INLINE:
            return record[xattrs_end:]
        start = raw.union * BLOCK
        return self._claim(start, start + erofs.round_up(raw.size, BLOCK))[: raw.size]

    def _address(self, raw: RawInode, record: bytes) -> Address | None:
        """Where the content of a regular file lies; None for an empty one."""
        if (raw.layout, raw.size) == (PLAIN, 0):
            return None
        one_chunk = 0 < raw.size <= erofs.FILE_SIZE_MAX and raw.union == erofs.chunk_format(raw.size)
        if raw.layout != CHUNKED or not one_chunk:
            raise Corrupt("metadata image: a file that is not one chunk")
        device, offset = erofs.unpack_chunk(record[-erofs.CHUNK_SIZE :])
        if not 0 <= device < len(self._devices) or not self._devices[device].holds(offset, raw.size):
            raise Corrupt(f"metadata image: content at {offset}+{raw.size} is not on blob device {device}")
        return Address(device, offset)

    # --- Directories ---

    def _read_entries(self, pending: _Pending) -> None:
        """Fill one directory; its subdirectories become pending."""
        entries = erofs.unpack_directory(pending.data)
        own = [entry for entry in entries if entry.name in {b".", b".."}]
        kind = erofs.FILE_TYPES[stat.S_IFDIR]
        if own != [Dirent(b".", pending.nid, kind), Dirent(b"..", pending.parent, kind)]:
            raise Corrupt("metadata image: a directory without its own two entries")
        for entry in entries:
            if entry not in own:
                node = self._read_entry(entry, pending.nid)
                pending.directory.entries[entry.name] = node
                pending.found.met += isinstance(node, Directory)

    def _read_entry(self, entry: Dirent, parent: int) -> Inode | Directory:
        """The node of one entry: a new one, or a known inode's further name."""
        if not erofs.valid_name(entry.name):
            raise Corrupt(f"metadata image: bad file name {entry.name!r}")
        found = self._found.get(entry.nid)
        if found is None:
            found = self._read_inode(entry.nid, parent)
        elif isinstance(found.node, Directory):
            raise Corrupt("metadata image: a directory with two names")
        else:
            found.met += 1
        if erofs.FILE_TYPES[stat.S_IFMT(inode_of(found.node).mode)] != entry.kind:
            raise Corrupt("metadata image: an entry of another type than its inode")
        return found.node


def _record_length(raw: RawInode, xattrs_end: int) -> int:
    """Bytes from an inode to the end of what must follow it."""
    if raw.layout == CHUNKED:
        return erofs.chunk_offset(xattrs_end - INODE_SIZE) + erofs.CHUNK_SIZE
    length = xattrs_end + raw.size if raw.layout == INLINE else xattrs_end
    if raw.layout == INLINE and length > BLOCK:
        raise Corrupt("metadata image: inline data of more than a block")
    return length


def _attributes(raw: RawInode, xattrs: dict[bytes, bytes]) -> Inode:
    """Mode, owner, time and device number; what depends on the data comes later."""
    if not erofs.valid_mode(raw.mode) or max(raw.uid, raw.gid) > ID_MAX or raw.nanoseconds >= erofs.NANOSECONDS:
        raise Corrupt("metadata image: an inode with a bad type, owner or time")
    is_device = stat.S_ISCHR(raw.mode) or stat.S_ISBLK(raw.mode)
    return Inode(
        raw.mode,
        uid=raw.uid,
        gid=raw.gid,
        mtime_ns=raw.seconds * erofs.NANOSECONDS + raw.nanoseconds,
        rdev=erofs.decode_rdev(raw.union) if is_device else (0, 0),
        xattrs=xattrs,
    )
