"""Environments: names in the store become layers from the bottom up, and how a command starts in them.

    base at the bottom, workspace above, toolkits on top:        resolve(objects, "debian", ["repo/main"], ["ripgrep"])

The base's configuration is the frame. What the other images carry (`env`, `path`) is added in the order of the layers,
then what the caller says (`dsec_sandbox.spec.merge_env`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsec_store.descriptor import Image, Pairs
from dsec_store.descriptor import RunConfig as ImageRunConfig
from dsec_store.digest import Digest
from dsec_store.errors import Invalid
from dsec_store.objects import Objects


@dataclass(frozen=True, slots=True)
class Environment:
    """Layers, bottom first; the base's run configuration; what each further image adds to the environment."""

    layers: tuple[Digest, ...]
    run: ImageRunConfig
    additions: tuple[tuple[Pairs, tuple[str, ...]], ...]


def resolve(objects: Objects, base: str, workspaces: Sequence[str] = (), toolkits: Sequence[str] = ()) -> Environment:
    """The environment of these names. Raises `NotFound` for a name, `Invalid` for an image of the wrong kind."""
    images = [_image(objects, base, None)]
    images += [_image(objects, name, "workspace") for name in workspaces]
    images += [_image(objects, name, "toolkit") for name in toolkits]
    return Environment(
        # A run knows only what lies below it in its own image: above the base, each layer is mounted by itself.
        layers=(*images[0].mounted, *(layer for image in images[1:] for layer in image.layers)),
        run=images[0].config,
        additions=tuple((image.env, image.path) for image in images),
    )


def _image(objects: Objects, name: str, kind: str | None) -> Image:
    image = objects.image(objects.references.get(name))
    if kind is not None and image.kind != kind:
        raise Invalid(f"{name!r} is a {image.kind}, not a {kind}")
    return image
