"""One large file read from beginning to end, beside a plain client that gets the same bytes and drops them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

import obstore

from bench import big
from bench.measure import MIB, Failed, Spread
from bench.nodes import Commands, running_node
from bench.origin import Cost, Origin, Task
from bench.report import Table
from bench.workloads import read_through

IMAGE: Final = "big"
"""Of the image, and of its store below the origin's URL."""

PARALLEL: Final = 8
"""Requests that the plain client makes at once; as many as the kernel's read-ahead keeps under way in a lazy mount."""

RANGE: Final = 512 << 10
"""Stored bytes of one range of the plain client; 1 MiB of the file takes about as many."""

LAZY: Final = "lazy mount"

_T = TypeVar("_T")


def fill(origin: Origin, folder: Path) -> None:
    """Store the image."""
    big.build(Commands.of(f"{origin.url}/{IMAGE}", folder / "none", origin.near), folder / "big", IMAGE)


def tasks(origin: Origin, folder: Path) -> dict[str, Task]:
    client = origin.client(IMAGE)
    packs = {str(pack["path"]): pack["size"] for page in obstore.list(client, "packs") for pack in page}
    ranges = [
        (pack, start, min(RANGE, size - start)) for pack, size in packs.items() for start in range(0, size, RANGE)
    ]

    def whole(pack: str) -> None:
        obstore.get(client, pack).bytes()

    def part(piece: tuple[str, int, int]) -> None:
        pack, start, length = piece
        obstore.get_range(client, pack, start=start, length=length)

    def counted(get: Callable[[], object]) -> Task:
        def sample(_: int) -> Cost:
            cost = Cost()
            with origin.counting(cost, "read"):
                get()
            return cost

        return sample

    return {
        LAZY: lambda number: _lazy(origin, folder / f"read-{number}"),
        f"plain client, ranges, {PARALLEL} at once": counted(lambda: _at_once(part, ranges, PARALLEL)),
        "plain client, packs, one by one": counted(lambda: _at_once(whole, packs, 1)),
        f"plain client, packs, {PARALLEL} at once": counted(lambda: _at_once(whole, packs, PARALLEL)),
    }


def table(costs: Mapping[str, Sequence[Cost]]) -> Table:
    return Table(
        ("", "seconds", "MiB/s of the file", "GETs", "bytes on the wire, MiB"),
        tuple(_row(name, samples) for name, samples in costs.items()),
    )


def _row(name: str, costs: Sequence[Cost]) -> tuple[str, ...]:
    return (
        name,
        Spread.of(cost.steps["read"] for cost in costs).show(2),
        Spread.of(big.SIZE / MIB / cost.steps["read"] for cost in costs).show(),
        Spread.of(cost.gets for cost in costs).show(),
        Spread.of(cost.bytes / MIB for cost in costs).show(1),
    )


def _lazy(origin: Origin, folder: Path) -> Cost:
    """Mounted anew on a new node, then read."""
    commands = Commands.of(f"{origin.url}/{IMAGE}", folder / "root", origin.far)
    target, cost = folder / "mounted", Cost()
    target.mkdir(parents=True)
    with running_node(commands):
        commands("dsec-image", "mount", IMAGE, str(target))
        with origin.counting(cost, "read"):
            size = read_through([str(target / big.FOLDER / big.NAME)])
    if size != big.SIZE:
        raise Failed(f"{size} bytes of {big.SIZE} came from a lazy mount")
    return cost


def _at_once(work: Callable[[_T], None], items: Iterable[_T], threads: int) -> None:
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(work, items):
            pass
