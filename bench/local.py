"""The control of the warm benchmark: the same layers mounted from plain local files, without any process of ours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from dsec_cli.wiring import open_objects
from dsec_snapshotter import mounts
from dsec_store.chunks import ChunkSource, NoCache
from dsec_store.descriptor import LayerDescriptor
from dsec_store.layer.build import open_blob
from dsec_store.objects import Objects

_PIECE: Final = 4 << 20


def materialise(store: str, images: Sequence[str], folder: Path) -> list[Path]:
    """Write metadata image and blob of every layer of `images` into a folder of its own; bottom first."""
    objects = open_objects(store)
    source = ChunkSource(objects.blobs, NoCache())
    digests = [layer for image in images for layer in objects.image(objects.references.get(image)).layers]
    return [
        _write(objects, source, objects.layer(digest), folder / str(number)) for number, digest in enumerate(digests)
    ]


def _write(objects: Objects, source: ChunkSource, layer: LayerDescriptor, folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "metadata").write_bytes(objects.metadata(layer.metadata))
    blob = open_blob(objects, layer, source)
    with (folder / "blob").open("wb") as file:
        for offset in range(0, blob.size, _PIECE):
            file.write(blob.read(offset, _PIECE))
    return folder


@contextmanager
def mounted(layers: Sequence[Path], folder: Path, *, as_lazy: bool) -> Iterator[Path]:
    """A read-only overlay over `layers` as a node makes it; everything is unmounted at the end.

    `as_lazy`: the layers have the options and the read-ahead of lazy ones too, instead of the kernel's defaults.
    """
    with ExitStack() as undo:
        lowers: list[str] = []
        for number, layer in enumerate(layers):
            lower = _directory(folder / str(number))
            mounts.mount_erofs(f"{layer}/metadata", [f"{layer}/blob"], lower, direct_io=as_lazy)
            undo.callback(mounts.unmount, lower, lazy=True)
            if as_lazy and (bdi := mounts.bdi_of(lower)):
                mounts.set_read_ahead(bdi, mounts.READ_AHEAD)
            lowers.insert(0, lower)
        merged = _directory(folder / "merged")
        mounts.mount_overlay([_directory(folder / "top"), *lowers], None, merged)
        undo.callback(mounts.unmount, merged, lazy=True)
        yield Path(merged)


def _directory(path: Path) -> str:
    path.mkdir(parents=True)
    return str(path)
