"""The interface of a blob store: named, immutable bytes. This file is its manual.

A *blob* here is an object of the backend: a key and its bytes. It has a short life:

    put(key, data) ──> stored ──> get / get_range / stat / list, any number of times ──> delete(key) ──> absent

Three words. A *key* is a relative path of plain segments ("packs/ab/ab12…"). *Stored* means: every later call, by any
process, sees the whole blob, and it outlives a crash of the machine (as far as the backend can promise that). *Absent*
means `NotFound`, and never an empty answer.

Blobs whose key ends in a digest never change; the others (references, locators, lookups) are replaced whole: a reader
sees the old bytes or the new ones, never a mixture. Two writers of one key: the last one wins.

    store = RetryBlobs(VerifyBlobs(FolderBlobs(path)))          # behaviour is added by wrapping
    store.put("refs/demo", b"...");  store.get_range("packs/ab/ab12", offset=4096, length=65536)

Every implementation is safe for calls from many threads, and raises only the errors of `dsec_store.errors`.
Implementations run `dsec_store.testing.BlobStoreContract`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol

from dsec_store.errors import Invalid

MAX_KEY_LENGTH: Final = 900
"""Bytes. S3 allows 1,024 for prefix and key together."""

_SEGMENT: Final = re.compile(r"[A-Za-z0-9_%][A-Za-z0-9._%-]{0,254}")


@dataclass(frozen=True, slots=True)
class BlobStat:
    """A key, the size of its blob in bytes, and when it was stored last.

    `modified`: seconds since 1970 by the backend's clock, perhaps rounded to whole ones; None when the backend does not
    say. It is no part of what makes two stats equal.
    """

    key: str
    size: int
    modified: float | None = field(default=None, compare=False)


class BlobStore(Protocol):
    """See the module's text. All methods block; all raise `Unavailable` when the backend cannot be reached."""

    @property
    def location(self) -> str:
        """Where the blobs lie, for messages and comparison ("file:///srv/store"). Holds no secret."""
        ...

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Store `data` under `key`: on return it is stored, without implying because of this call.

        Atomic for every reader. Replaces what was there. `Denied` when the target is read-only or full: then the key
        is as it was before.
        """
        ...

    def get(self, key: str, limit: int | None = None) -> bytes:
        """All bytes of the blob. `Corrupt` when it is larger than `limit` bytes (nothing beyond is read)."""
        ...

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        """Exactly `length` > 0 bytes from `offset` on.

        `Corrupt` when the blob ends before `offset + length`; `Unavailable` when an answer came short or long.
        """
        ...

    def stat(self, key: str) -> BlobStat | None:
        """The blob's size, or None when it is absent. Never raises `NotFound`."""
        ...

    def list(self, prefix: str) -> Iterator[BlobStat]:
        """Every stored blob whose key starts with the folder `prefix` ("packs/"; "" for all), in no promised order.

        Blobs put or deleted meanwhile may or may not appear; others appear exactly once.
        """
        ...

    def delete(self, key: str) -> None:
        """On return the blob is absent. Deleting what is absent is no error."""
        ...


def check_key(key: str) -> str:
    """`key` itself, if it is well formed; else `Invalid`."""
    segments = key.split("/")
    if len(key) > MAX_KEY_LENGTH or not all(_SEGMENT.fullmatch(segment) for segment in segments):
        raise Invalid(f"not a key: {key!r}")
    return key


def check_prefix(prefix: str) -> str:
    """`prefix` itself, if it is empty or a well-formed folder that ends in a slash; else `Invalid`."""
    if prefix and (not prefix.endswith("/") or check_key(prefix[:-1]) is None):
        raise Invalid(f"not a prefix: {prefix!r}")
    return prefix
