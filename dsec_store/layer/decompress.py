"""A layer blob's plain bytes, whatever it was compressed with: gzip, zstd or nothing.

Problem: a media type may lie, so the form is told by the first bytes, as containerd does. Both compressed forms come in
several parts (members, frames, empty and skippable ones among them), and the usual readers stop quietly after the
first part or at a cut. A layer that is silently short is the worst outcome, so here every end that is not the end of a
part is `Corrupt`.

Choice: gzip by isal's reader, which knows members; zstd block by block, because the binding alone neither reports a
stream that was cut nor bounds what one call returns (a 4-byte block may stand for 128 KiB, so 1 MiB of input for
32 GiB). Memory stays at a few pieces and the zstd window, whatever the input claims.

>>> stream = open_decompressed(blob)
>>> while piece := stream.read(PIECE_SIZE):
...     hasher.update(piece)
...     spool.write(piece)
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from gzip import BadGzipFile
from typing import TYPE_CHECKING, BinaryIO, Final, Protocol

import zstandard
from isal import igzip, igzip_lib

from dsec_store.errors import Corrupt

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

PIECE_SIZE: Final = 1 << 20
"""Bytes of one read of the input, and a good size for a caller's reads."""

ZSTD_WINDOW_MAX: Final = 1 << 27
"""Bytes. Frames that need a larger window (`zstd --ultra --long=28` and up) are refused, as by `zstd` itself."""

GZIP_MAGIC: Final = b"\x1f\x8b\x08"
ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_IsalError: Final[type[Exception]] = igzip_lib.IsalError  # type: ignore[assignment]  # the stub says: an instance
_SKIPPABLE_MASK: Final = 0xFFFFFFF0
_SKIPPABLE_MAGIC: Final = 0x184D2A50

_MAGIC_SIZE: Final = 4
_BLOCK_HEADER_SIZE: Final = 3
_CHECKSUM_SIZE: Final = 4
_RLE_BLOCK: Final = 1
_DICTIONARY_ID_SIZES: Final = (0, 1, 2, 4)
_CONTENT_SIZE_SIZES: Final = (0, 2, 4, 8)


class Readable(Protocol):
    """All that is asked of the input. Short reads are fine, b"" means the end."""

    def read(self, size: int, /) -> bytes: ...


def open_decompressed(raw: Readable) -> BinaryIO:
    """The same as a stream: `read(n)` gives exactly n bytes unless the stream ends. A failure stays."""
    return io.BufferedReader(_Raw(decompressed(raw)), PIECE_SIZE)


def decompressed(raw: Readable) -> Iterator[bytes]:
    """The plain bytes of `raw`, read from its current position, in pieces of at most `PIECE_SIZE`. None if it is empty.

    Raises `Corrupt` when the input is damaged, cut or followed by garbage (zero padding after the last gzip member is
    none). Errors of `raw` itself pass through. `raw` stays open and is the caller's to close.
    """
    source = io.BufferedReader(_Raw(_chunks(raw)), PIECE_SIZE)
    head = source.peek(_MAGIC_SIZE)[:_MAGIC_SIZE]
    if head.startswith(GZIP_MAGIC):
        return _gunzipped(source)
    if head == ZSTD_MAGIC or _is_skippable(head):
        return _unzstd(source)
    return _chunks(source)


class _Raw(io.RawIOBase):
    """An iterator of byte strings as a raw stream. Reads are filled up, and a failure stays."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = memoryview(b"")
        self._failure: Exception | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        target = memoryview(buffer).cast("B")
        filled = 0
        while filled < len(target) and (self._rest or self._advance()):
            count = min(len(self._rest), len(target) - filled)
            target[filled : filled + count] = self._rest[:count]
            self._rest = self._rest[count:]
            filled += count
        return filled

    def _advance(self) -> bool:
        """Fetch the next piece that is not empty; False at the end."""
        if self._failure:
            raise self._failure
        try:
            piece = next((piece for piece in self._pieces if piece), b"")
        except Exception as failure:
            self._failure = failure
            raise
        self._rest = memoryview(piece)
        return bool(piece)


def _chunks(raw: Readable) -> Iterator[bytes]:
    while data := raw.read(PIECE_SIZE):
        yield data


@contextmanager
def _damage_is_corrupt(form: str) -> Iterator[None]:
    try:
        yield
    except (BadGzipFile, EOFError, zstandard.ZstdError, _IsalError) as error:
        text = " ".join(str(error).split())
        raise Corrupt(f"{form} stream is damaged or cut: {text}") from error


def _gunzipped(source: BinaryIO) -> Iterator[bytes]:
    members = igzip.IGzipFile(fileobj=source, mode="rb")  # type: ignore[no-untyped-call]
    with _damage_is_corrupt("gzip"), members:
        while piece := members.read1(PIECE_SIZE):
            yield piece


def _unzstd(source: BinaryIO) -> Iterator[bytes]:
    decompressor = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_MAX)
    with _damage_is_corrupt("zstd"):
        while magic := source.read(_MAGIC_SIZE):
            if magic == ZSTD_MAGIC:
                yield from _unzstd_frame(source, decompressor.decompressobj())
            elif _is_skippable(magic):
                _skip_frame(source)
            else:
                raise EOFError(f"no frame begins with {magic.hex()}")


def _unzstd_frame(source: BinaryIO, frame: zstandard.ZstdDecompressionObj) -> Iterator[bytes]:
    """One frame whose magic was read (RFC 8878, section 3.1.1): header, blocks, checksum if announced."""
    descriptor = _exactly(source, 1)
    frame.decompress(ZSTD_MAGIC + descriptor + _exactly(source, _rest_of_frame_header(descriptor[0])))
    last = False
    while not last:
        header = _exactly(source, _BLOCK_HEADER_SIZE)
        fields = int.from_bytes(header, "little")
        last, kind, size = bool(fields & 1), fields >> 1 & 3, fields >> 3
        yield frame.decompress(header + _exactly(source, 1 if kind == _RLE_BLOCK else size))
    if descriptor[0] & 0b100:
        yield frame.decompress(_exactly(source, _CHECKSUM_SIZE))
    if not frame.eof:
        raise EOFError("a frame does not end with its last block")


def _rest_of_frame_header(descriptor: int) -> int:
    """Bytes of a zstd frame header after its descriptor byte: window, dictionary id, content size."""
    single_segment = bool(descriptor & 0b10_0000)
    content_size = _CONTENT_SIZE_SIZES[descriptor >> 6] or int(single_segment)
    return int(not single_segment) + _DICTIONARY_ID_SIZES[descriptor & 0b11] + content_size


def _is_skippable(magic: bytes) -> bool:
    return len(magic) == _MAGIC_SIZE and int.from_bytes(magic, "little") & _SKIPPABLE_MASK == _SKIPPABLE_MAGIC


def _skip_frame(source: BinaryIO) -> None:
    left = int.from_bytes(_exactly(source, 4), "little")
    while left:
        left -= len(_exactly(source, min(left, PIECE_SIZE)))


def _exactly(source: BinaryIO, size: int) -> bytes:
    data = source.read(size)
    if len(data) < size:
        raise EOFError(f"{size - len(data)} bytes lack at its end")
    return data
