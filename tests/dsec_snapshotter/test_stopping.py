"""The node is stopped whatever its data daemon, its store and its readers do: nobody waits for ever."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dsec_snapshotter.mounts import unmount
from dsec_snapshotter.processes import Process
from dsec_store.errors import Invalid, Unavailable
from tests.dsec_snapshotter.making import put_layer
from tests.dsec_snapshotter.nodes import NodeUnderTest, node_under_test, until

pytestmark = pytest.mark.component

CONTENT = bytes(range(256)) * 8192
WITHIN = 25.0
"""Seconds, in which a stop ends: requests under way have 5, a data daemon has 5 to obey."""


def stop(node: NodeUnderTest, *, force: bool) -> None:
    stopping = threading.Thread(target=node.client.stop, kwargs={"force": force}, daemon=True)
    stopping.start()
    stopping.join(WITHIN)
    assert not stopping.is_alive()
    node.assert_gone()


def waiting(process: subprocess.Popen[bytes]) -> bool:
    """Whether it waits for the file system."""
    return b"\nState:\tD" in Path(f"/proc/{process.pid}/status").read_bytes()


def frozen_daemon(node: NodeUnderTest) -> Process:
    daemon = Process.of(node.status()["daemon_pid"])
    assert daemon
    os.kill(daemon.pid, signal.SIGSTOP)
    return daemon


def killed_reader(file: Path) -> None:
    """Read what nobody answers, and die of it: the pages stay locked."""
    with subprocess.Popen(["cat", file], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as reader:
        until(lambda: waiting(reader))
        reader.kill()


def test_by_force_while_the_daemon_stands_still(node: NodeUnderTest) -> None:
    """With a killed reader, and a compose that waits for the daemon."""
    layer, other = put_layer(node.objects, {"a": CONTENT}), put_layer(node.objects, {"b": CONTENT[1:]})
    path = Path(node.compose(layer)["path"])
    daemon = frozen_daemon(node)
    killed_reader(path / "a")
    with ThreadPoolExecutor(1) as threads:
        composing = threads.submit(node.compose, other)
        until(lambda: len(os.listdir(node.root / "l")) == 2)
        stop(node, force=True)
        assert isinstance(composing.exception(WITHIN), Unavailable)
    assert not daemon.alive()


def test_without_force_while_the_daemon_stands_still(node: NodeUnderTest) -> None:
    composition = node.compose(put_layer(node.objects, {"a": CONTENT}))
    daemon = frozen_daemon(node)
    killed_reader(Path(composition["path"], "a"))
    node.call("release", id=composition["id"])
    stop(node, force=False)
    assert not daemon.alive()


def test_by_force_while_the_store_does_not_answer(node: NodeUnderTest) -> None:
    node.compose(put_layer(node.objects, {"a": CONTENT}))
    node.store.with_name("stalled").touch()
    with ThreadPoolExecutor(1) as threads:
        composing = threads.submit(node.compose, put_layer(node.objects, {"b": b"b"}))
        until(lambda: len(os.listdir(node.root / "s")) == 2)
        stop(node, force=True)
        assert isinstance(composing.exception(WITHIN), Unavailable)


def test_by_force_while_no_daemon_starts(tmp_path: Path) -> None:
    program = Path(__file__).with_name("daemon_program.py")
    gone = tmp_path / "gone"
    root, store = tmp_path / "root", tmp_path / "store"
    script = f"test -e {gone} && exit 1; exec {sys.executable} {program} {root} {store}"
    with node_under_test(root, store, "-", "sh", "-c", script) as node:
        path = Path(node.compose(put_layer(node.objects, {"a": CONTENT}))["path"])
        gone.touch()
        node.kill("daemon")
        killed_reader(path / "a")
        stop(node, force=True)


def test_by_force_and_in_vain(node: NodeUnderTest, tmp_path: Path) -> None:
    """What somebody has mounted over ours keeps the node: it goes on, with a data daemon that answers."""
    layer = put_layer(node.objects, {"a": CONTENT})
    target = tmp_path / "target"
    target.mkdir()
    node.compose(layer, target=str(target))
    subprocess.run(["mount", "-t", "tmpfs", "over", target], check=True)
    try:
        with pytest.raises(Invalid, match="something else is mounted over"):
            node.client.stop(force=True)
        assert Path(node.compose(layer)["path"], "a").read_bytes() == CONTENT
    finally:
        unmount(str(target))
    stop(node, force=True)
    assert not target.is_mount()
