"""The `.git` folder of a work tree that has the history of one commit: what is in it, in canonical order.

Besides the pack: HEAD on the one branch, a configuration that says only what git needs, an index, and `shallow` where
the history ends early. All but the pack's objects, which lie in a temporary file, is held in memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import IO, BinaryIO, Final

from dsec_store.errors import Denied
from dsec_store.inputs.gitfiles import PACK_HEADER_SIZE, IndexEntry, Packed, index_file, pack_header, pack_index
from dsec_store.inputs.githistory import History, records
from dsec_store.inputs.gitobjects import Objects

BRANCH: Final = b"main"
"""The one branch."""

Files = Iterable[tuple[bytes, Iterable[bytes], int]]
"""Path, content in pieces, its size; a path that ends in a slash is a directory."""

_PIECE: Final = 1 << 20
_CONFIG: Final = b"[core]\n\trepositoryformatversion = %d\n\tfilemode = true\n\tbare = false\n"
_OBJECT_FORMAT: Final = b"[extensions]\n\tobjectformat = %s\n"


def git_folder(
    kept: ExitStack, objects: Objects, object_format: str, history: History, index: Sequence[IndexEntry]
) -> Files:
    """The files of `.git`, with `index` as what is staged. They can be read until `kept` is closed.

    Raises `Denied` when there is no room for the objects, and as `Objects` does.
    """
    packed: list[Packed] = []
    body = _spooled(kept, records(objects, history, packed))
    checksum = objects.hasher()
    checksum.update(pack_header(len(packed)))
    body_size = 0
    for piece in _pieces(body):
        checksum.update(piece)
        body_size += len(piece)
    pack_checksum = checksum.digest()
    name = b".git/objects/pack/pack-" + pack_checksum.hex().encode()
    config = _CONFIG % 0 if object_format == "sha1" else _CONFIG % 1 + _OBJECT_FORMAT % object_format.encode()
    shallow = b"".join(b"%s\n" % commit.hex().encode() for commit in history.shallow)
    return (
        *_whole(
            (b".git/", b""),
            (b".git/HEAD", b"ref: refs/heads/%s\n" % BRANCH),
            (b".git/config", config),
            (b".git/index", index_file(index, objects.hasher)),
            (b".git/objects/", b""),
            (b".git/objects/pack/", b""),
            (name + b".idx", pack_index(packed, pack_checksum, objects.hasher())),
        ),
        (
            name + b".pack",
            _pack(len(packed), body, pack_checksum),
            PACK_HEADER_SIZE + body_size + len(pack_checksum),
        ),
        *_whole(
            (b".git/refs/", b""),
            (b".git/refs/heads/", b""),
            (b".git/refs/heads/" + BRANCH, history.commits[-1].hex().encode() + b"\n"),
            *([(b".git/shallow", shallow)] if shallow else []),
        ),
    )


def _whole(*files: tuple[bytes, bytes]) -> Files:
    return [(path, [data], len(data)) for path, data in files]


def _pack(count: int, body: BinaryIO, checksum: bytes) -> Iterator[bytes]:
    yield pack_header(count)
    yield from _pieces(body)
    yield checksum


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    file.seek(0)
    while piece := file.read(_PIECE):
        yield piece


def _spooled(kept: ExitStack, pieces: Iterable[bytes]) -> BinaryIO:
    """The bytes of `pieces` in an unnamed temporary file, which is gone when `kept` is closed."""
    file = kept.enter_context(_temporary())
    for piece in pieces:
        _write(file, piece)
    file.seek(0)
    return kept.enter_context(open(file.fileno(), "rb", closefd=False))


def _temporary() -> IO[bytes]:
    try:
        return tempfile.TemporaryFile(prefix="dsec-git-", buffering=0)
    except OSError as error:
        raise Denied(f"no temporary file can be made: {error.strerror or error}; set TMPDIR") from None


def _write(file: IO[bytes], piece: bytes) -> None:
    """All of `piece`. Unbuffered, so that a full disk shows here and not when the file is closed."""
    left = memoryview(piece)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError as error:
        place = tempfile.gettempdir()
        raise Denied(f"a history cannot be kept in {place}: {error.strerror}; free space or set TMPDIR") from None
