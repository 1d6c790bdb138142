"""The least that any conversion does: `python -m bench.floor LAYER.gz` gunzips, digests and compresses on one thread.

No tar is parsed, no chunk is found, nothing is stored; the fastest known libraries do the work.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import blake3
import zstandard
from isal import igzip

PIECE: Final = 128 << 10
"""Bytes digested and compressed at once: as much as our average chunk."""


def floor(layer: Path) -> None:
    compressor = zstandard.ZstdCompressor(level=3, write_checksum=False)
    whole = hashlib.sha256()
    for piece in _pieces(layer):
        whole.update(piece)
        blake3.blake3(piece).digest()
        compressor.compress(piece)


def plain_size(layer: Path) -> int:
    """Bytes of the tar in `layer`."""
    return sum(map(len, _pieces(layer)))


def _pieces(layer: Path) -> Iterator[bytes]:
    """What is in `layer`, PIECE bytes at a time."""
    with igzip.IGzipFile(str(layer)) as tar:  # type: ignore[no-untyped-call]
        while piece := tar.read(PIECE):
            yield piece


if __name__ == "__main__":
    floor(Path(sys.argv[1]))
