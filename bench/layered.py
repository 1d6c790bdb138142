"""Images of many layers for the collapse benchmark: each layer brings a package and a tool, as an installer does."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from bench.nodes import Commands
from tests import tarmaker as tar
from tests.ocimaker import Layer, LayoutMaker

FILES: Final = 20
SMALL: Final = 1500
DATA: Final = 128 << 10
"""Bytes of the files of a package: many small ones, and one."""

PLAIN, AUTOMATIC, ONE = "plain", "automatic", "one run"
FORMS: Final = {PLAIN: "--undo", AUTOMATIC: "--auto", ONE: "--all"}

SHARED: Final = 32
FEW_SHARED: Final = 20

IMAGES: Final[dict[str, Sequence[int]]] = {
    "n20": range(20),
    "n40": range(40),
    "n140": range(140),
    "many": [*range(SHARED), *range(1000, 1008)],
    "few": [*range(FEW_SHARED), *range(2000, 2020)],
}
"""The numbers of the layers of each. `many` and `few` share their lower layers with n40."""


def make_layout(path: Path) -> Path:
    """An OCI layout with all images, by tag."""
    maker = LayoutMaker(path)
    for tag, numbers in IMAGES.items():
        maker.add(maker.image([_layer(number) for number in numbers]), tag=tag)
    return maker.path


def fill(commands: Commands, layout: Path, images: Iterable[str]) -> None:
    """Store each image in each form, as `stored_name`."""
    for image in images:
        for form, option in FORMS.items():
            commands("dsec-image", "convert", f"oci:{layout}:{image}", stored_name(image, form))
            commands("dsec-image", "collapse", stored_name(image, form), option)


def stored_name(image: str, form: str) -> str:
    return f"{image}-{form.replace(' ', '-')}"


def data_file(number: int) -> str:
    """Path of the large file of a layer."""
    return f"usr/lib/p{number}/data"


def _layer(number: int) -> Layer:
    chance = random.Random(number)
    package = b"usr/lib/p%d/" % number
    folders = (b"usr/", b"usr/bin/", b"usr/lib/", package)
    return Layer(
        tar.archive(
            *(tar.directory(folder) for folder in folders),
            tar.file(b"usr/bin/tool%d" % number, chance.randbytes(SMALL), mode=0o755),
            tar.file(package + b"data", chance.randbytes(DATA)),
            *(tar.file(package + b"f%d" % file, chance.randbytes(SMALL)) for file in range(FILES)),
        ),
        "plain",
    )
