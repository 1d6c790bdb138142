"""The files of a layer with many blobs: fetched together, but never too many at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import pytest

from dsec_store import keys
from dsec_store.around import AroundBlobs, Request
from dsec_store.backends.memory import MemoryBlobs
from dsec_store.descriptor import Blob, LayerDescriptor
from dsec_store.errors import NotFound
from dsec_store.layerfiles import REQUESTS_AT_ONCE, LayerFiles
from dsec_store.meter import MeteredBlobs
from dsec_store.objects import Objects
from tests.dsec_store.blobmaker import PATIENCE, in_threads, noise, store_blob

BLOBS: Final = 40
T = TypeVar("T")


class Crowd(AroundBlobs):
    """Lets nobody through before `size` requests are under way at once, and counts how many were at most."""

    def __init__(self, inner: MemoryBlobs, size: int) -> None:
        super().__init__(inner)
        self.most = 0
        self._size = size
        self._inside = 0
        self._changed = threading.Condition()

    def _around(self, request: Request, call: Callable[[], T]) -> T:
        with self._changed:
            self._inside += 1
            self.most = max(self.most, self._inside)
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self.most >= self._size, PATIENCE):
                raise AssertionError(f"only {self.most} at once")
        try:
            return call()
        finally:
            with self._changed:
                self._inside -= 1


def stored_run(objects: Objects, blobs: int, seed: str = "") -> LayerDescriptor:
    """A layer with so many blobs; its metadata image is none, which nobody here looks into."""
    found = []
    for number in range(blobs):
        blob = store_blob(objects, noise(5000, f"{seed}{number}"))
        chunk_map = objects.put_chunk_map(blob.chunk_map)
        objects.put_locator(chunk_map, blob.locations)
        found.append(Blob(chunk_map, 5000))
    metadata = objects.put_metadata(f"metadata image {seed}".encode() * 50)
    return LayerDescriptor(metadata, tuple(found), inodes=2, has_root=False)


def test_all_files_of_a_run_arrive(tmp_path: Path) -> None:
    metered = MeteredBlobs(MemoryBlobs())
    objects, files = Objects(metered), LayerFiles(tmp_path)
    layer = stored_run(objects, BLOBS)
    before = metered.snapshot().total.requests
    files.fetch(objects, layer)
    assert metered.snapshot().total.requests - before == 1 + 2 * BLOBS
    assert files.blobs() == sorted(blob.name.hex for blob in layer.blobs)
    for blob in layer.blobs:
        chunk_map = files.chunk_map(blob.name)
        assert len(files.locator(blob.name, len(chunk_map))) == len(chunk_map)


def test_a_blob_that_a_layer_has_twice_is_fetched_once(tmp_path: Path) -> None:
    metered = MeteredBlobs(MemoryBlobs())
    objects = Objects(metered)
    layer = stored_run(objects, 1)
    before = metered.snapshot().total.requests
    LayerFiles(tmp_path).fetch(objects, LayerDescriptor(layer.metadata, layer.blobs * 2, inodes=2, has_root=False))
    assert metered.snapshot().total.requests - before == 3


def test_so_many_at_once_and_no_more(tmp_path: Path) -> None:
    store = MemoryBlobs()
    layers = [stored_run(Objects(store), BLOBS, seed) for seed in ("one", "two")]
    crowd, files = Crowd(store, REQUESTS_AT_ONCE), LayerFiles(tmp_path)
    done = in_threads([lambda layer=layer: files.fetch(Objects(crowd), layer) for layer in layers])  # type: ignore[misc]
    assert done == [None, None]
    assert crowd.most == REQUESTS_AT_ONCE


@pytest.mark.parametrize("number", [0, BLOBS - 1])
def test_one_that_is_missing_is_told(tmp_path: Path, number: int) -> None:
    objects = Objects(MemoryBlobs())
    layer = stored_run(objects, BLOBS)
    lost = layer.blobs[number].name
    objects.blobs.delete(keys.locator(lost))
    with pytest.raises(NotFound, match=f"locator of chunk map {lost} is missing"):
        LayerFiles(tmp_path).fetch(objects, layer)
