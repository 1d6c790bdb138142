"""Reads of what was read before: a lazy mount beside the same layers on plain local files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from bench import big, local, workloads
from bench.measure import MIB, Spread, seconds_of, take_turns
from bench.nodes import Commands, running_node, scratch
from bench.report import Section, Table
from bench.workloads import Tree
from scripts.inputs import IMAGE, TAG

SAMPLES: Final = 9

LAZY: Final = "lazy"
LOCAL: Final = "local"
ALIKE: Final = "local, set up alike"

_IMAGES: Final = ("base", "large")

_CONDITIONS: Final = (
    "The Debian image with a layer of one {big:.0f} MiB file above it, {entries:,} entries: once mounted by "
    "`dsec-image mount`, twice from plain local files (the same metadata images; the blobs written out in full): "
    "with the kernel's defaults, and with the settings of lazy layers, `directio` and 8 MiB of read-ahead. Overlayfs "
    "is above all three. Every workload ran once before; then they take turns, {samples} samples each. The last "
    "columns are the speed of lazy as a share of the local mounts', sample by sample: above 100 % lazy is the faster "
    "one."
)
_WARM: Final = "Page cache warm; milliseconds, median (least-most):"
_DROPPED: Final = (
    "Large files dropped from the mount's page cache before each sample; what lies below is warm: the node cache "
    "(lazy), the blob's page cache (local), the page cache below the loop device (set up alike); milliseconds:"
)


def measure(samples: int) -> Section:
    with scratch() as folder, _trees(folder) as trees:
        times = {name: _compare(work, trees, samples) for name, work in _WORKLOADS.items()}
        again = {name: _compare(work, trees, samples, before=workloads.drop) for name, work in _BELOW.items()}
        entries = trees[LAZY].entries
        amounts = _amounts(trees[LAZY])
    conditions = _CONDITIONS.format(big=big.SIZE / MIB, entries=entries, samples=samples)
    tables = {_WARM: _table(times, amounts), _DROPPED: _table(again, amounts)}
    return Section("Warm reads", conditions, tables, {**times, **{f"{name}, dropped": again[name] for name in again}})


Workload = Callable[[Tree], None]

_WORKLOADS: Final[Mapping[str, Workload]] = {
    "walk and lstat, in Python": workloads.walk,
    "find with stat": workloads.find,
    "small files": workloads.read_small,
    "large files, 128 KiB reads": workloads.read_large,
    "random 4 KiB reads": workloads.read_random,
}
_BELOW: Final[Mapping[str, Workload]] = {"large files, 128 KiB reads": workloads.read_large}


def _amounts(tree: Tree) -> dict[str, str]:
    """How much work a sample is."""
    large = sum(Path(path).stat().st_size for path in tree.large)
    return {
        "walk and lstat, in Python": f"{tree.entries:,} entries",
        "find with stat": f"{tree.entries:,} entries",
        "small files": f"{len(tree.small):,} files",
        "large files, 128 KiB reads": f"{len(tree.large)} files, {large / MIB:.0f} MiB",
        "random 4 KiB reads": f"{workloads.RANDOM_READS:,} reads",
    }


@contextmanager
def _trees(folder: Path) -> Iterator[dict[str, Tree]]:
    """The three mounts of the same layers."""
    store, target = f"file://{folder}/store", folder / "lazy"
    commands = Commands.of(store, folder / "root")
    commands("dsec-image", "convert", f"oci:{IMAGE}:{TAG}", _IMAGES[0])
    big.build(commands, folder / "big", _IMAGES[1])
    layers = local.materialise(store, _IMAGES, folder / "layers")
    target.mkdir()
    with (
        running_node(commands),
        local.mounted(layers, folder / "plain", as_lazy=False) as plain,
        local.mounted(layers, folder / "alike", as_lazy=True) as alike,
    ):
        commands("dsec-image", "mount", *_IMAGES, str(target))
        yield {LAZY: Tree.of(target), LOCAL: Tree.of(plain), ALIKE: Tree.of(alike)}


def _compare(
    work: Workload, trees: Mapping[str, Tree], samples: int, before: Workload = lambda tree: None
) -> dict[str, list[float]]:
    """Seconds of each sample of `work` on each tree."""

    def task(tree: Tree) -> Callable[[int], float]:
        def sample(_: int) -> float:
            before(tree)
            return seconds_of(lambda: work(tree))

        return sample

    for tree in trees.values():
        work(tree)
    return take_turns({name: task(tree) for name, tree in trees.items()}, samples)


def _table(times: Mapping[str, Mapping[str, list[float]]], amounts: Mapping[str, str]) -> Table:
    rows = []
    for name, of in times.items():
        cells = [Spread.of(1000 * seconds for seconds in of[tree]).show(1) for tree in (LAZY, LOCAL, ALIKE)]
        rows.append((f"{name} ({amounts[name]})", *cells, _share(of[LAZY], of[LOCAL]), _share(of[LAZY], of[ALIKE])))
    return Table(("", LAZY, LOCAL, ALIKE, "lazy / local", "lazy / set up alike"), tuple(rows))


def _share(lazy: list[float], other: list[float]) -> str:
    return Spread.of(100 * theirs / ours for ours, theirs in zip(lazy, other, strict=True)).show(0, " %")
