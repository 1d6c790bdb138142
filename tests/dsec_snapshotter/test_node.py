"""The node over the real kernel: composing, counting, refusing, ending."""

import errno
import json
import os
import re
import signal
import stat
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner

from dsec_cli.node import node_group
from dsec_snapshotter import client
from dsec_snapshotter.client import NodeClient
from dsec_snapshotter.mounts import MountInfo, mountinfo, unmount
from dsec_snapshotter.root import START_LOCK, Root
from dsec_store.digest import Digest
from dsec_store.errors import Denied, Invalid, NotFound, Unavailable
from dsec_store.layer.tree import OPAQUE_VALUE, OPAQUE_XATTR, Directory, Inode, whiteout
from tests.dsec_snapshotter.making import put_layer
from tests.dsec_snapshotter.nodes import NodeUnderTest, node_under_test, owner_process, until

pytestmark = pytest.mark.component

MANY = 128


def mount_at(path: Path | str) -> MountInfo:
    return next(mount for mount in mountinfo() if mount.mountpoint == os.fsencode(path))


def users(node: NodeUnderTest) -> dict[str, int]:
    return {layer["descriptor"]: layer["users"] for layer in node.status()["layers"]}


# -- composing ---------------------------------------------------------------------------------------------------------


def test_one_layer_read_only(node: NodeUnderTest) -> None:
    layer = put_layer(node.objects, {"etc": {"motd": b"hello"}, "link": "etc/motd"})
    path = Path(node.compose(layer)["path"])
    assert (path / "link").read_bytes() == b"hello"
    with pytest.raises(OSError, match="Read-only") as caught:
        (path / "new").touch()
    assert caught.value.errno == errno.EROFS


def test_three_layers_writable(node: NodeUnderTest) -> None:
    base = put_layer(node.objects, {"etc": {"motd": b"base", "passwd": b"root"}, "old": {"a": b"a"}})
    work = put_layer(node.objects, {"etc": {"motd": b"workspace"}, "old": whiteout()})
    tool = put_layer(node.objects, {"opt": {"tool": b"tool"}})
    path = Path(node.compose(base, work, tool, writable=True)["path"])
    assert {entry.name for entry in path.iterdir()} == {"etc", "opt"}
    assert (path / "etc/motd").read_bytes() == b"workspace"
    (path / "etc").rename(path / "moved")  # a directory of lower layers
    (path / "moved/passwd").write_bytes(b"changed")
    assert (path / "moved/passwd").read_bytes() == b"changed"
    other = Path(node.compose(base, work, tool, writable=True)["path"])
    assert (other / "etc/passwd").read_bytes() == b"root"


def test_a_layer_of_several_blob_devices(node: NodeUnderTest) -> None:
    files = {name: name.encode() * size for name, size in (("a", 5000), ("b", 1), ("c", 4096), ("d", 9000), ("e", 0))}
    layer = put_layer(node.objects, files, devices=3)
    assert len(node.objects.layer(layer).blobs) == 3
    path = Path(node.compose(layer)["path"])
    assert {entry.name: entry.read_bytes() for entry in path.iterdir()} == files


def test_many_layers_in_a_root_with_a_long_name(tmp_path: Path) -> None:
    root = tmp_path / ("r" * (200 - len(str(tmp_path)) - 1))
    assert len(str(root)) == 200
    with node_under_test(root, tmp_path / "store") as node:
        layers = [
            put_layer(node.objects, {f"f{number}": b"%d" % number, "last": f"{number}"}) for number in range(MANY)
        ]
        for writable in (False, True):
            path = Path(node.compose(*layers, writable=writable)["path"])
            assert sum(1 for _ in path.iterdir()) == MANY + 1
            assert os.readlink(path / "last") == f"{MANY - 1}"
            assert (path / "f0").read_bytes() == b"0"
        assert set(users(node).values()) == {2}


def test_inode_numbers_are_the_same_in_listings_and_in_stat(node: NodeUnderTest) -> None:
    layer = put_layer(node.objects, {"a": b"a", "d": {"e": {}}, "l": "a"})
    path = node.compose(layer, writable=True)["path"]
    with os.scandir(path) as entries:
        assert all(entry.inode() == os.lstat(entry.path).st_ino for entry in entries)
    assert {os.lstat(f"{path}/{name}").st_dev for name in ("", "a", "d", "l")} == {os.stat(path).st_dev}


def test_reads_of_layers_are_ahead_and_uncached_below(node: NodeUnderTest) -> None:
    node.compose(put_layer(node.objects, {"a": b"a"}))
    status = node.status()
    if not all(status["features"].values()):
        pytest.skip(f"this kernel lacks some of {status['features']}")
    layer = mount_at(node.root.resolve() / "l" / status["layers"][0]["id"])
    assert b"directio" in layer.options
    read_ahead = [int(path.read_text()) for path in Path("/sys/class/bdi").glob("erofs-*/read_ahead_kb")]
    assert 8 << 10 in read_ahead


@pytest.mark.parametrize(("kind", "suid"), [("mount", {b"nosuid"}), ("run", set[bytes]())])
def test_device_nodes_of_an_image_are_dead(node: NodeUnderTest, kind: str, suid: set[bytes]) -> None:
    layer = put_layer(node.objects, {"null": Inode(stat.S_IFCHR | 0o666, rdev=(1, 3))})
    path = node.compose(layer, kind=kind, writable=True)["path"]
    assert mount_at(path).options & {b"nosuid", b"nodev"} == suid | {b"nodev"}
    with pytest.raises(PermissionError):
        Path(path, "null").read_bytes()


def test_setuid_programs_work_in_a_sandbox_and_not_in_a_mount(node: NodeUnderTest) -> None:
    """Although the layer's own mount is `nosuid` in both cases."""
    program = Path("/bin/cat").resolve().read_bytes()
    layer = put_layer(node.objects, {"cat": (program, 0o4755)})
    found = {}
    for kind in ("run", "mount"):
        cat = os.open(Path(node.compose(layer, kind=kind)["path"], "cat"), os.O_PATH)
        command = ["setpriv", "--reuid=65534", "--clear-groups", f"/proc/self/fd/{cat}", "/proc/self/status"]
        output = subprocess.run(command, pass_fds=[cat], check=True, capture_output=True, text=True).stdout
        found[kind] = re.findall(r"^Uid:\t(\d+)\t(\d+)", output, re.MULTILINE)[0]
        os.close(cat)
    assert found == {"run": ("65534", "0"), "mount": ("65534", "65534")}


# -- root attributes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("writable", [False, True])
def test_the_root_has_the_attributes_of_the_topmost_layer_that_describes_it(
    node: NodeUnderTest, writable: bool
) -> None:
    lowest = put_layer(node.objects, {"a": {}}, root=Inode(stat.S_IFDIR | 0o700))
    xattrs = {b"user.color": b"blue", OPAQUE_XATTR: OPAQUE_VALUE}
    described = Inode(stat.S_IFDIR | 0o1751, uid=1234, gid=70000, mtime_ns=1_600_000_000_123_456_789, xattrs=xattrs)
    middle = put_layer(node.objects, {"b": {}}, root=described)
    top = put_layer(node.objects, {"c": {}})
    path = node.compose(lowest, middle, top, writable=writable)["path"]
    root = os.stat(path)
    assert (root.st_mode, root.st_uid, root.st_gid, root.st_mtime_ns) == (
        described.mode,
        described.uid,
        described.gid,
        described.mtime_ns,
    )
    assert os.listxattr(path) == ["user.color"]
    assert os.getxattr(path, "user.color") == b"blue"
    assert sorted(os.listdir(path)) == ["b", "c"]  # an opaque root hides what is below


def test_a_root_that_no_layer_describes(node: NodeUnderTest) -> None:
    root = os.stat(node.compose(put_layer(node.objects, {"a": {}}), writable=True)["path"])
    assert (root.st_mode, root.st_uid, root.st_gid, root.st_mtime_ns) == (stat.S_IFDIR | 0o755, 0, 0, 0)


# -- equal layers ------------------------------------------------------------------------------------------------------


def test_a_layer_may_occur_twice(node: NodeUnderTest) -> None:
    """With whiteouts, an opaque directory and a replaced type between the two: the upper occurrence wins everywhere."""
    first = put_layer(node.objects, {"d": {"x": b"c", "y": b"c"}, "e": {"z": b"c"}, "t": {"u": b"c"}, "w": b"c"})
    twice = put_layer(node.objects, {"d": {"x": b"a"}, "e": {"n": b"a"}, "t": {"v": b"a"}, "w": whiteout()})
    opaque = Directory(Inode(stat.S_IFDIR | 0o755, xattrs={OPAQUE_XATTR: OPAQUE_VALUE}))
    between = put_layer(node.objects, {"d": {"x": whiteout()}, "e": opaque, "t": b"b", "w": b"b"})
    path = Path(node.compose(first, twice, between, twice)["path"])
    found = {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}
    assert found == {"d/x": b"a", "d/y": b"c", "e/n": b"a", "t/v": b"a"}
    assert users(node)[str(twice)] == 1


def test_equal_empty_layers(node: NodeUnderTest) -> None:
    empty = put_layer(node.objects, {})
    assert os.listdir(node.compose(empty, empty)["path"]) == []


def test_concurrent_composing_mounts_each_layer_once(node: NodeUnderTest) -> None:
    layers = [put_layer(node.objects, {f"f{number}": b"%d" % number}) for number in range(5)]
    node.start().close()
    with ThreadPoolExecutor(16) as threads:
        found = list(threads.map(lambda _: node.compose(*layers, writable=True), range(16)))
    assert len(node.mounted("erofs")) == len(layers)
    assert len(node.mounted("overlay")) == len({composition["id"] for composition in found}) == 16
    assert users(node) == {str(layer): 16 for layer in layers}
    with ThreadPoolExecutor(16) as threads:
        list(threads.map(lambda composition: node.call("release", id=composition["id"]), found))
    assert node.mounted("overlay") == []
    assert os.listdir(node.root / "s") == []
    assert users(node) == {str(layer): 0 for layer in layers}


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_what_cannot_be_composed_leaves_nothing(node: NodeUnderTest) -> None:
    good = put_layer(node.objects, {"a": {}})
    missing = Digest.of(b"nothing")
    with pytest.raises(NotFound, match=str(missing)):
        node.compose(good, missing)
    with pytest.raises(Invalid, match="at least one layer"):
        node.compose()
    with pytest.raises(Invalid, match="merge some"):
        node.compose(*(Digest.of(b"%d" % number) for number in range(500)))
    with pytest.raises(Invalid, match="kind"):
        node.compose(good, kind="other")
    assert node.status()["compositions"] == []
    assert os.listdir(node.root / "s") == []
    assert len(os.listdir(node.root / "l")) == 1
    assert [path.name for path in (node.root / "records").iterdir() if "composition" in path.name] == []


def test_a_damaged_metadata_image_is_fetched_again(node: NodeUnderTest) -> None:
    layer = put_layer(node.objects, {"a": b"a"})
    node.call("release", id=node.compose(layer)["id"])
    image = node.objects.layer(layer).metadata.digest.hex
    [mounted] = node.status()["layers"]
    node.kill("node")
    unmount(str(node.root / "l" / mounted["id"]))
    (node.root / "m" / f"{image}.erofs").write_bytes(b"damaged")
    assert Path(node.compose(layer)["path"], "a").read_bytes() == b"a"


# -- targets -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Path]:
    target = tmp_path / "a target"
    target.mkdir()
    yield target
    while target.is_mount():
        unmount(str(target), lazy=True)


def test_mount_and_umount_a_target(node: NodeUnderTest, target: Path) -> None:
    layer = put_layer(node.objects, {"a": b"a"})
    assert node.compose(layer, target=str(target))["path"] == str(target)
    assert (target / "a").read_bytes() == b"a"
    with pytest.raises(Invalid, match="unmount that first"):
        node.compose(layer, target=str(target))
    node.call("umount", target=str(target))
    assert list(target.iterdir()) == []
    with pytest.raises(NotFound, match="a target"):
        node.call("umount", target=str(target))


def test_targets_that_cannot_be(node: NodeUnderTest, target: Path) -> None:
    layer = put_layer(node.objects, {"a": b"a"})
    file = target / "file"
    file.touch()
    for path, error in [
        (target / "missing", NotFound),
        (file, Invalid),
        (Path("relative"), Invalid),
        (node.root / "l", Invalid),
    ]:
        with pytest.raises(error, match=path.name):
            node.compose(layer, target=str(path))


def test_a_target_in_use_stays_and_is_named(node: NodeUnderTest, target: Path) -> None:
    layer = put_layer(node.objects, {"a": b"a"})
    node.compose(layer, target=str(target))
    with (target / "a").open("rb") as used:
        with pytest.raises(Invalid, match="fuser"):
            node.call("umount", target=str(target))
        assert used.read() == b"a"
    node.call("umount", target=str(target))


def test_a_target_that_was_unmounted_by_hand_can_be_used_again(node: NodeUnderTest, target: Path) -> None:
    layer = put_layer(node.objects, {"a": b"a"})
    first = node.compose(layer, target=str(target))
    unmount(str(target))
    second = node.compose(layer, target=str(target))
    assert [found["id"] for found in node.status()["compositions"]] == [second["id"]]
    assert os.listdir(node.root / "s") == [second["id"]]
    assert first["id"] != second["id"]


def test_one_of_many_gets_a_target(node: NodeUnderTest, target: Path) -> None:
    layer = put_layer(node.objects, {"a": b"a"})
    node.start().close()

    def compose(_: int) -> bool:
        try:
            node.compose(layer, target=str(target))
        except Invalid:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(compose, range(8))) == 1
    assert len([mount for mount in mountinfo() if mount.mountpoint == os.fsencode(target)]) == 1


# -- ends --------------------------------------------------------------------------------------------------------------


def test_gc_removes_what_nobody_uses(node: NodeUnderTest) -> None:
    used, unused = (put_layer(node.objects, {name: name.encode()}) for name in ("used", "unused"))
    kept = Path(node.compose(used)["path"])
    node.call("release", id=node.compose(used, unused)["id"])
    assert node.call("gc") == {"layers": 1, "files": 3}
    assert users(node) == {str(used): 1}
    assert len(node.mounted("erofs")) == len(os.listdir(node.root / "m")) == 1
    assert (kept / "used").read_bytes() == b"used"
    assert Path(node.compose(unused)["path"], "unused").read_bytes() == b"unused"


def test_gc_as_a_command(node: NodeUnderTest) -> None:
    node.call("release", id=node.compose(put_layer(node.objects, {"a": b"a"}))["id"])
    arguments = ["gc", "--root", str(node.root)]
    assert CliRunner().invoke(node_group, arguments).output == "1 layers unmounted, 3 files removed\n"
    assert json.loads(CliRunner().invoke(node_group, [*arguments, "--json"]).output) == {"layers": 0, "files": 0}


def test_stop_refuses_while_something_is_composed(node: NodeUnderTest) -> None:
    composition = node.compose(put_layer(node.objects, {"a": b"a"}))
    with pytest.raises(Invalid, match="1 compositions are in use"):
        node.client.stop()
    node.call("release", id=composition["id"])
    assert node.client.stop()
    node.assert_gone()
    assert not node.client.stop()
    with pytest.raises(Unavailable, match="no node runs"):
        node.client.connect()


def test_stop_by_force_while_files_are_open(node: NodeUnderTest, target: Path) -> None:
    layer = put_layer(node.objects, {"a": b"a" * 100_000})
    node.compose(layer, target=str(target))
    with (target / "a").open("rb"):
        assert node.client.stop(force=True)
        node.assert_gone()
        assert not target.is_mount()


def test_the_death_of_an_owner_releases(tmp_path: Path) -> None:
    orphans = tmp_path / "orphans"
    orphans.touch()
    with (
        node_under_test(tmp_path / "root", tmp_path / "store", str(orphans)) as node,
        owner_process() as (owner, record),
    ):
        layer = put_layer(node.objects, {"a": b"a"})
        first, second = (node.compose(layer, kind="run", owner=record) for _ in range(2))
        other = node.compose(layer, kind="run")
        node.kill("node")
        assert len(node.status()["compositions"]) == 3  # this node has only read of the owner
        with Path(first["path"], "a").open("rb"):
            owner.kill()
            until(lambda: [found["id"] for found in node.status()["compositions"]] == [other["id"]])
        assert sorted(orphans.read_text().split()) == sorted([first["id"], second["id"]])
        assert os.listdir(node.root / "s") == [other["id"]]


def test_an_owner_that_is_dead_already(node: NodeUnderTest) -> None:
    layer = put_layer(node.objects, {"a": b"a"})
    node.compose(layer, kind="run", owner={"pid": os.getpid(), "started": 1})
    until(lambda: node.status()["compositions"] == [])


# -- starting ----------------------------------------------------------------------------------------------------------


def test_many_commands_start_one_node(node: NodeUnderTest) -> None:
    with ThreadPoolExecutor(20) as threads:
        pids = set(threads.map(lambda _: node.call("ping")["pid"], range(20)))
    assert len(pids) == 1


def test_another_store_is_refused_by_a_running_node_and_by_the_root(node: NodeUnderTest, tmp_path: Path) -> None:
    node.start().close()
    other = NodeUnderTest(node.root, tmp_path / "other")
    with pytest.raises(Invalid, match=r"bound to the store .*/store, not to .*/other: use another --root"):
        other.start()
    node.client.stop()
    with pytest.raises(Invalid, match="use another --root"):
        other.start()


def test_a_node_whose_mounts_are_not_seen_here_is_refused(node: NodeUnderTest) -> None:
    elsewhere = ["unshare", "--mount", *node.argv]
    with pytest.raises(Invalid, match=r"another mount namespace \(process \d+\).*stop it and start it from here"):
        node.client.ensure_started(elsewhere, node.objects.blobs.location)
    assert node.client.stop()
    assert Path(node.compose(put_layer(node.objects, {"a": b"a"}))["path"], "a").read_bytes() == b"a"


def test_another_command_that_starts_or_stops_for_ever(node: NodeUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "LOCK_WITHIN", 0.0)
    with client._locked(Root.prepare(node.root).path / START_LOCK), pytest.raises(Unavailable, match="another command"):
        node.start()


def test_a_node_that_does_not_stop(node: NodeUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    node.start().close()
    monkeypatch.setattr(client, "STOP_WITHIN", 0.1)
    process = node.client.running()
    assert process
    with monkeypatch.context() as patch:
        patch.setattr(NodeClient, "running", lambda asked: process)
        os.kill(process.pid, signal.SIGSTOP)
        try:
            with pytest.raises(Unavailable, match=f"node process {process.pid} does not stop within"):
                node.client.stop()
        finally:
            os.kill(process.pid, signal.SIGCONT)
    until(lambda: not process.alive())


def test_a_second_node_is_refused(node: NodeUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsec_snapshotter import node as module

    node.start().close()
    monkeypatch.setattr(module, "LOCK_WITHIN", 0.0)
    with pytest.raises(Denied, match="in use by node process"), module._lock(Root.prepare(node.root)):
        pass


def test_a_daemon_that_cannot_start_is_told_with_its_last_words(tmp_path: Path) -> None:
    complains = ["-", "sh", "-c", "echo no such cache; exit 1"]
    with node_under_test(tmp_path / "root", tmp_path / "store", *complains) as node:
        with pytest.raises(Denied, match="no such cache"):
            node.start()
        node.assert_gone()
