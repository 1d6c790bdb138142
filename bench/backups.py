"""Controls for the chunk store's size: backup programs that cut by content, and gzip as images are shipped."""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from bench.measure import run
from bench.opened import unpacked

GZIP_LEVEL: Final = 6
"""That of builders which use the default, as most do."""
_READ: Final = 1 << 20

_Save = Callable[[Path, Path, Mapping[str, str], int], None]
"""Store a folder as the version of this number; makes the store if the number is 0."""


def _restic(store: Path, tree: Path, environment: Mapping[str, str], number: int) -> None:
    words = ["restic", "--quiet", "--no-cache", "--repo", str(store)]
    if number == 0:
        run([*words, "init", "--repository-version", "2"], environment)
    run([*words, "backup", str(tree)], environment)


def _casync(store: Path, tree: Path, environment: Mapping[str, str], number: int) -> None:
    store.mkdir(exist_ok=True)
    command = ["casync", "make", "--with=unix", f"--store={store}/chunks", f"{store}/{number}.caidx", str(tree)]
    run(command, environment)


def _borg(store: Path, tree: Path, environment: Mapping[str, str], number: int) -> None:
    if number == 0:
        run(["borg", "init", "--encryption=none", str(store)], environment)
    run(["borg", "create", f"{store}::{number}", str(tree)], environment)


PROGRAMS: Final[dict[str, _Save]] = {"restic": _restic, "casync": _casync, "borg": _borg}


def missing() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name) is None]


def grown(versions: Sequence[Sequence[Path]], folder: Path) -> dict[str, list[int]]:
    """Bytes by which the store of each program that is installed grows with each version, its metadata included."""
    taken: dict[str, list[int]] = {name: [] for name in PROGRAMS if shutil.which(name)}
    environment = {
        **os.environ,
        "RESTIC_PASSWORD": "bench",
        "BORG_BASE_DIR": str(folder),
        "BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK": "yes",
    }
    for number, version in enumerate(versions):
        with unpacked(version, folder) as tree:
            for name, sizes in taken.items():
                PROGRAMS[name](folder / name, tree, environment, number)
                sizes.append(_size(folder / name) - sum(sizes))
    return taken


def shipped(versions: Sequence[Sequence[Path]]) -> list[int]:
    """Bytes of gzip that each version has in layers which no earlier one had."""
    layers = list(dict.fromkeys(tar for version in versions for tar in version))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        packed = dict(zip(layers, pool.map(_gzip, layers), strict=True))
    return [sum(packed.pop(tar, 0) for tar in version) for version in versions]


def _gzip(tar: Path) -> int:
    compressor = zlib.compressobj(GZIP_LEVEL, wbits=31)
    with tar.open("rb") as file:
        return sum(len(compressor.compress(piece)) for piece in _pieces(file.read)) + len(compressor.flush())


def _pieces(read: Callable[[int], bytes]) -> Iterator[bytes]:
    while piece := read(_READ):
        yield piece


def _size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
