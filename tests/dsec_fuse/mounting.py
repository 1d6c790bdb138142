"""Mounts of a FUSE connection, and of EROFS above it."""

import contextlib
import os
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import pytest

from tests.kernel import mount, unmountable


@contextlib.contextmanager
def fuse_mounted(target: Path) -> Iterator[FileIO]:
    """A FUSE mount at `target`, as a node makes it; yields its connection, which may be closed before the end."""
    if why := unmountable("fuse"):
        pytest.skip(why)
    target.mkdir()
    with FileIO("/dev/fuse", "r+") as device:
        options = f"fd={device.fileno()},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions"
        with mount("dsec", target, "fuse", options):
            yield device


@contextlib.contextmanager
def erofs_mounted(target: Path, image: Path, device: Path) -> Iterator[None]:
    """A metadata image with its blob device, which is read past the page cache of the device's file system."""
    if why := unmountable("erofs"):
        pytest.skip(why)
    target.mkdir()
    with mount(image, target, "erofs", f"device={device},directio"):
        yield


def set_readahead(target: Path, size: int) -> None:
    """Bytes that the kernel reads ahead on the mount at `target`, and on no other."""
    device = target.stat().st_dev
    bdi = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    bdi.write_text(str(size >> 10))
