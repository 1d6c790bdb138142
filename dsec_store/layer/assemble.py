"""From the entries of a tar to a layer's tree, as overlayfs wants it on top of the layers below.

A tar is a list of changes to be replayed on a file system; a layer of ours is mounted beside others. So what the replay
would take from the file system is taken from the *merged view of the layers below* when the tree is made:

* a directory that the tar implies but does not list gets the attributes of the one below, or is 0755 root if there is
  none; a symlink below on the way to it is followed, inside the root;
* a hardlink to a file of a lower layer needs all names of that file in this layer: the file is copied up with its
  bytes;
* a whiteout hides what lies below, never what this tar brings; where nothing lies below it is dropped (overlayfs would
  list it in a directory that is not merged); an opaque marker on the root becomes whiteouts, since overlayfs ignores
  the mark there;
* a directory that takes the place of something else in the same tar shows nothing of the layers below.

A layer for which the layers below were looked at depends on them: `needs_lower`, and its build key has the parent's
chain_id. Whiteouts count before all other entries, wherever they lie; of those the later replace the earlier ones, as
the tar format says. All choices where the image specification leaves one, with reasons: docs/format/layers.md.
"""

from __future__ import annotations

import stat
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from dsec_store.errors import Invalid
from dsec_store.layer.contents import Contents
from dsec_store.layer.stack import Below, Found, Place, Stack, join, resolve, split_last
from dsec_store.layer.tar import TarEntry, TarKind
from dsec_store.layer.tree import (
    OPAQUE_VALUE,
    OPAQUE_XATTR,
    PATH_LENGTH_MAX,
    Address,
    Directory,
    Inode,
    shown,
    whiteout,
)
from dsec_store.layer.unpack import ENTRIES_MAX, Placed, is_marker

IMPLIED_MODE: Final = stat.S_IFDIR | 0o755

DEVICE_0_0: Final = "a character device 0:0 would hide files below; remove it from the source"
"""Overlayfs takes such a device for a whiteout (message)."""

_WHITEOUT: Final = b".wh."
_NO_NAMES: Final = (b"", b".", b"..")
_OPAQUE: Final = b".wh..wh..opq"
_AUFS: Final = b".wh..wh."
_TRUSTED_OVERLAY: Final = b"trusted.overlay."
_USER_OVERLAY: Final = b"user.overlay."
_ACLS: Final = {b"system.posix_acl_access", b"system.posix_acl_default"}
_ACL_VERSION: Final = struct.pack("<I", 2)
_ACL_ENTRY: Final = struct.Struct("<HHI")
_ACL_TAGS: Final = {0x01, 0x02, 0x04, 0x08, 0x10, 0x20}
"""Owner, user, owning group, group, mask, others."""
_TYPES: Final = {
    TarKind.FILE: stat.S_IFREG,
    TarKind.DIRECTORY: stat.S_IFDIR,
    TarKind.SYMLINK: stat.S_IFLNK,
    TarKind.CHAR: stat.S_IFCHR,
    TarKind.BLOCK: stat.S_IFBLK,
    TarKind.FIFO: stat.S_IFIFO,
}


@dataclass(slots=True)
class Assembly:
    """A layer's tree, ready to be stored: its contents are.

    has_root     whether the source says what the root directory is like; if not, that of the layers below counts
    needs_lower  whether the layers below were looked at: on other ones the tree could be another
    """

    root: Directory = field(default_factory=lambda: Directory(Inode(IMPLIED_MODE)))
    has_root: bool = False
    needs_lower: bool = False


OpenLower = Callable[[Found], Iterator[bytes]]
"""The content, in pieces, of a regular file that `Stack.find` found and that is not empty."""


def assemble(
    placed: list[Placed], contents: Contents, lower: Stack | None, open_lower: OpenLower | None = None
) -> Assembly:
    """The layer of a tar that was unpacked into `contents`; `placed` is consumed.

    `lower` is what it will lie on, an empty stack for a bottom layer. None means: not known, as for a workspace; then
    whiteouts are kept as they are, and links into other layers are refused. Raises `Invalid` naming the entry.
    """
    return _Assembler(contents, Below(lower), open_lower).assemble(placed)


class _Assembler:
    """Three steps: what the markers hide, the other entries in their order, the marks that overlayfs wants for both."""

    def __init__(self, contents: Contents, below: Below, open_lower: OpenLower | None) -> None:
        self._contents = contents
        self._below = below
        self._open_lower = open_lower
        self._result = Assembly()
        self._root = self._result.root
        self._copies: dict[Inode, tuple[Found, Inode]] = {}
        self._parents: dict[bytes, _Parent] = {}
        self._implied = 0

    def assemble(self, placed: list[Placed]) -> Assembly:
        markers = [entry for entry, _ in placed if is_marker(entry.path)]
        if markers:
            placed[:] = [each for each in placed if not is_marker(each.entry.path)]
            self._hide(markers, placed)
        placed.reverse()
        while placed:  # an entry is let go of when its inode is made
            self._add(*placed.pop())
        self._mark()
        self._copy_names()
        self._result.needs_lower = self._below.asked
        return self._result

    # -- markers: what they hide -----------------------------------------------------------------------------------

    def _hide(self, markers: list[TarEntry], others: Iterable[Placed]) -> None:
        """Tell `_below` what is hidden.

        Symlinks of the layers below on the way to a marker are followed, unless this tar puts something else there.
        """
        found = [marker for entry in markers if (marker := _marker(entry))]
        changed = {b"/".join(split_path(entry.path)) for entry, _ in others}
        changed |= {b"/".join([*parent, hidden]) for parent, hidden in found if hidden is not None}

        def look(here: Place, name: bytes) -> tuple[Inode | Directory | None, Place]:
            path = join(here.path, name)
            if path in changed:
                return None, Place(path, below=here.below)
            node = self._node_below(path) if here.below else None
            self._below.count(node)
            return node, Place(path, below=isinstance(node, Directory))

        for parent, hidden in found:
            place = resolve(parent, Place(), look)
            if place is None:
                continue
            if hidden is not None:
                self._below.hidden.add(join(place, hidden))
            elif place:
                self._below.emptied.add(place)
            else:
                self._empty_root()

    def _empty_root(self) -> None:
        if self._below.stack is None:
            raise Invalid("an opaque marker on the root: nothing can be hidden in layers that are not known yet")
        self._below.hidden.update(self._below.names(b""))

    def _node_below(self, path: bytes) -> Inode | Directory | None:
        found = self._below.find_unmarked(path)
        return found.node if found else None

    # -- entries ---------------------------------------------------------------------------------------------------

    def _add(self, entry: TarEntry, address: Address | None) -> None:
        # The target before the parent: as in link(2), the directory that is made for the new name cannot hide it.
        target = self._target(entry) if entry.kind is TarKind.HARDLINK else None
        spelled, _, name = entry.path.rstrip(b"/").rpartition(b"/")
        parent = self._parents.get(spelled)
        if parent is None or name in _NO_NAMES:
            parts = split_path(entry.path)
            if not parts:
                self._set_root(entry)
                return
            if name in _NO_NAMES:
                spelled, name = b"/".join(parts[:-1]), parts[-1]
            parent = self._parent(spelled, parts[:-1], entry)
        if len(parent.path) + len(name) >= PATH_LENGTH_MAX:
            raise _unreachable(entry)
        inode = target or _inode(entry, address)
        self._place(parent, name, Directory(inode) if entry.kind is TarKind.DIRECTORY else inode)

    def _set_root(self, entry: TarEntry) -> None:
        if entry.kind is not TarKind.DIRECTORY:
            raise Invalid(f"tar entry {shown(entry.path)}: the root must be a directory")
        self._root.inode = _inode(entry, None)
        self._result.has_root = True

    def _place(self, parent: _Parent, name: bytes, node: Inode | Directory) -> None:
        """Later entries replace earlier ones; only a directory over a directory keeps what is in it."""
        entries = parent.directory.entries
        existing = entries.get(name)
        if existing is not None:
            if isinstance(existing, Directory):
                if isinstance(node, Directory):
                    existing.inode = node.inode
                    return
                self._parents.clear()
            elif isinstance(node, Directory):
                self._below.replaced.add(join(parent.path, name))
        entries[name] = node

    # -- parents ---------------------------------------------------------------------------------------------------

    def _parent(self, spelled: bytes, parts: list[bytes], entry: TarEntry) -> _Parent:
        """The directory at `parts`, which the tar writes as `spelled`; made if it is only implied.

        It is remembered by its spelling unless a symlink led to it, since an entry for that could change it.
        """
        path = resolve(parts, Place(own=self._root), self._below.look)
        if path is None:
            raise _unreachable(entry)
        parent = _Parent(path, self._directory(path))
        if path == b"/".join(parts):
            self._parents[spelled] = parent
        return parent

    def _directory(self, path: bytes) -> Directory:
        """This layer's directory at `path`, which holds no symlinks; made if it is only implied."""
        directory, here = self._root, Place(own=self._root)
        for name in path.split(b"/") if path else ():
            node, here = self._below.look(here, name)
            own = here.own
            if own is None:
                self._count_implied(here.path)
                own = directory.entries[name] = _implied(node)
                here = replace(here, own=own)
            directory = own
        return directory

    def _count_implied(self, path: bytes) -> None:
        self._implied += 1
        if self._implied > ENTRIES_MAX:
            raise Invalid(f"directory {shown(path)}: a layer whose paths imply more than {ENTRIES_MAX} of them")

    # -- hardlinks -------------------------------------------------------------------------------------------------

    def _target(self, entry: TarEntry) -> Inode:
        """The inode that a hardlink entry names. The attributes in its own header are ignored: the inode has some."""
        *parents, name = split_path(entry.link) or [b""]
        parent = resolve(parents, Place(own=self._root), self._below.look)
        if parent is not None and name:
            node = self._root.find(join(parent, name))
            if node is None:
                node = self._copy(self._below.find_unmarked(join(parent, name)))
            if isinstance(node, Inode):
                return node
        raise Invalid(f"tar entry {shown(entry.path)}: a hardlink to {shown(entry.link)}, which is no file")

    def _copy(self, found: Found | None) -> Inode | None:
        """A copy of a file of a lower layer, for this one."""
        if found is None or isinstance(found.node, Directory) or self._open_lower is None:
            return None
        lower = found.node
        if lower not in self._copies:
            address = self._contents.add(self._open_lower(found), lower.size, "a lower layer") if lower.size else None
            self._copies[lower] = found, replace(lower, xattrs=dict(lower.xattrs), address=address)
        return self._copies[lower][1]

    def _copy_names(self) -> None:
        """Give every copy those names of the file below that still show, so that they stay one file."""
        for found, copy in self._copies.values():
            assert self._below.stack is not None, "copies are made of what was found there"
            for path in self._below.stack.links(found):
                if not self._below.hides(path) and not self._covers(path):
                    parent, name = split_last(path)
                    self._directory(parent).entries[name] = copy

    # -- marks, when all entries are in ----------------------------------------------------------------------------

    def _mark(self) -> None:
        """Put the whiteouts and opaque marks. Parents come before what is in them."""
        for path in sorted(self._below.hidden):
            node = self._root.find(path)
            if isinstance(node, Directory):
                _make_opaque(node)
            elif self._shows_below(path):
                parent, name = split_last(path)
                self._directory(parent).entries[name] = whiteout()
        for path in sorted(self._below.emptied | self._below.replaced):
            node = self._root.find(path)
            if isinstance(node, Directory):
                _make_opaque(node)
            elif path in self._below.emptied and self._shows_below(path, directory=True):
                _make_opaque(self._directory(path))

    def _shows_below(self, path: bytes, *, directory: bool = False) -> bool:
        """Whether something, or a directory, of the layers below would show at `path` without its own marker."""
        if self._covers(path) or self._below.closes(split_last(path)[0]):
            return False
        if self._below.stack is None:
            return True
        found = self._below.find_unmarked(path)
        return found is not None and (isinstance(found.node, Directory) or not directory)

    def _covers(self, path: bytes) -> bool:
        """Whether this layer has something at `path`, or on the way to it something that is no directory."""
        node: Inode | Directory | None = self._root
        for name in path.split(b"/"):
            if not isinstance(node, Directory):
                break
            node = node.entries.get(name)
        return node is not None


class _Parent(NamedTuple):
    """A directory of this layer and its path."""

    path: bytes
    directory: Directory


def _unreachable(entry: TarEntry) -> Invalid:
    problem = f"one of its parents is no directory, or symlinks make it longer than {PATH_LENGTH_MAX} bytes"
    return Invalid(f"tar entry {shown(entry.path)}: {problem}")


def _inode(entry: TarEntry, address: Address | None) -> Inode:
    if entry.kind is TarKind.CHAR and entry.rdev == (0, 0):
        raise Invalid(f"tar entry {shown(entry.path)}: {DEVICE_0_0}")
    return Inode(
        _TYPES[entry.kind] | entry.mode,
        entry.uid,
        entry.gid,
        entry.mtime_ns,
        entry.rdev,
        entry.link,
        escape_xattrs(entry.xattrs, entry.path) if entry.xattrs else {},
        entry.size,
        address,
    )


def _implied(below: Inode | Directory | None) -> Directory:
    """A directory with the attributes of the one below, or plain."""
    if not isinstance(below, Directory):
        return Directory(Inode(IMPLIED_MODE))
    lower = below.inode
    xattrs = {name: value for name, value in lower.xattrs.items() if name != OPAQUE_XATTR}
    return Directory(Inode(lower.mode, lower.uid, lower.gid, lower.mtime_ns, xattrs=xattrs))


def _make_opaque(directory: Directory) -> None:
    directory.inode.xattrs[OPAQUE_XATTR] = OPAQUE_VALUE


def _marker(entry: TarEntry) -> tuple[list[bytes], bytes | None] | None:
    """Where a marker lies and the name that it hides, None for all of them. None for the bookkeeping of aufs."""
    *parent, name = split_path(entry.path)
    if name == _OPAQUE and not is_marker(b"/".join(parent)):
        return parent, None
    if any(part.startswith(_AUFS) for part in (*parent, name)):
        return None
    hidden = name.removeprefix(_WHITEOUT)
    if hidden in (b"", b".", b"..", name) or is_marker(b"/".join(parent)):
        raise Invalid(f"tar entry {shown(entry.path)}: a whiteout of nothing that can have a name")
    return parent, hidden


def split_path(path: bytes) -> list[bytes]:
    """The names of a path from the root on; empty for the root itself. Raises `Invalid` for `..` and NUL.

    `/abs`, `./a`, `a//b` and `a/` are what they would be when unpacked; a path that climbs is refused, not clamped.
    """
    parts = [part for part in path.split(b"/") if part not in (b"", b".")]
    if b".." in parts or b"\0" in path:
        raise Invalid(f"tar entry {shown(path)}: a path that climbs out of its root, or has a NUL")
    return parts


def escape_xattrs(xattrs: dict[bytes, bytes], path: bytes) -> dict[bytes, bytes]:
    """The xattrs of `path` without the power to steer overlayfs.

    `trusted.overlay.x` is stored as `trusted.overlay.overlay.x`, which overlayfs shows under its own name (kernel 6.7
    on). `user.overlay.*` has no such form and is refused; so are ACLs that the kernel cannot read.
    """
    if any(name.startswith(_USER_OVERLAY) for name in xattrs):
        raise Invalid(f"{shown(path)}: xattr user.overlay.* would steer overlayfs; remove it from the source")
    for name in _ACLS & xattrs.keys():
        if not _is_acl(xattrs[name]):
            raise Invalid(f"{shown(path)}: the value of xattr {name.decode()} is no ACL")
    return {
        _TRUSTED_OVERLAY + b"overlay." + name.removeprefix(_TRUSTED_OVERLAY)
        if name.startswith(_TRUSTED_OVERLAY)
        else name: value
        for name, value in xattrs.items()
    }


def _is_acl(value: bytes) -> bool:
    """Whether `value` is what the kernel takes for an ACL: a version, then tag, permissions and id of each entry."""
    entries = value[len(_ACL_VERSION) :]
    if not value.startswith(_ACL_VERSION) or len(entries) % _ACL_ENTRY.size:
        return False
    return all(tag in _ACL_TAGS for tag, _, _ in _ACL_ENTRY.iter_unpack(entries))
