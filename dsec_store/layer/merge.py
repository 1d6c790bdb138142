"""A run of layers becomes one tree: what overlayfs would show of them, with the marks that what lies below still needs.

Problem: each layer of an image costs the node a mount, some requests, and a lookup for every name that it has not got.
Choice:  merge neighbours once, when the image is stored. Contents stay where they are: the merged tree has the blob
         devices of all its layers, and each file keeps its place on one of them.
Cost:    the result depends on what lies below the run. A whiteout inside it is resolved; it is kept, as is an opaque
         mark, only where something below would show without it. (Overlayfs lists whiteouts in directories that are
         not merged with anything, and stat(2) of them fails.)

>>> merge([Part(base, True, (blob,)), Part(update, False, (other,))], below=Stack([])).devices
(blob, other)

Rules: docs/format/layers.md, "Runs". Layers are only looked at; nothing of the result is shared with them.
"""

from __future__ import annotations

import stat
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Generic, TypeVar

from dsec_store.layer.stack import Stack, join
from dsec_store.layer.tree import OPAQUE_VALUE, OPAQUE_XATTR, Address, Directory, Inode

Device = TypeVar("Device", bound=Hashable)
"""What stands for a blob device: equal ones are the same device."""

_ROOT_MODE: Final = stat.S_IFDIR | 0o755
"""Of a root that no layer describes."""


@dataclass(frozen=True, slots=True)
class Part(Generic[Device]):
    """A layer, or the result of a merge: its tree, whether the root's attributes count, its blob devices in order."""

    tree: Directory
    has_root: bool
    devices: tuple[Device, ...]


def merge(run: Sequence[Part[Device]], below: Stack) -> Part[Device]:
    """`run` (bottom first, at least one) as one layer on `below`, which is empty for a run at the bottom.

    Two names of one inode of a layer stay one inode. Devices are those that are still used, each once, in the order in
    which a walk first meets them: the same run on the same layers gives the same result.
    """
    return _Merging(run, below).merge()


def from_opaque_root(parts: Sequence[Part[Device]]) -> Sequence[Part[Device]]:
    """The layers that show (bottom first): from the topmost one whose root is opaque, or all of them.

    Overlayfs ignores that mark, so a node ends the stack there itself.
    """
    first = next((number for number in reversed(range(len(parts))) if parts[number].tree.is_opaque), 0)
    return parts[first:]


@dataclass(frozen=True, slots=True)
class _Source(Generic[Device]):
    """A node of one layer."""

    part: Part[Device]
    node: Inode | Directory


@dataclass(frozen=True, slots=True)
class _Place(Generic[Device]):
    """A directory of the result whose entries are still to be made.

    sources  the directories that are merged here, topmost first
    shows    whether what lies below the run shows in it
    """

    path: bytes
    result: Directory
    sources: Sequence[_Source[Device]]
    shows: bool


class _Merging(Generic[Device]):
    """One merge. No recursion: trees are deeper than Python's stack."""

    def __init__(self, run: Sequence[Part[Device]], below: Stack) -> None:
        self._run = run
        self._below = below
        self._copies: dict[Inode, Inode] = {}
        self._devices: dict[Inode, Device] = {}
        self._pending: list[_Place[Device]] = []

    def merge(self) -> Part[Device]:
        visible = from_opaque_root(self._run)
        described = next((part for part in reversed(self._run) if part.has_root), None)
        attributes = described.tree.inode if described else Inode(_ROOT_MODE)
        closed = visible[0].tree.is_opaque
        root = Directory(_attributes(attributes, opaque=closed and len(self._below) > 0))
        sources = [_Source(part, part.tree) for part in reversed(visible)]
        self._pending.append(_Place(b"", root, sources, not closed and len(self._below) > 0))
        while self._pending:
            place = self._pending.pop()
            for name, found in sorted(_by_name(place.sources).items()):
                self._add(place, name, found)
        return Part(root, described is not None, self._number_devices(root))

    def _add(self, place: _Place[Device], name: bytes, found: list[_Source[Device]]) -> None:
        """One name of a directory; `found` is what the layers have there, topmost first."""
        path = join(place.path, name)
        top = found[0]
        if isinstance(top.node, Inode):
            if not top.node.is_whiteout or self._below_at(place, path) is not None:
                place.result.entries[name] = self._copy(top.part, top.node)
            return
        directories, closed = _merged(found)
        reaches = isinstance(self._below_at(place, path), Directory)
        made = Directory(_attributes(top.node.inode, opaque=closed and reaches))
        place.result.entries[name] = made
        self._pending.append(_Place(path, made, directories, reaches and not closed))

    def _below_at(self, place: _Place[Device], path: bytes) -> Inode | Directory | None:
        """What lies below the run at a path in `place`, and would show if the run had nothing there."""
        found = self._below.find(path) if place.shows else None
        return found.node if found else None

    def _copy(self, part: Part[Device], inode: Inode) -> Inode:
        """A copy for the result, the same for each name of an inode. Its address still has the device's old number."""
        copy = self._copies.get(inode)
        if copy is None:
            copy = self._copies[inode] = replace(inode, xattrs=dict(inode.xattrs))
            if inode.address is not None:
                self._devices[copy] = part.devices[inode.address.device]
        return copy

    def _number_devices(self, root: Directory) -> tuple[Device, ...]:
        """Give the addresses their devices' new numbers."""
        numbers: dict[Device, int] = {}
        for _, node in root.walk():
            if isinstance(node, Inode) and node.address is not None and node in self._devices:
                device = self._devices.pop(node)
                node.address = Address(numbers.setdefault(device, len(numbers)), node.address.offset)
        return tuple(numbers)


def _by_name(sources: Sequence[_Source[Device]]) -> dict[bytes, list[_Source[Device]]]:
    """What the layers have under each name of a merged directory, topmost first."""
    found: dict[bytes, list[_Source[Device]]] = {}
    for source in sources:
        assert isinstance(source.node, Directory), "only directories are merged"
        for name, node in source.node.entries.items():
            found.setdefault(name, []).append(_Source(source.part, node))
    return found


def _merged(found: Sequence[_Source[Device]]) -> tuple[list[_Source[Device]], bool]:
    """The directories that are merged, from the top down, and whether something ends them there: an opaque one, or what
    is no directory."""
    directories: list[_Source[Device]] = []
    for source in found:
        if not isinstance(source.node, Directory):
            return directories, True
        directories.append(source)
        if source.node.is_opaque:
            return directories, True
    return directories, False


def _attributes(inode: Inode, *, opaque: bool) -> Inode:
    """A directory's inode of its own, with the mark or without it."""
    xattrs = {name: value for name, value in inode.xattrs.items() if name != OPAQUE_XATTR}
    if opaque:
        xattrs[OPAQUE_XATTR] = OPAQUE_VALUE
    return replace(inode, xattrs=xattrs)
