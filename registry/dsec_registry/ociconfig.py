"""OCI image configs that are made: of images that came without one, or say more than theirs.

The same image gives the same bytes: canonical JSON (docs/format/descriptor.md), no time of making, nothing of this
machine. What is in it: docs/export.md. Source: OCI image-spec 1.1, config.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from dsec_registry.manifest import Platform
from dsec_store import document
from dsec_store.descriptor import Image, Pairs, RunConfig, with_additions
from dsec_store.digest import Digest

EPOCH: Final = "1970-01-01T00:00:00Z"
"""When everything was made."""


def make_config(image: Image, platform: Platform, diff_ids: Sequence[Digest]) -> bytes:
    """The config of `image`, whose layers' tars have these digests, from the lowest up."""
    history = [{"created": EPOCH, "created_by": f"dsec-image: {image.kind} layer {layer}"} for layer in image.layers]
    return document.encode(
        {
            **platform_fields(platform),
            "created": EPOCH,
            "config": _run_config(image.config, environment(image)),
            "rootfs": {"type": "layers", "diff_ids": [str(diff_id) for diff_id in diff_ids]},
            "history": history,
        }
    )


def platform_fields(platform: Platform) -> dict[str, str]:
    """As configs and descriptors have them."""
    fields = {"os": platform.os, "architecture": platform.architecture, "variant": platform.variant}
    return {name: value for name, value in fields.items() if value}


def environment(image: Image) -> Pairs:
    """The variables of the image's config, with what the image adds to them and puts in front of PATH."""
    if not image.env and not image.path:
        return image.config.env
    return with_additions(image.config.env, image.env, image.path)


def _run_config(run: RunConfig, env: Pairs) -> dict[str, Any]:
    """What is empty is left out."""
    fields: dict[str, Any] = {
        "Env": [f"{name}={value}" for name, value in env],
        "WorkingDir": run.working_dir,
        "User": run.user,
        "Entrypoint": list(run.entrypoint),
        "Cmd": list(run.cmd),
        "Labels": dict(run.labels),
        "StopSignal": run.stop_signal,
        "ExposedPorts": {port: {} for port in run.exposed_ports},
        "Volumes": {volume: {} for volume in run.volumes},
    }
    return {name: value for name, value in fields.items() if value}
