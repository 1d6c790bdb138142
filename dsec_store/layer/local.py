"""Images of one layer from what lies on this machine: a folder, a tar, a commit of git or Python packages become a
workspace, a toolkit or a base.

    build_local(objects, Path("src"), "repo/main", LocalBuild(kind="workspace", prefix="/testbed"))
    build_local(objects, parse_git("git:src@v1"), "repo/v1", LocalBuild(kind="workspace", prefix="/testbed"))

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

from dsec_store.descriptor import KINDS, Image, Pairs, is_unicode
from dsec_store.digest import Digest
from dsec_store.errors import Corrupt, Denied, Invalid, NotFound
from dsec_store.inputs.git import GitSource, open_git
from dsec_store.inputs.ignore import Ignore
from dsec_store.inputs.python import PythonSource, open_python
from dsec_store.layer.ahead import ReadAhead
from dsec_store.layer.assemble import IMPLIED_MODE, Assembly, assemble, split_path
from dsec_store.layer.build import LayerBuild, StoredLayer, clamp_mtimes, graft, inodes
from dsec_store.layer.contents import Contents
from dsec_store.layer.decompress import decompressed
from dsec_store.layer.folder import assemble_folder, nothing
from dsec_store.layer.tree import Inode, shown
from dsec_store.layer.unpack import unpack
from dsec_store.objects import Objects
from dsec_store.references import Origin, check_name
from dsec_store.upload import ChunkIndex

Source = Path | GitSource | PythonSource
"""A folder or a tar, a commit, or packages."""


@dataclass(frozen=True, slots=True)
class LocalBuild:
    """What to make of the input. `prefix` and `path` are absolute paths in the sandbox; times in seconds since 1970.
    What `ignore` names is left out of a folder.

    A prefix may be of any bytes (as os.fsencode takes them); `path` becomes a part of a variable and must be UTF-8.
    """

    kind: str
    prefix: str = "/"
    env: tuple[tuple[str, str], ...] = ()
    path: tuple[str, ...] = ()
    keep_owner: bool = False
    clamp_mtime: int | None = None
    ignore: Ignore | None = None

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
    """The new image, its one layer, and what people should know about it."""

    image: Digest
    layer: StoredLayer
    notices: tuple[str, ...] = ()


@dataclass(slots=True)
class _Input:
    """A source's tree, and what it brings along."""

    assembly: Assembly
    env: Pairs = ()
    path: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()


def build_local(objects: Objects, source: Source, name: str, build: LocalBuild, *, verify: bool = False) -> Built:
    """Store `source` under `name`. Raises `StoreError`; then `name` is as it was.

    With `verify`, chunks that the store has are read and verified before they are relied on.
    """
    check_name(name)
    with LayerBuild(objects, ChunkIndex(objects, verify=verify)) as under_way:
        given = _read(source, under_way.contents, build)
        source_bytes = sum(inode.size for inode in inodes(given.assembly.root))
        _apply(given.assembly, build)
        layer = under_way.commit(given.assembly)
    env, path = (*given.env, *build.env), (*given.path, *build.path)
    image = objects.put_image(Image(kind=build.kind, layers=(layer.digest,), env=env, path=path))
    objects.references.set(name, image, Origin(source_bytes=source_bytes))
    return Built(image, layer, given.notices)


def _read(source: Source, contents: Contents, build: LocalBuild) -> _Input:
    if isinstance(source, GitSource):
        return _read_git(source, contents)
    if isinstance(source, PythonSource):
        return _read_python(source, contents, build.prefix)
    if source.is_dir():
        leave_out = build.ignore.decides if build.ignore else nothing
        return _Input(assemble_folder(os.fsencode(source), contents, keep_owner=build.keep_owner, leave_out=leave_out))
    with _naming(source), ReadAhead(_plain(source)) as tar:
        assembly = assemble(unpack(tar, contents), contents, None)
    if not build.keep_owner:
        _give_to_root(assembly)
    return _Input(assembly)


def _read_git(source: GitSource, contents: Contents) -> _Input:
    with open_git(source) as tree, ReadAhead(tree.tar) as tar:
        assembly = assemble(unpack(tar, contents), contents, None)
    empty = [f"{shown(path)} is a submodule: its directory is empty" for path in tree.submodules]
    return _Input(assembly, notices=tuple(empty))


def _read_python(source: PythonSource, contents: Contents, prefix: str) -> _Input:
    with open_python(source) as tools:
        assembly = assemble_folder(os.fsencode(tools.folder), contents, keep_owner=False)
        return _Input(assembly, tools.env(prefix), tools.path(prefix), tools.notices)


def _plain(source: Path) -> Iterator[bytes]:
    """The uncompressed bytes of a tar."""
    try:
        with open(source, "rb") as raw:
            yield from decompressed(raw)
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
