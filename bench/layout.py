"""The layers of the image that the benchmarks work on, straight from its OCI layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scripts.inputs import IMAGE


def blob(digest: str, layout: Path = IMAGE) -> Path:
    algorithm, _, hex = digest.partition(":")
    return layout / "blobs" / algorithm / hex


def manifest_digest() -> str:
    index = json.loads((IMAGE / "index.json").read_text(encoding="utf-8"))
    return str(index["manifests"][0]["digest"])


def _manifest() -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads(blob(manifest_digest()).read_text(encoding="utf-8"))
    return manifest


def layers() -> list[str]:
    """Digests, bottom first."""
    return [layer["digest"] for layer in _manifest()["layers"]]


def all_blobs() -> list[str]:
    """Digests of what a pull fetches, in its order: manifest, config, layers."""
    return [manifest_digest(), _manifest()["config"]["digest"], *layers()]
