"""Chunk maps and locators: which chunks hold a range, and strict reading."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec_store.chunker import MAX_CHUNK
from dsec_store.chunkmap import ChunkLocation, ChunkMap, decode_locator, encode_locator
from dsec_store.digest import Digest
from dsec_store.errors import Corrupt
from tests.dsec_store.blobmaker import damaged, unless_refused

U32 = st.integers(0, 2**32 - 1)
RAW = st.binary(min_size=32, max_size=32)
MAPS = st.lists(st.tuples(RAW, st.integers(1, 50)), max_size=20).map(
    lambda entries: ChunkMap([digest for digest, _ in entries], [size for _, size in entries])
)
PACKS = [Digest.of(b"one"), Digest.of(b"two")]
LOCATIONS = st.lists(
    st.builds(ChunkLocation, st.sampled_from(PACKS), U32, st.integers(1, 2**32 - 1), st.integers(0, 255)), max_size=8
)

MAP = ChunkMap([bytes([n] * 32) for n in range(4)], [10, 20, 5, 7]).encode()
LOCATOR = encode_locator([ChunkLocation(PACKS[0], 0, 9, 0), ChunkLocation(PACKS[1], 5, 9, 1)])


def same(one: ChunkMap, other: ChunkMap) -> bool:
    return (one.digests, one.sizes) == (other.digests, other.sizes)


@given(MAPS)
def test_a_map_is_read_back(chunk_map: ChunkMap) -> None:
    assert same(ChunkMap.decode(chunk_map.encode(), "map"), chunk_map)


@given(MAPS, st.integers(0, 1200), st.integers(0, 1200))
def test_covering_is_what_a_search_finds(chunk_map: ChunkMap, offset: int, length: int) -> None:
    every = [chunk_map[number] for number in range(len(chunk_map))]
    wanted = set(range(offset, offset + length))
    expected = [ref for ref in every if wanted & set(range(ref.address, ref.address + ref.size))]
    assert chunk_map.covering(offset, length) == expected


@given(MAPS)
def test_chunks_cover_the_blob_without_gaps(chunk_map: ChunkMap) -> None:
    end = 0
    for ref in chunk_map.covering(0, chunk_map.blob_size):
        assert (ref.address, ref.digest) == (end, chunk_map.digests[ref.number])
        end += ref.size
    assert end == chunk_map.blob_size


def test_an_empty_blob() -> None:
    empty = ChunkMap([], [])
    assert (empty.blob_size, len(empty), empty.covering(0, 1)) == (0, 0, [])


@given(damaged(MAP))
def test_a_damaged_map_is_corrupt_or_parses(data: bytes) -> None:
    chunk_map = unless_refused(lambda: ChunkMap.decode(data, "map"))
    assert chunk_map is None or chunk_map.encode() == data


@pytest.mark.parametrize("sizes", [[0], [5, 0, 5], [MAX_CHUNK + 1]])
def test_impossible_sizes_are_corrupt(sizes: list[int]) -> None:
    data = ChunkMap([bytes(32)] * len(sizes), sizes).encode()
    with pytest.raises(Corrupt, match="impossible size"):
        ChunkMap.decode(data, "map")


def test_a_map_that_does_not_add_up() -> None:
    data = MAP.replace(struct.pack("<Q", 42), struct.pack("<Q", 43))
    with pytest.raises(Corrupt, match="do not cover its 43 bytes"):
        ChunkMap.decode(data, "map")


@given(LOCATIONS)
def test_a_locator_is_read_back(locations: list[ChunkLocation]) -> None:
    assert decode_locator(encode_locator(locations), "locator", len(locations)) == locations


@given(damaged(LOCATOR))
def test_a_damaged_locator_is_corrupt_or_parses(data: bytes) -> None:
    """One that parses leads to bytes that are checked by the chunk's digest."""
    locations = unless_refused(lambda: decode_locator(data, "locator"))
    assert locations is None or len(locations) <= len(data)


def test_a_locator_of_another_map() -> None:
    with pytest.raises(Corrupt, match="2 entries for 3 chunks"):
        decode_locator(LOCATOR, "locator", 3)


def test_an_empty_entry_is_corrupt() -> None:
    with pytest.raises(Corrupt, match="empty"):
        decode_locator(encode_locator([ChunkLocation(PACKS[0], 0, 0, 0)]), "locator")


def test_an_entry_without_pack_is_corrupt() -> None:
    header = struct.pack("<II", 2, 2)
    data = LOCATOR.replace(header + PACKS[0].raw + PACKS[1].raw, struct.pack("<II", 1, 2) + PACKS[0].raw)
    with pytest.raises(Corrupt, match="does not list"):
        decode_locator(data, "locator")


@pytest.mark.parametrize(("data", "magic"), [(MAP, b"DSECMAP1"), (LOCATOR, b"DSECLOC1")])
def test_another_release_is_told_from_damage_by_the_text(data: bytes, magic: bytes) -> None:
    other = data.replace(magic, magic[:-1] + b"2")
    with pytest.raises(Corrupt, match="another release"):
        ChunkMap.decode(other, "map") if magic == b"DSECMAP1" else decode_locator(other, "locator")
