"""What is done with a mounted tree: each function takes the files it works on and does one sample of work."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SMALL: Final = 16 << 10
"""A file below this many bytes is small."""

LARGE: Final = 1 << 20
"""A file of at least this many bytes is large."""

READ: Final = 128 << 10
PAGE: Final = 4096
RANDOM_READS: Final = 50_000
SMALL_FILES: Final = 5_000

_SIZES: Final = range(1, SMALL)


@dataclass(frozen=True, slots=True)
class Tree:
    """The files of a mounted tree by their use, in an order that is the same for equal trees."""

    root: str
    entries: int
    small: tuple[str, ...]
    large: tuple[str, ...]
    largest: str

    @classmethod
    def of(cls, root: Path) -> Tree:
        found = [(path, path.lstat()) for path in sorted(root.rglob("*"))]
        files = [(str(path), facts.st_size) for path, facts in found if path.is_file() and not path.is_symlink()]
        return cls(
            str(root),
            len(found),
            tuple(path for path, size in files if size in _SIZES)[:SMALL_FILES],
            tuple(path for path, size in files if size >= LARGE),
            max(files, key=lambda file: file[1])[0],
        )


def walk(tree: Tree) -> None:
    """lstat of everything, from Python."""
    for folder, folders, files in os.walk(tree.root):
        for name in folders + files:
            os.lstat(f"{folder}/{name}")


def find(tree: Tree) -> None:
    """find(1), which stats everything because it is asked for modes."""
    subprocess.run(["find", tree.root, "-perm", "-7777"], check=True, stdout=subprocess.DEVNULL)


def read_small(tree: Tree) -> None:
    """Each small file opened, read and closed."""
    for path in tree.small:
        descriptor = os.open(path, os.O_RDONLY)
        os.read(descriptor, SMALL)
        os.close(descriptor)


def read_large(tree: Tree) -> None:
    """Each large file from beginning to end."""
    read_through(tree.large)


def read_through(paths: Sequence[str]) -> int:
    """Files from beginning to end; how many bytes came."""
    buffer = bytearray(READ)
    total = 0
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            while count := os.readv(descriptor, [buffer]):
                total += count
        finally:
            os.close(descriptor)
    return total


def read_random(tree: Tree) -> None:
    """Pages of the largest file, in an order that is the same each time."""
    chance = random.Random(0)
    descriptor = os.open(tree.largest, os.O_RDONLY)
    try:
        pages = os.fstat(descriptor).st_size // PAGE
        buffers = [bytearray(PAGE)]
        for _ in range(RANDOM_READS):
            os.preadv(descriptor, buffers, int(chance.random() * pages) * PAGE)
    finally:
        os.close(descriptor)


def drop(tree: Tree) -> None:
    """Take the large files out of the tree's own page cache; below it, all stays as it is."""
    for path in tree.large:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
