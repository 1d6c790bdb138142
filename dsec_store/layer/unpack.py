"""The first half of building a layer from a tar: contents into the blob, entries into a list, the rest into a recipe.

The archive is read once, as it arrives. What the entries mean together, on top of the layers below, is the second half
(`dsec_store.layer.assemble`): for that, all of them must be known.

The smallest archive may stand for endless bytes, entries and names, since it comes compressed. So all of these are
counted while they arrive, and what is beyond a limit is `Invalid` before it takes time, memory or room in the store.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple, Protocol

from dsec_store.errors import Invalid
from dsec_store.layer.contents import Contents, zeros
from dsec_store.layer.tar import Keep, Readable, TarEntry, TarReader
from dsec_store.layer.tarheader import Runs
from dsec_store.layer.tree import Address, shown

HOLES_MAX: Final = 64 << 30
"""Bytes of zeros that the sparse files of one tar may have in all: no archive is too small to ask for days of them."""

LAYER_SIZE_MAX: Final = 256 << 30
"""Plain bytes of one layer's tar, all that follows the archive's end included."""

ENTRIES_MAX: Final = 4 << 20
"""Entries of one tar, and directories that it only implies: all are in memory until the layer is stored, 1 KiB each."""

ATTRIBUTES_MAX: Final = 512 << 20
"""Bytes of all paths, link targets, xattrs and sparse maps of one tar. They are in memory too."""

XATTR_COST: Final = 128
RUN_COST: Final = 128
"""Bytes that an xattr, and a run of a sparse file, count for beside their own: what they take in memory."""

_WHITEOUT: Final = b".wh."


class Recipe(Protocol):
    """What is told of everything, so that the archive can be made again."""

    @property
    def keep(self) -> Keep: ...

    def content(self, address: int, size: int) -> None: ...


class Placed(NamedTuple):
    """An entry, and where its content lies; None if it has none."""

    entry: TarEntry
    address: Address | None


def unpack(stream: Readable, contents: Contents, recipe: Recipe | None = None) -> list[Placed]:
    """The entries of a tar, their contents stored; the stream is read to its end. Raises `Corrupt`, `Invalid`.

    Contents that no file of the layer will have (of markers, for one) are left to the recipe.
    """
    reader = TarReader(_Limited(stream), recipe.keep if recipe else None)
    placed: list[Placed] = []
    holes = attributes = 0
    for entry in reader:
        attributes += _attributes(entry)
        if len(placed) >= ENTRIES_MAX or attributes > ATTRIBUTES_MAX:
            raise _too_many(entry, attributes)
        address = None
        if entry.size and not is_marker(entry.path):
            if entry.runs is not None:
                holes += entry.size - sum(length for _, length in entry.runs)
                _check_holes(entry, holes)
            address = _store(reader, entry, contents)
            if recipe:
                for start, length in entry.runs if entry.runs is not None else ((0, entry.size),):
                    recipe.content(address.offset + start, length)
        placed.append(Placed(entry, address))
    reader.finish()
    return placed


def is_marker(path: bytes) -> bool:
    """Whether a path is or lies below a whiteout, an opaque marker or aufs's bookkeeping."""
    return _WHITEOUT in path and any(part.startswith(_WHITEOUT) for part in path.split(b"/"))


class _Limited:
    """A stream that may not be longer than a layer."""

    def __init__(self, stream: Readable) -> None:
        self._stream = stream
        self._size = 0

    def read(self, size: int, /) -> bytes:
        data = self._stream.read(size)
        self._size += len(data)
        if self._size > LAYER_SIZE_MAX:
            raise Invalid(f"a tar of more than {LAYER_SIZE_MAX} bytes uncompressed; divide it into several layers")
        return data


def _attributes(entry: TarEntry) -> int:
    """What the entry counts for in ATTRIBUTES_MAX."""
    size = len(entry.path) + len(entry.link)
    if entry.xattrs:
        size += sum(len(name) + len(value) + XATTR_COST for name, value in entry.xattrs.items())
    if entry.runs:
        size += len(entry.runs) * RUN_COST
    return size


def _too_many(entry: TarEntry, attributes: int) -> Invalid:
    if attributes > ATTRIBUTES_MAX:
        problem = f"{attributes} bytes of paths, link targets, xattrs and sparse maps so far (at most {ATTRIBUTES_MAX}"
    else:
        problem = f"more than {ENTRIES_MAX} entries (so many at most"
    return Invalid(f"tar entry {shown(entry.path)}: {problem} in a layer); divide it into several layers")


def _store(reader: TarReader, entry: TarEntry, contents: Contents) -> Address:
    if entry.runs is not None:
        return contents.add(_with_holes(reader, entry.runs, entry.size), entry.size, entry.path)
    if entry.size < contents.small:
        return contents.add_small(reader.whole_content())
    return contents.add(reader.content(), entry.size, entry.path)


def _with_holes(reader: TarReader, runs: Runs, size: int) -> Iterator[bytes]:
    """The content of a sparse file, its holes filled."""
    stored, rest, done = reader.content(), b"", 0
    for start, length in runs:
        yield from zeros(start - done)
        done = start
        while done < start + length:
            rest = rest or next(stored)
            piece, rest = rest[: start + length - done], rest[start + length - done :]
            done += len(piece)
            yield piece
    yield from zeros(size - done)


def _check_holes(entry: TarEntry, holes: int) -> None:
    if holes > HOLES_MAX:
        problem = f"sparse files with {holes} bytes of holes so far (at most {HOLES_MAX} in a layer)"
        raise Invalid(f"tar entry {shown(entry.path)}: {problem}")
