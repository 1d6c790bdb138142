"""Reads of what is not on the node, from an S3 origin at a distance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from bench import big, bigread, firstrun
from bench.measure import MIB, take_turns
from bench.nodes import scratch
from bench.origin import Cost, Origin, Task, running_origin
from bench.report import Section

SAMPLES: Final = 3

LATENCIES: Final = (0.0, 0.020)
"""Seconds that the near and the far origin take for each answer."""

_CONDITIONS: Final = (
    "The origin is OpenStack Swift's S3 server behind a proxy that delays each answer and counts; both run on the "
    "same processors as the client, and the line has no limit but theirs. Each sample has a new DSEC_ROOT, node, "
    "data daemon and mount; starting the node is not in the times. Samples take turns, {samples} each; medians "
    "(least-most)."
)
_READ: Final = (
    "A file of {size:.0f} MiB that compresses to half, read from beginning to end in 128 KiB reads, {latency:.0f} ms "
    "per request. The plain client is obstore: it gets the same packs, whole or in ranges of {range:.0f} KiB, and "
    "drops them; it decodes, verifies and keeps nothing."
)
_FIRST: Final = (
    "`{command}`, the first command in the Debian image: `dsec run` with nothing local; and all blobs fetched "
    "through the same proxy, `umoci unpack`, and the command in a chroot. Per request 0 or {latency:.0f} ms."
)


def measure(samples: int) -> Section:
    far = LATENCIES[-1]
    with running_origin() as origin, scratch() as folder:
        bigread.fill(origin, folder)
        firstrun.fill(origin, folder)
        reads = _at(origin, far, bigread.tasks(origin, folder), samples)
        runs = {latency: _first_runs(origin, latency, folder, samples) for latency in LATENCIES}
    words = {"latency": 1000 * far, "size": big.SIZE / MIB, "range": bigread.RANGE / 1024}
    *program, script = firstrun.COMMAND
    command = f"{' '.join(program)} '{script}'"
    return Section(
        "Cold reads",
        _CONDITIONS.format(samples=samples),
        {
            _READ.format(**words): bigread.table(reads),
            _FIRST.format(**words, command=command): firstrun.table(runs),
        },
        {"read": _plain(reads), **{f"run, {latency} s": _plain(costs) for latency, costs in runs.items()}},
    )


def _first_runs(origin: Origin, latency: float, folder: Path, samples: int) -> dict[str, list[Cost]]:
    return _at(origin, latency, firstrun.tasks(origin, folder / f"run-{latency}"), samples)


def _at(origin: Origin, latency: float, tasks: Mapping[str, Task], samples: int) -> dict[str, list[Cost]]:
    origin.proxy.delay = latency
    return take_turns(tasks, samples)


def _plain(costs: Mapping[str, list[Cost]]) -> dict[str, Any]:
    return {name: [asdict(cost) for cost in samples] for name, samples in costs.items()}
