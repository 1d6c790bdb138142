"""Contents on their way into a blob: each once, in the order in which they come, wherever its chunks are made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec_store.backends.memory import MemoryBlobs
from dsec_store.chunkmap import ChunkMap
from dsec_store.chunks import ChunkSource, LazyBlob, NoCache
from dsec_store.errors import Invalid
from dsec_store.layer.contents import BLOCK, PIECE, StoredContents, exactly, zeros
from dsec_store.layer.tree import Address
from dsec_store.objects import Objects
from dsec_store.upload import ChunkIndex, Upload
from tests.dsec_store.blobmaker import SMALL, noise

LARGE = noise(50_000, "large")
OTHER = noise(SMALL.solo, "other")
POOL = [b"x", b"y" * (BLOCK - 1), b"z" * BLOCK, noise(9000, "nine"), noise(SMALL.solo - 1, "small"), OTHER, LARGE]
"""Contents on both sides of every border."""


class Stored:
    """What became of contents that were added in this order."""

    def __init__(self, contents: Sequence[bytes], *, workers: int = 2, piece: int = 7000) -> None:
        objects = Objects(MemoryBlobs())
        with Upload(objects, ChunkIndex(objects), workers) as upload:
            stored = StoredContents(upload.blob(SMALL), SMALL)
            self.addresses = [
                stored.add([data[at : at + piece] for at in range(0, len(data), piece)], len(data), "it")
                for data in contents
            ]
            self.map: ChunkMap = stored.finish()
            upload.finish()
            locations = upload.locate(self.map)
        self.new_bytes = upload.new_bytes
        self._blob = LazyBlob(self.map, lambda _: locations, ChunkSource(objects.blobs, NoCache()))

    def bytes(self) -> bytes:
        return self._blob.read(0, self.map.blob_size)

    def ends(self) -> set[int]:
        return set(accumulate(self.map.sizes))


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % BLOCK)


def layout(contents: Iterable[bytes]) -> tuple[list[Address], bytes]:
    """The addresses and the blob that docs/format/chunk-map.md asks for."""
    blob, known, addresses = b"", dict[bytes, Address](), []
    for data in contents:
        if data not in known:
            known[data] = Address(0, len(blob))
            blob += padded(data)
        addresses.append(known[data])
    return addresses, blob


@settings(deadline=None, max_examples=40)
@given(st.lists(st.sampled_from(POOL), max_size=12), st.integers(1, 60_000))
def test_each_content_lies_where_it_came_first(contents: list[bytes], piece: int) -> None:
    addresses, blob = layout(contents)
    ways = [Stored(contents, workers=workers, piece=piece) for workers in (1, 2, 8)]
    for stored in (*ways, Stored(contents)):
        assert stored.addresses == addresses
        assert stored.bytes() == blob
        assert stored.map.encode() == ways[0].map.encode()


def test_duplicates_take_no_address_and_no_byte() -> None:
    once, again = Stored([b"x", LARGE, OTHER]), Stored([b"x", LARGE, OTHER, LARGE, b"x", OTHER, LARGE])
    assert again.addresses[3:] == [again.addresses[number] for number in (1, 0, 2, 1)]
    assert again.map.encode() == once.map.encode()
    assert again.new_bytes == once.new_bytes


def test_what_follows_a_dropped_content_lies_where_that_began() -> None:
    stored = Stored([LARGE, LARGE, b"next"])
    assert stored.addresses == [Address(0, 0), Address(0, 0), Address(0, len(padded(LARGE)))]
    assert stored.bytes() == padded(LARGE) + padded(b"next")


def test_a_large_content_is_cut_alone() -> None:
    """Whatever lies beside it, its chunks are the same."""
    chunks = Stored([LARGE]).map.digests
    for before, after in ((b"a" * 5000, b"b"), (noise(9000, "before"), noise(12_000, "after"))):
        stored = Stored([before, LARGE, after])
        start = stored.addresses[1].offset
        assert {start, start + len(padded(LARGE))} <= stored.ends()
        assert set(chunks) <= set(stored.map.digests)


def test_small_contents_are_cut_together() -> None:
    stored = Stored([b"%d" % number for number in range(16)])
    assert stored.map.blob_size == 16 * BLOCK
    assert len(stored.map) < 16


def test_no_content_no_chunk() -> None:
    assert len(Stored([]).map) == 0


# -- contents that change ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, 5, SMALL.solo])
def test_pieces_that_are_not_as_many_bytes_have_changed(size: int) -> None:
    with pytest.raises(Invalid, match="/f: changed while it was read; build again"):
        list(exactly([b"ab", b"cd"], size, "/f"))
    objects = Objects(MemoryBlobs())
    with Upload(objects, ChunkIndex(objects), 1) as upload, pytest.raises(Invalid, match="/f: changed"):
        StoredContents(upload.blob(SMALL), SMALL).add([b"ab", b"cd"], size, "/f")


@pytest.mark.parametrize("size", [12, SMALL.solo])
def test_what_keeps_growing_is_not_read_on(size: int) -> None:
    given = 0

    def growing() -> Iterator[bytes]:
        nonlocal given
        while True:
            given += 1
            yield bytes(5)

    with pytest.raises(Invalid, match="changed"):
        list(exactly(growing(), size, "it"))
    assert given == size // 5 + 1


def test_zeros_come_in_pieces() -> None:
    assert [len(piece) for piece in zeros(2 * PIECE + 5)] == [PIECE, PIECE, 5]
    assert not any(map(any, zeros(100)))
    assert list(zeros(0)) == []
