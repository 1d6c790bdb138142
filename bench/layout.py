"""The layers of the images that the benchmarks work on, straight from their OCI layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scripts.inputs import IMAGE


def blob(digest: str, layout: Path = IMAGE) -> Path:
    algorithm, _, hex = digest.partition(":")
    return layout / "blobs" / algorithm / hex


def manifest_digest(layout: Path = IMAGE) -> str:
    index = json.loads((layout / "index.json").read_text(encoding="utf-8"))
    return str(index["manifests"][0]["digest"])


def _manifest(layout: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads(blob(manifest_digest(layout), layout).read_text(encoding="utf-8"))
    return manifest


def layers(layout: Path = IMAGE) -> list[str]:
    """Digests, bottom first."""
    return [layer["digest"] for layer in _manifest(layout)["layers"]]


def all_blobs() -> list[str]:
    """Digests of what a pull fetches, in its order: manifest, config, layers."""
    return [manifest_digest(), _manifest(IMAGE)["config"]["digest"], *layers()]
