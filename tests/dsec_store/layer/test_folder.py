"""From a folder to a tree: what is kept, what is left out, what is refused."""

import os
import shutil
import socket
import stat
import subprocess
from pathlib import Path

import pytest

from dsec_store.errors import Denied, Invalid, NotFound
from dsec_store.layer import folder
from dsec_store.layer.assemble import Assembly
from dsec_store.layer.folder import assemble_folder
from dsec_store.layer.tree import Directory, Inode, inode_of
from tests.dsec_store.keptcontents import KeptContents

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="owners and devices need root")


def assembled(path: Path, *, keep_owner: bool = False, contents: KeptContents | None = None) -> Assembly:
    return assemble_folder(os.fsencode(path), contents or KeptContents(), keep_owner=keep_owner)


def at(assembly: Assembly, path: bytes) -> Inode:
    node = assembly.root.find(path)
    assert node is not None
    return inode_of(node)


def set_xattr(path: Path, name: str, value: bytes) -> None:
    try:
        os.setxattr(path, name, value, follow_symlinks=False)
    except OSError as error:
        pytest.skip(f"no xattr {name} here: {error.strerror}")


def test_names_modes_times_and_contents_are_kept(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir(mode=0o710)
    file = tmp_path / "d" / "f"
    file.write_bytes(b"data")
    file.chmod(0o4751)
    os.utime(file, ns=(0, -5 * 10**8 - 7))
    (tmp_path / "l").symlink_to("d/f")
    os.utime(tmp_path / "l", ns=(0, 123456789), follow_symlinks=False)
    os.mkfifo(tmp_path / "p", 0o600)
    (tmp_path / os.fsdecode(b"caf\xe9 \n")).touch()
    tmp_path.chmod(0o701)
    contents = KeptContents()
    assembly = assembled(tmp_path, contents=contents)
    assert [path for path, _ in assembly.root.walk()] == [b"caf\xe9 \n", b"d", b"d/f", b"l", b"p"]
    inode = at(assembly, b"d/f")
    assert (inode.mode, inode.mtime_ns, inode.size) == (stat.S_IFREG | 0o4751, -5 * 10**8 - 7, 4)
    assert contents.of(inode) == b"data"
    assert (at(assembly, b"l").target, at(assembly, b"l").mtime_ns) == (b"d/f", 123456789)
    assert at(assembly, b"p").mode == stat.S_IFIFO | 0o600
    assert at(assembly, b"d").mode == stat.S_IFDIR | 0o710
    assert (at(assembly, b"").mode, assembly.has_root) == (stat.S_IFDIR | 0o701, True)


@needs_root
def test_owners_are_root_unless_kept(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    os.chown(tmp_path / "f", 1000, 1001)
    os.chown(tmp_path, 7, 8)
    for keep, owners in ((False, [(0, 0), (0, 0)]), (True, [(7, 8), (1000, 1001)])):
        assembly = assembled(tmp_path, keep_owner=keep)
        inodes = at(assembly, b""), at(assembly, b"f")
        assert [(inode.uid, inode.gid) for inode in inodes] == owners


def test_two_names_are_one_file(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "z").write_bytes(b"1")
    os.link(tmp_path / "sub" / "z", tmp_path / "a")
    (tmp_path / "alone").write_bytes(b"1")
    assembly = assembled(tmp_path)
    assert at(assembly, b"a") is at(assembly, b"sub/z") is not at(assembly, b"alone")
    assert at(assembly, b"a").address == at(assembly, b"alone").address


def test_sockets_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("s")
        assert assembled(tmp_path).root.entries == {}


def test_user_xattrs_are_kept(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    set_xattr(tmp_path / "f", "user.k", b"\0=\n")
    set_xattr(tmp_path, "user.top", b"")
    assert at(assembled(tmp_path), b"f").xattrs == {b"user.k": b"\0=\n"}
    assert at(assembled(tmp_path), b"").xattrs == {b"user.top": b""}


@needs_root
def test_of_other_xattrs_only_the_capability_is_kept(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    capability = bytes.fromhex("0100000200200000000000000000000000000000")
    set_xattr(tmp_path / "f", "security.capability", capability)
    set_xattr(tmp_path / "f", "trusted.overlay.opaque", b"y")
    set_xattr(tmp_path / "f", "security.dsectest", b"label")
    assert at(assembled(tmp_path), b"f").xattrs == {b"security.capability": capability}


def test_marks_of_overlayfs_are_refused(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    set_xattr(tmp_path / "d", "user.overlay.opaque", b"y")
    with pytest.raises(Invalid, match=r"/d': xattr user\.overlay"):
        assembled(tmp_path)


@needs_root
def test_devices_are_kept_but_0_0(tmp_path: Path) -> None:
    try:
        os.mknod(tmp_path / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        os.mknod(tmp_path / "disk", stat.S_IFBLK | 0o600, os.makedev(259, 70000))
    except OSError as error:
        pytest.skip(f"no device nodes here: {error.strerror}")
    assert at(assembled(tmp_path), b"null").rdev == (1, 3)
    assert at(assembled(tmp_path), b"disk").rdev == (259, 70000)
    os.mknod(tmp_path / "gone", stat.S_IFCHR, 0)
    with pytest.raises(Invalid, match=r"/gone'.*0:0"):
        assembled(tmp_path)


def test_a_folder_that_is_none_is_not_found(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    for missing in (tmp_path / "gone", tmp_path / "f"):
        with pytest.raises(NotFound, match="no folder"):
            assembled(missing)


def test_a_folder_that_is_a_symlink_is_followed_once(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "f").touch()
    (tmp_path / "link").symlink_to("real")
    assert list(assembled(tmp_path / "link").root.entries) == [b"f"]
    assert isinstance(assembled(tmp_path).root.entries[b"link"], Inode)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_what_cannot_be_read_is_denied(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"1")
    (tmp_path / "f").chmod(0)
    with pytest.raises(Denied, match=r"/f' cannot be read"):
        assembled(tmp_path)


# -- a folder that changes meanwhile -----------------------------------------------------------------------------------


def test_a_file_that_grows_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").write_bytes(b"1234")

    def grow(path: bytes) -> dict[bytes, bytes]:
        if path.endswith(b"/f"):
            with open(path, "ab") as file:
                file.write(b"5")
        return {}

    monkeypatch.setattr(folder, "_xattrs", grow)  # asked for after the size, before the content
    with pytest.raises(Invalid, match=r"/f': changed while it was read"):
        assembled(tmp_path)


def test_a_file_that_goes_away_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").write_bytes(b"1234")
    monkeypatch.setattr(folder, "_names", lambda path: [b"f", b"gone"])
    with pytest.raises(Invalid, match=r"/gone': went away while it was read"):
        assembled(tmp_path)


@pytest.mark.parametrize("other", ["symlink", "fifo"])
def test_what_took_the_place_of_a_file_is_neither_followed_nor_waited_for(
    other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"1234")

    def replace(asked: bytes) -> dict[bytes, bytes]:
        """Asked for after the file was looked at, before it is read."""
        if asked == os.fsencode(path):
            path.unlink()
            path.symlink_to("/etc/passwd") if other == "symlink" else os.mkfifo(path)
        return {}

    monkeypatch.setattr(folder, "_xattrs", replace)
    error, text = (Denied, "cannot be read") if other == "symlink" else (Invalid, "changed while it was read")
    with pytest.raises(error, match=rf"/f'.* {text}"):
        assembled(tmp_path)


def test_another_file_of_the_same_size_and_time_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, other = tmp_path / "f", tmp_path.with_name("other")
    for each in (path, other):
        each.write_bytes(each.name[:1].encode() * 5)
        os.utime(each, ns=(0, 10**18))

    def replace(asked: bytes) -> dict[bytes, bytes]:
        if asked == os.fsencode(path):
            os.replace(other, path)
        return {}

    monkeypatch.setattr(folder, "_xattrs", replace)
    with pytest.raises(Invalid, match=r"/f': changed while it was read"):
        assembled(tmp_path)


def test_contents_come_directory_by_directory_in_byte_order(tmp_path: Path) -> None:
    for name in ("b/z", "b/a/f", "b/B", "a", "c", "b/a/F"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    contents = KeptContents()
    assembled(tmp_path, contents=contents)
    assert contents.kept == [b"a", b"c", b"b/B", b"b/z", b"b/a/F", b"b/a/f"]


# -- the same everywhere -----------------------------------------------------------------------------------------------


def test_a_copy_gives_the_same_tree(tmp_path: Path) -> None:
    original = tmp_path / "original"
    for name in ("z", "a", "M", "ä", "_"):
        (original / name).mkdir(parents=True)
        (original / name / "f").write_text(name)
    os.link(original / "z" / "f", original / "a" / "g")
    if not shutil.which("cp"):
        pytest.skip("cp is not installed")
    subprocess.run(["cp", "-a", original, tmp_path / "copy"], check=True)
    assert flat(assembled(original).root) == flat(assembled(tmp_path / "copy").root)


def flat(root: Directory) -> list[tuple[bytes, int, int, object]]:
    nodes = [(b"", root), *root.walk()]
    inodes = [(path, inode_of(node)) for path, node in nodes]
    return [(path, inode.mode, inode.mtime_ns, inode.address) for path, inode in inodes]
