"""Images of one layer from what lies on this machine: a folder or a tar becomes a workspace, a toolkit or a base.

    build_local(objects, Path("src"), "repo/main", LocalBuild(kind="workspace", prefix="/testbed"))

The same input gives the same digests on any machine: owners are 0:0 unless `keep_owner`, mtimes are kept as they are
or, by the rule of SOURCE_DATE_EPOCH, none is later than `clamp_mtime`; parents of the prefix are 0755 root with mtime
0, and so is the root of what is no base: in a composition the root looks like that of its base.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec_store.descriptor import KINDS, Image, is_unicode
from dsec_store.digest import Digest
from dsec_store.errors import Corrupt, Denied, Invalid, NotFound
from dsec_store.layer.assemble import IMPLIED_MODE, Assembly, assemble_tar, split_path
from dsec_store.layer.build import StoredLayer, clamp_mtimes, graft, inodes, store_layer
from dsec_store.layer.decompress import open_decompressed
from dsec_store.layer.folder import assemble_folder
from dsec_store.layer.spool import spooled
from dsec_store.layer.tar import read_entries
from dsec_store.layer.tree import Inode
from dsec_store.objects import Objects
from dsec_store.references import check_name
from dsec_store.upload import ChunkIndex

_PIECE: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class LocalBuild:
    """What to make of the input. `prefix` and `path` are absolute paths in the sandbox; times in seconds since 1970.

    A prefix may be of any bytes (as os.fsencode takes them); `path` becomes a part of a variable and must be UTF-8.
    """

    kind: str
    prefix: str = "/"
    env: tuple[tuple[str, str], ...] = ()
    path: tuple[str, ...] = ()
    keep_owner: bool = False
    clamp_mtime: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise Invalid(f"unknown kind {self.kind!r} (known: {', '.join(KINDS)})")
        for path in (self.prefix, *self.path):
            if not path.startswith("/") or ":" in path or ".." in path.split("/") or "\0" in path:
                raise Invalid(f"not an absolute path inside a sandbox: {path!r}")
        for path in self.path:
            if not is_unicode(path):
                raise Invalid(f"not in UTF-8: {path!r}")


@dataclass(frozen=True, slots=True)
class Built:
    """The new image and its one layer."""

    image: Digest
    layer: StoredLayer


def build_local(objects: Objects, source: Path, name: str, build: LocalBuild, *, verify: bool = False) -> Built:
    """Store `source` under `name`. Raises `StoreError`; then `name` is as it was.

    With `verify`, chunks that the store has are read and verified before they are relied on.
    """
    check_name(name)
    with _assembled(source, keep_owner=build.keep_owner) as assembly:
        source_bytes = sum(inode.size for inode in inodes(assembly.root))
        _apply(assembly, build)
        layer = store_layer(objects, ChunkIndex(objects, verify=verify), assembly, diff_id=None)
    image = objects.put_image(
        Image(kind=build.kind, layers=(layer.digest,), env=build.env, path=build.path, source_bytes=source_bytes)
    )
    objects.references.set(name, image)
    return Built(image, layer)


@contextmanager
def _assembled(source: Path, *, keep_owner: bool) -> Iterator[Assembly]:
    """The tree of a folder or a tar; its contents can be read inside the `with` statement."""
    if source.is_dir():
        yield assemble_folder(os.fsencode(source), keep_owner=keep_owner)
        return
    with spooled(_plain(source)) as tar:
        with _naming(source):
            assembly = assemble_tar(read_entries(tar), tar, None)
        if not keep_owner:
            _give_to_root(assembly)
        yield assembly


def _plain(source: Path) -> Iterator[bytes]:
    """The uncompressed bytes of a tar."""
    try:
        with _naming(source), open(source, "rb") as raw:
            tar = open_decompressed(raw)
            while piece := tar.read(_PIECE):
                yield piece
    except FileNotFoundError:
        raise NotFound(f"no folder or tar {str(source)!r}") from None
    except OSError as error:
        raise Denied(f"{str(source)!r} cannot be read: {error.strerror}") from None


@contextmanager
def _naming(source: Path) -> Iterator[None]:
    """What is wrong with a tar is told with its name."""
    try:
        yield
    except (Corrupt, Invalid) as error:
        raise type(error)(f"{str(source)!r}: {error}") from error


def _give_to_root(assembly: Assembly) -> None:
    for inode in inodes(assembly.root):
        inode.uid = inode.gid = 0


def _apply(assembly: Assembly, build: LocalBuild) -> None:
    if build.clamp_mtime is not None:
        clamp_mtimes(assembly, build.clamp_mtime)
    graft(assembly, tuple(split_path(os.fsencode(build.prefix))))
    if build.kind != "base":
        assembly.root.inode = Inode(IMPLIED_MODE)
        assembly.has_root = False
