"""Packs and indexes: what is written is read back, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec_store import pack
from dsec_store.digest import Digest
from dsec_store.errors import Corrupt
from dsec_store.pack import (
    FOOTER_SIZE,
    PackBuilder,
    PackedChunk,
    decode_index,
    decode_section,
    encode_index,
    section_span,
)
from tests.dsec_store.blobmaker import damaged, unless_refused

U32 = st.integers(0, 2**32 - 1)
RAW = st.binary(min_size=32, max_size=32)
CHUNKS = st.lists(st.builds(PackedChunk, RAW, U32, U32, U32, st.integers(0, 255)), max_size=5)
INDEXES = st.lists(st.tuples(RAW.map(lambda raw: Digest("blake3", raw)), CHUNKS), max_size=3)


def build(*stored: bytes) -> PackBuilder:
    builder = PackBuilder()
    for data in stored:
        builder.add(Digest.of(data).raw, len(data), 0, data)
    return builder


BUILDER = build(b"one", b"another", b"a third")
SEALED = BUILDER.seal()
INDEX = encode_index([(Digest.of(SEALED), BUILDER.chunks)])


def read_back(data: bytes) -> list[PackedChunk]:
    """All chunks of a pack, as a reader finds them that knows only its end."""
    start, length = section_span(len(data), data[-FOOTER_SIZE:], "pack")
    return decode_section(data[start : start + length], start, "pack")


@given(st.lists(st.binary(min_size=1)))
def test_a_pack_tells_what_it_holds(stored: list[bytes]) -> None:
    data = build(*stored).seal()
    assert [data[c.offset : c.offset + c.stored] for c in read_back(data)] == stored
    assert [c.digest for c in read_back(data)] == [Digest.of(each).raw for each in stored]


@given(INDEXES)
def test_an_index_is_read_back(packs: list[tuple[Digest, list[PackedChunk]]]) -> None:
    assert decode_index(encode_index(packs), "index") == packs


def test_an_index_says_what_the_packs_say() -> None:
    assert decode_index(INDEX, "index") == [(Digest.of(SEALED), read_back(SEALED))]


def test_a_pack_is_full_at_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "PACK_SIZE", 10)
    assert not build(b"one").full
    assert BUILDER.full


@given(damaged(SEALED))
def test_a_damaged_pack_is_corrupt_or_has_chunks_inside(data: bytes) -> None:
    """A section that still parses is caught by the pack's digest."""
    chunks = unless_refused(lambda: read_back(data))
    assert all(chunk.offset + chunk.stored <= len(data) for chunk in chunks or [])


@given(damaged(INDEX))
def test_a_damaged_index_is_corrupt_or_parses(data: bytes) -> None:
    packs = unless_refused(lambda: decode_index(data, "index"))
    assert packs is None or encode_index(packs) == data


@pytest.mark.parametrize("size", range(FOOTER_SIZE))
def test_a_footer_cut_short(size: int) -> None:
    with pytest.raises(Corrupt, match="cut short"):
        section_span(len(SEALED), SEALED[len(SEALED) - size :], "pack")


def test_chunks_beyond_the_body_are_refused() -> None:
    start, length = section_span(len(SEALED), SEALED[-FOOTER_SIZE:], "pack")
    with pytest.raises(Corrupt, match=f"beyond its {start - 1} bytes"):
        decode_section(SEALED[start : start + length], start - 1, "pack")


def test_an_index_of_another_release() -> None:
    with pytest.raises(Corrupt, match="another release"):
        decode_index(INDEX.replace(b"DSECIDX1", b"DSECIDX2"), "index")
