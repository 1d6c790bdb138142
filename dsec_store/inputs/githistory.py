"""What a commit consists of and comes from, in the order in which it is packed.

Commits come in postorder, parents in the order in which a commit names them: the history of the first parent, then what
further parents add, then the commit itself. After each commit come those of its trees and blobs that none before it
had: the root tree, the trees in that, the trees in those, and so on; then the blobs. Trees of one level, and all blobs,
are in the order in which the trees before them name them.

So the pack of a commit begins with the pack of its first parent, byte for byte but for the count in the header. Layers
of many commits of one repository then share nearly all chunks of their packs.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import NamedTuple

from dsec_store.inputs.gitfiles import PACK_HEADER_SIZE, Packed, pack_record
from dsec_store.inputs.gitobjects import SUBMODULE_MODE, TREE_MODE, Objects, parse_commit


class History(NamedTuple):
    """Ids of the commits in their order, the last being the one that was asked for; those without their parents."""

    commits: tuple[bytes, ...]
    shallow: tuple[bytes, ...]


def read_history(objects: Objects, commit: bytes, shallow: frozenset[bytes]) -> History:
    """The commit and its ancestors. The parents of commits in `shallow` are not looked for."""
    done: dict[bytes, None] = {}
    met = {commit}
    stack = [(commit, _parents(objects, commit, shallow))]
    while stack:
        current, parents = stack[-1]
        for parent in parents:
            if parent not in met:
                met.add(parent)
                stack.append((parent, _parents(objects, parent, shallow)))
                break
        else:
            stack.pop()
            done[current] = None
    return History(tuple(done), tuple(sorted(shallow & done.keys())))


def _parents(objects: Objects, commit: bytes, shallow: frozenset[bytes]) -> Iterator[bytes]:
    return iter(objects.commit(commit).parents if commit not in shallow else ())


def records(objects: Objects, history: History, packed: list[Packed]) -> Iterator[bytes]:
    """The records of the pack, in pieces. Each object is added to `packed` when its record is complete."""
    offset = PACK_HEADER_SIZE
    for object_id, kind, size, pieces in _objects(objects, history):
        checksum, start = 0, offset
        for piece in pack_record(kind, size, pieces):
            checksum = zlib.crc32(piece, checksum)
            offset += len(piece)
            yield piece
        packed.append(Packed(object_id, checksum, start))


def _objects(objects: Objects, history: History) -> Iterator[tuple[bytes, bytes, int, Iterator[bytes]]]:
    """Id, type, size and bytes of each object. The bytes must be read before the next object is asked for."""
    seen: set[bytes] = set()
    for commit in history.commits:
        (data,) = objects.read_each([commit], b"commit")
        yield commit, b"commit", len(data), iter([data])
        level, blobs = _new([parse_commit(data).tree], seen), list[bytes]()
        while level:
            below: list[bytes] = []
            for object_id, tree in zip(level, objects.read_each(level, b"tree"), strict=True):
                yield object_id, b"tree", len(tree), iter([tree])
                for entry in objects.tree(tree, object_id):
                    if entry.mode != SUBMODULE_MODE and entry.object_id not in seen:
                        seen.add(entry.object_id)
                        (below if entry.mode == TREE_MODE else blobs).append(entry.object_id)
            level = below
        for object_id, size, pieces in objects.stream_each(blobs, b"blob"):
            yield object_id, b"blob", size, pieces


def _new(object_ids: list[bytes], seen: set[bytes]) -> list[bytes]:
    """Those not seen before; now they are."""
    new = [object_id for object_id in object_ids if object_id not in seen]
    seen.update(new)
    return new
