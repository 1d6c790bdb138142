"""Images of many layers: mounted as they are, by the automatic rule, and as one run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from bench import layered, local, sharing, workloads
from bench.layered import FORMS, stored_name
from bench.measure import Spread, seconds_of, take_turns
from bench.nodes import Commands, running_node, scratch
from bench.origin import Cost, Origin, Task, running_origin
from bench.report import Section, Table
from bench.workloads import Tree
from dsec_snapshotter import mounts

SAMPLES: Final = 9
LATENCY: Final = 0.020
LOOKUPS: Final = 500

KERNEL_IMAGES: Final = ("n20", "n40", "n140")
FAR_IMAGES: Final = ("n40", "n140")

_FEWER: Final = 3
"""One of so many samples is taken of what takes seconds."""

_CONDITIONS: Final = (
    "Images of 20, 40 and 140 layers. Each layer brings a folder of {files} small files and one of {data} KiB, and a "
    "file in /usr/bin. Each image is mounted layer by layer, by the automatic rule of a conversion, and as one run."
)
_KERNEL: Final = (
    "The overlay, over EROFS mounts that are there already (metadata and blobs are local files): mounting it; lstat of "
    "{lookups} names that /usr/bin has not got, in a new overlay, each; lstat of everything, in a new overlay. "
    "{samples} samples each; medians (least-most):"
)
_FAR: Final = (
    "`dsec-image mount` on a new node, {latency:.0f} ms from the store per request, with the start of the command; "
    "{samples} samples each; medians (least-most):"
)


def measure(samples: int) -> Section:
    few = max(1, samples // _FEWER)
    with scratch() as folder:
        layout = layered.make_layout(folder / "layout")
        near = Commands.of(f"file://{folder}/store", folder / "none")
        layered.fill(near, layout, layered.IMAGES)
        kernel = {image: _kernel(image, f"file://{folder}/store", folder / image, samples) for image in KERNEL_IMAGES}
        cached = sharing.measure(f"file://{folder}/store", folder / "sharing")
        with running_origin() as origin:
            far = _first_mounts(origin, layout, folder, few)
    words = {"lookups": LOOKUPS, "latency": 1000 * LATENCY}
    return Section(
        "Collapsed layers",
        _CONDITIONS.format(files=layered.FILES, data=layered.DATA >> 10),
        {
            _KERNEL.format(samples=samples, **words): _kernel_table(kernel),
            _FAR.format(samples=few, **words): _far_table(far),
            sharing.HEADING: sharing.table(cached),
        },
        {
            "kernel": {image: {form: [asdict(s) for s in of[form]] for form in of} for image, of in kernel.items()},
            "far": {name: [asdict(cost) for cost in costs] for name, costs in far.items()},
            "sharing": cached,
        },
    )


# -- in the kernel -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kernel:
    """One sample: how many lowers; seconds of the mount, of a lookup in vain, and of a walk."""

    lowers: int
    mount: float
    lookup: float
    walk: float


def _kernel(image: str, store: str, folder: Path, samples: int) -> dict[str, list[Kernel]]:
    with ExitStack() as undo:
        folder.mkdir()
        undo.enter_context(contextlib.chdir(folder))  # an option of a mount must be short
        tasks = {form: undo.enter_context(_lowers(store, image, form)) for form in FORMS}
        for task in tasks.values():
            task(0)
        return take_turns(tasks, samples)


@contextmanager
def _lowers(store: str, image: str, form: str) -> Iterator[Callable[[int], Kernel]]:
    """The EROFS mounts of one form of an image, and the function that takes a sample of an overlay over them."""
    name = stored_name(image, form)
    with ExitStack() as undo:
        layers = local.materialise(store, [name], Path(name))
        lowers = [undo.enter_context(_mounted(layer)) for layer in layers]
        top, merged = Path(name, "top"), Path(name, "merged")
        for path in (top, merged):
            path.mkdir()

        def sample(_: int) -> Kernel:
            return _sample([str(top), *reversed(lowers)], merged)

        yield sample


@contextmanager
def _mounted(layer: Path) -> Iterator[str]:
    target = layer / "mounted"
    target.mkdir()
    blobs = [str(layer / f"blob-{number}") for number in range(len(list(layer.glob("blob-*"))))]
    mounts.mount_erofs(str(layer / "metadata"), blobs, str(target), direct_io=True)
    try:
        yield str(target)
    finally:
        mounts.unmount(str(target), lazy=True)


def _sample(lowers: Sequence[str], merged: Path) -> Kernel:
    """Two overlays: what one walks through is no news to the kernel afterwards."""
    mounting, lookups = _in_overlay(lowers, merged, _miss)
    _, walk = _in_overlay(lowers, merged, _walk)
    return Kernel(len(lowers) - 1, mounting, lookups / LOOKUPS, walk)


def _in_overlay(lowers: Sequence[str], merged: Path, work: Callable[[Path], None]) -> tuple[float, float]:
    """Seconds that mounting takes, and the work."""
    mounting = seconds_of(lambda: mounts.mount_overlay(lowers, None, str(merged)))
    try:
        return mounting, seconds_of(lambda: work(merged))
    finally:
        mounts.unmount(str(merged))


def _walk(merged: Path) -> None:
    workloads.walk(Tree(str(merged), 0, (), (), ""))


def _miss(merged: Path) -> None:
    folder = f"{merged}/usr/bin"
    for number in range(LOOKUPS):
        with contextlib.suppress(FileNotFoundError):
            os.lstat(f"{folder}/absent{number}")


def _kernel_table(kernel: Mapping[str, Mapping[str, Sequence[Kernel]]]) -> Table:
    rows = [
        (
            f"{len(layered.IMAGES[image])} layers, {form}",
            str(samples[0].lowers),
            Spread.of(1e6 * sample.mount for sample in samples).show(),
            Spread.of(1e6 * sample.lookup for sample in samples).show(1),
            Spread.of(1e3 * sample.walk for sample in samples).show(1),
        )
        for image, of in kernel.items()
        for form, samples in of.items()
    ]
    return Table(("", "lowers", "mount, µs", "a name that is not there, µs", "walk, ms"), tuple(rows))


# -- from afar ---------------------------------------------------------------------------------------------------------


def _first_mounts(origin: Origin, layout: Path, folder: Path, samples: int) -> dict[str, list[Cost]]:
    url = f"{origin.url}/layered"
    layered.fill(Commands.of(url, folder / "none", origin.near), layout, FAR_IMAGES)
    origin.proxy.delay = LATENCY
    names = {f"{len(layered.IMAGES[i])} layers, {form}": stored_name(i, form) for i in FAR_IMAGES for form in FORMS}
    return take_turns({row: _first_mount(origin, url, name, folder) for row, name in names.items()}, samples)


def _first_mount(origin: Origin, url: str, name: str, folder: Path) -> Task:
    def sample(number: int) -> Cost:
        root, target, cost = folder / f"root-{name}-{number}", folder / f"target-{name}-{number}", Cost()
        commands = Commands.of(url, root, origin.far)
        target.mkdir()
        with running_node(commands):
            with origin.counting(cost, "mount"):
                commands("dsec-image", "mount", name, str(target))
            commands("dsec-image", "umount", str(target))
        return cost

    return sample


def _far_table(far: Mapping[str, Sequence[Cost]]) -> Table:
    rows = [
        (row, Spread.of(cost.seconds for cost in costs).show(2), Spread.of(cost.gets for cost in costs).show())
        for row, costs in far.items()
    ]
    return Table(("", "seconds", "GETs"), tuple(rows))
