"""Packs and indexes as bytes. That git reads them is shown in test_git.py; here is also what only huge ones have."""

import hashlib
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec_store.errors import Corrupt
from dsec_store.inputs.gitfiles import STORED_MAX, IndexEntry, Packed, index_file, pack_header, pack_index, pack_record
from dsec_store.inputs.gitobjects import TreeEntry, parse_commit, parse_tree

IDS = st.binary(min_size=20, max_size=20)


@pytest.mark.parametrize("size", [0, 1, STORED_MAX - 1, STORED_MAX, STORED_MAX + 1, 2 * STORED_MAX, 300_000])
@pytest.mark.parametrize("piece", [1000, 65_536, 1 << 20])
def test_a_record_is_a_zlib_stream_of_stored_blocks(size: int, piece: int) -> None:
    data = bytes(number * 7 % 251 for number in range(size))
    record = b"".join(pack_record(b"blob", size, (data[at : at + piece] for at in range(0, size, piece))))
    head = 1
    while record[head - 1] & 0x80:
        head += 1
    assert record[0] >> 4 & 7 == 3
    found = record[0] & 15
    for number, byte in enumerate(record[1:head]):
        found |= (byte & 0x7F) << (4 + 7 * number)
    assert found == size
    assert zlib.decompress(record[head:]) == data
    blocks = max(1, -(-size // STORED_MAX))
    assert len(record) - head == 2 + 5 * blocks + size + 4


@given(st.lists(st.builds(Packed, IDS, st.integers(0, 2**32 - 1), st.integers(0, 2**40)), unique_by=lambda one: one[0]))
def test_a_pack_index_finds_every_object(objects: list[Packed]) -> None:
    data = pack_index(objects, b"p" * 20, hashlib.sha1())
    count = len(objects)
    assert data[:8] == b"\xfftOc\0\0\0\2"
    assert data[-40:-20] == b"p" * 20
    assert data[-20:] == hashlib.sha1(data[:-20]).digest()
    fanout = struct.unpack(">256I", data[8:1032])
    assert fanout[255] == count
    large_at = 1032 + count * 28
    for wanted in objects:
        first = wanted.object_id[0]
        low, high = fanout[first - 1] if first else 0, fanout[first]
        at = [data[1032 + 20 * number : 1052 + 20 * number] for number in range(low, high)].index(
            wanted.object_id
        ) + low
        assert struct.unpack_from(">I", data, 1032 + 20 * count + 4 * at)[0] == wanted.crc32
        (offset,) = struct.unpack_from(">I", data, 1032 + 24 * count + 4 * at)
        if offset >> 31:
            (offset,) = struct.unpack_from(">Q", data, large_at + 8 * (offset & 0x7FFFFFFF))
        assert offset == wanted.offset


def test_the_header_of_a_pack() -> None:
    assert pack_header(258) == b"PACK\0\0\0\2\0\0\1\2"


@pytest.mark.parametrize("length", [1, 7, 8, 9, 10, 4094, 4095])
def test_index_entries_are_padded_to_eight_bytes_and_end_in_nul(length: int) -> None:
    data = index_file([IndexEntry(b"p" * length, 0o100644, b"i" * 20)], hashlib.sha1)
    assert data[:12] == b"DIRC\0\0\0\2\0\0\0\1"
    entry = data[12:-20]
    assert len(entry) % 8 == 0
    assert entry[:62] == bytes(24) + b"\0\0\x81\xa4" + bytes(12) + b"i" * 20 + struct.pack(">H", min(length, 0xFFF))
    assert 1 <= len(entry[62 + length :]) <= 8
    assert not entry[62 + length :].strip(b"\0")


def test_trees_and_commits_are_parsed() -> None:
    one, two = b"\1" * 20, b"\0" * 20
    assert parse_tree(b"100644 a b\0" + one + b"40000 \xff\0" + two, 20) == [
        TreeEntry(0o100644, b"a b", one),
        TreeEntry(0o40000, b"\xff", two),
    ]
    text = b"tree %s\nparent %s\nparent %s\nauthor A <a> 1 +0\ncommitter C> <c> 5 -0130\n\n"
    text += b"parent %s\ncommitter X <> 9 +0000"
    commit = parse_commit(text % ((b"01" * 20,) * 4))
    assert (commit.tree, commit.parents, commit.time) == (one, (one, one), 5)
    assert parse_commit(b"tree " + b"00" * 32 + b"\n\nx").time is None


@pytest.mark.parametrize(
    "data", [b"100644 a", b"100644 a\0short", b"x a\0" + bytes(20), b"100644 a\0" + bytes(21), b" "]
)
def test_malformed_trees(data: bytes) -> None:
    with pytest.raises(Corrupt, match="tree"):
        parse_tree(data, 20)


@pytest.mark.parametrize(
    "data", [b"", b"tree", b"tree 12\n", b"parent " + b"00" * 20, b"tree " + b"00" * 20 + b"\nparent x"]
)
def test_malformed_commits(data: bytes) -> None:
    with pytest.raises(Corrupt, match="commit"):
        parse_commit(data)
