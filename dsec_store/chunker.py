"""Cutting a blob's address space into chunks by content, so that equal data gives equal chunks wherever it lies.

FastCDC (Xia et al., 2020) in the variant of pyfastcdc, whose exact release is pinned: the cuts are part of the format.
Files of `solo` bytes and more are cut on their own, so an unchanged large file keeps all its chunks when its neighbours
change and reading it fetches nothing else; runs of smaller files are cut as one stream, or each would be a chunk.

>>> cutter = Cutter(DEFAULT)
>>> chunks = [*cutter.feed(bytes(300_000)), *cutter.feed(bytes(300_000)), *cutter.finish()]
>>> [len(chunk) for chunk in chunks]
[262144, 262144, 75712]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

from pyfastcdc import FastCDC

from dsec_store.errors import Invalid

FASTCDC: Final = "fastcdc-2020"

MAX_CHUNK: Final = 8 << 20
"""Bytes of the largest chunk that any chunker may make, and so of what a reader must be ready to hold."""

WINDOW: Final = 8 << 20
"""Bytes gathered before a window is cut, at least `MAX_CHUNK`; the cuts do not depend on it."""


@dataclass(frozen=True, slots=True)
class ChunkerParameters:
    """Names the cut rule exactly; sizes in bytes. Part of the build key and of the layer descriptor.

    Any values are accepted here, for readers do not cut: a layer that a later release has cut can be read by this one.
    """

    name: str = FASTCDC
    minimum: int = 16 << 10
    average: int = 64 << 10
    maximum: int = 256 << 10
    solo: int = 64 << 10

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


DEFAULT: Final = ChunkerParameters()


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
        self._pending = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[bytes]:
        """Take in `data`; yields the chunks that no later byte can change."""
        self._pending += data
        return self._cut(last=False) if len(self._pending) >= WINDOW else iter(())

    def finish(self) -> Iterator[bytes]:
        """The end of the stream: yields the chunks that were held back. The cutter can start another stream."""
        return self._cut(last=True)

    def _cut(self, *, last: bool) -> Iterator[bytes]:
        window = bytes(self._pending)
        done = 0
        try:
            for chunk in self._cdc.cut_buf(window) if window else ():
                if not last and len(window) - chunk.offset < self._maximum:
                    break  # more bytes could move this cut
                done = chunk.offset + chunk.length
                yield window[chunk.offset : done]
        finally:
            del self._pending[:done]
