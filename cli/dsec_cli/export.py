"""`dsec-image export`: an image of the store leaves as an OCI image."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import click

from dsec_cli.command import NAME, Checked, emit, json_option, progress, say, size, store_option
from dsec_cli.wiring import Settings, open_objects
from dsec_registry.export import COMPRESSIONS, Exported
from dsec_registry.export import export as export_image
from dsec_registry.layoutwriter import Target, parse_target
from dsec_registry.manifest import Platform
from dsec_store import keys
from dsec_store.digest import Digest
from dsec_store.errors import Denied
from dsec_store.leases import hold
from dsec_store.objects import Objects

TARGET = Checked("target", parse_target)
PLATFORM = Checked("platform", Platform.parse)


@click.command()
@click.argument("name", type=NAME)
@click.argument("target", type=TARGET, metavar="DEST")
@click.option(
    "--compression", type=click.Choice(COMPRESSIONS), default="gzip", show_default=True, help="Of the layers' blobs."
)
@click.option("--platform", type=PLATFORM, help="What an image that runs anywhere is said to be for [this host's].")
@store_option
@json_option
def export(
    name: str, target: Target, compression: str, platform: Platform | None, store: str | None, as_json: bool
) -> None:
    """Write the image NAME to DEST, as an OCI image.

    DEST is one of

    \b
      oci:DIR[:TAG]            an OCI image layout; one that exists gets the image added, or its TAG replaced
      oci-archive:FILE[:TAG]   the same in a new tar

    Layers that were converted leave with the diff_ids with which they came, under the same image ID. Until all is
    written and verified, DEST is as it was.
    """
    objects = open_objects(Settings.of(store, None).store)
    reference = objects.references.read(name)
    with _held(objects, reference.image), progress(in_bytes=True) as shown:
        done = export_image(objects, reference, target, compression=compression, platform=platform, progress=shown)
    if as_json:
        emit({"name": name, "image": str(reference.image), "target": str(target), **_facts(done)})
        return
    plain, packed = (sum(part) for part in zip(*_sizes(done), strict=True)) if done.layers else (0, 0)
    click.echo(f"{name}: {done.manifest.digest}")
    config = "original" if done.original_config else "made"
    click.echo(f"{len(done.layers)} layers, {size(packed)} ({size(plain)} plain), config {config}")


@contextmanager
def _held(objects: Objects, image: Digest) -> Iterator[None]:
    """Keep gc off what is read. Who may not write to the store is told that nothing does."""
    with ExitStack() as stack:
        try:
            stack.enter_context(hold(objects.blobs, [keys.image(image)]))
        except Denied as error:
            say("dsec-image", f"no lease, so a gc at the same time may end this export with an error: {error}")
        yield


def _sizes(done: Exported) -> list[tuple[int, int]]:
    return [(layer.plain_bytes, layer.blob.size) for layer in done.layers]


def _facts(done: Exported) -> dict[str, Any]:
    return {
        "manifest": str(done.manifest.digest),
        "config": str(done.config.digest),
        "original_config": done.original_config,
        "layers": [
            {
                "descriptor": str(layer.layer),
                "diff_id": str(layer.diff_id),
                "plain_bytes": layer.plain_bytes,
                "digest": str(layer.blob.digest),
                "size": layer.blob.size,
                "media_type": layer.blob.media_type,
            }
            for layer in done.layers
        ],
    }
