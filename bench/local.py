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
from dsec_store.objects import Objects
from dsec_store.storedblob import open_blob

_PIECE: Final = 4 << 20


def materialise(store: str, images: Sequence[str], folder: Path) -> list[Path]:
    """Write metadata image and blobs of every mounted layer of `images` into a folder of its own; bottom first."""
    objects = open_objects(store)
    source = ChunkSource(objects.blobs, NoCache())
    digests = [layer for image in images for layer in objects.image(objects.references.get(image)).mounted]
    return [
        _write(objects, source, objects.layer(digest), folder / str(number)) for number, digest in enumerate(digests)
    ]


def _write(objects: Objects, source: ChunkSource, layer: LayerDescriptor, folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "metadata").write_bytes(objects.metadata(layer.metadata))
    for number, blob in enumerate(layer.blobs):
        lazy = open_blob(objects, blob, source)
        with (folder / f"blob-{number}").open("wb") as file:
            for offset in range(0, lazy.size, _PIECE):
                file.write(lazy.read(offset, _PIECE))
    return folder


def _devices(layer: Path) -> list[str]:
    """The blobs of a layer's folder in the order of its device table; none if no file has contents."""
    return [f"{layer}/blob-{number}" for number in range(len(list(layer.glob("blob-*"))))]


@contextmanager
def mounted(layers: Sequence[Path], folder: Path, *, as_lazy: bool) -> Iterator[Path]:
    """A read-only overlay over `layers` as a node makes it; everything is unmounted at the end.

    `as_lazy`: the layers have the options and the read-ahead of lazy ones too, instead of the kernel's defaults.
    """
    with ExitStack() as undo:
        lowers: list[str] = []
        for number, layer in enumerate(layers):
            lower = _directory(folder / str(number))
            mounts.mount_erofs(f"{layer}/metadata", _devices(layer), lower, direct_io=as_lazy)
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
