"""The first command in an image of which nothing is local, beside an eager pull of the same image."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import obstore
from obstore.store import S3Store

from bench import layout
from bench.measure import MIB, Spread, run
from bench.nodes import Commands, command_line, running_node
from bench.origin import Cost, Origin, Task
from bench.report import Table
from scripts.inputs import IMAGE, TAG

NAME: Final = "base"
"""Of the image, and of its store below the origin's URL."""

COMMAND: Final = ("python3", "-c", "import json, ssl, sqlite3")

LAZY: Final = "`dsec run`"
EAGER: Final = "pull, unpack, chroot"

_BLOBS: Final = "oci"
"""Prefix of the OCI image's blobs in the origin's bucket."""
_LAYERS_AT_ONCE: Final = 3
"""As a pull by containerd."""


def fill(origin: Origin, folder: Path) -> None:
    """Store the image, and the blobs that it was converted from."""
    near = Commands.of(f"{origin.url}/{NAME}", folder / "none", origin.near)
    near("dsec-image", "convert", f"oci:{IMAGE}:{TAG}", NAME)
    client = origin.client(_BLOBS)
    for digest in layout.all_blobs():
        obstore.put(client, digest, layout.blob(digest))


def tasks(origin: Origin, folder: Path) -> dict[str, Task]:
    return {
        LAZY: lambda number: _lazy(origin, folder / f"lazy-{number}"),
        EAGER: lambda number: _eager(origin, folder / f"eager-{number}"),
    }


def table(costs: Mapping[float, Mapping[str, Sequence[Cost]]]) -> Table:
    """`costs` by seconds of latency."""
    rows = [
        _row(f"{name}, {1000 * latency:.0f} ms", samples)
        for latency, of in costs.items()
        for name, samples in of.items()
    ]
    return Table(("", "seconds", "of that", "GETs", "bytes on the wire, MiB"), tuple(rows))


def _row(name: str, costs: Sequence[Cost]) -> tuple[str, ...]:
    steps = [f"{step} {Spread.of(cost.steps[step] for cost in costs).median:.2f}" for step in costs[0].steps]
    return (
        name,
        Spread.of(cost.seconds for cost in costs).show(2),
        ", ".join(steps) if len(steps) > 1 else "-",
        Spread.of(cost.gets for cost in costs).show(),
        Spread.of(cost.bytes / MIB for cost in costs).show(1),
    )


def _lazy(origin: Origin, folder: Path) -> Cost:
    commands, cost = Commands.of(f"{origin.url}/{NAME}", folder / "root", origin.far), Cost()
    with running_node(commands), origin.counting(cost, "run"):
        run(command_line("dsec", "run", NAME, "--", *COMMAND), commands.environment)
    return cost


def _eager(origin: Origin, folder: Path) -> Cost:
    client, cost, bundle = origin.client(_BLOBS), Cost(), folder / "bundle"
    with origin.counting(cost, "pull"):
        _pull(client, folder / "image")
    with origin.counting(cost, "unpack"):
        run(["umoci", "unpack", "--image", f"{folder}/image:{TAG}", str(bundle)])
    with origin.counting(cost, "command"):
        subprocess.run(["chroot", str(bundle / "rootfs"), *COMMAND], check=True, stdin=subprocess.DEVNULL)
    return cost


def _pull(client: S3Store, image: Path) -> None:
    """An OCI layout of what is fetched: manifest, config, then the layers, some at once."""
    manifest, config, *layers = layout.all_blobs()
    for digest in (manifest, config):
        _fetch(client, digest, image)
    with ThreadPoolExecutor(_LAYERS_AT_ONCE) as pool:
        list(pool.map(lambda digest: _fetch(client, digest, image), layers))
    for name in ("index.json", "oci-layout"):
        (image / name).write_bytes((IMAGE / name).read_bytes())


def _fetch(client: S3Store, digest: str, image: Path) -> None:
    path = layout.blob(digest, image)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for piece in obstore.get(client, digest):
            file.write(piece)
