"""Blobs as files of a local folder: the store that needs no server, and the one on shared file systems.

A file must never be seen half written, by nobody, whatever dies. So a blob is written to a temporary file in the
store's own folder `.tmp`, flushed to the disk, renamed to its name, and the folder flushed. Crash before the rename: a
temporary file is left, which no key can name (segments of keys do not begin with a dot) and no listing shows; the first
put of a later process removes those that are older than a day. Crash after: the blob is stored.

    folder/packs/ab/ab12…       one file a blob, its path is the key
    folder/.tmp/8814-5f0c…      blobs that are being written

Folders of keys are made when first needed and never removed: removing an empty one would race with a put into it. The
name of each is flushed to the disk before the first put into it is acknowledged, by every process that puts: another
one that made the folder may not have come to that yet.

Only its owner may enter a new store. Who else may is for the operator to say, by the mode of the top folder.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from dsec_store.blobs import BlobStat, check_key, check_prefix
from dsec_store.bounds import check_end, check_length, check_limit, check_range
from dsec_store.errors import Denied, Invalid, NotFound, StoreError, Unavailable

STALE_SECONDS: Final = 24 * 60 * 60
"""Age at which a temporary file belongs to nobody any more. No write takes a day."""

MODE: Final = 0o700
"""Of the top folder, when it is made here."""

_TEMPORARY: Final = ".tmp"

_REFUSALS: Final = {
    errno.ENOSPC: "is full: make room there or choose another store",
    errno.EDQUOT: "has used up its quota: make room there or choose another store",
    errno.EROFS: "is read-only: mount it writable or choose another store",
    errno.EACCES: "may not be accessed by this user: change its permissions or run as its owner",
    errno.EPERM: "may not be changed by this user: change its permissions or run as its owner",
}
"""errno -> what is wrong with the store, and the way out. Other errors of the system may pass: `Unavailable`."""

_ABSENT: Final = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""No blob of that name: nothing at all, or a blob where a folder should be, or a folder itself."""


class FolderBlobs:
    """The store in the folder `path`. With `create` the folder is made if need be; else its absence is `NotFound`."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self._root = Path(os.path.abspath(path))  # not resolved: a symbolic link may be moved to another disk
        self._location = self._root.as_uri()
        self._tidy = False
        self._tidying = threading.Lock()
        self._durable: set[Path] = set()
        with self._errors(""):
            if create:
                with suppress(FileExistsError, NotADirectoryError):  # a file is in the way
                    _make_folders(self._root, MODE)
            if not self._root.is_dir():
                raise NotFound(
                    f"{self._location}: there is no such folder (the first 'dsec-image convert' or 'build' makes it)"
                )

    @property
    def location(self) -> str:
        return self._location

    def put(self, key: str, data: bytes | memoryview) -> None:
        target = self._path(key)
        with self._errors(key):
            self._tidy_once()
            temporary = self._root / _TEMPORARY / f"{os.getpid()}-{secrets.token_hex(8)}"
            try:
                _write_durably(temporary, data)
                self._move(temporary, target, key)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            _sync_folder(target.parent)

    def get(self, key: str, limit: int | None = None) -> bytes:
        with self._open(key) as (file, size):
            check_limit(self._name(key), size, limit)
            return self._read(file, key, 0, size)

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        check_range(offset, length)
        with self._open(key) as (file, size):
            check_end(self._name(key), size, offset, length)
            return self._read(file, key, offset, length)

    def stat(self, key: str) -> BlobStat | None:
        try:
            with self._open(key) as (file, size):
                return BlobStat(key, size, os.fstat(file).st_mtime)
        except NotFound:
            return None

    def list(self, prefix: str) -> Iterator[BlobStat]:
        check_prefix(prefix)
        self._check_present()
        return self._walk(prefix)

    def delete(self, key: str) -> None:
        path = self._path(key)
        with self._errors(key):
            try:
                path.unlink()
            except _ABSENT:
                self._check_present()
            else:
                _sync_folder(path.parent)

    def _move(self, temporary: Path, target: Path, key: str) -> None:
        try:
            self._settle(target.parent)
            temporary.replace(target)
        except (IsADirectoryError, NotADirectoryError, FileExistsError) as error:
            raise Invalid(f"{self._name(key)}: a name cannot be both a blob and a folder of blobs") from error

    def _settle(self, folder: Path) -> None:
        """Make a folder of keys if need be. Its name is on the disk on return, whoever made it."""
        if folder == self._root or (folder in self._durable and folder.is_dir()):
            return
        self._settle(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync_folder(folder.parent)
        self._durable.add(folder)

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    def _name(self, key: str) -> str:
        return f"{self._location}/{key}" if key else self._location

    @contextmanager
    def _open(self, key: str) -> Iterator[tuple[int, int]]:
        """The blob's open file and its size. Raises `NotFound` for what is no regular file."""
        path = self._path(key)
        with self._errors(key):
            try:
                file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except _ABSENT as error:
                raise self._not_found(key) from error
            try:
                status = os.fstat(file)
                if not stat.S_ISREG(status.st_mode):
                    raise self._not_found(key)
                yield file, status.st_size
            finally:
                os.close(file)

    def _read(self, file: int, key: str, offset: int, length: int) -> bytes:
        """Read exactly, in several calls if the system wants it so."""
        data = os.pread(file, length, offset)
        while len(data) < length and (more := os.pread(file, length - len(data), offset + len(data))):
            data += more
        return check_length(self._name(key), data, length)

    def _walk(self, prefix: str) -> Iterator[BlobStat]:
        """Every blob below the folder `prefix`. What vanishes while we look is left out."""
        folders = [prefix]
        while folders:
            folder = folders.pop()
            with self._errors(folder):
                entries = _scan(self._root / folder)
            for name, status in entries:
                if stat.S_ISDIR(status.st_mode):
                    folders.append(f"{folder}{name}/")
                elif stat.S_ISREG(status.st_mode):
                    yield BlobStat(f"{folder}{name}", status.st_size, status.st_mtime)

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        """Raise what the system says as an error of the store."""
        try:
            yield
        except OSError as error:
            raise self._translated(error, key) from error

    def _translated(self, error: OSError, key: str) -> StoreError:
        if error.errno in _REFUSALS:
            return Denied(f"{self._location} {_REFUSALS[error.errno]}")
        return Unavailable(f"{self._name(key)}: {os.strerror(error.errno or errno.EIO)}")

    def _not_found(self, key: str) -> NotFound:
        """`NotFound`, unless the whole store is gone: an outage must not look like absence."""
        self._check_present()
        return NotFound(f"{self._name(key)} does not exist")

    def _check_present(self) -> None:
        with self._errors(""):
            if not self._root.is_dir():
                raise Unavailable(f"{self._location}: the folder has disappeared")

    def _tidy_once(self) -> None:
        """Before the first put: make `.tmp`, and remove from it what killed writers left."""
        with self._tidying:
            if not self._tidy:
                folder = self._root / _TEMPORARY
                folder.mkdir(exist_ok=True)
                _remove_stale(folder)
                self._tidy = True


def _write_durably(path: Path, data: bytes | memoryview) -> None:
    """A new file with `data`, on the disk on return. Its mode is what the umask makes of 0666."""
    with open(path, "xb", buffering=0) as file:
        rest = memoryview(data).cast("B")
        while rest:
            rest = rest[file.write(rest) :]
        os.fsync(file.fileno())


def _make_folders(path: Path, mode: int = 0o777) -> None:
    """`path` with this mode and the folders above it, each one's name flushed to the disk when it is new."""
    if not path.is_dir():
        _make_folders(path.parent)
        path.mkdir(mode, exist_ok=True)
        _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _scan(path: Path) -> list[tuple[str, os.stat_result]]:
    """Names and status of what lies in the folder, if the name can be part of a key; nothing if the folder is gone."""
    found = []
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as entries:
        for entry in entries:
            with suppress(FileNotFoundError, Invalid):
                found.append((check_key(entry.name), entry.stat()))
    return found


def _remove_stale(folder: Path) -> None:
    oldest = time.time() - STALE_SECONDS
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            if path.stat().st_mtime < oldest:
                path.unlink()
