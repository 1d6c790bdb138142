"""The files that a source consists of, in a folder or elsewhere, and errors that name them.

Names are relative paths of plain segments that the source's own code makes, such as `blobs/sha256/<hex>`; what a
foreign document names is looked up in an `Archive` alone, which never leaves itself.
"""

from __future__ import annotations

import contextlib
import errno
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Protocol, Self

from dsec_registry.images import ByteStream
from dsec_store.errors import Denied, Invalid, NotFound, StoreError, Unavailable

_OS_ERRORS: Final = {
    errno.ENOENT: NotFound,
    errno.ENOTDIR: NotFound,
    errno.ENAMETOOLONG: Invalid,
    errno.EISDIR: Invalid,
    errno.EACCES: Denied,
    errno.EPERM: Denied,
    errno.ENOSPC: Denied,
    errno.EDQUOT: Denied,
}
"""What an errno means here; another one may pass (`Unavailable`)."""


@contextlib.contextmanager
def errors_about(what: str) -> Iterator[None]:
    """Turn errors of the system, and those of readers that do not know their file, into errors about `what`."""
    try:
        yield
    except StoreError as error:
        raise type(error)(f"{what}: {error}") from error
    except OSError as error:
        kind = _OS_ERRORS.get(error.errno or 0, Unavailable)
        raise kind(f"{what}: {error.strerror or error}") from error


class Files(Protocol):
    """Files by name. `path` is what holds them: a folder, an archive."""

    @property
    def path(self) -> Path: ...

    def open(self, name: str) -> ByteStream | None:
        """The bytes of the regular file `name`, None when there is none. The stream is closed by the caller."""
        ...

    def close(self) -> None:
        """Free what is held. Streams are closed before."""
        ...


class Folder:
    """The files of a folder."""

    def __init__(self, path: Path, instead: str) -> None:
        """`NotFound` when there is nothing; `Invalid` when it is no folder, with `instead`, the way out."""
        self.path = path
        with errors_about(str(path)):
            is_folder = stat.S_ISDIR(path.stat().st_mode)
        if not is_folder:
            raise Invalid(f"{path}: not a folder ({instead})")

    def open(self, name: str) -> ByteStream | None:
        path = self.path / name
        with errors_about(str(path)):
            return path.open("rb") if path.is_file() else None  # a named pipe would block

    def close(self) -> None:
        """Nothing is held."""


class FileSource:
    """What image sources made of `Files` share."""

    def __init__(self, files: Files) -> None:
        """Takes over `files`, and closes them."""
        self.files = files
        self.path = files.path

    def read(self, name: str, limit: int) -> bytes | None:
        """A file that no digest names, None when it is missing; of one that is too large `limit` and one more byte."""
        stream = self.files.open(name)
        if stream is None:
            return None
        with contextlib.closing(stream), errors_about(f"{self.path}/{name}"):
            return stream.read(limit + 1)

    def close(self) -> None:
        self.files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
