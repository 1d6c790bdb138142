"""How one chunk or object is stored: as one zstd frame, or plain when that does not shrink it.

Source of the frame format: RFC 8878. The level is no part of the format: any reader reads any level.

>>> encoding, stored = encode(bytes(4096))
>>> encoding, len(stored) < 40, decode(encoding, stored, 4096, "a page of zeros") == bytes(4096)
(1, True, True)
"""

from __future__ import annotations

import threading
from typing import Final

import zstandard

from dsec_store.errors import Corrupt

PLAIN: Final = 0
ZSTD: Final = 1
LEVEL: Final = 3

_local = threading.local()


def encode(data: bytes | memoryview) -> tuple[int, bytes]:
    """`data` as (encoding, stored bytes), never longer than `data`. Compressors are kept per thread."""
    compressor = getattr(_local, "compressor", None)
    if compressor is None:
        compressor = _local.compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=False)
    frame: bytes = compressor.compress(data)
    return (ZSTD, frame) if len(frame) < len(data) else (PLAIN, bytes(data))


def decode(encoding: int, stored: bytes | memoryview, size: int, what: str) -> bytes:
    """The `size` plain bytes behind `stored`. Raises `Corrupt` naming `what`; memory is bounded by `size`."""
    if encoding == PLAIN:
        if len(stored) != size:
            raise Corrupt(f"{what}: {len(stored)} bytes stored where {size} were expected")
        return bytes(stored)
    if encoding != ZSTD:
        raise Corrupt(f"{what}: unknown encoding {encoding}")
    try:
        if zstandard.frame_content_size(stored) != size:
            raise Corrupt(f"{what}: its frame does not hold {size} bytes")
        plain: bytes = _decompressor().decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Corrupt(f"{what}: {error}") from None
    if len(plain) != size:
        raise Corrupt(f"{what}: {len(plain)} bytes where {size} were expected")
    return plain


def _decompressor() -> zstandard.ZstdDecompressor:
    decompressor = getattr(_local, "decompressor", None)
    if decompressor is None:
        decompressor = _local.decompressor = zstandard.ZstdDecompressor()
    return decompressor
