"""A node's blobs as the data daemon uses them: what they give without the store."""

from pathlib import Path

import pytest

from dsec_store.backends.memory import MemoryBlobs
from dsec_store.chunks import ChunkSource
from dsec_store.digest import Digest
from dsec_store.errors import NotFound
from dsec_store.layerfiles import LayerFiles, NodeBlobs
from dsec_store.objects import Objects
from tests.dsec_store.blobmaker import flipped, noise, store_blob
from tests.dsec_store.test_chunks import DictCache

DATA = noise(60_000, "at hand")


@pytest.fixture
def objects() -> Objects:
    return Objects(MemoryBlobs())


@pytest.fixture
def files(tmp_path: Path) -> LayerFiles:
    return LayerFiles(tmp_path)


@pytest.fixture
def digest(objects: Objects, files: LayerFiles) -> Digest:
    """A blob whose chunk map and locator are on the node."""
    blob = store_blob(objects, DATA)
    stored = objects.put_chunk_map(blob.chunk_map)
    objects.put_locator(stored, blob.locations)
    files.keep_chunk_map(stored.digest, objects.chunk_map_bytes(stored))
    files.keep_locator(stored.digest, objects.locator_bytes(stored.digest))
    return stored.digest


def test_a_cached_range_is_given_without_the_store(objects: Objects, files: LayerFiles, digest: Digest) -> None:
    blobs = NodeBlobs(files, objects, ChunkSource(objects.blobs, DictCache()))
    blob = blobs.at_hand(digest.hex)
    assert blob is not None
    assert blob is blobs.at_hand(digest.hex) is blobs.open(digest.hex)
    assert blob.cached(100, 20_000) is None
    assert blob.figures.requests == blob.figures.hits == 0
    blob.read(0, len(DATA))
    requests = blob.figures.requests
    for offset, length in ((0, 1), (100, 20_000), (59_000, 5_000), (60_000, 7), (5, 0)):
        assert blob.cached(offset, length) == DATA[offset : offset + length]
    assert blob.figures.requests == requests
    assert blob.figures.hits > 0


def test_a_damaged_chunk_map_is_left_to_who_waits(
    objects: Objects, files: LayerFiles, digest: Digest, tmp_path: Path
) -> None:
    (path,) = tmp_path.rglob("*.map")
    path.write_bytes(flipped(path.read_bytes(), 40))
    blobs = NodeBlobs(files, objects, ChunkSource(objects.blobs, DictCache()))
    assert blobs.at_hand(digest.hex) is None
    assert blobs.open(digest.hex) is blobs.at_hand(digest.hex)


@pytest.mark.parametrize("name", ["0" * 64, "x"])
def test_a_blob_that_is_not_here_is_nobody_s_to_wait_for(objects: Objects, files: LayerFiles, name: str) -> None:
    with pytest.raises(NotFound):
        NodeBlobs(files, objects, ChunkSource(objects.blobs, DictCache())).at_hand(name)
