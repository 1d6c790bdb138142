"""Cutting a blob's address space into chunks by content, so that equal data gives equal chunks wherever it lies.

FastCDC (Xia et al., 2020) in the variant of pyfastcdc, whose exact release is pinned: the cuts are part of the format.
Files of `solo` bytes and more are cut on their own, so an unchanged large file keeps all its chunks when its neighbours
change and reading it fetches nothing else; runs of smaller files are cut as one stream, or each would be a chunk.

>>> cutter = Cutter(DEFAULT)
>>> cutter.add(bytes(300_000)), cutter.add(bytes(300_000))
(None, None)
>>> cutter.end().ends
[524288, 600000]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

from pyfastcdc import FastCDC

from dsec_store.errors import Invalid

FASTCDC: Final = "fastcdc-2020"

MAX_CHUNK: Final = 8 << 20
"""Bytes of the largest chunk that any chunker may make, and so of what a reader must be ready to hold."""

WINDOW: Final = 4 << 20
"""Bytes gathered before a window is cut, if two of the largest chunks are not more; the cuts do not depend on it."""


@dataclass(frozen=True, slots=True)
class ChunkerParameters:
    """Names the cut rule exactly; sizes in bytes. Part of the build key and of the layer descriptor.

    Any values are accepted here, for readers do not cut: a layer that a later release has cut can be read by this one.
    """

    name: str = FASTCDC
    minimum: int = 32 << 10
    average: int = 128 << 10
    maximum: int = 512 << 10
    solo: int = 64 << 10

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


DEFAULT: Final = ChunkerParameters()


class Cut(NamedTuple):
    """Chunks that lie one behind the other in `window`, from its start on: `ends` are their ends."""

    window: bytes
    ends: list[int]

    def chunks(self) -> Iterator[memoryview]:
        """The chunks, without copying."""
        view, start = memoryview(self.window), 0
        for end in self.ends:
            yield view[start:end]
            start = end


class Cutter:
    """Cuts one stream that arrives in pieces: the same cuts however it is divided into pieces.

    Raises `Invalid` for parameters that this release cannot cut by.
    """

    def __init__(self, parameters: ChunkerParameters) -> None:
        if parameters.name != FASTCDC:
            raise Invalid(f"unknown chunker {parameters.name!r} (known: {FASTCDC})")
        if not 4096 <= parameters.minimum <= parameters.average <= parameters.maximum <= MAX_CHUNK:
            raise Invalid(f"chunker sizes out of order, or not between 4096 and {MAX_CHUNK}: {parameters}")
        try:
            self._cdc = FastCDC(parameters.average, min_size=parameters.minimum, max_size=parameters.maximum)
        except ValueError as error:  # its own limits, below ours
            raise Invalid(f"chunker sizes: {error}") from None
        self._maximum = parameters.maximum
        self._window = max(WINDOW, 2 * parameters.maximum)
        self._pending: list[bytes] = []
        self._size = 0

    def add(self, data: bytes) -> Cut | None:
        """Take in `data`; the chunks that no later byte can change, once there are enough for a window."""
        self._pending.append(data)
        self._size += len(data)
        return self._cut(last=False) if self._size >= self._window else None

    def end(self) -> Cut | None:
        """The end of the stream: the chunks that were held back, if any. The cutter can start another stream."""
        return self._cut(last=True) if self._size else None

    def _cut(self, *, last: bool) -> Cut:
        window = b"".join(self._pending)
        ends = [chunk.offset + chunk.length for chunk in self._cdc.cut_buf(window)]
        if not last:  # more bytes could move the end of a chunk that begins so late
            while ends[-2] > len(window) - self._maximum:
                ends.pop()
        self._pending = [window[ends[-1] :]]
        self._size = len(window) - ends[-1]
        return Cut(window, ends)
