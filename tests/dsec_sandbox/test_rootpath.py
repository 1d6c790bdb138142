"""Paths inside a root cannot lead out of it."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec_sandbox.rootpath import RootPath

pytestmark = pytest.mark.component


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root/etc").mkdir(parents=True)
    (tmp_path / "secret").write_text("outside")
    return tmp_path / "root"


@pytest.fixture
def inside(root: Path) -> Iterator[RootPath]:
    with RootPath(root) as inside:
        yield inside


def test_absolute_links_lead_into_the_root(root: Path, inside: RootPath) -> None:
    (root / "etc/real").write_text("inside")
    (root / "link").symlink_to("/etc/real")
    assert inside.read("/link", 100) == b"inside"
    assert inside.stat("link").st_ino == (root / "etc/real").stat().st_ino


@pytest.mark.parametrize("target", ["../secret", "../../secret", "/../secret", "{outside}", "/proc/self/root{outside}"])
def test_links_do_not_leave_the_root(root: Path, inside: RootPath, target: str) -> None:
    (root / "link").symlink_to(target.format(outside=root.parent / "secret"))
    with pytest.raises(FileNotFoundError):
        inside.read("/link", 100)
    with pytest.raises(FileNotFoundError):
        inside.read("/../secret", 100)


def test_reading_is_bounded(root: Path, inside: RootPath) -> None:
    (root / "file").write_bytes(b"0123456789")
    assert inside.read("file", 4) == b"0123"


def test_what_is_no_file_is_not_opened(root: Path, inside: RootPath) -> None:
    os.mkfifo(root / "pipe")
    for name in ("pipe", "etc"):
        with pytest.raises(OSError, match="not a regular file"):
            inside.read(name, 100)


def test_directories_are_made_with_plain_permissions(root: Path, inside: RootPath) -> None:
    former = os.umask(0o077)
    try:
        inside.make_directories("/a/b/c")
    finally:
        os.umask(former)
    inside.make_directories("/a/b/c")
    inside.make_directories("/")
    assert {stat.S_IMODE(path.stat().st_mode) for path in (root / "a", root / "a/b", root / "a/b/c")} == {0o755}


def test_directories_are_made_behind_links_inside_only(root: Path, inside: RootPath) -> None:
    (root / "link").symlink_to("/etc")
    inside.make_directories("/link/new")
    assert (root / "etc/new").is_dir()
    outside = root.parent / "outside"
    outside.mkdir()
    (root / "escape").symlink_to(outside)
    with pytest.raises(FileExistsError):  # inside it dangles
        inside.make_directories("/escape/new")
    assert list(outside.iterdir()) == []


def test_a_file_in_the_way_is_reported(root: Path, inside: RootPath) -> None:
    (root / "file").touch()
    for path in ("/file", "/file/below"):
        with pytest.raises(NotADirectoryError):
            inside.make_directories(path)
