"""Recipes: the tar comes back byte for byte, one tar has one recipe, and hostile bytes are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec_store.backends.memory import MemoryBlobs
from dsec_store.chunker import DEFAULT
from dsec_store.chunks import ChunkSource, LazyBlob, NoCache
from dsec_store.errors import Corrupt
from dsec_store.layer import recipe
from dsec_store.layer.contents import PIECE
from dsec_store.layer.recipe import MAGIC, TAR_BLOCK, RecipeWriter, read_recipe
from dsec_store.objects import Objects
from dsec_store.upload import ChunkIndex, Upload
from tests.dsec_store.blobmaker import damaged, noise, unless_refused

BLOB = noise(100_000, "contents")

Part = bytes | tuple[int, int]
"""Literal bytes of a tar, or address and size of a content."""


def read(address: int, size: int) -> bytes:
    return BLOB[address : address + size]


def written(parts: Sequence[Part]) -> bytes:
    """The recipe of a tar of these parts, each told in one call."""
    objects = Objects(MemoryBlobs())
    with Upload(objects, ChunkIndex(objects), workers=1) as upload:
        writer = RecipeWriter(upload.blob(DEFAULT))
        for part in parts:
            if isinstance(part, bytes):
                writer.keep(part)
            else:
                writer.content(*part)
        chunk_map = writer.finish()
        upload.finish()
        locations = upload.locate(chunk_map)
    assert writer.size == chunk_map.blob_size
    blob = LazyBlob(chunk_map, lambda _: locations, ChunkSource(objects.blobs, NoCache()))
    return blob.read(0, chunk_map.blob_size)


def tar_of(parts: Sequence[Part]) -> bytes:
    return b"".join(part if isinstance(part, bytes) else read(*part) for part in parts)


def remade(data: bytes, give: Callable[[int, int], bytes] = read) -> bytes:
    return b"".join(read_recipe([data], give, "recipe"))


def divided(data: bytes, places: Sequence[int]) -> list[bytes]:
    return [data[start:end] for start, end in pairwise([0, *sorted(places), len(data)])]


def joined(parts: Sequence[Part]) -> list[Part]:
    """The same parts, neighbouring literals in one."""
    whole: list[Part] = []
    for part in parts:
        if isinstance(part, bytes) and whole and isinstance(whole[-1], bytes):
            whole[-1] += part
        else:
            whole.append(part)
    return whole


CONTENTS = st.builds(
    lambda address, size: (address, min(size, len(BLOB) - address)),
    st.one_of(st.integers(0, 20).map(lambda block: block * 4096), st.integers(0, len(BLOB) - 1)),
    st.one_of(st.integers(1, 5000), st.integers(1, 8).map(lambda blocks: blocks * TAR_BLOCK)),
)
LITERALS = st.one_of(
    st.binary(max_size=700),
    st.integers(0, 3 * TAR_BLOCK).map(bytes),
    st.sampled_from([b"x" * TAR_BLOCK, bytes(TAR_BLOCK - 1) + b"x"]),
)


@st.composite
def part_lists(draw: st.DrawFn) -> list[Part]:
    """Contents with their own padding behind them, with less, with more, with other bytes, or with none."""
    parts: list[Part] = []
    for part in draw(st.lists(st.one_of(CONTENTS, LITERALS), max_size=10)):
        parts.append(part)
        if isinstance(part, tuple) and draw(st.booleans()):
            parts.append(bytes(-part[1] % TAR_BLOCK))
    return parts


@settings(deadline=None)
@given(part_lists(), st.data(), st.sampled_from([recipe.LITERAL_MAX, 600, TAR_BLOCK]))
def test_any_mixture_comes_back_and_has_one_recipe(parts: list[Part], data: st.DataObject, literal_max: int) -> None:
    split: list[Part] = []
    for part in parts:
        if isinstance(part, bytes):
            split += divided(part, data.draw(st.lists(st.integers(0, len(part)), max_size=4)))
        else:
            split.append(part)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "LITERAL_MAX", literal_max)
        made = written(split)
        assert made == written(joined(parts))
        pieces = divided(made, data.draw(st.lists(st.integers(0, len(made)), max_size=5)))
        assert b"".join(read_recipe(pieces, read, "recipe")) == tar_of(parts)


def test_padding_costs_nothing_and_its_lack_neither() -> None:
    assert written([(0, 5), bytes(507)]) == MAGIC + bytes([0 << 2 | 1, 0, 5])
    assert written([(0, 5)]) == MAGIC + bytes([0 << 2 | 2, 0, 5])
    assert written([(0, 5), bytes(506)]) == MAGIC + bytes([2, 0, 5]) + b"\xe8\x0f" + bytes(506)


def test_neighbours_in_the_blob_are_told_by_a_zero() -> None:
    assert written([(0, 5), (4096, 4097), (12288, 1)])[len(MAGIC) :] == bytes([2, 0, 5, 2, 0, 0x81, 0x20, 2, 0, 1])


@pytest.mark.parametrize("address", [0, 1, 63, 64, 4095, 2**31, 2**40 + 5, 2**62])
@pytest.mark.parametrize("size", [1, 127, 128, 70_000])
def test_numbers_of_any_size(address: int, size: int) -> None:
    asked = []

    def give(address: int, size: int) -> bytes:
        asked.append((address, size))
        return bytes(size)

    parts: list[Part] = [(address, size), (0, 1), (address, 2)]
    assert len(remade(written(parts), give)) == size + 3
    assert asked == parts


def test_long_literals_and_contents_come_in_bounded_pieces() -> None:
    literal = noise(2 * recipe.LITERAL_MAX + 5, "literal")
    made = written([literal, (0, 2 * PIECE + 7), literal])
    pieces = list(read_recipe([made], lambda _, size: bytes(size), "recipe"))
    assert b"".join(pieces) == literal + bytes(2 * PIECE + 7) + literal
    assert max(map(len, pieces)) <= PIECE


def test_an_empty_tar_has_an_empty_recipe() -> None:
    assert written([]) == MAGIC
    assert remade(MAGIC) == b""


# -- hostile bytes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "ends within"),
        (MAGIC[:-1], "ends within"),
        (b"DSECRCP0", "not a recipe, or written by another release"),
        (MAGIC + b"\x80", "ends within"),
        (MAGIC + b"\x14abcd", "ends within"),
        (MAGIC + b"\x01", "ends within"),
        (MAGIC + b"\x01\x00", "ends within"),
        (MAGIC + b"\x03", "kind 3 with 0 literal"),
        (MAGIC + b"\x84\x80\x80\x02" + bytes(1 << 20), "kind 0 with 1048577 literal"),
        (MAGIC + b"\x01\x00\x00", "a content of 0 bytes at 0"),
        (MAGIC + b"\x01\x01\x05", "a content of 5 bytes at -1"),
        (MAGIC + b"\x80" * 10 + b"\x01", "a number of more than 10 bytes"),
        (MAGIC + b"\x01\x00\xa1\x8d\x06", "a content of 100001 bytes at 0, beyond the end of the blob"),
        (MAGIC + b"\x01\x00" + b"\xff" * 9 + b"\x7f", "beyond the end of the blob"),
    ],
)
def test_what_is_no_recipe(data: bytes, problem: str) -> None:
    with pytest.raises(Corrupt, match=rf"^recipe: .*{problem}"):
        remade(data)


SAMPLE: list[Part] = [b"head", (0, 700), bytes(324), b"next", (8192, 4096), (4096, 5), b"tail" * 50]


@settings(deadline=None)
@given(damaged(written(SAMPLE)))
def test_damaged_recipes_are_refused_or_make_another_tar(data: bytes) -> None:
    unless_refused(lambda: remade(data))


def test_errors_of_the_blob_pass_through() -> None:
    def fail(address: int, size: int) -> bytes:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        remade(written([(0, 1)]), fail)
