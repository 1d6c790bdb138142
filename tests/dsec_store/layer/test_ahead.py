"""Reading ahead: the same pieces and errors as without, and no thread afterwards."""

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from dsec_store.errors import Corrupt
from dsec_store.layer.ahead import DEPTH, ReadAhead
from tests.dsec_store.blobmaker import eventually


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert "read-ahead" not in [thread.name for thread in threading.enumerate()]


class Given:
    """Pieces, with a note of how many were taken and whether their giver was closed."""

    def __init__(self, count: int, last: Callable[[], bytes] = lambda: b"last") -> None:
        self.taken = 0
        self.closed = False
        self.pieces = self._pieces(count, last)

    def _pieces(self, count: int, last: Callable[[], bytes]) -> Iterator[bytes]:
        try:
            for number in range(count):
                self.taken += 1
                yield b"%d" % number
            yield last()
        finally:
            self.closed = True


def fail() -> bytes:
    raise Corrupt("damaged")


def test_all_pieces_come_in_order_and_then_the_end_for_ever() -> None:
    given = Given(100)
    with ReadAhead(given.pieces) as stream:
        found = [stream.read(1) for _ in range(101)]
        assert [stream.read(1), stream.read(1)] == [b"", b""]
    assert found == [*(b"%d" % number for number in range(100)), b"last"]
    assert given.closed


def test_empty_pieces_are_no_end() -> None:
    with ReadAhead(iter([b"", b"a", b"", b"", b"b", b""])) as stream:
        assert [stream.read(1) for _ in range(3)] == [b"a", b"b", b""]


@pytest.mark.parametrize("count", [0, 3, 5 * DEPTH])
def test_an_error_comes_after_the_pieces_before_it_and_stays(count: int) -> None:
    with ReadAhead(Given(count, fail).pieces) as stream:
        for number in range(count):
            assert stream.read(1) == b"%d" % number
        for _ in range(2):
            with pytest.raises(Corrupt, match="damaged"):
                stream.read(1)


def test_only_so_much_is_read_ahead() -> None:
    given = Given(10 * DEPTH)
    with ReadAhead(given.pieces) as stream:
        eventually(lambda: given.taken == DEPTH + 1)
        assert stream.read(1) == b"0"
        eventually(lambda: given.taken == DEPTH + 2)
    assert given.taken == DEPTH + 2


@pytest.mark.parametrize("taken", [0, 1, DEPTH])
def test_leaving_early_ends_the_thread_and_closes_the_pieces(taken: int) -> None:
    given = Given(10 * DEPTH)
    with suppress(ZeroDivisionError), ReadAhead(given.pieces) as stream:
        for _ in range(taken):
            stream.read(1)
        raise ZeroDivisionError
    assert given.taken < 10 * DEPTH
    given.pieces = iter(())
    assert given.closed
