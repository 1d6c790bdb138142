"""Every compressed form gives the whole stream or `Corrupt`, never a part of it that looks whole."""

import gzip
import io
import os
import struct
import tracemalloc
import zlib
from contextlib import suppress

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from dsec_store.errors import Corrupt
from dsec_store.layer.decompress import PIECE_SIZE, ZSTD_WINDOW_MAX, open_decompressed

TEXT = os.urandom(3000) + bytes(300_000) + b"layer " * 40_000


class Dribble:
    """An input with nothing but `read`, and that gives a few bytes at a time."""

    def __init__(self, data: bytes, most: int) -> None:
        self._file = io.BytesIO(data)
        self._most = most

    def read(self, size: int, /) -> bytes:
        return self._file.read(min(size, self._most))


def plain(data: bytes) -> bytes:
    return open_decompressed(io.BytesIO(data)).read()


def gzip_member(data: bytes) -> bytes:
    """A member whose header has all optional fields (RFC 1952): extra, name, comment, header checksum."""
    raw = zlib.compressobj(wbits=-15)
    head = b"\x1f\x8b\x08\x1e" + bytes(5) + b"\x03" + struct.pack("<H", 5) + b"extra" + b"name\0" + b"comment\0"
    head += struct.pack("<H", zlib.crc32(head) & 0xFFFF)
    return head + raw.compress(data) + raw.flush() + struct.pack("<II", zlib.crc32(data), len(data))


def zstd_frame(data: bytes, *, checksum: bool = False, content_size: bool = True) -> bytes:
    compressor = zstandard.ZstdCompressor(write_checksum=checksum, write_content_size=content_size)
    if content_size:
        return compressor.compress(data)
    stream = compressor.compressobj()
    return stream.compress(data) + stream.flush()


def zstd_skippable(data: bytes, number: int = 0) -> bytes:
    return struct.pack("<II", 0x184D2A50 + number, len(data)) + data


WHOLE = {
    "empty": (b"", b""),
    "plain": (TEXT, TEXT),
    "plain, shorter than any magic": (b"(", b"("),
    "gzip": (gzip.compress(TEXT), TEXT),
    "gzip of nothing": (gzip.compress(b""), b""),
    "gzip members, two of them empty": (
        b"".join(map(gzip.compress, (b"", TEXT[:1000], b"", TEXT[1000:]))),
        TEXT,
    ),
    "gzip members with optional fields": (gzip_member(TEXT) + gzip_member(b"more"), TEXT + b"more"),
    "gzip and zero padding": (gzip.compress(TEXT) + bytes(5000), TEXT),
    "zstd": (zstd_frame(TEXT), TEXT),
    "zstd of nothing": (zstd_frame(b""), b""),
    "zstd with a checksum": (zstd_frame(TEXT, checksum=True), TEXT),
    "zstd of unknown size": (zstd_frame(TEXT, checksum=True, content_size=False), TEXT),
    "zstd frames between skippable ones": (
        zstd_skippable(b"first")
        + zstd_frame(TEXT)
        + zstd_skippable(b"", 15)
        + zstd_frame(b"end")
        + zstd_skippable(b"x"),
        TEXT + b"end",
    ),
    "zstd of skippable frames alone": (zstd_skippable(bytes(3_000_000)), b""),
}
CUT = {
    "gzip": gzip_member(TEXT[:5000]) + gzip.compress(TEXT[:5000]),
    "zstd": zstd_skippable(b"skipped") + zstd_frame(TEXT, checksum=True) + zstd_frame(TEXT[:9], content_size=False),
}
BOUNDARIES = {
    "gzip": {0, len(gzip_member(TEXT[:5000]))},
    "zstd": {0, 15, 15 + len(zstd_frame(TEXT, checksum=True))},
}


@pytest.mark.parametrize("step", [1 << 30, 7])
@pytest.mark.parametrize("name", WHOLE)
def test_the_whole_stream(name: str, step: int) -> None:
    compressed, expected = WHOLE[name]
    stream = open_decompressed(Dribble(compressed, step))
    assert stream.read() == expected
    assert stream.read(1) == b""


@pytest.mark.parametrize("name", ["plain", "gzip", "zstd"])
def test_a_read_is_full_unless_the_stream_ends(name: str) -> None:
    compressed, expected = WHOLE[name]
    stream = open_decompressed(Dribble(compressed, 100))
    assert [len(stream.read(200_000)) for _ in range(4)] == [200_000, 200_000, len(expected) - 400_000, 0]


@pytest.mark.parametrize("form", CUT)
def test_a_cut_is_told_wherever_it_falls(form: str) -> None:
    for size in range(len(CUT[form])):
        if size not in BOUNDARIES[form] and size > 3:  # fewer bytes than a magic are a plain file
            with pytest.raises(Corrupt, match=f"{form} stream is damaged or cut"):
                plain(CUT[form][:size])


@pytest.mark.parametrize(
    "data",
    [
        gzip.compress(TEXT) + b"garbage",
        gzip.compress(TEXT) + b"\x1f",
        gzip.compress(TEXT) + bytes(100) + b"garbage",
        zstd_frame(TEXT) + b"garbage",
        zstd_frame(TEXT) + bytes(512),
        zstd_frame(TEXT) + b"\x28",
    ],
)
def test_garbage_behind_the_stream_is_told(data: bytes) -> None:
    with pytest.raises(Corrupt):
        plain(data)


@pytest.mark.parametrize("compressed", [gzip.compress(TEXT), zstd_frame(TEXT, checksum=True)])
def test_a_wrong_checksum_is_told(compressed: bytes) -> None:
    damaged = bytearray(compressed)
    damaged[-5 if compressed.startswith(b"\x1f") else -1] ^= 1
    with pytest.raises(Corrupt):
        plain(bytes(damaged))


def test_damage_is_told_again_by_every_later_read() -> None:
    """A caller that swallowed the first error must not take the rest for a clean end."""
    stream = open_decompressed(io.BytesIO(gzip.compress(TEXT)[:-1]))
    for _ in range(3):
        with pytest.raises(Corrupt) as caught:
            stream.read()
        assert "\n" not in str(caught.value)


def test_a_window_beyond_the_limit_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=ZSTD_WINDOW_MAX.bit_length(), compression_level=3)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    with pytest.raises(Corrupt, match="too much memory"):
        plain(stream.compress(b"x") + stream.flush())


@pytest.mark.parametrize("compressed", [gzip.compress(bytes(50_000_000)), zstd_frame(bytes(50_000_000))])
def test_a_bomb_is_expanded_piece_by_piece(compressed: bytes) -> None:
    tracemalloc.start()
    stream, size = open_decompressed(io.BytesIO(compressed)), 0
    while piece := stream.read(PIECE_SIZE):
        size += len(piece)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size == 50_000_000
    assert peak < 12 * PIECE_SIZE


class Failing(Dribble):
    """An input whose connection breaks where its data ends."""

    def read(self, size: int, /) -> bytes:
        if data := super().read(size):
            return data
        raise ConnectionResetError("gone")


@pytest.mark.parametrize("data", [b"", b"plain", *CUT.values()])
def test_errors_of_the_input_pass_through(data: bytes) -> None:
    with pytest.raises(ConnectionResetError):
        open_decompressed(Failing(data[:2000], 100)).read()


def test_the_input_stays_open() -> None:
    raw = io.BytesIO(gzip.compress(TEXT))
    with open_decompressed(raw) as stream:
        stream.read(10)
    assert not raw.closed


@given(st.sampled_from(["gzip", "zstd"]), st.data())
def test_one_damaged_byte_raises_nothing_but_corrupt(form: str, data: st.DataObject) -> None:
    damaged = bytearray(CUT[form])
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    with suppress(Corrupt):
        plain(bytes(damaged))


@given(st.sampled_from([b"", b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd", b"\x50\x2a\x4d\x18"]), st.binary(max_size=2000))
def test_random_bytes_raise_nothing_but_corrupt(magic: bytes, data: bytes) -> None:
    with suppress(Corrupt):
        plain(magic + data)
