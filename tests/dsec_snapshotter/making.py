"""Layers for tests, written straight into a store: a tree of plain values, its blobs cut into one chunk per file.

>>> put_layer(objects, {"etc": {"motd": b"hello"}, "bin": "usr/bin", "gone": whiteout()})
"""

import io
import stat
from collections.abc import Mapping
from typing import Any

from dsec_store import compression
from dsec_store.chunker import DEFAULT
from dsec_store.chunkmap import ChunkLocation, ChunkMap
from dsec_store.descriptor import Blob, LayerDescriptor
from dsec_store.digest import Digest
from dsec_store.layer.erofs import Device, write_image
from dsec_store.layer.erofs.format import BLOCK, round_up
from dsec_store.layer.tree import Address, Directory, Inode
from dsec_store.objects import Objects
from dsec_store.pack import PackBuilder

DIRECTORY = Inode(stat.S_IFDIR | 0o755)


_Contents = list[list[bytes]]
"""What each blob device holds: padded contents, one behind the other."""


def put_layer(objects: Objects, entries: Mapping[str, Any], *, root: Inode | None = None, devices: int = 1) -> Digest:
    """Store a layer. Values: bytes, or (bytes, mode), are a file, str a symlink, a mapping a directory; or an `Inode`.

    With `root`, the layer has an entry for its root directory, with these attributes. The contents of files are dealt
    to so many blob devices in turn; one that gets none is left out.
    """
    contents: _Contents = [[] for _ in range(devices)]
    directory = _directory(entries, root or Inode(DIRECTORY.mode), contents)
    blobs = [_put_blob(objects, device) for device in contents if device]
    out = io.BytesIO()
    write_image(directory, [Device(blob.name.hex, blob.size // BLOCK) for blob in blobs], out)
    return objects.put_layer(
        LayerDescriptor(
            metadata=objects.put_metadata(out.getvalue()),
            blobs=tuple(blobs),
            inodes=1,
            has_root=root is not None,
            chunker=DEFAULT,
            diff_id=None,
        )
    )


def _directory(entries: Mapping[str, Any], inode: Inode, contents: _Contents) -> Directory:
    return Directory(inode, {name.encode(): _node(value, contents) for name, value in entries.items()})


def _node(value: Any, contents: _Contents) -> Inode | Directory:
    match value:
        case bytes():
            return _file(value, 0o644, contents)
        case (bytes() as data, int() as mode):
            return _file(data, mode, contents)
        case str():
            return Inode(stat.S_IFLNK | 0o777, target=value.encode())
        case Inode() | Directory():
            return value
        case _:
            return _directory(value, Inode(DIRECTORY.mode), contents)


def _file(data: bytes, mode: int, contents: _Contents) -> Inode:
    inode = Inode(stat.S_IFREG | mode, size=len(data))
    if data:
        device = sum(map(len, contents)) % len(contents)
        inode.address = Address(device, sum(map(len, contents[device])))
        contents[device].append(data.ljust(round_up(len(data), BLOCK), b"\0"))
    return inode


def _put_blob(objects: Objects, contents: list[bytes]) -> Blob:
    pack = PackBuilder()
    for content in contents:
        encoding, stored = compression.encode(content)
        pack.add(Digest.of(content).raw, len(content), encoding, stored)
    packed = objects.put_pack(pack.seal())
    chunk_map = objects.put_chunk_map(ChunkMap([chunk.digest for chunk in pack.chunks], list(map(len, contents))))
    locations = [ChunkLocation(packed, chunk.offset, chunk.stored, chunk.encoding) for chunk in pack.chunks]
    objects.put_locator(chunk_map, locations)
    return Blob(chunk_map, sum(map(len, contents)))
