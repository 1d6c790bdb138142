"""The node as a process: `python -m dsec_cli.nodeprocess`, started by the first command that needs it."""

from __future__ import annotations

import logging
from pathlib import Path

import click

from dsec_cli.command import run_group
from dsec_cli.nodes import RUNS
from dsec_cli.wiring import LOG_FORMAT, metered_objects, process
from dsec_sandbox.crun import kill_leftover
from dsec_snapshotter import root as names
from dsec_snapshotter.node import serve


@click.command()
@click.option("--root", type=click.Path(path_type=Path), required=True)
@click.option("--store", required=True)
@click.option("--cache-bytes", required=True)
def nodeprocess(root: Path, store: str, cache_bytes: str) -> None:
    """Mount, count and supervise until stopped."""
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    objects, traffic = metered_objects(store)
    daemon = process(
        "dsec_cli.daemon",
        *("--root", str(root), "--store", store, "--cache-bytes", cache_bytes),
        *("--holder", str(root / names.HOLDER_SOCKET), "--slot", names.HOLDER_SLOT),
        *("--control", str(root / names.DAEMON_SOCKET)),
    )
    serve(root, objects, store, daemon, on_orphan=lambda id: kill_leftover(root / RUNS, id), traffic=traffic)


if __name__ == "__main__":
    run_group(nodeprocess, "dsec-node")
