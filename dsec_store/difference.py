"""What differs between two images: paths, and the chunks that they share.

    for change in differences(a, a.lookup(b"/"), b, b.lookup(b"/")):
        print(change.path, change.what)

Problem: the store keeps no digest of a file; two files may have the same bytes in chunks that were cut differently.
Choice:  what can be told without reading is told so: another size; the same place of the same blob; the same chunks
         around it. Only what is left is read, piece by piece, and no further than to the first difference.
Cost:    files of one size that lie among other neighbours in both images are fetched. Images that come from each other
         share whole layers and whole directories, of which nothing is looked at.

Memory: the trees of both images (`dsec_store.browse`), and some 500 bytes for each path that differs or must be read.
Give both `Files` one cache of recent chunks: neighbours are often in one chunk.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Final

from dsec_store.browse import Entry, Files, shown_xattrs
from dsec_store.chunkmap import ChunkMap
from dsec_store.descriptor import Blob
from dsec_store.digest import Digest
from dsec_store.layer.tree import Inode
from dsec_store.objects import Objects
from dsec_store.parallel import in_parallel
from dsec_store.reachable import Each
from dsec_store.usage import Amount

PIECE: Final = 1 << 20
"""Bytes of a content that are compared at once."""

READERS: Final = 16
"""Contents that are compared at once."""

ADDED: Final = "added"
REMOVED: Final = "removed"
CHANGED: Final = "changed"

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Change:
    """One path that is not the same in both images.

    kind    ADDED, REMOVED or CHANGED (seen from the first image to the second)
    what    of a changed path, in this order, any of: type, content, target, device, mode, owner, mtime, xattrs.
            When the type changed, nothing else is told but mode bits, owner, mtime and xattrs
    before, after    the inodes; None where there is none
    """

    path: bytes
    kind: str
    what: tuple[str, ...]
    before: Inode | None
    after: Inode | None


@dataclass(frozen=True, slots=True)
class Sharing:
    """Chunks of the contents of two images, by digest: in both, only in the first, only in the second."""

    both: Amount
    first: Amount
    second: Amount


def differences(
    first: Files,
    first_top: Entry,
    second: Files,
    second_top: Entry,
    progress: Progress = lambda what, done, total: None,
) -> list[Change]:
    """What differs at and below the two entries, in the order of a walk; paths are from the entries on, which have the
    empty one. Raises `StoreError` when a content that must be read cannot be had."""
    return _Comparing(first, second, progress).run(first_top, second_top)


def shared_chunks(objects: Objects, first: Iterable[Digest], second: Iterable[Digest]) -> Sharing:
    """Which chunks the contents of these layers have in common. Recipes and metadata are not looked at."""
    each = Each()
    sides = [_blobs(objects, each, layers) for layers in (first, second)]
    chunks: dict[bytes, list[int]] = {}
    for bit, blobs in enumerate(sides):
        for chunk_map, stored in each(lambda blob: _chunks(objects, blob), blobs):
            for digest, size, taken in zip(chunk_map.digests, chunk_map.sizes, stored, strict=True):
                chunks.setdefault(digest, [0, size, taken])[0] |= 1 << bit
    amounts = [Amount(), Amount(), Amount(), Amount()]
    for sides_of, size, taken in chunks.values():
        amounts[sides_of].add(Amount(1, size, taken))
    return Sharing(both=amounts[3], first=amounts[1], second=amounts[2])


def _blobs(objects: Objects, each: Each, layers: Iterable[Digest]) -> list[Blob]:
    descriptors = each(objects.layer, dict.fromkeys(layers))
    return list(dict.fromkeys(blob for layer in descriptors for blob in layer.blobs))


def _chunks(objects: Objects, blob: Blob) -> tuple[ChunkMap, list[int]]:
    chunk_map = objects.chunk_map(blob.chunk_map)
    return chunk_map, [at.stored for at in objects.locator(blob.name, len(chunk_map))]


@dataclass(frozen=True, slots=True)
class _Content:
    """A content of one side: its blob and where it begins there."""

    blob: Blob
    offset: int

    @property
    def order(self) -> tuple[bytes, int]:
        return self.blob.name.raw, self.offset


_Pair = tuple[_Content, _Content, int]
"""Two contents and the size of both."""


class _Comparing:
    """One comparison: a walk of both sides at once, then the contents that have to be read."""

    def __init__(self, first: Files, second: Files, progress: Progress) -> None:
        self._first = first
        self._second = second
        self._progress = progress
        self._differs: dict[_Pair, bool] = {}
        self._doubtful: list[_Pair] = []

    def run(self, first: Entry, second: Entry) -> list[Change]:
        found = list(self._walk(first, second))
        self._read_doubtful()
        return [settled for change, pair in found if (settled := self._settled(change, pair))]

    def _settled(self, change: Change, pair: _Pair | None) -> Change | None:
        """The change without "content" if the contents proved equal; None if nothing is left."""
        if pair is None or self._differs[pair]:
            return change
        what = tuple(each for each in change.what if each != "content")
        return Change(change.path, change.kind, what, change.before, change.after) if what else None

    # -- the walk --------------------------------------------------------------------------------------------------

    def _walk(self, first: Entry, second: Entry) -> Iterator[tuple[Change, _Pair | None]]:
        """What may differ, with the contents on which it depends."""
        skip = len(first.path) + bool(first.path)
        other_skip = len(second.path) + bool(second.path)
        stack: list[Iterator[tuple[Entry | None, Entry | None]]] = [iter([(first, second)])]
        while stack:
            pair = next(stack[-1], None)
            if pair is None:
                stack.pop()
                continue
            before, after = pair
            path = before.path[skip:] if before else after.path[other_skip:] if after else b""
            if doubt := self._change(path, before, after):
                yield doubt
            if not self._same_below(before, after):
                stack.append(self._children(before, after))

    def _same_below(self, before: Entry | None, after: Entry | None) -> bool:
        directories = [entry for entry in (before, after) if entry and entry.inode.is_directory]
        if before is None or after is None or len(directories) < 2 or before.path != after.path:
            return not directories
        return self._first.providers(before) == self._second.providers(after)

    def _children(self, before: Entry | None, after: Entry | None) -> Iterator[tuple[Entry | None, Entry | None]]:
        """The entries of two directories side by side, in byte order."""
        left = self._first.entries(before) if before and before.inode.is_directory else iter(())
        right = self._second.entries(after) if after and after.inode.is_directory else iter(())
        one, other = next(left, None), next(right, None)
        while one or other:
            if other is None or (one and one.name < other.name):
                yield one, None
                one = next(left, None)
            elif one is None or other.name < one.name:
                yield None, other
                other = next(right, None)
            else:
                yield one, other
                one, other = next(left, None), next(right, None)

    def _change(self, path: bytes, before: Entry | None, after: Entry | None) -> tuple[Change, _Pair | None] | None:
        if before is None or after is None:
            inodes = (before.inode if before else None, after.inode if after else None)
            return Change(path, REMOVED if before else ADDED, (), *inodes), None
        if before.inode is after.inode:
            return None
        content, pair = self._content(before, after)
        what = tuple(_facts(before.inode, after.inode, content=content))
        return (Change(path, CHANGED, what, before.inode, after.inode), pair) if what else None

    # -- contents --------------------------------------------------------------------------------------------------

    def _content(self, before: Entry, after: Entry) -> tuple[bool, _Pair | None]:
        """Whether the contents may differ, and the pair that has to be read to know."""
        one, other = before.inode, after.inode
        if not (stat.S_ISREG(one.mode) and stat.S_ISREG(other.mode)):
            return False, None
        if one.size != other.size or not one.size:
            return one.size != other.size, None
        pair = (_content_of(self._first, before), _content_of(self._second, after), one.size)
        if pair[0] == pair[1]:
            return False, None
        if pair not in self._differs:
            self._differs[pair] = False
            if not self._same_chunks(pair):
                self._doubtful.append(pair)
        return True, pair

    def _same_chunks(self, pair: _Pair) -> bool:
        one, other, size = pair
        here = _covering(self._first.chunk_map(one.blob), one.offset, size)
        return here == _covering(self._second.chunk_map(other.blob), other.offset, size)

    def _read_doubtful(self) -> None:
        """In the order in which they lie, so that a chunk of several files is there when the next one needs it."""
        doubtful = sorted(self._doubtful, key=lambda pair: pair[0].order)
        steps = count(1)

        def read(pair: _Pair) -> None:
            self._differs[pair] = not self._equal(pair)
            self._progress("contents", next(steps), len(doubtful))

        in_parallel(read, doubtful, READERS)

    def _equal(self, pair: _Pair) -> bool:
        one, other, size = pair
        for at in range(0, size, PIECE):
            length = min(PIECE, size - at)
            here = self._first.read_range(one.blob, one.offset + at, length)
            if here != self._second.read_range(other.blob, other.offset + at, length):
                return False
        return True


def _content_of(files: Files, entry: Entry) -> _Content:
    blob, address = files.blob(entry), entry.inode.address
    assert blob, "files that are not empty have a content"
    assert address, "files that are not empty have a content"
    return _Content(blob, address.offset)


def _covering(chunk_map: ChunkMap, offset: int, size: int) -> list[tuple[bytes, int]]:
    """The chunks around a content, with where they begin as seen from it."""
    return [(ref.digest, ref.address - offset) for ref in chunk_map.covering(offset, size)]


def _facts(one: Inode, other: Inode, *, content: bool) -> Iterator[str]:
    """What differs between two inodes."""
    if stat.S_IFMT(one.mode) != stat.S_IFMT(other.mode):
        yield "type"
    else:
        if content:
            yield "content"
        if one.target != other.target:
            yield "target"
        if one.rdev != other.rdev:
            yield "device"
    if stat.S_IMODE(one.mode) != stat.S_IMODE(other.mode):
        yield "mode"
    if (one.uid, one.gid) != (other.uid, other.gid):
        yield "owner"
    if one.mtime_ns != other.mtime_ns:
        yield "mtime"
    if shown_xattrs(one) != shown_xattrs(other):
        yield "xattrs"
