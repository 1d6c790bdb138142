"""Damage in the store and on the node's disk: an error or the right bytes, never wrong ones, and it is named."""

import errno
import random
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from dsec_store import keys
from dsec_store.backends.folder import FolderBlobs
from dsec_store.chunkmap import ChunkLocation
from dsec_store.layer.erofs import read_image
from dsec_store.layer.tree import Directory, inode_of
from dsec_store.objects import Objects
from tests.flows.images import make_folder
from tests.flows.world import World

pytestmark = pytest.mark.flow

FILES: Final = {name: random.Random(name).randbytes(1 << 20) for name in ("a", "b", "c", "d")}
VICTIM: Final = "b"


class Place(NamedTuple):
    """Where the first chunk of a file lies."""

    digest: str
    pack: Path
    location: ChunkLocation


@pytest.fixture
def files(world: World) -> World:
    """A world with FILES in its store, under the name `files`."""
    folder = make_folder(world.folder / "files", FILES)
    world.ok("dsec-image", "build", str(folder), "files", "--kind", "workspace")
    return world


@pytest.fixture
def victim(files: World) -> Place:
    """The chunk that will be damaged."""
    objects = Objects(FolderBlobs(files.store))
    (digest,) = objects.image(objects.references.get("files")).layers
    layer = objects.layer(digest)
    tree = dict(read_image(objects.metadata(layer.metadata)).root.walk())
    node = tree[VICTIM.encode()]
    assert not isinstance(node, Directory)
    address = inode_of(node).address
    assert address is not None
    blob = layer.blobs[address.device]
    chunk = objects.chunk_map(blob.chunk_map).covering(address.offset, 1)[0]
    location = objects.locator(blob.name)[chunk.number]
    return Place(f"blake3:{chunk.digest.hex()}", files.store / keys.pack(location.pack), location)


def flip(file: Path, offset: int) -> None:
    data = bytearray(file.read_bytes())
    data[offset] ^= 1
    file.write_bytes(data)


def mounted(world: World) -> Path:
    """The image `files`, on a new node."""
    target = world.make("target")
    world.ok("dsec-image", "mount", "files", str(target))
    return target


def read_all(target: Path) -> dict[str, bytes]:
    return {name: (target / name).read_bytes() for name in FILES}


def flip_a_byte(place: Place) -> None:
    flip(place.pack, place.location.offset + place.location.stored // 2)


def cut(place: Place) -> None:
    place.pack.write_bytes(place.pack.read_bytes()[: place.location.offset + 1])


def remove(place: Place) -> None:
    place.pack.unlink()


@pytest.mark.parametrize("damage", [flip_a_byte, cut, remove])
def test_damage_in_the_store_is_an_error_that_is_named_and_heals(
    files: World, victim: Place, damage: Callable[[Place], None]
) -> None:
    whole = victim.pack.read_bytes()
    damage(victim)
    target = mounted(files)
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output error") as caught:
            (target / VICTIM).read_bytes()
        assert caught.value.errno == errno.EIO
    assert victim.digest in (files.root / "daemon.log").read_text()
    assert victim.digest in files.status()["damaged_chunks"]
    assert any(victim.digest in line for line in files.ok("dsec", "node", "status").lines)
    victim.pack.write_bytes(whole)
    assert read_all(target) == FILES
    assert files.status()["damaged_chunks"] == {}


def test_what_is_not_damaged_can_be_read(files: World, victim: Place) -> None:
    flip_a_byte(victim)
    target = mounted(files)
    for name in FILES.keys() - {VICTIM}:
        assert (target / name).read_bytes() == FILES[name]


@pytest.mark.parametrize("damage", [flip_a_byte, cut, remove])
def test_check_finds_the_damage(files: World, victim: Place, damage: Callable[[Place], None]) -> None:
    """The deep one each kind, and the chunk or the pack by name."""
    damage(victim)
    done = files.run("dsec-image", "check", "files", "--deep", "--json")
    assert (done.code, done.errors) == (1, [])
    problems = done.json["problems"]
    assert problems
    assert all(victim.digest in problem or victim.pack.name in problem for problem in problems)
    shown = files.run("dsec-image", "check", "files", "--deep")
    assert (shown.code, shown.lines[:-1]) == (1, problems)


@pytest.mark.parametrize("damage", [flip_a_byte, cut, remove])
def test_building_again_repairs_it(files: World, victim: Place, damage: Callable[[Place], None]) -> None:
    """Readers that met the damage need no restart."""
    damage(victim)
    target = mounted(files)
    with pytest.raises(OSError, match="Input/output error"):
        (target / VICTIM).read_bytes()
    folder = str(files.folder / "files")
    files.ok("dsec-image", "build", folder, "again", "--kind", "workspace", "--verify")
    files.ok("dsec-image", "check", "files", "--deep")
    assert read_all(target) == FILES


def test_damage_in_the_nodes_cache_is_fetched_again(files: World) -> None:
    target = mounted(files)
    assert read_all(target) == FILES
    files.ok("dsec", "node", "stop", "--force")
    cached = [file for file in (files.root / "cache/data").iterdir() if file.stat().st_size]
    assert cached
    for file in cached:
        flip(file, file.stat().st_size // 2)
    files.ok("dsec-image", "mount", "files", str(target))
    assert read_all(target) == FILES
    stats = files.stats()
    assert stats["cache"]["damaged"] >= len(cached)
    assert stats["total"]["fetched_chunks"] >= len(cached)
    assert stats["total"]["hits"] > 0


@pytest.mark.parametrize("pattern", ["m/*.erofs", "c/*.map", "c/*.locator"])
def test_damage_in_a_layers_local_files_is_fetched_again(files: World, pattern: str) -> None:
    target = mounted(files)
    files.ok("dsec", "node", "stop", "--force")
    (file,) = files.root.glob(pattern)
    flip(file, file.stat().st_size // 2)
    files.ok("dsec-image", "mount", "files", str(target))
    assert read_all(target) == FILES
