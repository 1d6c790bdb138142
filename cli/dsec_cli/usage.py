"""`dsec-image inspect` and `du`: what images consist of, and what room they take."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import click

from dsec_cli.command import NAME, emit, json_option, print_table, progress, say, size, store_option
from dsec_cli.wiring import PROMPT, Settings, open_objects
from dsec_store.check import describe
from dsec_store.descriptor import Image, LayerDescriptor
from dsec_store.digest import Digest
from dsec_store.errors import NotFound
from dsec_store.objects import Objects
from dsec_store.references import Origin
from dsec_store.sourcedocs import layer_sizes
from dsec_store.usage import Amount, ImageUse, LayerUse, StoreUse, Survey, amount_of, survey_store

PROGRAM: Final = "dsec-image"

LAYERS_AT_ONCE: Final = 16
"""Layers that are read at once."""


# -- inspect -----------------------------------------------------------------------------------------------------------


@click.command()
@click.argument("name", type=NAME)
@click.option("--sharing", is_flag=True, help="Tell what other images and layers use too; reads all images' locators.")
@store_option
@json_option
def inspect(name: str, sharing: bool, store: str | None, as_json: bool) -> None:
    """Show what NAME consists of, with every digest, size and number of chunks."""
    objects = open_objects(Settings.of(store, None).store, policy=PROMPT)
    reference = objects.references.read(name)
    image = objects.image(reference.image)
    facts = {"name": name, "image": str(reference.image), **describe(image, reference.origin)}
    layers = _layers_facts(objects, image, reference.origin)
    mounted = _mounted_facts(objects, image)
    if sharing:
        facts |= _add_sharing(objects, name, layers)
    if as_json:
        emit({**facts, "mounted": mounted, "layers": layers})
        return
    for key, value in facts.items():
        click.echo(f"{key + ':':26}{_for_people(key, value)}")
    for number, layer in enumerate(layers):
        click.echo(f"layer {number}:")
        for key, value in layer.items():
            click.echo(f"    {key + ':':26}{_for_people(key, value)}")
    for lower in mounted:
        if lower["run"]:
            click.echo(f"run {lower['layer']}: {len(lower['run'])} layers mounted as one, {lower['inodes']} inodes")


def _layers_facts(objects: Objects, image: Image, origin: Origin) -> list[dict[str, Any]]:
    def facts(digest: Digest) -> dict[str, Any]:
        layer = objects.layer(digest)
        contents = amount_of(objects, layer.blobs)
        recipe = amount_of(objects, [layer.recipe]) if layer.recipe else None
        return _layer_facts(digest, layer, contents, recipe)

    with ThreadPoolExecutor(LAYERS_AT_ONCE, thread_name_prefix="layer") as pool:
        layers = list(pool.map(facts, image.layers))
    for layer, source in zip(layers, _source_sizes(objects, origin, len(layers)), strict=True):
        layer["source_bytes"] = source
    return layers


def _layer_facts(digest: Digest, layer: LayerDescriptor, contents: Amount, recipe: Amount | None) -> dict[str, Any]:
    return {
        "descriptor": str(digest),
        "diff_id": str(layer.diff_id) if layer.diff_id else None,
        "metadata": layer.metadata.as_json(),
        "blobs": [blob.as_json() for blob in layer.blobs],
        "inodes": layer.inodes,
        "chunker": layer.chunker.as_json() if layer.chunker else None,
        "chunks": contents.chunks,
        "average_chunk_bytes": contents.average,
        "plain_bytes": contents.plain,
        "stored_bytes": contents.stored,
        "recipe": {**layer.recipe.as_json(), "stored_bytes": recipe.stored} if layer.recipe and recipe else None,
    }


def _source_sizes(objects: Objects, origin: Origin, layers: int) -> list[int | None]:
    """The compressed bytes of each layer as it came; None where no manifest says it."""
    if origin.manifest is None:
        return [None] * layers
    sizes = layer_sizes(objects.oci(origin.manifest), f"manifest {origin.manifest}")
    return list(sizes) if len(sizes) == layers else [None] * layers


def _mounted_facts(objects: Objects, image: Image) -> list[dict[str, Any]]:
    """What a node mounts, bottom first: the layers, or runs of them."""
    with ThreadPoolExecutor(LAYERS_AT_ONCE, thread_name_prefix="layer") as pool:
        lowers = list(pool.map(objects.layer, image.mounted))
    return [
        {
            "layer": str(digest),
            "run": [str(part) for part in lower.run],
            "blobs": len(lower.blobs),
            "inodes": lower.inodes,
        }
        for digest, lower in zip(image.mounted, lowers, strict=True)
    ]


def _add_sharing(objects: Objects, name: str, layers: list[dict[str, Any]]) -> dict[str, Any]:
    """Put what is shared into the facts of the layers; returns those of the image."""
    with progress() as shown:
        survey = survey_store(objects, watch=name, progress=shown)
    _complain(survey)
    if name not in survey.images:
        raise NotFound(f"image {name}: removed while it was looked at")
    for layer, use in zip(layers, survey.layers, strict=True):
        layer.update(_layer_sharing(use))
    return _image_facts(survey.images[name])


def _layer_sharing(use: LayerUse) -> dict[str, int]:
    return {
        "shared_with_images_bytes": use.shared_with_images,
        "shared_with_layers_bytes": use.shared_with_layers,
    }


def _for_people(key: str, value: Any) -> str:
    if value is None or value in ([], {}):
        return "-"
    if key == "recipe":
        blob = value["chunk_map"]["digest"]
        return f"{blob} ({size(value['size'])}, {size(value['stored_bytes'])} stored)"
    if key == "metadata":
        return f"{value['digest']} ({size(value['size'])})"
    if isinstance(value, dict):
        return " ".join(f"{name}={entry}" for name, entry in value.items())
    if isinstance(value, list):
        return _list_for_people(key, value)
    return size(value) if key.endswith("_bytes") else str(value)


def _list_for_people(key: str, values: list[Any]) -> str:
    if key == "blobs":
        return " ".join(f"{blob['chunk_map']['digest']} ({size(blob['size'])})" for blob in values)
    return ":".join(values)


# -- du ----------------------------------------------------------------------------------------------------------------


@click.command()
@click.argument("names", type=NAME, nargs=-1)
@store_option
@json_option
def du(names: tuple[str, ...], store: str | None, as_json: bool) -> None:
    """Show the room that images take, and what of it no other image shares: all of them, or NAME...

    STORED are bytes of chunks in the store, compressed, recipes included; UNIQUE is what of them would go with the
    image. PLAIN are the contents' bytes, uncompressed. DOCUMENTS are metadata images, chunk maps, and other small
    objects.
    """
    objects = open_objects(Settings.of(store, None).store, policy=PROMPT)
    for name in names:
        objects.references.get(name)
    with progress() as shown:
        survey = survey_store(objects, progress=shown)
    images = {name: use for name, use in survey.images.items() if not names or name in names}
    if as_json:
        facts = {name: _image_facts(use) for name, use in images.items()}
        emit({"images": facts, "store": _store_facts(survey.store), "problems": survey.problems})
    else:
        _show(images, survey.store)
    _complain(survey, as_json)
    if survey.problems:
        raise SystemExit(1)


def _complain(survey: Survey, as_json: bool = False) -> None:
    for problem in () if as_json else survey.problems:
        say(PROGRAM, problem)


def _image_facts(use: ImageUse) -> dict[str, Any]:
    return {
        "layer_count": use.layers,
        "chunks": use.contents.chunks,
        "plain_bytes": use.contents.plain,
        "stored_bytes": use.stored,
        "unique_bytes": use.unique,
        "shared_bytes": use.shared,
        "recipe_stored_bytes": use.recipes.stored,
        "document_bytes": use.documents,
        "shared_with": use.shared_with,
    }


def _store_facts(store: StoreUse) -> dict[str, Any]:
    families = {name: {"objects": count, "bytes": amount} for name, (count, amount) in store.families.items()}
    return {"bytes": store.bytes, "families": families, "unused_bytes": store.unused, "dead_bytes": store.dead}


def _show(images: dict[str, ImageUse], store: StoreUse) -> None:
    rows = [
        [
            name,
            *(str(use.layers), size(use.contents.plain), size(use.stored), size(use.unique), size(use.shared)),
            *(size(use.recipes.stored), size(use.documents), str(use.shared_with)),
        ]
        for name, use in images.items()
    ]
    headings = ["NAME", "LAYERS", "PLAIN", "STORED", "UNIQUE", "SHARED", "RECIPES", "DOCUMENTS", "SHARED WITH"]
    print_table(headings, rows)
    click.echo(f"store: {size(store.bytes)} in {sum(count for count, _ in store.families.values())} objects")
    if store.unused is None or store.dead is None:
        click.echo("what no name uses cannot be told while something cannot be read")
        return
    click.echo(f"no name uses {size(store.unused)} of whole objects and {size(store.dead)} inside of packs")
    click.echo("(gc frees at most so much)")
