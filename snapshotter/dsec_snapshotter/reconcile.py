"""At the start of a node: make records, mounts and folders agree again, wherever the last node was killed.

What is found                             means                                   and is
record and mount                          in use, or a warm layer                 adopted, untouched
record, no mount                          killed before the mount, unmounted by   dropped, with its folder
                                          hand, or the machine was restarted
mount or folder, no record                killed while it was being taken down    unmounted, removed
record that cannot be read                a damaged disk                          moved aside; its mount and folder stay
                                                                                  and are reported, until `stop`

Only mountinfo and our own folders are read: nothing here can wait for the data daemon.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from pathlib import Path

from dsec_snapshotter import mounts, root
from dsec_snapshotter.compositions import Compositions, composition_records, remove_folder
from dsec_snapshotter.layers import Layers, layer_records
from dsec_snapshotter.mounts import MountInfo


def reconcile(layers: Layers, compositions: Compositions) -> None:
    """Fill both with what is mounted and on record, and clear away the rest."""
    found = _by_path(mounts.mountinfo())
    compositions_kept = _adopt_compositions(compositions, found)
    layers_kept = _adopt_layers(layers, found)
    _clear(root.COMPOSITIONS, compositions_kept | set(composition_records().broken()))
    _clear(root.LAYERS, layers_kept | set(layer_records().broken()))


def broken_records() -> list[Path]:
    """The record files that were moved aside and not yet dealt with."""
    return [*composition_records().broken().values(), *layer_records().broken().values()]


def clear_all() -> None:
    """Detach and remove whatever there is, on record or not. For `stop`."""
    _clear(root.COMPOSITIONS, set())
    _clear(root.LAYERS, set())
    for records in (composition_records(), layer_records()):
        records.forget_broken()


def _by_path(found: list[MountInfo]) -> dict[bytes, list[MountInfo]]:
    """What is mounted at each path: somebody may have mounted something over ours."""
    paths: dict[bytes, list[MountInfo]] = {}
    for mount in found:
        paths.setdefault(mount.mountpoint, []).append(mount)
    return paths


def _adopt_compositions(compositions: Compositions, found: dict[bytes, list[MountInfo]]) -> set[str]:
    records = composition_records()
    kept = set()
    for id, composition in records.load().items():
        if any(composition.is_at(mount) for mount in found.get(os.fsencode(composition.path), [])):
            compositions.adopt(composition)
            kept.add(id)
        else:
            records.remove(id)
    return kept


def _adopt_layers(layers: Layers, found: dict[bytes, list[MountInfo]]) -> set[str]:
    records = layer_records()
    kept = set()
    for id, layer in records.load().items():
        here = found.get(os.fsencode(os.path.abspath(layer.path)), [])
        if any(mount.source == layer.image.encode() for mount in here) and layers.adopt(layer):
            kept.add(id)
        else:
            records.remove(id)
    return kept


def _clear(parent: str, kept: Collection[str]) -> None:
    """Detach every mount below the folders in `parent` that are not `kept`, innermost first, and remove them."""
    base = os.fsencode(os.path.abspath(parent))
    for mount in reversed(mounts.mountinfo()):
        inside = mount.mountpoint.removeprefix(base + b"/")
        if inside != mount.mountpoint and os.fsdecode(inside.split(b"/", 1)[0]) not in kept:
            mounts.unmount_all(os.fsdecode(mount.mountpoint))
    for folder in Path(parent).iterdir():
        if folder.name not in kept:
            _remove(folder)


def _remove(folder: Path) -> None:
    if folder.parent.name == root.COMPOSITIONS:
        remove_folder(str(folder))
    else:
        shutil.rmtree(folder, ignore_errors=True)
