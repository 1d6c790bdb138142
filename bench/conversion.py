"""From an OCI image to the chunk store: time, CPU, memory, and what is stored."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Final

from bench import layout
from bench.floor import plain_size
from bench.large import large_image
from bench.measure import GIB, MIB, Spread, Usage, run_measured, take_turns
from bench.nodes import Commands, command_line, scratch
from bench.report import Section, Table
from scripts.inputs import IMAGE, TAG

SAMPLES: Final = 3

OURS: Final = "`dsec-image convert`"
BACK: Final = "`dsec-image export`, to gzip"
UNPACK: Final = "`umoci unpack`"
RECOMPRESS: Final = "`skopeo copy`, to zstd"
MKFS: Final = "`mkfs.erofs -zlz4` of the unpacked tree"
FLOOR: Final = "floor: gunzip, sha256, blake3, zstd-3"

_CONDITIONS: Final = (
    "Into a folder store that is empty before every sample. Controls in the same run, taking turns: umoci unpacks the "
    "same image into a folder; skopeo writes it anew with zstd; mkfs.erofs packs what umoci unpacked; and one thread "
    "only decompresses, digests and compresses the same bytes (isal and zstandard, pieces of 128 KiB), which no "
    "conversion can do without. {samples} samples each.{missing}"
)
_SMALL: Final = "Debian with Python and git, {tar:.0f} MiB of tar in {packed:.0f} MiB of gzip"
_LARGE: Final = "Debian, Python packages and a project of npm: {tar:.0f} MiB of tar in {packed:.0f} MiB of gzip"
_COLUMNS: Final = ("", "seconds", "MiB/s of tar", "CPU s per GiB", "CPU / floor", "peak memory, MiB", "stored, MiB")


def measure(samples: int) -> Section:
    tables, taken = {}, {}
    for title, image in ((_SMALL, IMAGE), (_LARGE, large_image())):
        blobs = [layout.blob(digest, image) for digest in layout.layers(image)]
        tar, packed = sum(map(plain_size, blobs)), sum(path.stat().st_size for path in blobs)
        name = title.format(tar=tar / MIB, packed=packed / MIB)
        with scratch() as folder:
            usages = take_turns(_tasks(folder, image, blobs), samples)
            stored = {task: _size(path) for task, path in _results(folder).items() if task in usages}
        rows = (_row(task, one, usages[FLOOR], tar, stored.get(task)) for task, one in usages.items())
        tables[f"{name}; median (least-most):"] = Table(_COLUMNS, tuple(rows))
        taken[name] = {task: [asdict(usage) for usage in one] for task, one in usages.items()}
    lacking = [program for program in ("skopeo", "mkfs.erofs") if shutil.which(program) is None]
    missing = f" Not installed here: {', '.join(lacking)}." if lacking else ""
    return Section("Conversion", _CONDITIONS.format(samples=samples, missing=missing), tables, taken)


def _tasks(folder: Path, image: Path, blobs: list[Path]) -> dict[str, Callable[[int], Usage]]:
    source = f"{image}:{TAG}"

    def dsec(store: str, *arguments: str) -> Usage:
        commands = Commands.of(f"file://{folder}/{store}", folder / "root")
        return run_measured(command_line("dsec-image", *arguments), commands.environment)

    def convert(store: str) -> Usage:
        return dsec(store, "convert", f"oci:{source}", "base")

    def unpack_into(name: str) -> Usage:
        return run_measured(["umoci", "unpack", "--image", source, str(folder / name)])

    def ours(number: int) -> Usage:
        return convert(f"store-{number}")

    def back(number: int) -> Usage:
        return dsec("full", "export", "base", f"oci:{folder}/exported-{number}:{TAG}")

    def unpack(number: int) -> Usage:
        return unpack_into(f"unpacked-{number}")

    def recompress(number: int) -> Usage:
        command = ["skopeo", "copy", "--quiet", "--dest-compress-format", "zstd", f"oci:{source}"]
        return run_measured([*command, f"oci:{folder}/zstd-{number}:{TAG}"])

    def mkfs(number: int) -> Usage:
        tree = folder / "tree/rootfs"
        return run_measured(["mkfs.erofs", "--quiet", "-zlz4", str(folder / f"erofs-{number}"), str(tree)])

    def floor(_: int) -> Usage:
        return sum_up(run_measured([sys.executable, "-m", "bench.floor", str(path)]) for path in blobs)

    convert("full")  # what export and mkfs.erofs begin with, and nobody measures
    unpack_into("tree")
    tasks = {OURS: ours, BACK: back, UNPACK: unpack}
    if shutil.which("skopeo"):
        tasks[RECOMPRESS] = recompress
    if shutil.which("mkfs.erofs"):
        tasks[MKFS] = mkfs
    return {**tasks, FLOOR: floor}


def _results(folder: Path) -> dict[str, Path]:
    """What the first sample of each left."""
    return {
        OURS: folder / "store-0",
        BACK: folder / "exported-0",
        UNPACK: folder / "unpacked-0/rootfs",
        RECOMPRESS: folder / "zstd-0",
        MKFS: folder / "erofs-0",
    }


def sum_up(usages: Iterable[Usage]) -> Usage:
    """Of children that ran one after the other."""
    parts = list(usages)
    return Usage(sum(one.seconds for one in parts), sum(one.cpu for one in parts), max(one.rss for one in parts))


def _row(name: str, usages: list[Usage], floor: list[Usage], tar: int, stored: int | None) -> tuple[str, ...]:
    return (
        name,
        Spread.of(usage.seconds for usage in usages).show(2),
        Spread.of(tar / MIB / usage.seconds for usage in usages).show(),
        Spread.of(usage.cpu / (tar / GIB) for usage in usages).show(1),
        Spread.of(usage.cpu / least.cpu for usage, least in zip(usages, floor, strict=True)).show(2),
        Spread.of(usage.rss / MIB for usage in usages).show(),
        "-" if stored is None else f"{stored / MIB:.1f}",
    )


def _size(path: Path) -> int:
    """Bytes of a file, or of all files below a folder."""
    if path.is_file():
        return path.stat().st_size
    return sum(each.lstat().st_size for each in path.rglob("*") if each.is_file() and not each.is_symlink())
