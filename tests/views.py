"""What a composition of layers looks like, as a value: seen by a plain merge of their trees, or by the kernel.

view = merged_view(objects, objects.image(digest))                 # no root, no mount: also works with many examples
with mounted(objects, objects.image(digest), tmp_path) as path:    # EROFS for each layer, an overlay over them
    assert view_of(path) == view
"""

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, chdir, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from dsec_snapshotter.mounts import mount_erofs, mount_overlay, unmount
from dsec_store.chunks import ChunkSource, LazyBlob, NoCache
from dsec_store.descriptor import Image
from dsec_store.layer.erofs import read_image
from dsec_store.layer.tree import OPAQUE_XATTR, Directory, Inode, inode_of
from dsec_store.objects import Objects
from dsec_store.storedblob import open_blob

_ESCAPED = b"trusted.overlay.overlay."


class Seen(NamedTuple):
    """All that a program can find out about a path. `twin` is the first path (by byte order) of the same inode."""

    mode: int
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    rdev: tuple[int, int] = (0, 0)
    target: bytes = b""
    xattrs: dict[bytes, bytes] = {}  # noqa: RUF012  # never changed
    data: bytes = b""
    twin: bytes = b""


View = dict[bytes, Seen]
"""Every path with what is there, the root's being empty."""


def regular(data: bytes = b"", mode: int = 0o644, **rest: Any) -> Seen:
    return Seen(stat.S_IFREG | mode, data=data, **rest)


def folder(mode: int = 0o755, **rest: Any) -> Seen:
    return Seen(stat.S_IFDIR | mode, **rest)


def link(target: bytes, **rest: Any) -> Seen:
    return Seen(stat.S_IFLNK | 0o777, target=target, **rest)


def view(paths: View, root: Seen | None = None) -> View:
    """An expected view: every twin that is not given is the path itself, and there is a root."""
    whole = {b"": root or folder(), **paths}
    return {path: seen if seen.twin else seen._replace(twin=path) for path, seen in whole.items()}


# -- seen by a plain merge ---------------------------------------------------------------------------------------------


def merged_view(objects: Objects, image: Image) -> View:
    """What overlayfs would show of the image's layers. Fails if one holds what overlayfs would show wrongly."""
    source = ChunkSource(objects.blobs, NoCache())
    merged: dict[bytes, tuple[Inode, LazyBlob | None]] = {}
    root = Inode(stat.S_IFDIR | 0o755)
    for digest in image.mounted:
        layer = objects.layer(digest)
        blobs = [open_blob(objects, blob, source) for blob in layer.blobs]
        tree = read_image(objects.metadata(layer.metadata)).root
        assert not tree.is_opaque, "overlayfs ignores the mark on a root"
        root = tree.inode if layer.has_root else root
        for path, node in tree.walk():
            _put(merged, path, node, blobs)
    names: dict[Inode, bytes] = {}
    for path in sorted(merged):
        names.setdefault(merged[path][0], path)
    paths = {path: _seen(inode, names[inode], blob) for path, (inode, blob) in merged.items()}
    return {b"": _seen(root, b"", None), **paths}


def _put(
    merged: dict[bytes, tuple[Inode, LazyBlob | None]], path: bytes, node: Inode | Directory, blobs: Sequence[LazyBlob]
) -> None:
    inode = inode_of(node)
    if inode.is_whiteout:
        assert path in merged, f"a whiteout of nothing, which an unmerged directory would list: {path!r}"
    below = merged.get(path)
    if not (isinstance(node, Directory) and below and below[0].is_directory and not node.is_opaque):
        for hidden in [other for other in merged if other.startswith(path + b"/")]:
            del merged[hidden]
    if inode.is_whiteout:
        del merged[path]
    else:
        merged[path] = inode, blobs[inode.address.device] if inode.address else None


def _seen(inode: Inode, twin: bytes, blob: LazyBlob | None) -> Seen:
    data = blob.read(inode.address.offset, inode.size) if blob and inode.address else b""
    assert len(data) == inode.size
    xattrs = {
        b"trusted.overlay." + name.removeprefix(_ESCAPED) if name.startswith(_ESCAPED) else name: value
        for name, value in inode.xattrs.items()
        if name != OPAQUE_XATTR
    }
    return Seen(inode.mode, inode.uid, inode.gid, inode.mtime_ns, inode.rdev, inode.target, xattrs, data, twin)


# -- seen by the kernel ------------------------------------------------------------------------------------------------


def view_of(top: Path) -> View:
    """A folder as it is."""
    paths = {b"": os.fsencode(top)}
    for folder_path, folders, files in os.walk(os.fsencode(top)):
        for name in (*folders, *files):
            path = os.path.join(folder_path, name)
            paths[os.path.relpath(path, os.fsencode(top))] = path
    twins: dict[tuple[int, int], bytes] = {}
    for path in sorted(paths):
        status = os.lstat(paths[path])
        twins.setdefault((status.st_dev, status.st_ino), path)
    return {path: _stat(whole, twins) for path, whole in paths.items()}


def _stat(path: bytes, twins: dict[tuple[int, int], bytes]) -> Seen:
    status = os.lstat(path)
    kind = stat.S_IFMT(status.st_mode)
    device = kind in (stat.S_IFCHR, stat.S_IFBLK)
    names = os.listxattr(path, follow_symlinks=False)
    return Seen(
        mode=status.st_mode,
        uid=status.st_uid,
        gid=status.st_gid,
        mtime_ns=status.st_mtime_ns,
        rdev=(os.major(status.st_rdev), os.minor(status.st_rdev)) if device else (0, 0),
        target=os.readlink(path) if kind == stat.S_IFLNK else b"",
        xattrs={os.fsencode(name): os.getxattr(path, name, follow_symlinks=False) for name in names},
        data=Path(os.fsdecode(path)).read_bytes() if kind == stat.S_IFREG else b"",
        twin=twins[status.st_dev, status.st_ino],
    )


@contextmanager
def mounted(objects: Objects, image: Image, scratch: Path) -> Iterator[Path]:
    """The layers of `image`, one EROFS mount each with its blobs in plain files, under a read-only overlay."""
    root = Inode(stat.S_IFDIR | 0o755)
    with ExitStack() as stack:
        stack.enter_context(chdir(scratch))
        for number, digest in enumerate(image.mounted):
            layer = objects.layer(digest)
            Path(f"{number}.erofs").write_bytes(objects.metadata(layer.metadata))
            devices = [f"{number}-{device}.blob" for device in range(len(layer.blobs))]
            for device, blob in zip(devices, layer.blobs, strict=True):
                lazy = open_blob(objects, blob, ChunkSource(objects.blobs, NoCache()))
                Path(device).write_bytes(lazy.read(0, blob.size))
            os.mkdir(str(number))
            mount_erofs(f"{number}.erofs", devices, str(number), direct_io=False)
            stack.callback(unmount, str(number))
            if layer.has_root:
                root = read_image(objects.metadata(layer.metadata)).root.inode
        _make_top(Path("top"), root)
        os.mkdir("merged")
        mount_overlay(["top", *(str(number) for number in reversed(range(len(image.mounted))))], None, "merged")
        stack.callback(unmount, "merged")
        yield scratch / "merged"


def _make_top(top: Path, root: Inode) -> None:
    """An empty directory with the root's attributes: overlayfs takes them from the topmost layer alone."""
    top.mkdir()
    os.chown(top, root.uid, root.gid)
    top.chmod(stat.S_IMODE(root.mode))
    for name, value in root.xattrs.items():
        os.setxattr(top, name, value)
    os.utime(top, ns=(root.mtime_ns, root.mtime_ns))
