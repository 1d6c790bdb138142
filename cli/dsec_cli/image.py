"""`dsec-image`: convert, build, look at, check and mount images."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import click

from dsec_cli import nodes
from dsec_cli.command import (
    ENV,
    NAME,
    Checked,
    emit,
    json_option,
    print_table,
    progress,
    root_option,
    run_group,
    size,
    store_option,
    verify_option,
)
from dsec_cli.wiring import PROMPT, Settings, open_objects
from dsec_registry.convert import convert as convert_image
from dsec_registry.manifest import Platform, host_platform
from dsec_registry.sources import SourceSpec, open_source, parse_source
from dsec_store.check import check_image, describe
from dsec_store.descriptor import KINDS
from dsec_store.digest import Digest
from dsec_store.errors import StoreError
from dsec_store.layer.local import LocalBuild, build_local
from dsec_store.objects import Objects

PROGRAM = "dsec-image"

_SHORT: Final = len("blake3:") + 12

SOURCE = Checked("source", parse_source)
PLATFORM = Checked("platform", Platform.parse)


def main() -> None:
    run_group(group, PROGRAM)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dsec-platform")
def group() -> None:
    """Images of the chunk store: from OCI images, folders and tars; to be mounted lazily."""


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
    """Store the OCI image SRC under NAME.

    SRC is oci:DIR[:TAG] or oci-archive:FILE[:TAG]; the last colon splits, unless the whole path exists.
    """
    objects = open_objects(Settings.of(store, None).store, create=True)
    with open_source(source) as opened, progress() as shown:
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
@click.argument("path", type=click.Path(path_type=Path))
@click.argument("name", type=NAME)
@click.option("--kind", type=click.Choice(KINDS), required=True, help="What the layer is for.")
@click.option("--prefix", default="/", show_default=True, help="Where the tree is to appear, as in /testbed.")
@click.option("--env", type=ENV, multiple=True, help="An environment variable that goes with the layer. Repeatable.")
@click.option("--path", "search", multiple=True, help="A folder in front of PATH, as in /opt/t/bin. Repeatable.")
@click.option("--keep-owner", is_flag=True, help="Keep uid and gid; without it, all is owned by 0:0.")
@click.option(
    "--clamp-mtime",
    type=int,
    envvar="SOURCE_DATE_EPOCH",
    metavar="SECONDS",
    help="No mtime is later than this [$SOURCE_DATE_EPOCH].",
)
@verify_option
@store_option
@json_option
def build(
    path: Path,
    name: str,
    kind: str,
    prefix: str,
    env: tuple[tuple[str, str], ...],
    search: tuple[str, ...],
    keep_owner: bool,
    clamp_mtime: int | None,
    verify: bool,
    store: str | None,
    as_json: bool,
) -> None:
    """Store the folder or tar PATH under NAME, as an image of one layer."""
    try:
        wanted = LocalBuild(kind, prefix, env, search, keep_owner, clamp_mtime)
    except StoreError as error:
        raise click.UsageError(str(error)) from None
    objects = open_objects(Settings.of(store, None).store, create=True)
    built = build_local(objects, path, name, wanted, verify=verify)
    if as_json:
        emit(
            {
                "name": name,
                "image": str(built.image),
                "new_packs": built.layer.new_packs,
                "new_bytes": built.layer.new_bytes,
            }
        )
        return
    click.echo(f"{name}: {built.image}")
    click.echo(f"{built.layer.new_packs} new packs, {size(built.layer.new_bytes)} of chunks added")


@group.command("ls")
@store_option
@json_option
def list_images(store: str | None, as_json: bool) -> None:
    """List the names in the store."""
    objects = open_objects(Settings.of(store, None).store, policy=PROMPT)
    rows = []
    for name in objects.references.names():
        digest = objects.references.get(name)
        rows.append({"name": name, "image": str(digest), **_summary(objects, digest)})
    if as_json:
        emit(rows)
        return
    print_table(
        ["NAME", "KIND", "LAYERS", "SOURCE", "IMAGE"],
        [
            [
                row["name"],
                row["kind"],
                str(row["layers"]),
                size(row["source_bytes"]),
                row["image"][:_SHORT],
            ]
            for row in rows
        ],
    )


def _summary(objects: Objects, digest: Digest) -> dict[str, Any]:
    """One damaged image does not hide the others."""
    try:
        image = objects.image(digest)
    except StoreError as error:
        return {"kind": "damaged", "layers": 0, "source_bytes": 0, "problem": str(error)}
    return {"kind": image.kind, "layers": len(image.layers), "source_bytes": image.source_bytes}


@group.command()
@click.argument("name", type=NAME)
@store_option
@json_option
def inspect(name: str, store: str | None, as_json: bool) -> None:
    """Show what NAME consists of, with every digest."""
    objects = open_objects(Settings.of(store, None).store, policy=PROMPT)
    digest = objects.references.get(name)
    image = objects.image(digest)
    facts = {"name": name, "image": str(digest), **describe(image)}
    layers = [_layer_facts(objects, layer) for layer in image.layers]
    if as_json:
        emit({**facts, "layers": layers})
        return
    for key, value in facts.items():
        click.echo(f"{key + ':':14}{_for_people(key, value)}")
    for number, layer in enumerate(layers):
        click.echo(f"layer {number}:")
        for key, value in layer.items():
            click.echo(f"    {key + ':':12}{_for_people(key, value)}")


def _layer_facts(objects: Objects, digest: Digest) -> dict[str, Any]:
    layer = objects.layer(digest)
    return {
        "descriptor": str(digest),
        "diff_id": str(layer.diff_id) if layer.diff_id else None,
        "metadata": layer.metadata.as_json(),
        "chunk_map": layer.chunk_map.as_json(),
        "blob_size": layer.blob_size,
        "inodes": layer.inodes,
        "chunker": layer.chunker.as_json(),
    }


def _for_people(key: str, value: Any) -> str:
    if isinstance(value, dict) and set(value) == {"digest", "size"}:
        return f"{value['digest']} ({size(value['size'])})"
    if isinstance(value, dict):
        return " ".join(f"{name}={entry}" for name, entry in value.items()) or "-"
    if isinstance(value, list):
        return ":".join(value) or "-"
    if key.endswith(("_size", "_bytes")):
        return size(value)
    return "-" if value is None else str(value)


@group.command()
@click.argument("name", type=NAME)
@click.option("--deep", is_flag=True, help="Fetch and verify every chunk too.")
@store_option
@json_option
def check(name: str, deep: bool, store: str | None, as_json: bool) -> None:
    """Verify that all of NAME is in the store and undamaged. Exit code 1 if it is not."""
    objects = open_objects(Settings.of(store, None).store, policy=PROMPT)
    with progress() as shown:
        digest = objects.references.get(name)
        report = check_image(objects, digest, deep=deep, progress=lambda done, total: shown("layers", done, total))
    if as_json:
        facts = {"layers": report.layers, "chunks": report.chunks, "bytes": report.bytes, "problems": report.problems}
        emit({"name": name, "image": str(digest), "deep": deep, **facts})
    else:
        for problem in report.problems:
            click.echo(problem)
        read = f", {report.chunks} chunks ({size(report.bytes)}) read" if deep else ""
        click.echo(f"{name}: {len(report.problems)} problems in {report.layers} layers{read}")
    if report.problems:
        raise SystemExit(1)


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
    images = [objects.image(objects.references.get(name)) for name in names]
    layers = [layer for image in images for layer in image.layers]
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
