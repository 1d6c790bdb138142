"""What tests of the chunk store need again and again: fixed noise, stored blobs, damaged bytes, patience."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from hypothesis import strategies as st

from dsec_store.chunker import DEFAULT, ChunkerParameters
from dsec_store.chunkmap import ChunkLocation, ChunkMap
from dsec_store.errors import Corrupt, Invalid
from dsec_store.objects import Objects
from dsec_store.upload import ChunkIndex, Upload

T = TypeVar("T")

PATIENCE = 30.0
"""Seconds after which a test that waits for something gives up."""

SMALL = ChunkerParameters(minimum=4096, average=8192, maximum=16384, solo=16384)
"""Small chunks, so that small blobs have many."""


def noise(size: int, seed: str = "") -> bytes:
    """Bytes that do not compress; the same ones everywhere and for ever."""
    return hashlib.shake_256(seed.encode()).digest(size)


@dataclass(frozen=True, slots=True)
class StoredBlob:
    """A blob in a store, without a layer around it."""

    data: bytes
    chunk_map: ChunkMap
    locations: list[ChunkLocation]


def store_blob(
    objects: Objects, data: bytes, *, parameters: ChunkerParameters = SMALL, index: ChunkIndex | None = None
) -> StoredBlob:
    with Upload(objects, index or ChunkIndex(objects), workers=2) as upload:
        writer = upload.blob(parameters)
        writer.write(data)
        chunk_map = writer.finish()
        upload.finish()
        return StoredBlob(data, chunk_map, upload.locate(chunk_map))


def store_default(objects: Objects, data: bytes) -> StoredBlob:
    return store_blob(objects, data, parameters=DEFAULT)


def flipped(data: bytes, at: int) -> bytes:
    """`data` with one bit changed in byte `at`."""
    changed = bytearray(data)
    changed[at] ^= 1
    return bytes(changed)


def damaged(valid: bytes) -> st.SearchStrategy[bytes]:
    """Bytes that begin like `valid` and are not: flipped, cut, lengthened, replaced, or something else altogether."""
    places = st.integers(0, len(valid) - 1)
    return st.one_of(
        places.map(lambda at: flipped(valid, at)),
        places.map(lambda at: valid[:at]),
        st.binary(min_size=1, max_size=40).map(lambda more: valid + more),
        st.tuples(places, st.binary(min_size=1, max_size=16)).map(
            lambda change: valid[: change[0]] + change[1] + valid[change[0] + len(change[1]) :]
        ),
        st.binary(max_size=200),
    ).filter(lambda data: data != valid)


def unless_refused(decode: Callable[[], T]) -> T | None:
    """What `decode` gives, None when it refuses in the way it may; any other error is the test's failure."""
    with contextlib.suppress(Corrupt, Invalid):
        return decode()
    return None


def eventually(condition: Callable[[], bool]) -> None:
    """Wait until `condition` holds; fail when it never does."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.001)


def in_threads(calls: Sequence[Callable[[], T]]) -> list[T | BaseException]:
    """Run all `calls` at once; what each gave or raised."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.exception(PATIENCE) or future.result() for future in futures]
