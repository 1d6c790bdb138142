"""Shorthands for tests of the tar reader: the entries of an archive, and the bytes of a file in it."""

import io

from dsec_store.layer.tar import TarEntry, read_entries


def entries(data: bytes) -> list[TarEntry]:
    return list(read_entries(io.BytesIO(data)))


def content(data: bytes, entry: TarEntry) -> bytes:
    """A file's bytes, the zeros between its runs included."""
    result, position = bytearray(entry.size), entry.offset
    for offset, length in entry.runs if entry.runs is not None else ((0, entry.size),):
        result[offset : offset + length] = data[position : position + length]
        position += length
    return bytes(result)
