"""A layer of one large file of many chunks."""

from __future__ import annotations

import io
import stat

from dsec_store.chunker import ChunkerParameters
from dsec_store.descriptor import Blob, LayerDescriptor
from dsec_store.digest import Digest
from dsec_store.layer.erofs import Device, write_image
from dsec_store.layer.tree import Address, Directory, Inode
from dsec_store.objects import Objects
from tests.dsec_store.blobmaker import store_blob

_BLOCK = 4096


def put_file(objects: Objects, name: str, data: bytes, parameters: ChunkerParameters) -> Digest:
    """Store a layer whose only file holds `data`, cut as `parameters` say."""
    stored = store_blob(objects, data + bytes(-len(data) % _BLOCK), parameters=parameters)
    blob = Blob(objects.put_chunk_map(stored.chunk_map), len(stored.data))
    objects.put_locator(blob.chunk_map, stored.locations)
    root = Directory(Inode(stat.S_IFDIR | 0o755))
    root.entries[name.encode()] = Inode(stat.S_IFREG | 0o644, size=len(data), address=Address(0, 0))
    out = io.BytesIO()
    write_image(root, [Device(blob.name.hex, blob.size // _BLOCK)], out)
    return objects.put_layer(LayerDescriptor(objects.put_metadata(out.getvalue()), (blob,), 2, False))
