"""`dsec-image`: images into the store, what it says of them, and their files on a mount point."""

import os
import re
import shutil
import signal
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsec_snapshotter.mounts import mountinfo
from dsec_store.backends.folder import FolderBlobs
from dsec_store.descriptor import Image
from dsec_store.objects import Objects
from tests.dsec_snapshotter.making import put_layer
from tests.dsec_snapshotter.nodes import until
from tests.dsec_store.blobmaker import noise
from tests.flows import images
from tests.flows.world import World, ended
from tests.kernel import mount
from tests.ocimaker import LayoutMaker, pack_archive, tar_of
from tests.s3server import S3Server

pytestmark = pytest.mark.flow

DIGEST = re.compile(r"(blake3|sha256):([0-9a-f]{64})")

BUILD = ("dsec-image", "build")
TOOLKIT = ("--kind", "toolkit", "--prefix", "/opt/tools", "--path", "/opt/tools/bin", "--env", "FROM=tools")


def inspect(world: World, name: str) -> Any:
    return world.json("dsec-image", "inspect", name)


def names(world: World) -> list[str]:
    return [row["name"] for row in world.json("dsec-image", "ls")]


def digests_in(value: object) -> Iterator[str]:
    """Every digest in a JSON document."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from digests_in(each)
    elif isinstance(value, str) and DIGEST.fullmatch(value):
        yield value


def stored(world: World) -> set[str]:
    """The objects of a folder store."""
    return {str(path.relative_to(world.store)) for path in world.store.rglob("*") if path.is_file()}


# -- into the store --------------------------------------------------------------------------------------------------


def test_a_second_conversion_adds_nothing(world: World, layout: Path) -> None:
    first = world.json("dsec-image", "convert", f"oci:{layout}:plain", "team/app:1.2")
    before = stored(world)
    assert (first["name"], first["layers"], first["built"]) == ("team/app:1.2", 2, 2)
    assert first["new_packs"] > 0
    second = world.json("dsec-image", "convert", f"oci:{layout}:plain", "team/app:1.2")
    assert second == {**first, "built": 0, "new_packs": 0, "new_bytes": 0}
    assert stored(world) == before


def test_the_same_input_has_the_same_digests_in_every_store(
    world: World, layout: Path, tmp_path: Path, s3_server: S3Server, s3_url: str
) -> None:
    elsewhere, cloud = world.with_store("elsewhere"), world.with_(DSEC_STORE=s3_url, **s3_server.environment)
    archive = pack_archive(layout, tmp_path / "image.tar", compression="gzip")
    world.ok("dsec-image", "convert", f"oci:{layout}:plain", "app")
    elsewhere.ok("dsec-image", "convert", f"oci-archive:{archive}:plain", "app")
    cloud.ok("dsec-image", "convert", f"oci:{layout}:plain", "app")
    assert inspect(world, "app") == inspect(elsewhere, "app") == inspect(cloud, "app")
    assert stored(world) == stored(elsewhere)
    assert cloud.json("dsec-image", "check", "app", "--deep")["problems"] == []


def test_an_s3_store_serves_runs(world: World, layout: Path, s3_server: S3Server, s3_url: str) -> None:
    cloud = world.with_(DSEC_STORE=s3_url, **s3_server.environment)
    cloud.ok("dsec-image", "convert", f"oci:{layout}:plain", "app")
    images.build_parts(cloud)
    done = cloud.ok("dsec", "run", "--toolkit", "tools", "--workspace", "work", "app", "--", "cat", "/testbed/README")
    assert done.lines == ["the workspace"]
    assert not any(name in file.read_text() for file in cloud.root.rglob("*.log") for name in ("Traceback", "ERROR"))


def test_a_folder_has_the_same_digests_at_any_place(world: World, tmp_path: Path) -> None:
    first = images.make_folder(tmp_path / "here", images.TOOLS)
    second = shutil.copytree(first, tmp_path / "a place" / "elsewhere", copy_function=shutil.copy2)
    one = world.json(*BUILD, str(first), "one", *TOOLKIT)
    two = world.json(*BUILD, str(second), "two", *TOOLKIT)
    assert (two["image"], two["new_packs"]) == (one["image"], 0)


def test_a_tar_can_be_built_as_well(world: World, tmp_path: Path) -> None:
    folder = images.make_folder(tmp_path / "tools", images.TOOLS)
    with tarfile.open(tmp_path / "tools.tar", "w") as tar:
        tar.add(folder, ".")
    world.ok(*BUILD, str(tmp_path / "tools.tar"), "tools", *TOOLKIT)
    target = world.make("target")
    world.ok("dsec-image", "mount", "tools", str(target))
    assert (target / "opt/tools/bin/greet").read_bytes() == images.TOOLS["bin/greet"]


def test_owners_and_times_are_settled_unless_asked_otherwise(world: World, tmp_path: Path) -> None:
    folder = images.make_folder(tmp_path / "tools", images.TOOLS)
    os.chown(folder / "lib/module", 4711, 4712)
    os.utime(folder / "lib/module", (1_500_000_000, 1_500_000_000))
    world.ok(*BUILD, str(folder), "plain", *TOOLKIT)
    world.ok(*BUILD, str(folder), "kept", *TOOLKIT, "--keep-owner", "--clamp-mtime", "1000")
    seen = {}
    for name in ("plain", "kept"):
        target = world.make(name)
        world.ok("dsec-image", "mount", name, str(target))
        status = (target / "opt/tools/lib/module").stat()
        seen[name] = (status.st_uid, status.st_gid, status.st_mtime)
    assert seen == {"plain": (0, 0, 1_500_000_000), "kept": (4711, 4712, 1000)}


def test_the_platform_can_be_chosen(world: World, tmp_path: Path) -> None:
    maker = LayoutMaker(tmp_path / "index")
    both = [maker.image([tar_of({"arch": name.encode()})], platform=name) for name in ("linux/amd64", "linux/arm64")]
    maker.add(maker.index(both), tag="t")
    world.ok("dsec-image", "convert", f"oci:{maker.path}:t", "arm", "--platform", "linux/arm64")
    assert inspect(world, "arm")["platform"] == "linux/arm64"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_a_build_that_is_ended_leaves_no_name_and_can_be_repeated(
    world: World, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    folder = images.make_folder(tmp_path / "big", images.big_files())
    build = (*BUILD, str(folder), "big", "--kind", "workspace")
    process = world.start(*build)
    until(lambda: any(world.store.glob("packs/*/*")))
    process.send_signal(number)
    assert ended(process).code == code
    assert names(world) == []
    assert world.json(*build)["name"] == "big"
    assert world.json("dsec-image", "check", "big", "--deep")["problems"] == []


# -- what it says ----------------------------------------------------------------------------------------------------


def test_inspect_names_every_object(shared: World) -> None:
    facts = inspect(shared, "configured")
    assert (facts["kind"], len(facts["layers"])) == ("base", 2)
    objects = set(digests_in(facts)) - {layer["diff_id"] for layer in facts["layers"]}
    files = {path.name for path in shared.store.rglob("*") if path.is_file()}
    assert len(objects) == 3 + 4 * len(facts["layers"]), "of a layer: descriptor, metadata, contents, recipe"
    assert all(any(digest.partition(":")[2] in file for file in files) for digest in objects)


def test_people_and_programs_are_told_the_same(shared: World) -> None:
    facts = inspect(shared, "tools")
    shown = "\n".join(shared.ok("dsec-image", "inspect", "tools").lines)
    assert all(digest in shown for digest in digests_in(facts))
    rows = shared.json("dsec-image", "ls")
    listed = [line.split()[0] for line in shared.ok("dsec-image", "ls").lines]
    assert listed == ["NAME", *(row["name"] for row in rows)]


def test_names_come_and_go(world: World, tmp_path: Path) -> None:
    folder = str(images.make_folder(tmp_path / "tools", images.TOOLS))
    wanted = ["a", "a/b", "a/b:1", "team/app:v1.2_x", "x--y.z_0"]
    for name in wanted:
        world.ok(*BUILD, folder, name, *TOOLKIT)
    assert names(world) == sorted(wanted)
    world.ok("dsec-image", "rm", "a/b")
    assert names(world) == sorted({*wanted} - {"a/b"})
    assert world.run("dsec-image", "rm", "a/b").code == 1
    assert world.json("dsec-image", "check", "a/b:1", "--deep")["problems"] == []


@pytest.mark.parametrize("name", ["", "A", "a//b", "/a", "a/", "a:", "a:-x", "a b", "../a", "-a", "a..b", "a" * 256])
def test_what_is_no_name_is_wrong_usage(world: World, tmp_path: Path, name: str) -> None:
    done = world.run(*BUILD, str(tmp_path), "--kind", "toolkit", "--", name)
    assert (done.code, len(done.errors)) == (2, 1)
    assert "name" in done.errors[0]
    assert not world.store.exists()


@pytest.mark.parametrize("deep", [False, True])
def test_check_reads_what_it_says(shared: World, deep: bool) -> None:
    options = ["--deep"] if deep else []
    report = shared.json("dsec-image", "check", "plain", *options)
    assert (report["deep"], report["layers"], report["problems"]) == (deep, 2, [])
    assert (report["bytes"] > 0) == (report["chunks"] > 0) == deep


@pytest.mark.parametrize("command", ["dsec", "dsec-image"])
def test_every_command_has_a_help_text(shared: World, command: str) -> None:
    """Of commands and of groups, each with a sentence that says what it does."""
    todo: list[tuple[str, ...]] = [()]
    while todo:
        words = todo.pop()
        lines = shared.ok(command, *words, "--help").lines
        assert lines[0].startswith(" ".join(("Usage:", command, *words)))
        assert lines[2].strip()[0].isupper()
        below = lines[lines.index("Commands:") + 1 :] if "Commands:" in lines else []
        todo += [(*words, line.split()[0]) for line in below]


# -- on a mount point ------------------------------------------------------------------------------------------------


@pytest.fixture
def target(shared: World) -> Path:
    return shared.make("target")


def test_the_first_name_is_at_the_bottom(shared: World, target: Path, tmp_path: Path) -> None:
    """Files merge, and the later image wins."""
    mine = shared.with_store("mine")
    for name in ("one", "two", "three"):
        folder = images.make_folder(tmp_path / name, {"who": name.encode(), f"only-{name}": b"x"})
        mine.ok(*BUILD, str(folder), name, "--kind", "workspace")
    for order in (("one", "two", "three"), ("three", "one", "two")):
        mine.ok("dsec-image", "mount", *order, str(target))
        assert (target / "who").read_text() == order[-1]
        assert sorted(os.listdir(target)) == ["only-one", "only-three", "only-two", "who"]
        mine.ok("dsec-image", "umount", str(target))
    assert os.listdir(target) == []


def test_a_layer_has_the_figures_of_all_its_blobs(world: World) -> None:
    objects = Objects(FolderBlobs(world.store, create=True))
    files = {name: noise(9000, name) for name in ("a", "b", "c")}
    layer = put_layer(objects, files, devices=2)
    objects.references.set("two", objects.put_image(Image("workspace", (layer,))))
    target = world.make("target")
    world.ok("dsec-image", "mount", "two", str(target))
    assert {name: (target / name).read_bytes() for name in files} == files
    stats = world.stats()
    (figures,) = stats["layers"]
    assert figures["fetched_chunks"] == stats["total"]["fetched_chunks"] == len(files)
    assert figures["fetched_bytes"] == stats["total"]["fetched_bytes"]
    assert world.json("dsec-image", "check", "two", "--deep")["problems"] == []
    assert [blob["size"] for blob in inspect(world, "two")["layers"][0]["blobs"]] == [24576, 12288]


def test_a_mount_is_read_only(shared: World, target: Path) -> None:
    shared.ok("dsec-image", "mount", "plain", "work", str(target))
    assert (target / "testbed/README").read_bytes() == images.WORKSPACE["README"]
    with pytest.raises(OSError, match="Read-only file system"):
        (target / "testbed/new").write_text("x")
    with pytest.raises(OSError, match="Read-only file system"):
        (target / "bin/busybox").unlink()


def test_changes_of_a_writable_mount_go_with_it(shared: World, target: Path) -> None:
    shared.ok("dsec-image", "mount", "plain", "work", str(target), "--rw")
    (target / "testbed/README").write_text("changed")
    (target / "etc/motd").unlink()
    (target / "testbed/new").write_text("x")
    shared.ok("dsec-image", "umount", str(target))
    shared.ok("dsec-image", "mount", "plain", "work", str(target))
    assert (target / "testbed/README").read_bytes() == images.WORKSPACE["README"]
    assert (target / "etc/motd").exists()
    assert not (target / "testbed/new").exists()


def test_no_setuid_program_and_no_device_comes_with_a_mount(shared: World, target: Path) -> None:
    shared.ok("dsec-image", "mount", "plain", str(target))
    (mounted,) = [one for one in mountinfo() if one.mountpoint == os.fsencode(target)]
    flags = Path("/proc/self/mountinfo").read_text()
    (line,) = [line for line in flags.splitlines() if f" {target} " in line]
    assert mounted.filesystem == "overlay"
    assert {"nosuid", "nodev", "ro"} <= set(line.split()[5].split(","))


def test_a_relative_target_is_the_callers(shared: World, target: Path) -> None:
    shared.ok("dsec-image", "mount", "plain", "target")
    assert (target / "etc/motd").exists()
    shared.ok("dsec-image", "umount", "./target/")
    assert not (target / "etc/motd").exists()


def test_a_target_may_have_any_name(shared: World) -> None:
    """Blanks, backslashes and line breaks, which mount tables escape, and what separates options."""
    target = shared.make("a \\134b:c,d\ne=%41")
    shared.ok("dsec-image", "mount", "plain", str(target))
    assert (target / "etc/motd").read_text() == "welcome\n"
    assert [one["target"] for one in shared.status()["compositions"]] == [str(target)]
    shared.ok("dsec-image", "umount", str(target))
    assert os.listdir(target) == []


def test_mounts_elsewhere_share_their_layers(shared: World, target: Path) -> None:
    other = shared.make("other")
    shared.ok("dsec-image", "mount", "plain", str(target))
    shared.ok("dsec-image", "mount", "configured", str(other))
    assert sorted(layer["users"] for layer in shared.status()["layers"]) == [2, 2]
    assert [one["target"] for one in shared.compositions()].count(str(target)) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gone", "does not exist: make the directory first"),
        ("a file", "is no directory"),
        ("root/inside", "is inside DSEC_ROOT: choose a directory elsewhere"),
        ("taken", "has a composition of this node already: unmount that first"),
    ],
)
def test_a_target_that_will_not_do(shared: World, name: str, text: str) -> None:
    taken = shared.make("taken")
    shared.ok("dsec-image", "mount", "plain", str(taken))
    (shared.folder / "a file").touch()
    (shared.root / "inside").mkdir()
    before = shared.compositions()
    done = shared.run("dsec-image", "mount", "work", str(shared.folder / name))
    assert (done.code, len(done.errors)) == (1, 1)
    assert f"{shared.folder / name} {text}" in done.errors[0]
    assert shared.compositions() == before


def test_umount_leaves_alone_what_is_not_ours(shared: World, target: Path) -> None:
    shared.ok("dsec", "node", "start")
    with mount("none", target, "tmpfs", flags=0):
        done = shared.run("dsec-image", "umount", str(target))
        assert (done.code, done.errors) == (1, [f"dsec-image: nothing of this node is mounted at {target}"])
        assert os.path.ismount(target)


def test_umount_says_who_keeps_it(shared: World, target: Path) -> None:
    shared.ok("dsec-image", "mount", "plain", str(target))
    with (target / "etc/motd").open():
        done = shared.run("dsec-image", "umount", str(target))
        assert (done.code, len(done.errors)) == (1, 1)
        assert f"{target} is in use" in done.errors[0]
        assert (target / "etc/motd").read_text() == "welcome\n"
    shared.ok("dsec-image", "umount", str(target))


def test_a_node_with_mounts_stops_only_by_force(shared: World, target: Path) -> None:
    shared.ok("dsec-image", "mount", "plain", str(target))
    done = shared.run("dsec", "node", "stop")
    assert (done.code, len(done.errors)) == (1, 1)
    assert "--force" in done.errors[0]
    shared.ok("dsec", "node", "stop", "--force")
    assert shared.mounts() == []
    assert "no node runs" in shared.ok("dsec", "node", "stop").lines[0]
