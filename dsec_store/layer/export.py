"""The way out: the tar of a stored layer, read back from the store.

A layer that came as a tar has a recipe, and leaves as the same bytes (docs/format/recipe.md); its diff_id is the proof.
A layer that was built otherwise leaves as the canonical tar of its tree (docs/format/canonical-tar.md).

Problem: a tar is a long row of small things, each at its own address of a blob; asked for one by one, a store on the
network would be waited for at each of them. Choice: the tar is planned ahead as *parts*, bytes that are at hand and
*spans* of the blob. Some thousand parts make a *batch*, whose spans are sorted, joined and read side by side, and the
next batch is on its way while one is handed out. Memory: a few batches, whatever the layer's size.

    source = ChunkSource(objects.blobs, RecentChunks())
    for piece in layer_tar(objects, descriptor, source): file.write(piece)
"""

from __future__ import annotations

import bisect
import contextlib
import stat
import threading
from collections import OrderedDict, deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, NamedTuple

from dsec_store.chunks import ChunkSource, LazyBlob
from dsec_store.descriptor import LayerDescriptor
from dsec_store.digest import Digest, hasher_for
from dsec_store.errors import Corrupt, Invalid, StoreError
from dsec_store.layer.contents import BLOCK, PIECE
from dsec_store.layer.erofs import read_image
from dsec_store.layer.recipe import read_recipe
from dsec_store.layer.tarwriter import tar_of_tree
from dsec_store.layer.tree import Directory, Inode
from dsec_store.objects import Objects
from dsec_store.parallel import in_parallel
from dsec_store.storedblob import open_blob

BATCH: Final = 4 << 20
"""Bytes of a batch, each span counting for a block more than it has."""

AHEAD: Final = 1
"""Batches that are read while another one is handed out."""

READS_AT_ONCE: Final = 8
"""Ranges of one batch that are read side by side, where its spans do not lie together."""

RECENT: Final = 16 << 20
"""Bytes of chunks that `RecentChunks` keeps."""


class Span(NamedTuple):
    """`size` > 0 bytes of a blob from byte `address` on, at most `PIECE`."""

    address: int
    size: int


Part = bytes | Span
Piece = bytes | memoryview


class RecentChunks:
    """The chunks that came last: batches meet inside of chunks, and a content may be wanted twice."""

    def __init__(self, limit: int = RECENT) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._chunks: OrderedDict[tuple[bytes, int], bytes] = OrderedDict()
        self._size = 0

    def get(self, digest: bytes, size: int) -> bytes | None:
        with self._lock:
            chunk = self._chunks.get((digest, size))
            if chunk is not None:
                self._chunks.move_to_end((digest, size))
            return chunk

    def put(self, digest: bytes, chunk: bytes) -> None:
        with self._lock:
            if (digest, len(chunk)) not in self._chunks:
                self._chunks[digest, len(chunk)] = chunk
                self._size += len(chunk)
            while self._size > self._limit:
                _, oldest = self._chunks.popitem(last=False)
                self._size -= len(oldest)


def layer_tar(objects: Objects, descriptor: LayerDescriptor, source: ChunkSource) -> Generator[bytes, None, None]:
    """The uncompressed tar of a layer, in pieces of `PIECE` bytes; the last one may be shorter.

    Nothing of it counts before the iterator has ended: then the bytes have the layer's diff_id, if it has one. Close it
    when you leave it early: it has threads. Raises `StoreError` naming the layer: `Corrupt` for another diff_id,
    `NotFound` and `Corrupt` with the chunk that is missing or damaged, `Invalid` for a tree that no OCI layer can say.
    """
    try:
        with contextlib.closing(_tar(objects, descriptor, source)) as parts:
            pieces = _even(parts)
            yield from _verified(pieces, descriptor.diff_id) if descriptor.diff_id else pieces
    except StoreError as error:
        raise type(error)(f"layer {Digest.of(descriptor.encode())}: {error}") from None


def _tar(objects: Objects, descriptor: LayerDescriptor, source: ChunkSource) -> Generator[Piece, None, None]:
    """The tar in pieces of any size. What reads ahead is closed with it."""
    if descriptor.run or len(descriptor.blobs) > 1:
        raise Invalid("collapsed from several layers, it has no tar of its own: each of those has")
    blob = open_blob(objects, descriptor.blobs[0], source) if descriptor.blobs else None
    if descriptor.recipe:
        recipe = open_blob(objects, descriptor.recipe, source)
        with contextlib.closing(read_ahead(_spans(0, recipe.size), recipe)) as whole:
            parts = _recipe_parts(whole, f"recipe {descriptor.recipe.name}")
            with contextlib.closing(read_ahead(parts, blob)) as tar:
                yield from tar
    else:
        root = read_image(objects.metadata(descriptor.metadata)).root
        with contextlib.closing(read_ahead(_contents(root), blob)) as contents:
            yield from _canonical(root, contents, with_root=descriptor.has_root)


def _verified(pieces: Iterable[bytes], diff_id: Digest) -> Iterator[bytes]:
    hasher = hasher_for(diff_id.algorithm)
    for piece in pieces:
        hasher.update(piece)
        yield piece
    if (found := Digest(diff_id.algorithm, hasher.digest())) != diff_id:
        raise Corrupt(f"its tar, made again, is {found}, but its diff_id is {diff_id}")


# -- Parts -------------------------------------------------------------------------------------------------------------


def _recipe_parts(recipe: Iterator[Piece], what: str) -> Iterator[Part]:
    """The tar of a recipe, with spans where its contents go: what comes right after a content was asked for is it."""
    asked: list[Span] = []

    def read(address: int, size: int) -> bytes:
        asked.append(Span(address, size))
        return bytes(size)

    for part in read_recipe(map(bytes, recipe), read, what):
        yield asked.pop() if asked else part


def _canonical(root: Directory, contents: Iterator[Piece], *, with_root: bool) -> Iterator[bytes]:
    """The tar of a tree; `contents` are those of `_contents`, which has the order in which `tar_of_tree` asks."""

    def content(inode: Inode) -> Iterator[bytes]:
        for _ in _spans_of(inode):
            yield bytes(next(contents))

    return tar_of_tree(root, content, with_root=with_root)


def _contents(root: Directory) -> Iterator[Part]:
    """The spans of every content of a tree, in the order of the first names."""
    seen: set[Inode] = set()
    for _, node in root.walk():
        if isinstance(node, Inode) and node not in seen:
            seen.add(node)
            yield from _spans_of(node)


def _spans_of(inode: Inode) -> Iterator[Span]:
    """None for what has no content; `tar_of_tree` complains about a file that should have one."""
    if stat.S_ISREG(inode.mode) and inode.address:
        yield from _spans(inode.address.offset, inode.size)


def _spans(address: int, size: int) -> Iterator[Span]:
    for done in range(0, size, PIECE):
        yield Span(address + done, min(PIECE, size - done))


# -- Reading ahead -----------------------------------------------------------------------------------------------------


def read_ahead(parts: Iterable[Part], blob: LazyBlob | None) -> Generator[Piece, None, None]:
    """Each part as bytes, in order. `parts` is read some batches ahead, on the caller's thread.

    Raises `StoreError` when bytes cannot be had; `Corrupt` for spans that the blob does not have, or without a blob.
    """
    waiting: deque[Future[Iterator[Piece]]] = deque()
    with ThreadPoolExecutor(AHEAD, thread_name_prefix="batch") as pool:
        try:
            for batch in _batches(parts):
                waiting.append(pool.submit(_resolved, batch, blob))
                if len(waiting) > AHEAD:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _batches(parts: Iterable[Part]) -> Iterator[list[Part]]:
    batch: list[Part] = []
    size = 0
    for part in parts:
        batch.append(part)
        size += part.size + BLOCK if isinstance(part, Span) else len(part)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _resolved(batch: list[Part], blob: LazyBlob | None) -> Iterator[Piece]:
    """The parts of a batch, whose bytes are all there when this returns."""
    runs = _joined({part for part in batch if isinstance(part, Span)})
    read: dict[int, memoryview] = {}

    def fetch(run: tuple[int, int]) -> None:
        start, end = run
        data = blob.read(start, end - start) if blob else b""
        if len(data) < end - start:
            raise Corrupt(f"a content at bytes {start} to {end}, of a blob of {blob.size if blob else 0} bytes")
        read[start] = memoryview(data)

    if len(runs) == 1:
        fetch(runs[0])
    else:
        in_parallel(fetch, runs, READS_AT_ONCE)
    return _cut(batch, read)


def _cut(batch: list[Part], read: dict[int, memoryview]) -> Iterator[Piece]:
    starts = sorted(read)
    for part in batch:
        if isinstance(part, Span):
            start = starts[bisect.bisect_right(starts, part.address) - 1]
            yield read[start][part.address - start : part.address - start + part.size]
        else:
            yield part


def _joined(spans: Iterable[Span]) -> list[tuple[int, int]]:
    """Ranges (start, end) that hold all spans; what lies in neighbouring blocks is one range."""
    runs: list[tuple[int, int]] = []
    for address, size in sorted(spans):
        end = address + size
        if runs and address <= -(-runs[-1][1] // BLOCK) * BLOCK:
            runs[-1] = runs[-1][0], max(runs[-1][1], end)
        else:
            runs.append((address, end))
    return runs


def _even(parts: Iterable[Piece]) -> Iterator[bytes]:
    """The same bytes in pieces of `PIECE`, the last one shorter: what is made of them does not depend on the parts."""
    held: list[Piece] = []
    size = 0
    for part in parts:
        held.append(part)
        size += len(part)
        if size >= PIECE:
            data = b"".join(held)
            whole = size - size % PIECE
            for start in range(0, whole, PIECE):
                yield data[start : start + PIECE]
            held, size = [data[whole:]], size - whole
    if size:
        yield b"".join(held)
