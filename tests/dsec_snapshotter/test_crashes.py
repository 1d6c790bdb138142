"""Processes of a node die by SIGKILL at any moment: afterwards mounts, records, folders and counts agree again."""

import os
import random
import signal
import sys
import threading
from pathlib import Path

import pytest

from dsec_snapshotter.mounts import unmount
from dsec_snapshotter.processes import Process, spawn, wait_ended
from dsec_snapshotter.root import DAEMON_PID, NODE_LOG, Root
from dsec_store.errors import Invalid, StoreError
from tests.dsec_snapshotter.making import put_layer
from tests.dsec_snapshotter.node_program import DAEMON
from tests.dsec_snapshotter.nodes import ENDS_WITHIN, NodeUnderTest, node_under_test, until

pytestmark = pytest.mark.component

ROUNDS = 20
CLIENTS = 4
STARTS = 12
LONGEST_START = 0.6
"""Seconds, in which a node starts with its data daemon."""
LONGEST_LIFE = 0.08
"""Seconds of composing and releasing before the node is killed: some twenty compositions."""


def assert_consistent(node: NodeUnderTest) -> None:
    """What the node tells is what the kernel and the disk have, and nothing else is there."""
    until(lambda: node.status()["problems"] == [])  # a data daemon may be about to answer
    status = node.status()
    compositions = {found["id"]: found for found in status["compositions"]}
    layers = {found["descriptor"]: found for found in status["layers"]}
    assert node.mounted("overlay") == sorted(f"s/{id}/merged" for id in compositions)
    assert node.mounted("erofs") == sorted(f"l/{layer['id']}" for layer in layers.values())
    assert sorted(os.listdir(node.root / "s")) == sorted(compositions)
    assert sorted(os.listdir(node.root / "l")) == sorted(layer["id"] for layer in layers.values())
    records = {f"composition-{id}.json" for id in compositions} | {
        f"layer-{layer['id']}.json" for layer in layers.values()
    }
    assert set(os.listdir(node.root / "records")) == records
    for digest, layer in layers.items():
        assert layer["users"] == sum(digest in found["layers"] for found in compositions.values())


def test_a_node_that_is_killed_leaves_everything_running(node: NodeUnderTest) -> None:
    base, tool = put_layer(node.objects, {"a": b"a"}), put_layer(node.objects, {"b": b"b"})
    writable = Path(node.compose(base, tool, writable=True)["path"])
    (writable / "written").write_bytes(b"kept")
    node.call("release", id=node.compose(tool)["id"])
    before = node.status()
    with (writable / "a").open("rb") as open_file:
        node.kill("node")
        assert open_file.read() == b"a"
        after = node.status()
    assert after["node_pid"] != before["node_pid"]
    assert (after["daemon_pid"], after["holder_pid"]) == (before["daemon_pid"], before["holder_pid"])
    assert (after["layers"], after["compositions"]) == (before["layers"], before["compositions"])
    assert (writable / "written").read_bytes() == b"kept"
    node.compose(base, writable=True)
    assert_consistent(node)


def test_a_node_that_ends_by_sigterm_leaves_everything_running(node: NodeUnderTest) -> None:
    path = Path(node.compose(put_layer(node.objects, {"a": b"a"}))["path"])
    process = node.client.running()
    assert process
    os.kill(process.pid, signal.SIGTERM)
    assert wait_ended(process, ENDS_WITHIN)
    assert (path / "a").read_bytes() == b"a"
    assert_consistent(node)


def test_a_node_that_is_killed_in_the_middle_of_anything(node: NodeUnderTest) -> None:
    """Clients compose and release; the node dies at a random moment; the next one must have it all right."""
    moments = random.Random(1)
    layers = [put_layer(node.objects, {f"f{number}": b"%d" % number}) for number in range(6)]

    def use(order: random.Random) -> None:
        try:
            with node.client.connect() as client:
                while True:
                    chosen = [str(layer) for layer in order.sample(layers, 3)]
                    made = client.call("compose", layers=chosen, writable=True, kind="run", target=None, owner=None)
                    if order.random() < 0.9:
                        client.call("release", id=made["id"])
        except (StoreError, OSError):  # the node died
            return

    for _ in range(ROUNDS):
        node.call("gc")
        clients = [threading.Thread(target=use, args=(random.Random(moments.random()),)) for _ in range(CLIENTS)]
        for client in clients:
            client.start()
        process = node.client.running()
        assert process
        threading.Event().wait(moments.uniform(0, LONGEST_LIFE))
        os.kill(process.pid, signal.SIGKILL)
        for client in clients:
            client.join()
        assert wait_ended(process, ENDS_WITHIN)
        assert_consistent(node)


def test_a_node_that_is_killed_while_it_starts(node: NodeUnderTest) -> None:
    """From nothing, or over what another has left: there is one holder and one daemon afterwards."""
    moments = random.Random(2)
    layer = put_layer(node.objects, {"a": b"a"})
    for number in range(STARTS):
        if number % 3:
            node.client.stop(force=True)
        elif number:
            node.kill("node")
        process = spawn(node.argv, Root.prepare(node.root).path / NODE_LOG, os.environ)
        wait_ended(process, moments.uniform(0.05, LONGEST_START))
        os.kill(process.pid, signal.SIGKILL)
        assert wait_ended(process, ENDS_WITHIN)
        assert_consistent(node)
        assert len(node.processes()) == 2  # node and daemon; the holder bears no root on its command line
        assert Path(node.compose(layer)["path"], "a").read_bytes() == b"a"


def test_a_data_daemon_that_is_killed_is_replaced(node: NodeUnderTest) -> None:
    content = b"x" * 300_000
    path = Path(node.compose(put_layer(node.objects, {f"f{n}": content + bytes([n]) for n in range(4)}))["path"])
    for number in range(4):
        restarts = node.status()["restarts"]
        node.kill("daemon")
        assert (path / f"f{number}").read_bytes() == content + bytes([number])
        assert node.call("stats")["errors"].get("EIO", 0) == 0
        assert node.status()["restarts"] == restarts + 1
    assert_consistent(node)


def test_a_data_daemon_is_replaced_although_it_cannot_be_put_on_record(node: NodeUnderTest) -> None:
    path = Path(node.compose(put_layer(node.objects, {"a": b"a", "b": b"b"}))["path"])
    record = node.root / DAEMON_PID
    record.unlink()
    record.mkdir()
    for name in ("a", "b"):
        node.kill("daemon")
        assert (path / name).read_bytes() == name.encode()
    record.rmdir()
    assert_consistent(node)


def test_a_data_daemon_that_cannot_be_started_is_started_later(tmp_path: Path) -> None:
    """Its program is away for a time: first under a running node, then when a node takes over."""
    program, away = tmp_path / "daemon", tmp_path / "away"
    root, store = tmp_path / "root", tmp_path / "store"
    program.write_text(f"#!/bin/sh\nexec {sys.executable} {DAEMON} {root} {store}\n")
    program.chmod(0o755)
    with node_under_test(root, store, "-", str(program)) as node:
        path = Path(node.compose(put_layer(node.objects, {"a": b"a"}))["path"])
        program.rename(away)
        node.kill("daemon")
        until(lambda: "trying again" in (root / NODE_LOG).read_text())
        away.rename(program)
        assert (path / "a").read_bytes() == b"a"
        program.rename(away)
        node.kill("node", "daemon")
        assert any("does not answer" in problem for problem in node.status()["problems"])
        away.rename(program)
        assert_consistent(node)


def test_a_holder_that_is_killed_is_replaced(node: NodeUnderTest) -> None:
    path = Path(node.compose(put_layer(node.objects, {"a": b"a", "b": b"b"}))["path"])
    before = node.status()["holder_pid"]
    node.kill("holder")
    until(lambda: node.status()["holder_pid"] not in (None, before))
    node.kill("node", "daemon")  # so the new holder has the only descriptor
    node.start().close()
    assert (path / "a").read_bytes() == b"a"
    assert_consistent(node)


def test_a_holder_that_died_while_no_node_watched_is_replaced(node: NodeUnderTest) -> None:
    path = Path(node.compose(put_layer(node.objects, {"a": b"a"}))["path"])
    node.kill("node", "holder")
    node.kill("daemon")  # the next node has started a holder, and the old daemon has filled it
    assert (path / "a").read_bytes() == b"a"
    assert_consistent(node)


def test_when_all_three_die_the_mounts_are_lost_and_that_is_told(node: NodeUnderTest, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    layer = put_layer(node.objects, {"a": b"a"})
    inside = node.compose(layer, writable=True)["path"]
    node.compose(layer, target=str(target))
    node.kill("node", "holder", "daemon")
    status = node.status()
    assert (status["compositions"], status["layers"]) == ([], [])
    [problem] = status["problems"]
    assert inside in problem
    assert str(target) in problem
    assert not target.is_mount()
    assert node.mounted("overlay") == []
    assert Path(node.compose(layer)["path"], "a").read_bytes() == b"a"


def test_a_connection_that_is_aborted_under_a_running_node(node: NodeUnderTest) -> None:
    layer = put_layer(node.objects, {"a": b"a"})
    lost = node.compose(layer)["path"]
    before = Process.of(node.status()["daemon_pid"])
    unmount(str(node.root / "l" / node.status()["layers"][0]["id"]))
    unmount(lost)
    unmount(str(node.root / "b"))  # nobody has a file of it any more: this ends the connection
    assert before
    assert wait_ended(before, ENDS_WITHIN)
    until(lambda: node.status()["problems"] and node.status()["compositions"] == [])
    assert any(lost in problem for problem in node.status()["problems"])
    assert Path(node.compose(layer)["path"], "a").read_bytes() == b"a"


def test_a_record_that_cannot_be_read(node: NodeUnderTest) -> None:
    layer = put_layer(node.objects, {"a": b"a"})
    broken, whole = node.compose(layer, writable=True), node.compose(layer)
    node.kill("node")
    record = node.root / "records" / f"composition-{broken['id']}.json"
    record.write_bytes(record.read_bytes()[:40])
    for _ in range(2):
        status = node.status()
        assert [found["id"] for found in status["compositions"]] == [whole["id"]]
        [problem] = status["problems"]
        assert record.name in problem
        assert Path(broken["path"], "a").read_bytes() == b"a"
        node.kill("node")
    node.call("release", id=whole["id"])
    with pytest.raises(Invalid, match="force"):
        node.client.stop()
    node.client.stop(force=True)
    assert list((node.root / "records").iterdir()) == []


def test_after_a_restart_of_the_machine(node: NodeUnderTest) -> None:
    layer = put_layer(node.objects, {"a": b"a"})
    node.compose(layer, writable=True)
    node.kill("node", "daemon", "holder")
    for mount in reversed(node.mounts()):
        unmount(os.fsdecode(mount.mountpoint), lazy=True)
    assert_consistent(node)
    assert node.status()["compositions"] == []
    assert Path(node.compose(layer)["path"], "a").read_bytes() == b"a"
