"""`dsec-image`: convert, build, look at, check and mount images."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Final

import click

from dsec_cli import nodes
from dsec_cli.build import build
from dsec_cli.checking import check
from dsec_cli.collapse import collapse
from dsec_cli.collect import gc as collect_garbage
from dsec_cli.command import (
    NAME,
    Checked,
    emit,
    json_option,
    progress,
    root_option,
    run_group,
    size,
    store_option,
    verify_option,
)
from dsec_cli.export import export
from dsec_cli.look import cat, diff, ls, tree
from dsec_cli.usage import du, inspect
from dsec_cli.wiring import PROMPT, Settings, open_building, open_objects
from dsec_registry.convert import convert as convert_image
from dsec_registry.manifest import Platform, host_platform
from dsec_registry.sources import SourceSpec, open_source, parse_source
from dsec_store.allocator import keep_freed

PROGRAM = "dsec-image"

SOURCE = Checked("source", parse_source)
PLATFORM = Checked("platform", Platform.parse)


SWITCH_INTERVAL: Final = 0.0005
"""Seconds after which a thread hands Python on. A conversion's threads are mostly inside of zstd, zlib and digests, and
come back for microseconds: with Python's 5 ms they would wait longer for each other than they work."""


def main() -> None:
    keep_freed()
    gc.disable()  # the process ends before cycles count; looking for them among a layer's inodes takes 5 % of a build
    sys.setswitchinterval(SWITCH_INTERVAL)
    run_group(group, PROGRAM)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dsec-platform")
def group() -> None:
    """Images of the chunk store: from OCI images, folders and tars; to be mounted lazily."""


group.add_command(build)
group.add_command(cat)
group.add_command(check)
group.add_command(collapse)
group.add_command(diff)
group.add_command(du)
group.add_command(export)
group.add_command(collect_garbage)
group.add_command(inspect)
group.add_command(ls)
group.add_command(tree)


@group.command()
@click.argument("source", type=SOURCE, metavar="SRC")
@click.argument("name", type=NAME)
@click.option("--platform", type=PLATFORM, help="Which of an index's images, as in linux/amd64 [this host's].")
@verify_option
@store_option
@json_option
def convert(
    source: SourceSpec, name: str, platform: Platform | None, verify: bool, store: str | None, as_json: bool
) -> None:
    """Store the image SRC under NAME.

    SRC is one of

    \b
      oci:DIR[:TAG]                    an OCI image layout
      oci-archive:FILE[:TAG]           the same in a tar
      docker-archive:FILE[:NAME:TAG]   from docker save; :@0 is its first image
      dir:DIR                          from skopeo copy ... dir:DIR

    A tar may be compressed with gzip or zstd. The path is the longest one that exists; without a tag or name there
    must be only one image.
    """
    building = open_building(Settings.of(store, None).store)
    with building as objects, open_source(source) as opened, progress(in_bytes=True) as shown:
        done = convert_image(
            objects, opened, source.tag, platform or host_platform(), name, progress=shown, verify=verify
        )
    if as_json:
        emit(
            {
                "name": name,
                "image": str(done.image),
                "layers": done.layers,
                "built": done.built,
                "new_packs": done.new_packs,
                "new_bytes": done.new_bytes,
            }
        )
        return
    click.echo(f"{name}: {done.image}")
    click.echo(
        f"{done.layers} layers, {done.built} built, {done.new_packs} new packs, {size(done.new_bytes)} of chunks added"
    )


@group.command()
@click.argument("name", type=NAME)
@store_option
def rm(name: str, store: str | None) -> None:
    """Remove NAME. What it named stays in the store until garbage collection."""
    open_objects(Settings.of(store, None).store, policy=PROMPT).references.remove(name)


@group.command()
@click.argument("names", type=NAME, nargs=-1, required=True)
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--rw", is_flag=True, help="Writable: changes stay on this node until umount.")
@store_option
@root_option
def mount(names: tuple[str, ...], target: Path, rw: bool, store: str | None, root: str | None) -> None:
    """Mount NAME... on the folder TARGET, the first name at the bottom. Nothing is fetched before it is read."""
    settings = Settings.of(store, root)
    objects = open_objects(settings.store, policy=PROMPT)
    bottom, *others = [objects.image(objects.references.get(name)) for name in names]
    # A run knows only what lies below it in its own image, so on other images each layer is mounted by itself.
    layers = [*bottom.mounted, *(layer for image in others for layer in image.layers)]
    nodes.mount(settings, layers, target.absolute(), writable=rw)


@group.command()
@click.argument("target", type=click.Path(path_type=Path))
@store_option
@root_option
def umount(target: Path, store: str | None, root: str | None) -> None:
    """Undo `mount`. The changes of a writable mount are gone with it."""
    nodes.umount(Settings.of(store, root), target.absolute())


if __name__ == "__main__":
    main()
