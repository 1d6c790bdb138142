"""`dsec-image gc` and the leases of real commands: processes that are killed, that run side by side, that mount."""

import json
import random
import signal
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dsec_snapshotter import root as names
from dsec_store import ipc
from dsec_store.backends.folder import FolderBlobs
from dsec_store.errors import NotFound
from dsec_store.leases import BUILD, MOUNT, read_leases
from dsec_store.locate import open_store
from dsec_store.objects import Objects
from dsec_store.retry import RetryBlobs
from tests.dsec_snapshotter.nodes import until
from tests.dsec_store import gcmaker
from tests.flows import images
from tests.flows.world import World, ended
from tests.s3server import S3Server

pytestmark = pytest.mark.flow

KILLS = 20
GC = ("dsec-image", "gc", "--min-age", "0")
BUILD_TOOLS = ("--kind", "toolkit", "--prefix", "/opt")


def stored(world: World) -> set[str]:
    """The objects of a folder store that do not depend on what it held before."""
    files = [path.relative_to(world.store) for path in world.store.rglob("*") if path.is_file()]
    return {str(path) for path in files if path.parts[0] not in ("packs", "indexes", ".tmp")}


def build(world: World, name: str, seed: int, size: int = 300_000) -> None:
    """A toolkit with a file of its own, and one that all share."""
    folder = world.folder / f"made-{name}"
    files = {"own": random.Random(seed).randbytes(size), "shared": random.Random(0).randbytes(50_000)}
    images.make_folder(folder, files)
    world.ok("dsec-image", "build", str(folder), name, *BUILD_TOOLS)


def assert_whole(world: World) -> None:
    """As `dsec-image check --deep` of every name."""
    store = open_store(world.environment["DSEC_STORE"], environment=world.environment)
    assert gcmaker.problems(Objects(RetryBlobs(store))) == []


def test_what_has_no_name_goes(world: World, layout: Path) -> None:
    world.ok("dsec-image", "convert", f"oci:{layout}:plain", "app")
    build(world, "tools", 1)
    kept = stored(world)
    build(world, "more", 2)
    world.ok("dsec-image", "rm", "more")
    dry = world.json(*GC, "--dry-run")
    assert dry["dry_run"]
    assert dry["freed"]["objects"] > 0
    assert world.json("dsec-image", "gc")["freed"]["objects"] == 0  # nothing is old enough
    report = world.json(*GC)
    assert report["freed"]["bytes"] >= 300_000
    assert (report["waiting"], report["problems"]) == ([], [])
    assert stored(world) == kept
    assert_whole(world)


def test_people_are_told_what_went(world: World) -> None:
    build(world, "tools", 1)
    world.ok("dsec-image", "rm", "tools")
    lines = world.ok("dsec-image", "gc", "--min-age", "12h").lines
    assert [line.split("  ")[0] for line in lines] == ["", "freed", "kept: young", "in use"]
    assert any(line.startswith("freed") and "KiB" in line for line in world.ok(*GC).lines)


@pytest.mark.parametrize("age", ["", "1w", "-1", "h", "1.5h"])
def test_what_is_no_duration_is_wrong_usage(world: World, age: str) -> None:
    done = world.run("dsec-image", "gc", f"--min-age={age}")
    assert (done.code, len(done.errors)) == (2, 1)
    assert "duration" in done.errors[0]


def test_killed_at_random_moments_it_loses_nothing(world: World) -> None:
    """The moments are as many requests into its work as were drawn, give or take what the machine is at."""
    for number in range(4):
        build(world, f"kept{number}", number)
    kept = stored(world)
    moments = random.Random(7)
    for number in range(KILLS):
        build(world, "gone", 100 + number)
        world.ok("dsec-image", "rm", "gone")
        process = world.start(*GC)
        wanted = moments.choice(["leases/gc", "condemned", "deleted", "late"])
        before = len(stored(world))
        until(partial(_reached, world, process, wanted, before))
        process.kill()
        ended(process)
    assert_whole(world)
    report = world.json(*GC)
    assert (report["waiting"], report["problems"]) == ([], [])
    assert stored(world) == kept
    assert_whole(world)


def _reached(world: World, process: "subprocess.Popen[bytes]", moment: str, before: int) -> bool:
    """Whether a collection has come so far, or has ended already."""
    if process.poll() is not None:
        return True
    if moment in ("leases/gc", "condemned"):
        return any(world.store.glob(f"{moment}/*"))
    return len(stored(world)) < before - (3 if moment == "late" else 0)


def test_a_killed_conversion_leaves_nothing_that_gc_does_not_free(world: World, tmp_path: Path) -> None:
    build(world, "tools", 1)
    kept = stored(world)
    folder = images.make_folder(tmp_path / "big", images.big_files())
    process = world.start("dsec-image", "build", str(folder), "big", "--kind", "workspace")
    until(lambda: len([*world.store.glob("packs/*/*")]) > 1)
    process.kill()
    ended(process)
    assert any(world.store.glob("leases/build/*"))
    report = world.json(*GC)
    assert report["freed"]["bytes"] > 10 << 20
    assert report["waiting"] == []
    assert stored(world) == kept
    assert {path.name for path in world.store.glob("packs/*/*")} == _packs_in_use(world)


def test_a_conversion_killed_at_random_moments_harms_nothing(world: World, layout: Path) -> None:
    """The moments are numbers of objects in the store. Every name stays whole, the same conversion succeeds afterwards,
    and what a killed one has left goes."""
    convert = ("dsec-image", "convert", f"oci:{layout}:plain", "app", "--json")
    image = world.json(*convert)["image"]
    whole = len(stored(world))
    world.ok("dsec-image", "rm", "app")
    world.json(*GC)
    build(world, "tools", 1)
    kept = stored(world)
    moments = random.Random(11)
    killed = 0
    for _ in range(KILLS):
        process = world.start(*convert)
        wanted = len(kept) + moments.randrange(whole)
        until(partial(_holds, world, process, wanted))
        process.kill()
        killed += ended(process).code == -signal.SIGKILL
        assert_whole(world)
        if moments.random() < 0.5:  # else the next one finds what this one has left
            world.run("dsec-image", "rm", "app")
            assert world.json(*GC)["waiting"] == []
            assert stored(world) == kept
    assert killed >= KILLS // 2
    assert world.json(*convert)["image"] == image
    assert_whole(world)
    world.ok("dsec-image", "rm", "app")
    assert world.json(*GC)["waiting"] == []
    assert stored(world) == kept
    assert {path.name for path in world.store.glob("packs/*/*")} == _packs_in_use(world)


def _holds(world: World, process: "subprocess.Popen[bytes]", objects: int) -> bool:
    """Whether a conversion has stored so much that the store has so many objects, or has ended already."""
    return process.poll() is not None or len(stored(world)) >= objects


def _packs_in_use(world: World) -> set[str]:
    objects = Objects(FolderBlobs(world.store))
    image = objects.image(objects.references.get("tools"))
    blobs = [blob for layer in image.layers for blob in objects.layer(layer).stored_blobs]
    return {at.pack.hex for blob in blobs for at in objects.locator(blob.name)}


def test_a_build_under_way_is_waited_for_and_keeps_what_it_has(world: World, tmp_path: Path) -> None:
    folder = images.make_folder(tmp_path / "big", images.big_files())
    build(world, "gone", 1)
    process = world.start("dsec-image", "build", str(folder), "big", "--kind", "workspace", "--json")
    until(lambda: len([*world.store.glob("packs/*/*")]) > 1)
    process.send_signal(signal.SIGSTOP)
    world.ok("dsec-image", "rm", "gone")
    report = world.json(*GC)
    assert [each["pid"] for each in report["waiting"]] == [process.pid]
    assert "waiting for a build" in "".join(world.ok(*GC).lines)
    process.send_signal(signal.SIGCONT)
    done = ended(process)
    assert (done.code, json.loads(done.stdout)["name"]) == (0, "big")
    assert world.json(*GC)["waiting"] == []
    assert_whole(world)


def test_collecting_beside_conversions(world: World, layout: Path) -> None:
    """Each round, two builds and a conversion run while gc does, and names come and go."""
    build(world, "first", 9)  # until something is stored there is no store, which gc would say
    folders = [world.folder / f"part{number}" for number in range(2)]
    for number, folder in enumerate(folders):
        images.make_folder(folder, {"a": random.Random(number).randbytes(200_000), "b": b"b" * 100_000})
    for number in range(5):
        commands = [
            world.start("dsec-image", "build", str(folder), f"part{at}", *BUILD_TOOLS)
            for at, folder in enumerate(folders)
        ]
        commands.append(world.start("dsec-image", "convert", f"oci:{layout}:plain", "app"))
        while any(command.poll() is None for command in commands):
            report = world.json(*GC)
            assert report["problems"] == []
        assert [ended(command).code for command in commands] == [0, 0, 0]
        assert_whole(world)
        world.ok("dsec-image", "rm", f"part{number % 2}")
    world.json(*GC)
    assert read_leases(Objects(FolderBlobs(world.store)).blobs, BUILD) == []
    assert_whole(world)


def test_what_a_node_has_mounted_stays_until_it_stops(world: World) -> None:
    build(world, "tools", 1)
    target = world.make("target")
    world.ok("dsec-image", "mount", "tools", str(target))
    blobs = FolderBlobs(world.store)
    (lease,) = read_leases(blobs, MOUNT)
    assert len(lease.holds) == 1
    world.ok("dsec-image", "rm", "tools")
    world.json(*GC)
    world.kill("node")
    assert world.json(*GC)["freed"]["objects"] == 0
    assert (target / "opt/own").read_bytes() == random.Random(1).randbytes(300_000)
    world.ok("dsec", "node", "start")
    world.ok("dsec-image", "umount", str(target))
    world.ok("dsec", "node", "gc")
    until(lambda: read_leases(blobs, MOUNT) == [])
    world.json(*GC)
    assert stored(world) == set()


def test_a_mounted_layer_costs_no_second_lease(world: World) -> None:
    build(world, "tools", 1)
    for name in ("one", "two"):
        world.ok("dsec-image", "mount", "tools", str(world.make(name)))
        (lease,) = read_leases(FolderBlobs(world.store), MOUNT)
        world.store.joinpath(lease.key).unlink()
        if name == "one":
            world.store.joinpath(lease.key).write_bytes(lease.encode())
    assert read_leases(FolderBlobs(world.store), MOUNT) == []
    world.ok("dsec", "node", "stop", "--force")


def test_a_layer_that_was_freed_is_told_by_name(world: World) -> None:
    build(world, "tools", 1)
    objects = Objects(FolderBlobs(world.store))
    image = objects.references.get("tools")
    (layer,) = objects.image(image).layers
    world.ok("dsec-image", "rm", "tools")
    world.json(*GC)
    world.ok("dsec", "node", "start")
    request: dict[str, Any] = {"writable": False, "target": None, "kind": "mount", "owner": None}
    with pytest.raises(NotFound, match=f"layer {layer} is missing"):
        ipc.call(world.root / names.NODE_SOCKET, "compose", layers=[str(layer)], **request)


def test_an_s3_store_is_collected(world: World, layout: Path, s3_server: S3Server, s3_url: str) -> None:
    cloud = world.with_(DSEC_STORE=s3_url, **s3_server.environment)
    cloud.ok("dsec-image", "convert", f"oci:{layout}:plain", "app")
    build(cloud, "tools", 1)
    cloud.ok("dsec-image", "rm", "tools")
    assert cloud.json(*GC)["freed"]["bytes"] >= 300_000
    assert cloud.json(*GC)["freed"]["objects"] == 0
    assert_whole(cloud)
