"""Recipes: how the tar of a layer is made again from the layer's blob, byte for byte.

A tar is headers and padding with contents between them. The contents lie in the layer's blob already; the *recipe* is
the rest, with marks where a content goes. It is a blob itself: cut into chunks that are shared with the recipes of
other layers, so that two versions of an image keep their headers once. Bytes: docs/format/recipe.md.

    recipe = RecipeWriter(upload.blob(DEFAULT))
    recipe.keep(header); recipe.content(address, size); recipe.keep(padding); ...
    chunk_map = recipe.finish()

    for piece in read_recipe(pieces_of_the_recipe, read_of_the_blob): tar.write(piece)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final

from dsec_store.chunkmap import ChunkMap
from dsec_store.errors import Corrupt
from dsec_store.layer.contents import BLOCK, PIECE

if TYPE_CHECKING:  # reading needs no building
    from dsec_store.upload import BlobWriter

MAGIC: Final = b"DSECRCP1"

TAR_BLOCK: Final = 512

LITERAL_ONLY, PADDED, BARE = 0, 1, 2
"""What follows the literal bytes of a record: nothing, a content filled up to whole blocks of the tar with zeros, or a
content alone."""

LITERAL_MAX: Final = 1 << 20
"""Bytes of one record's literal, not fewer than `TAR_BLOCK`: longer ones are spread over several records, of which all
but the last are as long as this."""

_FLUSH: Final = 256 << 10
_NUMBER_MAX: Final = 10
"""Bytes of a number that a reader accepts: 64 bits in groups of 7."""

_PADDING: Final = [bytes(size) for size in range(TAR_BLOCK)]


class RecipeWriter:
    """Writes a recipe into a blob while its tar is read. The same recipe however the tar is divided into pieces."""

    def __init__(self, blob: BlobWriter) -> None:
        self._blob = blob
        self._out = bytearray(MAGIC)
        self._literal = bytearray()
        self._content: tuple[int, int] | None = None
        self._before = b""  # literal bytes that precede `_content`
        self._next = 0

    def keep(self, data: bytes) -> None:
        """The next bytes of the tar, literally."""
        self._literal += data
        self._end_content()
        while len(self._literal) >= LITERAL_MAX:
            self._put(LITERAL_ONLY, bytes(self._literal[:LITERAL_MAX]))
            del self._literal[:LITERAL_MAX]

    def content(self, address: int, size: int) -> None:
        """The next bytes of the tar are `size` > 0 bytes of the layer's blob from `address` on."""
        self._end_content(last=True)
        self._content, self._before = (address, size), bytes(self._literal)
        self._literal.clear()
        self._end_content()

    def finish(self) -> ChunkMap:
        """The chunks of the recipe."""
        self._end_content(last=True)
        if self._literal:
            self._put(LITERAL_ONLY, bytes(self._literal))
        self._blob.write(bytes(self._out))
        return self._blob.finish()

    @property
    def size(self) -> int:
        """Bytes of the recipe; final after `finish`."""
        return self._blob.size

    def _end_content(self, *, last: bool = False) -> None:
        """Write the content that came last, once it is known (`last`: or will never be) what pads it."""
        if self._content is None:
            return
        address, size = self._content
        padding = -size % TAR_BLOCK
        if len(self._literal) < padding and not last:
            return
        padded = padding > 0 and self._literal.startswith(_PADDING[padding])
        if padded:
            del self._literal[:padding]
        self._put(PADDED if padded else BARE, self._before)
        self._out += _number(_folded(address - self._next))
        self._out += _number(size)
        self._next = _after(address, size)
        self._content = None

    def _put(self, kind: int, literal: bytes) -> None:
        """Write the head and the literal bytes of a record."""
        if len(self._out) >= _FLUSH:
            self._blob.write(bytes(self._out))
            self._out.clear()
        self._out += _number(len(literal) << 2 | kind)
        self._out += literal


def read_recipe(pieces: Iterable[bytes], read: Callable[[int, int], bytes], what: str) -> Iterator[bytes]:
    """The tar of a recipe that comes in `pieces`; `read(address, size)` gives bytes of the layer's blob, fewer only at
    its end.

    Raises `Corrupt` naming `what` for what is no recipe. Pieces of the tar have at most `PIECE` bytes.
    """
    source = _Bytes(pieces, what)
    if source.take(len(MAGIC)) != MAGIC:
        raise Corrupt(f"{what}: not a recipe, or written by another release")
    expected = 0
    while source:
        head = source.number()
        length, kind = head >> 2, head & 3
        if length > LITERAL_MAX or kind > BARE:
            raise Corrupt(f"{what}: a record of kind {kind} with {length} literal bytes")
        yield source.take(length)
        if kind == LITERAL_ONLY:
            continue
        address = expected + _unfolded(source.number())
        size = source.number()
        if address < 0 or not size:
            raise Corrupt(f"{what}: a content of {size} bytes at {address}")
        for start in range(0, size, PIECE):
            data = read(address + start, min(PIECE, size - start))
            if len(data) != min(PIECE, size - start):
                raise Corrupt(f"{what}: a content of {size} bytes at {address}, beyond the end of the blob")
            yield data
        if kind == PADDED:
            yield _PADDING[-size % TAR_BLOCK]
        expected = _after(address, size)


class _Bytes:
    """The bytes of a recipe as they arrive."""

    def __init__(self, pieces: Iterable[bytes], what: str) -> None:
        self._pieces = iter(pieces)
        self._what = what
        self._buffer = b""
        self._at = 0

    def __bool__(self) -> bool:
        """Whether there is more."""
        while self._at == len(self._buffer):
            piece = next(self._pieces, None)
            if piece is None:
                return False
            self._buffer, self._at = piece, 0
        return True

    def take(self, size: int) -> bytes:
        parts = []
        while size:
            if not self:
                raise Corrupt(f"{self._what}: it ends within a record")
            part = self._buffer[self._at : self._at + size]
            self._at += len(part)
            size -= len(part)
            parts.append(part)
        return b"".join(parts)

    def number(self) -> int:
        value = 0
        for shift in range(0, 7 * _NUMBER_MAX, 7):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise Corrupt(f"{self._what}: a number of more than {_NUMBER_MAX} bytes")


def _number(value: int) -> bytes:
    """LEB128: seven bits a byte, the lowest first, the top bit set in all but the last."""
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _folded(value: int) -> int:
    """A signed number as an unsigned one that is small where its distance from 0 is (zigzag)."""
    return value << 1 if value >= 0 else (-value << 1) - 1


def _unfolded(value: int) -> int:
    return -(value + 1 >> 1) if value & 1 else value >> 1


def _after(address: int, size: int) -> int:
    """Where the next content lies, if nothing was there before."""
    return -(-(address + size) // BLOCK) * BLOCK
