"""How much of what one mount has read lies in the page cache of another one, when images have layers in common."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench import layered
from bench.layered import AUTOMATIC, FEW_SHARED, ONE, PLAIN, SHARED, stored_name
from bench.measure import Failed
from bench.nodes import Commands, running_node
from bench.report import Table
from bench.workloads import read_through

HEADING: Final = (
    "Two mounts on one node. The large files of the common layers are read through the first; then pages of the same "
    "files are counted (mincore) that are in memory when the second one opens them; then the second reads them as well:"
)

_libc: Final = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two images and their forms, and how many lower layers they have in common."""

    what: str
    first: tuple[str, str]
    second: tuple[str, str]
    common: int


PAIRS: Final = tuple(
    Pair(what, (first, form), (second, other), common)
    for what, first, second, common, forms in (
        ("the same image", "n40", "n40", 40, ((PLAIN, PLAIN), (AUTOMATIC, AUTOMATIC), (ONE, ONE))),
        ("the same image in two forms", "n40", "n40", 40, ((PLAIN, AUTOMATIC), (PLAIN, ONE), (AUTOMATIC, ONE))),
        ("32 of 40 layers", "n40", "many", SHARED, ((PLAIN, PLAIN), (AUTOMATIC, AUTOMATIC), (ONE, ONE))),
        ("20 of 40 layers", "n40", "few", FEW_SHARED, ((PLAIN, PLAIN), (AUTOMATIC, AUTOMATIC), (ONE, ONE))),
        ("20 of 40, all of 20", "n40", "n20", 20, ((PLAIN, PLAIN), (AUTOMATIC, AUTOMATIC))),
    )
    for form, other in forms
)


def measure(store: str, folder: Path) -> dict[str, dict[str, Any]]:
    """By pair: the share of pages that are there before the second mount reads, and what it fetches."""
    folder.mkdir()
    return {
        f"{pair.what}: {_form(pair)}": _measure(
            Commands.of(store, folder / f"root-{number}"), pair, folder / str(number)
        )
        for number, pair in enumerate(PAIRS)
    }


def table(found: Mapping[str, Mapping[str, Any]]) -> Table:
    rows = [(name, f"{100 * of['resident']:.0f} %", f"{of['fetched'] >> 10:,}") for name, of in found.items()]
    return Table(("in common", "pages there", "KiB fetched by the second"), tuple(rows))


def _form(pair: Pair) -> str:
    forms = dict.fromkeys((pair.first[1], pair.second[1]))
    return " and ".join(forms)


def _measure(commands: Commands, pair: Pair, folder: Path) -> dict[str, Any]:
    targets = [folder / "first", folder / "second"]
    for target in targets:
        target.mkdir(parents=True)
    with running_node(commands):
        for (image, form), target in zip((pair.first, pair.second), targets, strict=True):
            commands("dsec-image", "mount", stored_name(image, form), str(target))
        first, second = ([str(target / layered.data_file(n)) for n in range(pair.common)] for target in targets)
        read_through(first)
        before, resident = _fetched(commands), _resident(second)
        read_through(second)
        return {"resident": resident, "fetched": _fetched(commands) - before}


def _fetched(commands: Commands) -> int:
    return int(commands.json("dsec", "node", "stats")["total"]["wire_bytes"])


def _resident(paths: Sequence[str]) -> float:
    """The share of the files' pages that are in memory."""
    pages = [page for path in paths for page in _pages(path)]
    return sum(pages) / len(pages)


def _pages(path: str) -> list[int]:
    """For each page of a file, whether it is in the page cache that a reader of this path has. It is not read."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        with mmap.mmap(descriptor, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
            found = (ctypes.c_ubyte * (-(-size // mmap.PAGESIZE)))()
            held = ctypes.c_char.from_buffer(mapped)
            if _libc.mincore(ctypes.c_void_p(ctypes.addressof(held)), ctypes.c_size_t(size), found):
                raise Failed(f"mincore: {os.strerror(ctypes.get_errno())}")
            del held  # else the map cannot be closed
            return [page & 1 for page in found]
    finally:
        os.close(descriptor)
