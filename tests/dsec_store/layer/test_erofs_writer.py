"""What the writer writes, judged by the format's document, by fsck.erofs and by the kernel."""

import errno
import io
import itertools
import os
import shutil
import stat
import struct
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from dsec_store.digest import Digest
from dsec_store.errors import Invalid
from dsec_store.layer.erofs import Device, write_image
from dsec_store.layer.erofs.format import BLOCK, FILE_SIZE_MAX, directory_size
from dsec_store.layer.tree import ID_MAX, OPAQUE_VALUE, OPAQUE_XATTR, Address, Directory, Inode, whiteout
from tests.kernel import mount, unmountable
from tests.trees import XATTR_NAMES, Facts, describe, trees

DEVICE = Device("blob", blocks=2**20)

VECTOR = "22499ce2928680ca5a1c68efab09cd7379299d853a36474e1ad32713938d6f3e"
"""BLAKE3 of the example image in docs/format/metadata-image.md. It never changes within a version of the format."""


def regular(size: int = 0, address: Address | None = None, **rest: Any) -> Inode:
    return Inode(stat.S_IFREG | 0o644, size=size, address=address, **rest)


def directory(entries: dict[bytes, Inode | Directory] | None = None, **rest: Any) -> Directory:
    return Directory(Inode(stat.S_IFDIR | 0o755, **rest), entries or {})


def written(root: Directory, *devices: Device) -> bytes:
    out = io.BytesIO()
    write_image(root, devices, out)
    return out.getvalue()


# --- Bytes -----------------------------------------------------------------------------------------------------------


def test_vector() -> None:
    """The example of docs/format/metadata-image.md."""
    root = directory({b"file": regular(5, Address(0, 4096), mtime_ns=1), b"link": Inode(0o120777, target=b"file")})
    image = written(root, Device("blob", blocks=2))
    assert len(image) == 4096
    assert Digest.of(image).hex == VECTOR


@given(trees())
def test_bytes_depend_on_the_tree_only(root: Directory) -> None:
    devices = Device("first", 2**20), Device("second", 2**20)
    assert written(root, *devices) == written(reversed_order(root), *devices)


def reversed_order(directory: Directory) -> Directory:
    """The same tree, built in the opposite order."""
    inode = directory.inode
    inode.xattrs = dict(reversed(inode.xattrs.items()))
    entries = {
        name: reversed_order(node) if isinstance(node, Directory) else node
        for name, node in reversed(directory.entries.items())
    }
    return Directory(inode, entries)


def test_an_empty_tree_is_one_block_without_devices() -> None:
    image = written(directory())
    assert len(image) == BLOCK
    assert struct.unpack_from("<I", image, 1024 + 80) == (0,)  # no incompatible feature


def test_places_follow_ls_lr() -> None:
    """The entries of a directory side by side, then those of each of its subdirectories, depth first."""
    uids = iter(range(0x7A5C0000, 0x7A5C0008))
    root = directory(uid=next(uids))
    root.entries |= {name: directory(uid=next(uids)) for name in (b"a", b"b")}
    root.entries[b"c"] = regular(uid=next(uids))
    a, b, _ = root.entries.values()
    assert isinstance(a, Directory)
    assert isinstance(b, Directory)
    a.entries |= {b"x": directory(uid=next(uids)), b"y": regular(uid=next(uids))}
    a.entries[b"x"] = directory({b"deep": regular(uid=0x7A5C0006)}, uid=0x7A5C0004)
    b.entries[b"z"] = regular(uid=0x7A5C0007)
    image = written(root)
    places = [image.index(struct.pack("<I", uid)) for uid in range(0x7A5C0000, 0x7A5C0008)]
    assert places == sorted(places)


# --- Refusals --------------------------------------------------------------------------------------------------------

TWICE = directory()


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (regular(1), "no address"),
        (regular(-1), "-1 bytes"),
        (regular(1, Address(1, 0)), "blob device 1 of 1"),
        (regular(1, Address(0, 1)), "unaligned"),
        (regular(4097, Address(0, (2**20 - 1) * 4096)), "not on the blob device"),
        (regular(FILE_SIZE_MAX + 1, Address(0, 0)), "chunks of up to"),
        (Inode(stat.S_IFLNK, target=b""), "symlink target"),
        (Inode(stat.S_IFLNK, target=b"x" * 4096), "symlink target"),
        (Inode(stat.S_IFLNK, target=b"a\0b"), "symlink target"),
        (Inode(0o644), "file type"),
        (Inode(stat.S_IFREG | 1 << 16), "file type"),
        (Inode(-1), "file type"),
        (Inode(stat.S_IFDIR), "file type"),
        (Directory(Inode(stat.S_IFREG)), "file type"),
        (regular(uid=ID_MAX + 1), "owner"),
        (regular(gid=-1), "owner"),
        (regular(mtime_ns=2**63 * 10**9), "modification time"),
        (Inode(stat.S_IFCHR, rdev=(4096, 0)), "device number 4096:0"),
        (Inode(stat.S_IFBLK, rdev=(0, 2**20)), "device number"),
        (regular(xattrs={b"system.nfs4_acl": b""}), "system.nfs4_acl"),
        (regular(xattrs={b"system.posix_acl_access2": b""}), "system.posix_acl_access2"),
        (regular(xattrs={b"user.": b""}), "user."),
        (regular(xattrs={b"user.a\0": b""}), "user.a"),
        (regular(xattrs={b"user." + b"n" * 251: b""}), "up to 255 bytes"),
        (regular(xattrs={b"user.a": bytes(65536)}), "user.a.*65536 bytes"),
        (regular(xattrs={b"user.%d" % number: bytes(65535) for number in range(4)}), "limit for one inode"),
        (directory({b"a": TWICE, b"b": TWICE}), "two names"),
        (directory({b"..": regular()}), "file name"),
        (directory({b"a/b": regular()}), "file name"),
        (directory({b"n" * 256: regular()}), "file name"),
    ],
)
def test_what_erofs_cannot_hold_is_refused_by_path(node: Inode | Directory, message: str) -> None:
    out = io.BytesIO()
    with pytest.raises(Invalid, match=f"^'/etc/new.*: .*{message}"):
        write_image(directory({b"etc": directory({b"new\n": node})}), [DEVICE], out)
    assert not out.getvalue()


def test_the_root_is_checked_too() -> None:
    with pytest.raises(Invalid, match=r"^/: owner"):
        written(directory(uid=-1))


@pytest.mark.parametrize(("tag", "blocks"), [("", 1), ("x" * 65, 1), ("ä", 1), ("x", -1), ("x", 2**32)])
def test_device_limits(tag: str, blocks: int) -> None:
    with pytest.raises(Invalid, match="blob device"):
        Device(tag, blocks)


def test_more_devices_than_the_root_nid_allows() -> None:
    with pytest.raises(Invalid, match="16 bits"):
        written(directory(), *[Device("x", 0)] * 16400)


# --- The kernel and fsck.erofs ---------------------------------------------------------------------------------------


@dataclass
class Sample:
    """A tree under construction, the bytes of its blob devices, and each file's content."""

    root: Directory = field(default_factory=directory)
    blobs: tuple[bytearray, bytearray] = field(default_factory=lambda: (bytearray(), bytearray()))
    contents: dict[bytes, bytes] = field(default_factory=dict)

    def file(self, path: bytes, size: int, **rest: Any) -> Inode:
        """Add a file of `size` distinct bytes; files alternate between the devices."""
        device = len(self.contents) % 2
        blob = self.blobs[device]
        content = os.urandom(size)
        inode = regular(size, Address(device, len(blob)), **rest)
        blob += content + bytes(-size % BLOCK)
        self.contents[path] = content
        self.add(path, inode)
        return inode

    def add(self, path: bytes, node: Inode | Directory) -> None:
        parent, _, name = path.rpartition(b"/")
        below = self.root.find(parent)
        assert isinstance(below, Directory)
        below.entries[name] = node

    def write(self, folder: Path) -> tuple[Path, list[Path]]:
        """The image and its blobs as files."""
        devices = []
        paths = [folder / "first", folder / "second"]
        for path, blob in zip(paths, self.blobs, strict=True):
            path.write_bytes(blob)
            devices.append(Device(path.name, len(blob) // BLOCK))
        with (folder / "image").open("wb") as out:
            write_image(self.root, devices, out)
        return folder / "image", paths


def capability() -> bytes:
    """cap_net_bind_service=ep in the form of `struct vfs_cap_data`, revision 2."""
    return struct.pack("<5I", 0x02000001, 1 << 10, 0, 0, 0)


def acl(*users: int) -> bytes:
    """user::rw- user:<each>:r-- group::r-- mask::r-- other::--- in the form of `struct posix_acl_xattr_header`."""
    none = 2**32 - 1
    entries = [(1, 6, none), *((2, 4, user) for user in sorted(users)), (4, 4, none), (0x10, 4, none), (0x20, 0, none)]
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


def add_kinds(sample: Sample) -> None:
    for size in (1, 4095, 4096, 4097, 3 * 2**20 + 123):
        sample.file(b"size-%d" % size, size, mtime_ns=-1 - size, uid=ID_MAX, gid=1000)
    sample.add(b"empty", regular(mtime_ns=2**40 * 10**9 + 999_999_999))
    for number, mode in enumerate((0o7777, 0o4755, 0o2755, 0o1777, 0)):
        sample.add(b"mode-%d" % number, Inode(stat.S_IFREG | mode, mtime_ns=-(2**40)))
        sample.add(b"modedir-%d" % number, Directory(Inode(stat.S_IFDIR | mode)))
    sample.add(b"whiteout", whiteout())
    sample.add(b"char", Inode(stat.S_IFCHR | 0o600, rdev=(4095, 2**20 - 1)))
    sample.add(b"block", Inode(stat.S_IFBLK | 0o600, rdev=(259, 256)))
    sample.add(b"fifo", Inode(stat.S_IFIFO | 0o644, gid=ID_MAX))
    sample.add(b"socket", Inode(stat.S_IFSOCK | 0o755))
    sample.add(b"opaque", directory(xattrs={OPAQUE_XATTR: OPAQUE_VALUE}))


def add_names(sample: Sample) -> None:
    sample.add(b"names", directory())
    for name in (b"n" * 255, b"\xff\xfe", b"-first", b"...", b"..a", b".a", b" ", b"\x01", b"new\nline", b"\xc3\xa4"):
        sample.add(b"names/" + name, regular())
    sample.add(b"crowd", directory({b"entry-%05d" % number: regular() for number in range(5000)}))
    sample.add(b"long", directory({b"%03d" % number + b"x" * 252: regular() for number in range(40)}))
    path = b"deep"
    sample.add(path, directory())
    for _ in range(200):
        path += b"/d"
        sample.add(path, directory())
    sample.file(path + b"/end", 10)


def add_links(sample: Sample) -> None:
    linked = sample.file(b"linked", 5000, xattrs={b"user.shared": b"yes"})
    fifo = Inode(stat.S_IFIFO | 0o600)
    sample.add(b"links", directory({b"again": linked, b"fifo-1": fifo, b"fifo-2": fifo}))
    sample.add(b"modedir-0/again", linked)
    sample.contents |= dict.fromkeys((b"links/again", b"modedir-0/again"), sample.contents[b"linked"])
    for size in (1, 100, 3967, 3968, 4000, 4031, 4032, 4033, 4095):
        sample.add(b"links/target-%d" % size, Inode(stat.S_IFLNK | 0o777, target=b"t" * size))


def add_directories_near_block_edges(sample: Sample) -> None:
    """Directories whose data just fits, or just not, into the rest of the inode's block, one block, or two."""
    sample.add(b"edges", directory())
    for size in (*range(BLOCK - 67, BLOCK - 60), *range(BLOCK - 3, BLOCK + 1), 4109, 4110, 8190, 8191, 8192, 8205):
        names = names_of(size)
        assert directory_size(sorted([b".", b"..", *names])) == size
        sample.add(b"edges/%d" % size, directory({name: regular() for name in names}))


def names_of(size: int) -> list[bytes]:
    """Names that take `size` bytes in a directory together with `.` and `..`. Entries of 32 bytes fill whole blocks;
    the first is longer where the first block needs it, the last one shorter."""
    first_block, rest = min(size, BLOCK) - 27, max(size - BLOCK, 0)
    names = [b"%05d" % number + b"-" * 15 for number in range(first_block // 32 + rest // 32)]
    names[0] += b"-" * (first_block % 32)
    return [*names, b"z" * (rest % 32 - 12)] if rest % 32 else names


def add_xattrs(sample: Sample) -> None:
    sample.file(b"capable", 20, xattrs={b"security.capability": capability()})
    sample.add(b"acl", regular(xattrs={b"system.posix_acl_access": acl(1000, 70000)}))
    sample.add(b"acldir", directory(xattrs={b"system.posix_acl_default": acl(1), b"system.posix_acl_access": acl(2)}))
    sample.file(b"large", 5000, xattrs={b"user.large": os.urandom(40 * 1024), b"trusted.small": b""})
    sample.file(b"largest", 1, xattrs={b"user.%d" % number: os.urandom(65535) for number in range(3)})
    named = {b"user." + b"n" * 250: b"value", b"user.\xff": b"\0", b"user.empty": b""}
    sample.file(b"names-of-xattrs", 1, xattrs=named)
    sample.add(b"large-dir", directory({b"inside": regular()}, xattrs={b"trusted.x": os.urandom(5000)}))
    sample.add(b"large-link", Inode(stat.S_IFLNK | 0o777, target=b"t" * 50, xattrs={b"trusted.x": os.urandom(5000)}))
    sample.add(b"xattr-edges", directory())
    for size in range(3990, 4040, 3):
        big = {b"trusted.x": os.urandom(size)}
        sample.file(b"xattr-edges/file-%d" % size, 100, xattrs=big)
        sample.add(b"xattr-edges/dir-%d" % size, directory({b"inside": regular()}, xattrs=big))
        sample.add(b"xattr-edges/link-%d" % size, Inode(stat.S_IFLNK | 0o777, target=b"target", xattrs=big))


def everything() -> Sample:
    sample = Sample(directory(uid=5, gid=6, mtime_ns=-5, xattrs={b"trusted.of-the-root": b"1"}))
    add_kinds(sample)
    add_names(sample)
    add_links(sample)
    add_directories_near_block_edges(sample)
    add_xattrs(sample)
    return sample


@contextmanager
def mounted(image: Path, blobs: list[Path], target: Path) -> Iterator[Path]:
    """The image mounted by the kernel; skips where the kernel cannot mount files."""
    target.mkdir(exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(mount(image, target, "erofs", ",".join(f"device={blob}" for blob in blobs)))
        except OSError as error:
            if error.errno == errno.ENOTBLK:
                pytest.skip("this kernel mounts EROFS from block devices only (from files: Linux 6.12)")
            raise
        yield target


needs_erofs = pytest.mark.skipif(bool(unmountable("erofs")), reason=unmountable("erofs") or "it can be mounted")


def paths_below(root: bytes) -> Iterator[bytes]:
    """Paths relative to `root`, that of the root itself being empty."""
    yield b""
    for folder, folders, files in os.walk(root):
        for name in itertools.chain(folders, files):
            yield os.path.relpath(os.path.join(folder, name), root)


def observe(target: Path) -> dict[bytes, Facts]:
    """The facts of a mounted tree, as `describe` gives them for a tree in memory."""
    root = os.fsencode(target)
    stats = {path: os.lstat(os.path.join(root, path)) for path in paths_below(root)}
    twins: dict[int, bytes] = {}
    for path in sorted(stats):
        twins.setdefault(stats[path].st_ino, path)
    return {path: facts(os.path.join(root, path), found, twins[found.st_ino]) for path, found in stats.items()}


def facts(path: bytes, found: os.stat_result, twin: bytes) -> Facts:
    names = [os.fsencode(name) for name in os.listxattr(path, follow_symlinks=False)]
    return Facts(
        found.st_mode,
        found.st_uid,
        found.st_gid,
        found.st_size if stat.S_ISREG(found.st_mode) else 0,
        found.st_mtime_ns,
        (os.major(found.st_rdev), os.minor(found.st_rdev)),
        os.readlink(path) if stat.S_ISLNK(found.st_mode) else b"",
        {name: os.getxattr(path, name, follow_symlinks=False) for name in names},
        found.st_nlink,
        twin,
    )


@pytest.mark.component
@needs_erofs
def test_the_kernel_shows_the_tree(tmp_path: Path) -> None:
    sample = everything()
    image, blobs = sample.write(tmp_path)
    with mounted(image, blobs, tmp_path / "mnt") as target:
        seen, expected = observe(target), describe(sample.root)
        assert seen.keys() == expected.keys()
        assert [(path, seen[path], expected[path]) for path in seen if seen[path] != expected[path]] == []
        for path, content in sample.contents.items():
            assert Path(os.fsdecode(os.path.join(os.fsencode(target), path))).read_bytes() == content, path
        for path in expected:
            assert os.path.lexists(os.path.join(os.fsencode(target), path + b"-absent")) is False


@pytest.mark.component
@needs_erofs
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trees(devices=0, xattr_names=XATTR_NAMES))
def test_the_kernel_shows_random_trees(tmp_path: Path, root: Directory) -> None:
    image = tmp_path / "image"
    image.write_bytes(written(root))
    with mounted(image, [], tmp_path / "mnt") as target:
        assert observe(target) == describe(root)


@pytest.mark.component
@needs_erofs
def test_the_kernel_reads_the_end_of_8_tib(tmp_path: Path) -> None:
    blob = tmp_path / "blob"
    with blob.open("wb") as file:
        file.seek(FILE_SIZE_MAX - 3)
        file.write(b"end")
    huge, tail = regular(FILE_SIZE_MAX, Address(0, 0)), regular(3, Address(0, FILE_SIZE_MAX - BLOCK))
    root = directory({b"huge": huge, b"tail": tail})
    image = tmp_path / "image"
    image.write_bytes(written(root, Device("blob", FILE_SIZE_MAX // BLOCK)))
    with mounted(image, [blob], tmp_path / "mnt") as target, (target / "huge").open("rb") as file:
        assert file.seek(0, os.SEEK_END) == FILE_SIZE_MAX
        file.seek(-3, os.SEEK_END)
        assert file.read() == b"end"


@pytest.mark.component
@needs_erofs
def test_a_mount_without_its_device_gives_no_wrong_bytes(tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.write_bytes(written(directory({b"file": regular(5, Address(0, 0))}), DEVICE))
    with mounted(image, [], tmp_path / "mnt") as target, pytest.raises(OSError, match="Input/output error"):
        (target / "file").read_bytes()


@pytest.mark.component
@pytest.mark.skipif(shutil.which("fsck.erofs") is None, reason="fsck.erofs is not installed (Debian: erofs-utils)")
def test_fsck_accepts(tmp_path: Path) -> None:
    image, blobs = everything().write(tmp_path)
    devices = [f"--device={blob}" for blob in blobs]
    done = subprocess.run(["fsck.erofs", "-d3", *devices, image], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No errors found" in done.stdout + done.stderr
