"""The reader gives back what the writer wrote, and refuses everything else as Corrupt."""

import io
import mmap
import stat
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsec_store.errors import Corrupt
from dsec_store.layer.erofs import Device, read_image, write_image
from dsec_store.layer.tree import Address, Directory, Inode
from tests.trees import addresses, describe, trees

DEVICES = (Device("first", 2**20), Device("second", 2**20))
DIRECTORY = stat.S_IFDIR | 0o755
REGULAR = stat.S_IFREG | 0o644
ROOT = 1152 + 128 * len(DEVICES)
"""Offset of the root's inode."""


def written(root: Directory) -> bytes:
    out = io.BytesIO()
    write_image(root, DEVICES, out)
    return out.getvalue()


def small_tree() -> Directory:
    """Three directories, one of them on plain blocks, a hardlink, a symlink, xattrs: one of each form."""
    linked = Inode(REGULAR, size=5000, address=Address(1, 8192), xattrs={b"user.a": b"1", b"security.b": b"22"})
    below = Directory(Inode(DIRECTORY), {b"linked": linked, b"link": Inode(stat.S_IFLNK | 0o777, target=b"../linked")})
    gone = Inode(stat.S_IFCHR)
    return Directory(Inode(DIRECTORY), {b"linked": linked, b"below": below, b"crowd": crowd(), b"gone": gone})


def crowd() -> Directory:
    """A directory whose names need two plain blocks."""
    return Directory(Inode(DIRECTORY), {b"%04d" % number: Inode(REGULAR) for number in range(300)})


IMAGE = written(small_tree())


@given(trees())
def test_what_was_written_is_read_back(root: Directory) -> None:
    image = read_image(written(root))
    assert image.devices == DEVICES
    assert describe(image.root) == describe(root)
    assert addresses(image.root) == addresses(root)
    assert written(image.root) == written(root)


def test_any_source(tmp_path: Path) -> None:
    path = tmp_path / "image"
    path.write_bytes(IMAGE)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        for source in (IMAGE, bytearray(IMAGE), memoryview(IMAGE), mapped, file):
            assert describe(read_image(source).root) == describe(small_tree())


def test_a_map_can_be_closed_after_an_error() -> None:
    with mmap.mmap(-1, len(IMAGE)) as mapped, pytest.raises(Corrupt, match="no EROFS superblock"):
        read_image(mapped)


def test_a_very_deep_tree_needs_no_recursion() -> None:
    root = Directory(Inode(DIRECTORY))
    deepest = root
    for _ in range(5000):
        deepest.entries[b"d"] = deepest = Directory(Inode(DIRECTORY))  # assigned left to right
    assert sum(1 for _ in read_image(written(root)).root.walk()) == 5000


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (1024, b"\0", "no EROFS superblock"),
        (1024 + 12, b"\x0d", "does not write"),  # 8 KiB blocks
        (1024 + 80, b"\x80", "does not write"),  # an unknown incompatible feature
        (1024 + 14, b"\xff\xff", "outside the image"),  # root nid
        (1024 + 16, b"\1", "inodes, not"),
        (1024 + 36, b"\1", "blocks it names"),
        (1024 + 86, b"\xff\xff", "outside the image"),  # devices
        (1152, b"\xff", "ASCII"),  # a tag
        (1152, bytes(64), "not 1 to 64"),
        (1152 + 68, bytes(4), "mapped into the image"),
        (1152 + 128 + 64, struct.pack("<I", 2), "not on blob device"),  # blocks of the second
        (ROOT, b"\0", "unknown format"),  # a compact inode
        (ROOT + 2, b"\xff\xff", "more than a block"),  # xattrs
        (ROOT + 4, struct.pack("<H", REGULAR), "not one chunk"),
        (ROOT + 4, struct.pack("<H", stat.S_IFIFO), "special file with data"),
        (ROOT + 4, struct.pack("<H", 0o170000), "bad type"),
        (ROOT + 8, struct.pack("<Q", 2**64 - 1), "more than a block"),
        (ROOT + 24, b"\xff\xff\xff\xff", "bad type, owner"),
        (ROOT + 40, b"\xff\xff\xff\xff", "owner or time"),
        (ROOT + 44, b"\x09", "link count"),
        (ROOT + 64, b"\xff", "own two entries"),  # nid of "."
        (ROOT + 64 + 8, b"\xff", "whole number"),  # offset of the first name
        (ROOT + 64 + 2 * 12, struct.pack("<Q", ROOT // 32), "two names"),  # "below" is the root: a loop
        (ROOT + 64 + 2 * 12 + 10, b"\1", "another type"),
        (ROOT + 64 + 6 * 12, b"z", "out of order"),  # the name "."
    ],
)
def test_damage_is_named(offset: int, value: bytes, message: str) -> None:
    damaged = bytearray(IMAGE)
    damaged[offset : offset + len(value)] = value
    with pytest.raises(Corrupt, match=message):
        read_image(damaged)


def test_bytes_that_two_things_share_are_refused() -> None:
    """Many directories over one list of names would make a small image a huge tree."""
    image = bytearray(written(Directory(Inode(DIRECTORY), {b"a": crowd(), b"b": crowd()})))
    first, second = (at for at in range(ROOT + 64, 4096, 32) if image[at : at + 2] == b"\1\0" and image[at + 5] == 0x41)
    image[second + 16 : second + 20] = image[first + 16 : first + 20]  # the first data block
    with pytest.raises(Corrupt, match="used twice"):
        read_image(image)


def outcome(read: Callable[[], object]) -> str:
    try:
        read()
    except Corrupt:
        return "corrupt"
    return "read"


@settings(max_examples=400)
@given(st.lists(st.tuples(st.integers(1024, len(IMAGE) - 1), st.integers(0, 255)), min_size=1, max_size=8))
@example([(0, 255)])
def test_flipped_bytes_give_a_tree_or_corrupt(flips: list[tuple[int, int]]) -> None:
    damaged = bytearray(IMAGE)
    for offset, value in flips:
        damaged[offset] = value
    assert outcome(lambda: read_image(damaged)) in {"corrupt", "read"}


@given(st.integers(0, len(IMAGE) - 1))
def test_a_cut_image_is_corrupt(size: int) -> None:
    assert outcome(lambda: read_image(IMAGE[:size])) == "corrupt"


@given(st.binary(max_size=300))
def test_noise_behind_a_valid_superblock_is_no_surprise(noise: bytes) -> None:
    damaged = IMAGE[:ROOT] + noise + IMAGE[ROOT + len(noise) :]
    assert outcome(lambda: read_image(damaged)) in {"corrupt", "read"}
