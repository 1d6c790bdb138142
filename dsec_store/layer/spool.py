"""A layer's plain tar in an unnamed temporary file: its contents are needed in another order than the tar has them.

The file is as large as the uncompressed layer and lies where TMPDIR says; it is gone with the process.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO, BinaryIO, Final

from dsec_store.errors import Denied

READ_BUFFER: Final = 64 << 10
"""Bytes of one read of small files and headers, which lie side by side."""


@contextmanager
def spooled(pieces: Iterable[bytes]) -> Iterator[BinaryIO]:
    """The bytes of `pieces` as a file, at its start. Raises `Denied` when the disk does not take them."""
    with _temporary() as file:
        for piece in pieces:
            _write(file, piece)
        file.seek(0)
        with open(file.fileno(), "rb", buffering=READ_BUFFER, closefd=False) as reader:
            yield reader


def _temporary() -> IO[bytes]:
    try:
        return tempfile.TemporaryFile(prefix="dsec-layer-", buffering=0)
    except OSError as error:
        raise Denied(f"no temporary file can be made: {error.strerror or error}; set TMPDIR") from None


def _write(file: IO[bytes], piece: bytes) -> None:
    """All of `piece`. Unbuffered, so that a full disk shows here and not when the file is closed."""
    left = memoryview(piece)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError as error:
        place = tempfile.gettempdir()
        raise Denied(f"a layer cannot be unpacked in {place}: {error.strerror}; free space or set TMPDIR") from None
