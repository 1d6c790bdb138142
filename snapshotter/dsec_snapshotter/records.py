"""Durable records: one small JSON file each, written whole, read back at the next start.

Problem: the node may be killed between any two steps, and must know at its next start what it had begun. Choice: a
record is on disk *before* the mount that it tells of is made, and goes *after* that mount is gone; so a mount without
a record is never ours to keep, and a record without a mount is a leftover. Written to a temporary file, synced,
renamed, and the folder synced. Cost: two fsync(2) per record, 0.3 ms on an SSD.

A file that cannot be read is moved aside as `<name>.broken` and never stops the others.

    records = Records(Path("records"), "layer", Layer.as_json, Layer.from_json)
    records.write("ab3d", layer);  records.load();  records.remove("ab3d")
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from dsec_store.errors import Denied, StoreError

Json = dict[str, Any]
T = TypeVar("T")

_SUFFIX: Final = ".json"
_BROKEN: Final = ".broken"
_TEMPORARY: Final = ".tmp-"
_NOT_A_RECORD: Final = (OSError, ValueError, KeyError, TypeError, AttributeError, StoreError, RecursionError)
"""What reading and decoding a damaged file may raise."""


class Records(Generic[T]):
    """The records of one kind, `<folder>/<kind>-<id>.json`. Different ids may be written by many threads at once."""

    def __init__(self, folder: Path, kind: str, encode: Callable[[T], Json], decode: Callable[[Json], T]) -> None:
        self._folder = folder
        self._prefix = f"{kind}-"
        self._encode = encode
        self._decode = decode

    def write(self, id: str, record: T) -> None:
        """On return the record outlives a crash of the machine. `Denied` when the disk does not take it."""
        try:
            descriptor, temporary = tempfile.mkstemp(dir=self._folder, prefix=_TEMPORARY)
            with contextlib.ExitStack() as undo:
                undo.callback(os.unlink, temporary)
                with os.fdopen(descriptor, "w", encoding="utf-8") as out:
                    json.dump(self._encode(record), out, sort_keys=True)
                    out.flush()
                    os.fsync(out.fileno())
                os.rename(temporary, self._path(id))
                undo.pop_all()
            self._sync_folder()
        except OSError as error:
            raise Denied(f"record {self._path(id).name} cannot be written: {error.strerror}") from error

    def remove(self, id: str) -> None:
        """Not synced: a record that comes back after a crash of the machine finds no mount, and is dropped."""
        self._path(id).unlink(missing_ok=True)

    def load(self) -> dict[str, T]:
        """All records by id. Leftovers of unfinished writes are removed, unreadable files moved aside (`broken`)."""
        for temporary in self._folder.glob(f"{_TEMPORARY}*"):
            temporary.unlink(missing_ok=True)
        found = {}
        for path in sorted(self._folder.glob(f"{self._prefix}*{_SUFFIX}")):
            try:
                found[self._id(path)] = self._decode(json.loads(path.read_bytes()))
            except _NOT_A_RECORD:
                path.rename(path.with_name(path.name + _BROKEN))
        return found

    def broken(self) -> dict[str, Path]:
        """The files that `load` has ever moved aside, by the id that their name tells."""
        return {self._id(path): path for path in sorted(self._folder.glob(f"{self._prefix}*{_SUFFIX}{_BROKEN}"))}

    def forget_broken(self) -> None:
        for path in self.broken().values():
            path.unlink(missing_ok=True)

    def _path(self, id: str) -> Path:
        return self._folder / f"{self._prefix}{id}{_SUFFIX}"

    def _id(self, path: Path) -> str:
        return path.name.removeprefix(self._prefix).partition(".")[0]

    def _sync_folder(self) -> None:
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
