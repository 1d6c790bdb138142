"""Stored forms of a chunk: no longer than the chunk, and decoded strictly."""

from __future__ import annotations

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from dsec_store.compression import PLAIN, ZSTD, decode, encode
from dsec_store.errors import Corrupt
from tests.dsec_store.blobmaker import damaged, in_threads, noise, unless_refused

TEXT = b"a line of text that repeats\n" * 40
ENCODING, STORED = encode(TEXT)


@given(st.one_of(st.binary(), st.binary(max_size=20).map(lambda data: data * 500)))
def test_round_trip(data: bytes) -> None:
    encoding, stored = encode(data)
    assert len(stored) <= len(data)
    assert decode(encoding, memoryview(stored), len(data), "data") == data


def test_what_does_not_shrink_is_stored_plain() -> None:
    assert encode(noise(4096)) == (PLAIN, noise(4096))
    assert encode(b"") == (PLAIN, b"")
    assert ENCODING == ZSTD


@given(damaged(STORED))
def test_damage_is_corrupt_or_caught_by_the_size(stored: bytes) -> None:
    """A digest over the plain bytes, which the callers check, catches the rest."""
    plain = unless_refused(lambda: decode(ZSTD, stored, len(TEXT), "text"))
    assert plain is None or len(plain) == len(TEXT)


@pytest.mark.parametrize("level", [1, 3, 19])
def test_frames_of_any_level_are_read(level: int) -> None:
    assert decode(ZSTD, zstandard.ZstdCompressor(level=level).compress(TEXT), len(TEXT), "text") == TEXT


@pytest.mark.parametrize(
    ("encoding", "stored", "size"),
    [
        pytest.param(ZSTD, STORED, len(TEXT) - 1, id="another size"),
        pytest.param(ZSTD, STORED + STORED, len(TEXT), id="two frames"),
        pytest.param(ZSTD, STORED + b"\0", len(TEXT), id="bytes behind the frame"),
        pytest.param(
            ZSTD,
            zstandard.ZstdCompressor(write_content_size=False).compress(TEXT),
            len(TEXT),
            id="no size in the frame",
        ),
        pytest.param(ZSTD, b"", 0, id="no frame"),
        pytest.param(PLAIN, TEXT, len(TEXT) + 1, id="plain and short"),
        pytest.param(PLAIN, TEXT, len(TEXT) - 1, id="plain and long"),
        pytest.param(2, STORED, len(TEXT), id="unknown encoding"),
        pytest.param(-1, b"", 0, id="no encoding"),
    ],
)
def test_anything_inexact_is_corrupt(encoding: int, stored: bytes, size: int) -> None:
    with pytest.raises(Corrupt, match="text: "):
        decode(encoding, stored, size, "text")


def test_a_bomb_is_refused_by_its_size() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(256 << 20))
    with pytest.raises(Corrupt, match="does not hold 65536 bytes"):
        decode(ZSTD, bomb, 65536, "bomb")


def test_threads_do_not_disturb_each_other() -> None:
    def many(seed: int) -> bool:
        data = [noise(2000, f"{seed}") * (n + 1) for n in range(50)]
        return all(decode(*encode(each), len(each), "data") == each for each in data)

    assert in_threads([lambda seed=seed: many(seed) for seed in range(8)]) == [True] * 8  # type: ignore[misc]
