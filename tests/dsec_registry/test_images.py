"""The verifying reader: no byte counts before all are verified."""

from __future__ import annotations

import io

import pytest

from dsec_registry.images import ByteStream, VerifiedReader
from dsec_registry.manifest import Descriptor
from dsec_store.digest import Digest
from dsec_store.errors import Corrupt, Unavailable
from tests.ocimaker import CONFIG


class Bytes(io.BytesIO):
    """Gives at most `step` bytes a read, as a network does."""

    def __init__(self, data: bytes, step: int = 7) -> None:
        super().__init__(data)
        self._step = step

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(self._step if size is None or size < 0 else min(size, self._step))


class Broken(Bytes):
    def read(self, size: int | None = -1, /) -> bytes:
        raise OSError(5, "Input/output error")


def reader_of(stream: ByteStream, data: bytes) -> VerifiedReader:
    return VerifiedReader(stream, Descriptor(CONFIG, Digest.of(data, "sha256"), len(data)))


@pytest.mark.parametrize("data", [b"", b"x", b"0123456789" * 50])
def test_verified_bytes_are_all_bytes(data: bytes) -> None:
    with reader_of(Bytes(data), data) as reader:
        assert reader.read() == data
        assert reader.read() == b""
        reader.finish()
    with reader_of(Bytes(data), data) as reader:
        assert b"".join(iter(lambda: reader.read(3), b"")) == data


@pytest.mark.parametrize("stored", [b"0123456789x", b"012345678", b"012345678x", b""])
def test_nobody_gets_all_bytes_of_a_wrong_blob(stored: bytes) -> None:
    """Not even who asks for exactly as many as there should be; and a second try does not help."""
    with reader_of(Bytes(stored), b"0123456789") as reader:
        for _ in range(3):
            with pytest.raises(Corrupt, match=r"^blob sha256:84d898"):
                reader.read(10)
        with pytest.raises(Corrupt):
            reader.finish()


def test_finish_reads_the_rest() -> None:
    data = bytes(3 << 20)
    with reader_of(Bytes(data, 1 << 16), data) as reader:
        assert reader.read(10) == bytes(10)
        reader.finish()
    with reader_of(Bytes(data + b"x", 1 << 16), data) as reader:
        assert reader.read(10) == bytes(10)
        with pytest.raises(Corrupt, match="is longer than its size, 3145728 bytes"):
            reader.finish()


def test_a_stream_is_closed_with_its_reader_and_its_errors_may_pass() -> None:
    stream = Broken(b"")
    with reader_of(stream, b"abc") as reader, pytest.raises(Unavailable, match=r"^blob sha256:ba78.*output error"):
        reader.read()
    assert stream.closed
