"""Layers for tests, written straight into a store: a tree of plain values, its blob cut into one chunk per file.

>>> put_layer(objects, {"etc": {"motd": b"hello"}, "bin": "usr/bin", "gone": whiteout()})
"""

import io
import stat
from collections.abc import Mapping
from typing import Any

from dsec_store import compression
from dsec_store.chunker import DEFAULT
from dsec_store.chunkmap import ChunkLocation, ChunkMap
from dsec_store.descriptor import LayerDescriptor, Sized
from dsec_store.digest import Digest
from dsec_store.layer.erofs import Device, write_image
from dsec_store.layer.erofs.format import BLOCK, round_up
from dsec_store.layer.tree import Address, Directory, Inode
from dsec_store.objects import Objects
from dsec_store.pack import PackBuilder

DIRECTORY = Inode(stat.S_IFDIR | 0o755)


def put_layer(objects: Objects, entries: Mapping[str, Any], *, root: Inode | None = None) -> Digest:
    """Store a layer. Values: bytes, or (bytes, mode), are a file, str a symlink, a mapping a directory; or an `Inode`.

    With `root`, the layer has an entry for its root directory, with these attributes.
    """
    contents: list[bytes] = []
    directory = _directory(entries, root or Inode(DIRECTORY.mode), contents)
    chunk_map = _put_blob(objects, contents)
    out = io.BytesIO()
    devices = [Device(chunk_map.digest.hex, sum(map(len, contents)) // BLOCK)] if contents else []
    write_image(directory, devices, out)
    return objects.put_layer(
        LayerDescriptor(
            metadata=objects.put_metadata(out.getvalue()),
            chunk_map=chunk_map,
            blob_size=sum(map(len, contents)),
            inodes=1,
            has_root=root is not None,
            chunker=DEFAULT,
            diff_id=None,
        )
    )


def _directory(entries: Mapping[str, Any], inode: Inode, contents: list[bytes]) -> Directory:
    return Directory(inode, {name.encode(): _node(value, contents) for name, value in entries.items()})


def _node(value: Any, contents: list[bytes]) -> Inode | Directory:
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


def _file(data: bytes, mode: int, contents: list[bytes]) -> Inode:
    inode = Inode(stat.S_IFREG | mode, size=len(data))
    if data:
        inode.address = Address(0, sum(map(len, contents)))
        contents.append(data.ljust(round_up(len(data), BLOCK), b"\0"))
    return inode


def _put_blob(objects: Objects, contents: list[bytes]) -> Sized:
    pack = PackBuilder()
    for content in contents:
        encoding, stored = compression.encode(content)
        pack.add(Digest.of(content).raw, len(content), encoding, stored)
    packed = objects.put_pack(pack.seal())
    chunk_map = objects.put_chunk_map(ChunkMap([chunk.digest for chunk in pack.chunks], list(map(len, contents))))
    locations = [ChunkLocation(packed, chunk.offset, chunk.stored, chunk.encoding) for chunk in pack.chunks]
    objects.put_locator(chunk_map, locations)
    return chunk_map
