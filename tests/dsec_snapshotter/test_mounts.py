"""Reading mountinfo, errors of mounting; and what the options of the overlay mean on this kernel."""

import errno
import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec_snapshotter import mounts
from dsec_snapshotter.compositions import topmost_occurrences
from dsec_snapshotter.supervisor import pause_before
from dsec_store.digest import Digest
from dsec_store.errors import Denied, Invalid, NotFound, StoreError, Unavailable
from dsec_store.layer.erofs import write_image
from dsec_store.layer.tree import Directory, Inode
from tests.kernel import unmountable

MOUNTINFO = rb"""22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
42 22 0:39 / /a\040b/l/x\134y ro,nosuid,nodev - erofs m/ab.erofs ro,directio
43 22 0:41 / /\377/s/q/merged rw master:2 propagate_from:1 - overlay overlay rw,lowerdir+=l/a,lowerdir+=l/b,xino=on
"""


def test_mountinfo() -> None:
    root, layer, overlay = mounts.parse_mountinfo(MOUNTINFO)
    assert root == mounts.MountInfo(
        22, 1, "254:0", b"/", "ext4", b"/dev/vda", frozenset({b"rw", b"relatime", b"discard"})
    )
    assert layer.mountpoint == b"/a b/l/x\\y"
    assert (layer.filesystem, layer.source) == ("erofs", b"m/ab.erofs")
    assert overlay.mountpoint == b"/\xff/s/q/merged"
    assert {b"lowerdir+=l/a", b"lowerdir+=l/b"} <= overlay.options


def test_this_kernels_mountinfo_can_be_read() -> None:
    assert any(mount.filesystem == "proc" for mount in mounts.mountinfo())


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOENT, NotFound),
        (errno.EBUSY, Invalid),
        (errno.ENOTCONN, Unavailable),
        (errno.ENOSPC, Denied),
        (errno.EPERM, Denied),
        (errno.E2BIG, StoreError),
    ],
)
def test_refusals_by_number(number: int, kind: type[StoreError]) -> None:
    error = mounts.refused("this layer", OSError(number, os.strerror(number)))
    assert type(error) is kind
    assert str(error) == f"this layer: {os.strerror(number)}"


@pytest.mark.parametrize("number", [errno.ENODEV, errno.ENOSYS, errno.ENOTBLK])
def test_a_kernel_that_is_too_old_is_told_so(number: int) -> None:
    error = mounts.refused("EROFS cannot be mounted", OSError(number, "x"))
    assert isinstance(error, Denied)
    assert "6.12" in str(error)


def test_a_file_system_that_carries_no_images_is_told_with_the_way_out() -> None:
    error = mounts.refused("EROFS cannot be mounted", OSError(errno.ENOTBLK, "Block device required"))
    assert "the file system of DSEC_ROOT" in str(error)
    assert "--root on ext4 or xfs" in str(error)


def test_the_topmost_occurrence_of_a_layer_is_kept() -> None:
    a, b, c = (Digest.of(name) for name in (b"a", b"b", b"c"))
    assert topmost_occurrences([a, b, a, c, b]) == [a, c, b]


def test_restarts_become_slower() -> None:
    assert [pause_before(deaths) for deaths in range(1, 9)] == [0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5]
    assert pause_before(10_000) == 5


# -- the kernel --------------------------------------------------------------------------------------------------------


@pytest.fixture
def mounting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with an image `i` and folders to mount at; afterwards nothing is mounted there."""
    for lacking in map(unmountable, ("erofs", "overlay")):
        if lacking:
            pytest.skip(lacking)
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b", "o", "upper", "work"):
        (tmp_path / folder).mkdir()
    out = io.BytesIO()
    write_image(Directory(Inode(stat.S_IFDIR | 0o755), {b"d": Directory(Inode(stat.S_IFDIR | 0o755))}), [], out)
    (tmp_path / "i").write_bytes(out.getvalue())
    yield tmp_path
    for folder in ("o", "a", "b"):
        mounts.unmount_all(folder)


@pytest.mark.component
def test_every_option_of_the_overlay_is_known_to_this_kernel(mounting: Path) -> None:
    mounts.mount_erofs("i", [], "a", direct_io=False)
    mounts.mount_erofs("i", [], "b", direct_io=False)
    for upper in (("upper", "work"), None):
        mounts.mount_overlay(["a", "b"], upper, "o")
        assert os.listdir("o") == ["d"]
        mounts.unmount("o")


@pytest.mark.component
def test_what_the_kernel_has_logged_is_told(mounting: Path) -> None:
    mounts.mount_erofs("i", [], "a", direct_io=False)
    with pytest.raises(OSError, match=r"lowerdir\+=missing") as missing:
        mounts.mount_overlay(["a", "missing"], None, "o")
    assert missing.value.errno == errno.ENOENT
    with pytest.raises(OSError, match="overlay at o"):
        mounts.mount_overlay(["a"], None, "o")
    with pytest.raises(OSError, match="unmount o"):
        mounts.unmount("o")


@pytest.mark.component
def test_read_ahead_of_one_mount_and_of_no_other(mounting: Path) -> None:
    for folder in ("a", "b"):
        mounts.mount_erofs("i", [], folder, direct_io=False)
    ours, other = mounts.bdi_of("a"), mounts.bdi_of("b")
    if ours is None or other is None:
        pytest.skip("this kernel does not tell the bdi of an EROFS mount")
    mounts.set_read_ahead(ours, 4096)
    read_ahead = [Path("/sys/class/bdi", name, "read_ahead_kb").read_text().strip() for name in (ours, other)]
    assert read_ahead == ["4096", "128"]
