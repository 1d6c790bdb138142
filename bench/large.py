"""A large image of real packages, as an OCI layout: Debian with Python, scientific packages, a web project of npm.

Made once from layers that the family benchmarks use as well (`bench.families`), about 1.2 GiB of tar in three layers.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from bench.families import families, folder
from bench.measure import run
from scripts.inputs import TAG

LAYOUT: Final = "large"


def large_image() -> Path:
    """The layout's folder; the image's tag is that of all our inputs."""
    layout = folder() / LAYOUT
    if layout.exists():
        return layout
    known = families()
    debian, packages = known["yardstick"].versions[0]
    project = known["node"].versions[-1][-1]
    part = layout.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    image = f"{part}:{TAG}"
    run(["umoci", "init", "--layout", str(part)])
    run(["umoci", "new", "--image", image])
    for tar in (debian, packages, project):
        run(["umoci", "raw", "add-layer", "--image", image, str(tar)])
    run(["umoci", "gc", "--layout", str(part)])
    part.rename(layout)
    return layout
