"""`dsec-image collapse`: long runs of an image's layers are mounted as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import click

from dsec_cli.command import NAME, emit, json_option, store_option
from dsec_cli.wiring import PROMPT, Settings, open_building, open_objects
from dsec_store.digest import Digest
from dsec_store.layer.collapse import collapse as collapse_runs
from dsec_store.layer.collapse import lowers_of
from dsec_store.objects import Objects

Rule = Callable[[Objects, Sequence[Digest]], tuple[Digest, ...]]


def _all(objects: Objects, layers: Sequence[Digest]) -> tuple[Digest, ...]:
    return collapse_runs(objects, layers, [range(len(layers))])


def _none(objects: Objects, layers: Sequence[Digest]) -> tuple[Digest, ...]:
    return ()


RULES: Final[dict[str, Rule]] = {"all": _all, "auto": lowers_of, "none": _none}
"""What is mounted for an image's layers."""


@click.command()
@click.argument("name", type=NAME)
@click.option("--all", "rule", flag_value="all", default=True, help="All layers become one run [the default].")
@click.option("--auto", "rule", flag_value="auto", help="As a conversion does it: complete runs of many layers.")
@click.option("--undo", "rule", flag_value="none", help="Every layer is mounted by itself again.")
@store_option
@json_option
def collapse(name: str, rule: str, store: str | None, as_json: bool) -> None:
    """Have the layers of NAME mounted as one, with what whiteouts hide left out.

    No content is copied: what changes is the name, which leads to another image of the same layers. Sandboxes that run
    are not touched. Images that share layers share page cache only where they share whole runs.
    """
    url = Settings.of(store, None).store
    reference = open_objects(url, policy=PROMPT).references.read(name)  # before a lease, or a folder, is made
    with open_building(url) as objects:
        image = objects.image(reference.image)
        collapsed = replace(image, lowers=RULES[rule](objects, image.layers))
        digest = objects.put_image(collapsed)
        if digest != reference.image:
            objects.references.set(name, digest, reference.origin)
        mounted = [(layer, objects.layer(layer)) for layer in collapsed.mounted]
    if as_json:
        lowers = [
            {"layer": str(lower), "run": [str(part) for part in layer.run], "blobs": len(layer.blobs)}
            for lower, layer in mounted
        ]
        emit({"name": name, "image": str(digest), "layers": len(image.layers), "mounted": lowers})
        return
    runs = sum(bool(layer.run) for _, layer in mounted)
    click.echo(f"{name}: {digest}")
    click.echo(f"{len(image.layers)} layers, mounted as {len(mounted)}, {runs} of them runs of several")
