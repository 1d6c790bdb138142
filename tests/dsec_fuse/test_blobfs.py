"""The file system without a kernel."""

import errno
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec_fuse.blobfs import FILE_MODE, BlobFileSystem, Refused, WouldWait, node_of
from dsec_fuse.protocol import ROOT
from dsec_store.digest import Digest
from dsec_store.errors import Corrupt, NotFound, StoreError, Unavailable

HEXES = sorted(Digest.of(bytes([number])).hex for number in range(50))
CONTENT = bytes(range(256)) * 40


@dataclass
class MemoryBlob:
    data: bytes
    broken: StoreError | None = None
    """Raised by the next read, once."""
    here: bool = True
    """Whether it is cached."""

    @property
    def size(self) -> int:
        return len(self.data)

    def read(self, offset: int, length: int) -> bytes:
        if self.broken is not None:
            error, self.broken = self.broken, None
            raise error
        return self.data[offset : offset + length]

    def cached(self, offset: int, length: int) -> bytes | None:
        return self.data[offset : offset + length] if self.here else None


@dataclass
class MemoryBlobs:
    blobs: dict[str, MemoryBlob] = field(default_factory=dict)
    broken: StoreError | None = None

    def open(self, hex: str) -> MemoryBlob:
        if self.broken is not None:
            raise self.broken
        if hex not in self.blobs:
            raise NotFound(f"no blob {hex}")
        return self.blobs[hex]

    def at_hand(self, hex: str) -> MemoryBlob | None:
        return self.blobs[hex] if self.blobs[hex].here else None

    def names(self) -> list[str]:
        return sorted(self.blobs)


@pytest.fixture
def blobs() -> MemoryBlobs:
    return MemoryBlobs({hex: MemoryBlob(CONTENT) for hex in HEXES})


def refused(call: Callable[[], object]) -> int:
    with pytest.raises(Refused) as caught:
        call()
    return caught.value.number


def name_of(hex: str) -> bytes:
    return f"{hex}.blob".encode()


@given(st.lists(st.binary(min_size=32, max_size=32), min_size=1))
def test_node_ids_are_positive_not_the_root_and_sort_like_digests(digests: list[bytes]) -> None:
    nodes = [node_of(digest.hex()) for digest in sorted(digests)]
    assert nodes == sorted(nodes)
    assert all(ROOT < node < 1 << 63 for node in nodes)


def test_a_blob_is_found_by_name_and_then_by_node(blobs: MemoryBlobs) -> None:
    files = BlobFileSystem(blobs)
    found = files.lookup(ROOT, name_of(HEXES[3]))
    assert found == files.attributes(node_of(HEXES[3])) == (node_of(HEXES[3]), FILE_MODE, len(CONTENT), 1)


def test_a_successor_knows_the_nodes_that_another_gave_out(blobs: MemoryBlobs) -> None:
    node = BlobFileSystem(blobs).lookup(ROOT, name_of(HEXES[7])).node
    successor = BlobFileSystem(blobs)
    assert successor.read(node, 100, 1000) == CONTENT[100:1100]
    assert successor.attributes(node).size == len(CONTENT)


@pytest.mark.parametrize(
    "name", [b"", b"x", b"0.blob", name_of("A" * 64), name_of("0" * 64), name_of(HEXES[0]) + b"\n"]
)
def test_other_names_do_not_exist(blobs: MemoryBlobs, name: bytes) -> None:
    assert refused(lambda: BlobFileSystem(blobs).lookup(ROOT, name)) == errno.ENOENT


def test_the_root_is_the_only_directory(blobs: MemoryBlobs) -> None:
    assert BlobFileSystem(blobs).attributes(ROOT).links == 2
    node = node_of(HEXES[0])
    assert refused(lambda: BlobFileSystem(blobs).lookup(node, name_of(HEXES[0]))) == errno.ENOENT


def test_a_listing_goes_on_after_a_cookie_whatever_came_or_went(blobs: MemoryBlobs) -> None:
    files = BlobFileSystem(blobs)
    whole = list(files.entries(0))
    assert [entry.name for entry in whole] == [name_of(hex) for hex in HEXES]
    del blobs.blobs[HEXES[19]]
    assert list(files.entries(whole[19].cookie)) == whole[20:]
    assert list(files.entries(whole[-1].cookie)) == []
    assert files.count() == len(HEXES) - 1


@pytest.mark.parametrize(("offset", "length"), [(0, 10), (5000, 4096), (len(CONTENT) - 3, 100), (len(CONTENT) + 5, 7)])
def test_a_read_gives_what_lies_there(blobs: MemoryBlobs, offset: int, length: int) -> None:
    data = BlobFileSystem(blobs).read(node_of(HEXES[0]), offset, length)
    assert data == CONTENT[offset : offset + length]


@pytest.mark.parametrize("error", [Unavailable("down"), Corrupt("bad"), NotFound("no chunk")])
def test_a_read_that_fails_is_an_input_output_error_and_is_logged(
    blobs: MemoryBlobs, error: StoreError, caplog: pytest.LogCaptureFixture
) -> None:
    files, node = BlobFileSystem(blobs), node_of(HEXES[0])
    blobs.blobs[HEXES[0]].broken = error
    assert refused(lambda: files.read(node, 0, 10)) == errno.EIO
    assert HEXES[0] in caplog.text
    assert str(error) in caplog.text
    assert files.read(node, 0, 10) == CONTENT[:10]


def test_a_short_answer_of_a_blob_is_never_passed_on(blobs: MemoryBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryBlob, "read", lambda self, offset, length: b"xy")
    assert refused(lambda: BlobFileSystem(blobs).read(node_of(HEXES[0]), 0, 10)) == errno.EIO


def test_who_does_not_wait_gets_only_what_is_here(blobs: MemoryBlobs) -> None:
    files, node = BlobFileSystem(blobs), node_of(HEXES[0])
    assert files.read(node, 5, 10, wait=False) == files.read(node, 5, 10) == CONTENT[5:15]
    assert files.lookup(ROOT, name_of(HEXES[0]), wait=False) == files.attributes(node, wait=False)
    blobs.blobs[HEXES[0]].here = False
    for call in (
        lambda: files.read(node, 5, 10, wait=False),
        lambda: files.lookup(ROOT, name_of(HEXES[0]), wait=False),
        lambda: files.attributes(node, wait=False),
    ):
        with pytest.raises(WouldWait):
            call()
    assert files.read(node, 5, 10) == CONTENT[5:15]


def test_a_short_answer_of_the_cache_is_never_passed_on(blobs: MemoryBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryBlob, "cached", lambda self, offset, length: b"xy")
    assert refused(lambda: BlobFileSystem(blobs).read(node_of(HEXES[0]), 0, 10, wait=False)) == errno.EIO


ONE, OTHER = HEXES[0], HEXES[0][:16] + "0" * 48
"""Two blobs of one node id."""


def test_a_blob_keeps_its_node_id_against_another(caplog: pytest.LogCaptureFixture) -> None:
    blobs = MemoryBlobs({ONE: MemoryBlob(CONTENT)})
    files = BlobFileSystem(blobs)
    node = files.lookup(ROOT, name_of(ONE)).node
    blobs.blobs[OTHER] = MemoryBlob(b"other")
    assert refused(lambda: files.lookup(ROOT, name_of(OTHER))) == errno.EIO
    assert OTHER in caplog.text
    assert files.read(node, 0, 10) == CONTENT[:10]
    assert files.lookup(ROOT, name_of(ONE)).node == node


@pytest.mark.parametrize("first", [ONE, OTHER])
def test_a_successor_serves_neither_of_two_blobs_with_one_node_id(first: str, caplog: pytest.LogCaptureFixture) -> None:
    blobs = MemoryBlobs({ONE: MemoryBlob(CONTENT), OTHER: MemoryBlob(b"other")})
    asks: list[Callable[[BlobFileSystem], object]] = [
        lambda files: files.lookup(ROOT, name_of(first)),
        lambda files: files.attributes(node_of(first)),
        lambda files: files.read(node_of(first), 0, 5),
    ]
    for ask in asks:
        caplog.clear()
        assert refused(partial(ask, BlobFileSystem(blobs))) == errno.EIO
        assert hex(node_of(first)) in caplog.text


def test_a_store_that_is_down_is_not_a_missing_file(blobs: MemoryBlobs) -> None:
    files = BlobFileSystem(blobs)
    blobs.broken = Unavailable("down")
    assert refused(lambda: files.lookup(ROOT, name_of(HEXES[0]))) == errno.EIO


def test_a_node_without_a_blob_is_stale_and_unreadable(blobs: MemoryBlobs) -> None:
    files, node = BlobFileSystem(blobs), node_of("0" * 64)
    assert refused(lambda: files.attributes(node)) == errno.ESTALE
    assert refused(lambda: files.read(node, 0, 1)) == errno.EIO
