"""What the OCI documents of an image's origin say of its layers. Pure.

Source: OCI image specification, manifest.md ("layers") and config.md ("rootfs"). Conversion reads these documents
strictly; here, only two lists of them are looked at.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from dsec_store.digest import Digest
from dsec_store.errors import Corrupt, Invalid


def diff_ids(config: bytes, what: str) -> list[Digest]:
    """The diff_ids of an image configuration, bottom first. Raises `Corrupt` naming `what`."""
    try:
        return [Digest.parse(text) for text in _list(_object(_object(json.loads(config)).get("rootfs")), "diff_ids")]
    except (ValueError, TypeError, AttributeError, Invalid, RecursionError):
        raise Corrupt(f"{what}: it is no image configuration with diff_ids") from None


def chain_ids(diffs: Sequence[Digest]) -> list[Digest]:
    """The chain_id of each layer with those below it (config.md, "Layer ChainID")."""
    chain = list(diffs[:1])
    for diff in diffs[1:]:
        chain.append(Digest.of(f"{chain[-1]} {diff}".encode(), "sha256"))
    return chain


def layer_sizes(manifest: bytes, what: str) -> list[int]:
    """The compressed bytes of the layers of a manifest, bottom first. Raises `Corrupt` naming `what`."""
    try:
        return [int(layer["size"]) for layer in _list(_object(json.loads(manifest)), "layers")]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise Corrupt(f"{what}: it is no manifest with layers") from None


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError
    return value


def _list(owner: dict[str, Any], name: str) -> list[Any]:
    value = owner.get(name)
    if not isinstance(value, list):
        raise TypeError
    return value
