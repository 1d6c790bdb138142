"""DSEC_ROOT: made once, kept apart from other releases, other stores and other people's folders."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dsec_snapshotter import root as names
from dsec_snapshotter.root import Root
from dsec_store.errors import Denied, Invalid

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="DSEC_ROOT belongs to root")


@needs_root
def test_it_is_made_with_its_folders_for_root_alone(tmp_path: Path) -> None:
    root = Root.prepare(tmp_path / "a" / "b")
    assert root.path.stat().st_mode & 0o777 == 0o700
    assert (root.path / "version").read_text() == "dsec-root 1\n"
    assert {entry.name for entry in root.path.iterdir()} == {"version", "m", "c", "b", "l", "s", "records"}
    assert Root.prepare(tmp_path / "a" / "b") == root


@needs_root
def test_many_at_once_make_one(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as threads:
        roots = list(threads.map(lambda _: Root.prepare(tmp_path / "root"), range(16)))
        list(threads.map(lambda root: root.bind("file:///store"), roots))
    assert len(set(roots)) == 1
    assert not [name for name in os.listdir(tmp_path / "root") if name.startswith(".")]


@needs_root
def test_a_link_leads_to_the_folder_that_the_kernel_shows(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert Root.prepare(tmp_path / "link").path == tmp_path.resolve() / "real"


@needs_root
def test_another_version_is_named_with_the_way_out(tmp_path: Path) -> None:
    root = Root.prepare(tmp_path / "root")
    (root.path / names.VERSION_FILE).write_text("dsec-root 7\n")
    with pytest.raises(Invalid, match=r"root is 'dsec-root 7', and this release reads 'dsec-root 1'.*another --root"):
        Root.prepare(root.path)


@needs_root
def test_another_store_is_named_with_the_way_out(tmp_path: Path) -> None:
    root = Root.prepare(tmp_path / "root")
    root.bind("file:///one")
    root.bind("file:///one")
    with pytest.raises(
        Invalid, match=r"bound to the store file:///one, not to file:///two: use another --root, or stop"
    ):
        root.bind("file:///two")


@needs_root
def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(Invalid, match="'precious'"):
        Root.prepare(tmp_path)
    assert os.listdir(tmp_path) == ["precious"]


@needs_root
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    os.chown(other, 1234, 0)
    with pytest.raises(Denied, match=r"other belongs to user 1234, not to root: .*--root"):
        Root.prepare(other)
    assert os.listdir(other) == []


@needs_root
def test_where_nothing_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "root", tmp_path / "file", Path("/proc/dsec")):
        with pytest.raises(Denied, match="--root"):
            Root.prepare(path)


def test_it_needs_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(Denied, match="sudo"):
        Root.prepare(tmp_path / "root")
    assert not (tmp_path / "root").exists()
