"""The large file: content that a compressor halves, no part of which occurs twice, the same on every machine."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final

from bench.nodes import Commands

SIZE: Final = 200 << 20
NAME: Final = "big"
FOLDER: Final = "large"
"""Where it lies in its image."""

_HALF: Final = 2048
"""Random bytes, written twice: well within a compressor's window, and shorter than any chunk."""
_PIECE: Final = 1 << 20


def build(commands: Commands, folder: Path, name: str) -> None:
    """Build a layer of the file alone, under `name`; the file itself is left in the new `folder`."""
    folder.mkdir(parents=True)
    source = random.Random(0)
    with (folder / NAME).open("wb") as file:
        for _ in range(SIZE // _PIECE):
            file.write(b"".join(source.randbytes(_HALF) * 2 for _ in range(_PIECE // _HALF // 2)))
    commands("dsec-image", "build", str(folder), name, "--kind", "workspace", "--prefix", f"/{FOLDER}")
