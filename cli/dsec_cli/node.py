"""`dsec node`: start, stop, status and figures of the one node process of a machine."""

from __future__ import annotations

from typing import Any, Final

import click

from dsec_cli import nodes
from dsec_cli.command import emit, json_option, print_table, root_option, size, store_option
from dsec_cli.wiring import Settings
from dsec_snapshotter.client import NodeClient
from dsec_store.errors import StoreError

_SHORT: Final = len("blake3:") + 12


@click.group("node")
def node_group() -> None:
    """The node: mounts layers, keeps the cache, and survives the death of its data daemon."""


@node_group.command()
@store_option
@root_option
@click.option("--cache-bytes", type=click.IntRange(min=1), help="Most bytes of the cache [$DSEC_CACHE_BYTES, 20 GiB].")
def start(store: str | None, root: str | None, cache_bytes: int | None) -> None:
    """Start the node; a running one is left alone. A DSEC_ROOT is bound to the store it was first started with."""
    with nodes.start(Settings.of(store, root, cache_bytes)) as node:
        status = node.call("status")
    click.echo(f"node {status['node_pid']} serves {status['root']} from {status['store']}")


@node_group.command()
@root_option
@click.option("--force", is_flag=True, help="Also when something is mounted or runs: it fails.")
def stop(root: str | None, force: bool) -> None:
    """Stop the node and its daemon, and unmount all layers. The cache stays."""
    settings = Settings.of(None, root)
    if not NodeClient(settings.root).stop(force=force):
        click.echo(f"no node runs for {settings.root}")


@node_group.command()
@root_option
@json_option
def status(root: str | None, as_json: bool) -> None:
    """Show the node's processes, layers, compositions and problems."""
    with NodeClient(Settings.of(None, root).root).connect() as node:
        facts = node.call("status")
        try:
            facts["damaged_chunks"] = node.call("stats")["failures"]
        except StoreError as error:
            facts["problems"].append(str(error))
            facts["damaged_chunks"] = {}
    if as_json:
        emit(facts)
        return
    for key in ("root", "store", "version", "node_pid", "daemon_pid", "holder_pid", "restarts"):
        click.echo(f"{key + ':':14}{facts[key]}")
    click.echo(f"{'features:':14}{' '.join(f'{name}={value}' for name, value in facts['features'].items())}")
    click.echo(f"{'layers:':14}{len(facts['layers'])}, {sum(1 for layer in facts['layers'] if layer['users'])} in use")
    for composition in facts["compositions"]:
        click.echo(f"{composition['kind'] + ':':14}{composition['path']} ({len(composition['layers'])} layers)")
    for problem in [*facts["problems"], *facts["damaged_chunks"].values()]:
        click.echo(f"{'problem:':14}{problem}")


@node_group.command()
@root_option
@json_option
def gc(root: str | None, as_json: bool) -> None:
    """Unmount the layers that nothing uses, and remove their local files. The cache stays."""
    with NodeClient(Settings.of(None, root).root).connect() as node:
        removed = node.call("gc")
    if as_json:
        emit(removed)
        return
    click.echo(f"{removed['layers']} layers unmounted, {removed['files']} files removed")


@node_group.command()
@root_option
@json_option
def stats(root: str | None, as_json: bool) -> None:
    """Show what was fetched and what the cache gave, per layer and in all."""
    with NodeClient(Settings.of(None, root).root).connect() as node:
        facts = node.call("stats")
    if as_json:
        emit(facts)
        return
    rows = [_row("all", facts["total"])]
    rows += [_row(layer["descriptor"][:_SHORT], layer) for layer in facts["layers"] if "requests" in layer]
    print_table(["LAYER", "FETCHED", "ON THE WIRE", "REQUESTS", "HITS", "FROM CACHE", "FAILURES"], rows)
    metadata, cache = facts["metadata"], facts["cache"]
    click.echo(f"metadata: {size(metadata['wire_bytes'])} in {metadata['requests']} requests")
    click.echo(f"cache: {size(cache['bytes'])} of {size(cache['quota'])}, {size(cache['evicted_bytes'])} evicted")


def _row(name: str, figures: dict[str, Any]) -> list[str]:
    return [
        name,
        size(figures["fetched_bytes"]),
        size(figures["wire_bytes"]),
        str(figures["requests"]),
        str(figures["hits"]),
        size(figures["hit_bytes"]),
        str(figures["failures"]),
    ]
