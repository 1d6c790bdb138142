"""Cuts are part of the format: the same ones however the stream comes, with any release."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyfastcdc import FastCDC
from pyfastcdc.py import FastCDC as PythonFastCDC

from dsec_store import chunker
from dsec_store.chunker import DEFAULT, MAX_CHUNK, ChunkerParameters, Cutter
from dsec_store.errors import Invalid
from tests.dsec_store.blobmaker import SMALL, noise

DATA = noise(300_000, "cuts")
LARGE = noise(19 << 20, "more than two windows")

CUTS = [41952, 247060, 383572, 566746, 797140, 1007042, 1048576]
"""Ends of the chunks of `noise(1 << 20, "vector")` by the default parameters. Never to be changed."""


def ends(parameters: ChunkerParameters, *pieces: bytes) -> list[int]:
    cutter = Cutter(parameters)
    cuts = [cut for cut in (*map(cutter.add, pieces), cutter.end()) if cut]
    chunks = [chunk for cut in cuts for chunk in cut.chunks()]
    assert b"".join(chunks) == b"".join(pieces)
    return list(accumulate(map(len, chunks)))


def whole(parameters: ChunkerParameters, data: bytes) -> list[int]:
    """Where the library cuts data that it sees all at once."""
    cdc = FastCDC(parameters.average, min_size=parameters.minimum, max_size=parameters.maximum)
    return [chunk.offset + chunk.length for chunk in cdc.cut_buf(data)]


def divided(data: bytes, places: list[int]) -> list[bytes]:
    return [data[start:end] for start, end in pairwise([0, *sorted(places), len(data)])]


def test_the_vector() -> None:
    data = noise(1 << 20, "vector")
    assert ends(DEFAULT, data) == CUTS
    slow = PythonFastCDC(DEFAULT.average, min_size=DEFAULT.minimum, max_size=DEFAULT.maximum)
    assert [chunk.offset + chunk.length for chunk in slow.cut_buf(data)] == CUTS


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, len(LARGE)), max_size=30))
def test_pieces_do_not_matter(places: list[int]) -> None:
    assert ends(DEFAULT, *divided(LARGE, places)) == whole(DEFAULT, LARGE)


@settings(deadline=None)
@given(st.integers(SMALL.maximum, 200_000), st.lists(st.integers(0, len(DATA)), max_size=20))
def test_the_window_does_not_matter(window: int, places: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunker, "WINDOW", window)
        assert ends(SMALL, *divided(DATA, places)) == whole(SMALL, DATA)


def test_chunks_stay_within_their_limits() -> None:
    sizes = [end - start for start, end in pairwise([0, *ends(DEFAULT, LARGE)])]
    assert max(sizes) <= DEFAULT.maximum
    assert min(sizes[:-1]) >= DEFAULT.minimum
    assert DEFAULT.average / 2 < sum(sizes) / len(sizes) < DEFAULT.average * 2


def test_a_change_moves_only_cuts_near_it() -> None:
    before, after = (set(ends(DEFAULT, data)) for data in (LARGE, b"inserted" + LARGE))
    assert len(before & {end - len(b"inserted") for end in after}) > 0.95 * len(before)


def test_memory_is_a_window_and_a_chunk() -> None:
    cutter, held = Cutter(DEFAULT), 0
    for piece in divided(LARGE, list(range(0, len(LARGE), 1 << 20))):
        cut = cutter.add(piece)
        held += len(piece) - (cut.ends[-1] if cut else 0)
        assert held < chunker.WINDOW + len(piece)


def test_a_cutter_can_cut_another_stream() -> None:
    cutter = Cutter(SMALL)
    assert cutter.end() is None
    for data in (DATA, DATA[1:]):
        assert cutter.add(data) is None
        cut = cutter.end()
        assert cut is not None
        assert cut.ends == whole(SMALL, data)
        assert b"".join(cut.chunks()) == data
        assert cutter.end() is None


@pytest.mark.parametrize(
    "parameters",
    [
        ChunkerParameters(name="rabin"),
        ChunkerParameters(minimum=4095),
        ChunkerParameters(minimum=129 << 10),
        ChunkerParameters(average=1 << 20),
        ChunkerParameters(maximum=MAX_CHUNK + 1),
        ChunkerParameters(minimum=2 << 20, average=2 << 20, maximum=MAX_CHUNK),  # the library's own limit
    ],
)
def test_what_cannot_be_cut_by_is_refused(parameters: ChunkerParameters) -> None:
    with pytest.raises(Invalid, match="chunker"):
        Cutter(parameters)
