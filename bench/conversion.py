"""From an OCI image to the chunk store: time, CPU, memory, and what is stored."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Final

from bench import layout
from bench.floor import plain_size
from bench.measure import GIB, MIB, Spread, Usage, run_measured, take_turns
from bench.nodes import Commands, command_line, scratch
from bench.report import Section, Table
from scripts.inputs import IMAGE, TAG

SAMPLES: Final = 3

OURS: Final = "`dsec-image convert`"
UNPACK: Final = "`umoci unpack`"
FLOOR: Final = "floor: gunzip, sha256, blake3, zstd-3"

_CONDITIONS: Final = (
    "A Debian image with Python and git from packages, {tar:.0f} MiB of tar in {packed:.0f} MiB of gzip, into a "
    "folder store that is empty before every sample. Controls in the same run, taking turns: umoci unpacks the same "
    "image into a folder, and one thread only decompresses, digests and compresses the same bytes (isal and "
    "zstandard, pieces of 64 KiB), which no conversion can do without. {samples} samples each."
)


def measure(samples: int) -> Section:
    blobs = [layout.blob(digest) for digest in layout.layers()]
    tar = sum(map(plain_size, blobs))
    with scratch() as folder:
        taken = take_turns(_tasks(folder, blobs), samples)
        stored = {
            OURS: _size(folder / "store-0"),
            UNPACK: _size(folder / "unpacked-0/rootfs"),
            FLOOR: None,
        }
    packed = sum(path.stat().st_size for path in blobs)
    table = Table(
        ("", "seconds", "MiB/s of tar", "CPU s per GiB", "peak memory, MiB", "stored, MiB"),
        tuple(_row(name, usages, tar, stored[name]) for name, usages in taken.items()),
    )
    return Section(
        "Conversion",
        _CONDITIONS.format(tar=tar / MIB, packed=packed / MIB, samples=samples),
        {"Median (least-most):": table},
        {name: [asdict(usage) for usage in usages] for name, usages in taken.items()},
    )


def _tasks(folder: Path, blobs: list[Path]) -> dict[str, Callable[[int], Usage]]:
    source = f"{IMAGE}:{TAG}"

    def ours(number: int) -> Usage:
        commands = Commands.of(f"file://{folder}/store-{number}", folder / "root")
        return run_measured(command_line("dsec-image", "convert", f"oci:{source}", "base"), commands.environment)

    def unpack(number: int) -> Usage:
        return run_measured(["umoci", "unpack", "--image", source, str(folder / f"unpacked-{number}")])

    def floor(_: int) -> Usage:
        return sum_up(run_measured([sys.executable, "-m", "bench.floor", str(path)]) for path in blobs)

    return {OURS: ours, UNPACK: unpack, FLOOR: floor}


def sum_up(usages: Iterable[Usage]) -> Usage:
    """Of children that ran one after the other."""
    parts = list(usages)
    return Usage(sum(one.seconds for one in parts), sum(one.cpu for one in parts), max(one.rss for one in parts))


def _row(name: str, usages: list[Usage], tar: int, stored: int | None) -> tuple[str, ...]:
    return (
        name,
        Spread.of(usage.seconds for usage in usages).show(2),
        Spread.of(tar / MIB / usage.seconds for usage in usages).show(),
        Spread.of(usage.cpu / (tar / GIB) for usage in usages).show(1),
        Spread.of(usage.rss / MIB for usage in usages).show(),
        "-" if stored is None else f"{stored / MIB:.1f}",
    )


def _size(folder: Path) -> int:
    """Bytes of all files below `folder`."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
