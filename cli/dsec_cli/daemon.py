"""The data daemon as a process: `python -m dsec_cli.daemon`, started by the node and by nobody else.

It reads local layer files and the store, keeps the node cache, and serves blobs. It may be killed at any time.
"""

from __future__ import annotations

import logging
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click

from dsec_cli.command import run_group
from dsec_cli.wiring import LOG_FORMAT, open_objects
from dsec_fuse.daemon import serve
from dsec_store.cache import NodeCache
from dsec_store.chunks import ChunkSource
from dsec_store.layerfiles import LayerFiles, NodeBlobs

_log: Final = logging.getLogger(__name__)


@click.command()
@click.option("--root", type=click.Path(path_type=Path), required=True)
@click.option("--store", required=True)
@click.option("--holder", type=click.Path(path_type=Path), required=True)
@click.option("--slot", required=True)
@click.option("--control", type=click.Path(path_type=Path), required=True)
@click.option("--cache-bytes", type=int, required=True)
def daemon(root: Path, store: str, holder: Path, slot: str, control: Path, cache_bytes: int) -> None:
    """Serve this node's blobs until unmounted."""
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    objects = open_objects(store)
    cache = NodeCache(root / "cache", cache_bytes)
    source = ChunkSource(objects.blobs, cache)
    blobs = NodeBlobs(LayerFiles(root), objects, source)

    def stats() -> dict[str, Any]:
        return {
            "total": asdict(source.figures),
            "blobs": {name: {"size": blob.size, **asdict(blob.figures)} for name, blob in blobs.figures().items()},
            "cache": asdict(cache.figures()),
            "failures": source.failures(),
        }

    ending = serve(blobs, holder=holder, slot=slot, control=control, stats=stats)
    _log.info("ended: %s", ending.value)
    cache.close()
    logging.shutdown()
    os._exit(0)  # readers that still wait belong to a successor, not to us


if __name__ == "__main__":
    run_group(daemon, "dsec-daemon")
