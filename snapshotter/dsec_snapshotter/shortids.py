"""Short names for folders: random, and taken by making the folder.

A name tells nothing, is never used by two at once, and is short because containerd passes 128 of them in one page.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Final

_ALPHABET: Final = "abcdefghijklmnopqrstuvwxyz234567"


def claim_folder(parent: str, length: int) -> str:
    """Make a new folder in `parent` and return its name, of `length` characters. It is the caller's from now on."""
    while True:
        name = "".join(secrets.choice(_ALPHABET) for _ in range(length))
        try:
            os.mkdir(Path(parent, name), 0o700)
        except FileExistsError:
            continue
        return name
