"""Images, wherever they come from: the interface of an image source, blobs that are verified, and resolving.

An *image source* leads from a tag to an image for one platform, and hands out its blobs:

    with OciLayout(Path("out")) as source:
        image = source.resolve("v1", host_platform())          # index -> manifest -> config, all verified
        for layer in image.manifest.layers:
            with source.open_blob(layer) as reader:            # lowest layer first
                convert(reader)
                reader.finish()                                # nothing of it counts before this returned

Three words. A *tag* is a name inside the source: what it looks like is the source's matter. *Resolved* means that
manifest and config were read, match their digests and each other, and are for a platform that fits. *Verified* means
that size and sha256 are those of the descriptor: whoever stores something on the way lets nobody see it before.

Which forms there are, and what each of them decides: docs/format/sources.md. Source: OCI image-spec 1.1, image-index.md
(nesting).
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Final, Protocol, Self

from dsec_registry.manifest import (
    MAX_CONFIG_SIZE,
    MAX_MANIFEST_SIZE,
    Descriptor,
    ImageConfig,
    Index,
    Manifest,
    Platform,
    choose,
    parse_config,
    parse_index,
    parse_manifest,
)
from dsec_store.digest import Digest, hasher_for
from dsec_store.errors import Corrupt, Invalid, NotFound, StoreError, Unavailable

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

BLOCK_SIZE: Final = 1 << 20
"""Bytes that are read and hashed at once."""

MAX_INDEX_DEPTH: Final = 4
"""Indexes inside indexes. Tools nest once; the specification sets no end."""


# The interface


class ImageSource(Protocol):
    """See the module's text. All methods block; what is opened is closed by the `with` statement or `close`."""

    def resolve(self, tag: str | None, platform: Platform) -> ResolvedImage:
        """The image that `tag` names, for a machine of `platform`; without a tag the only image there is.

        `NotFound` for an unknown tag, an absent platform (both list what there is) or a missing blob; `Invalid` when
        no tag is given and several images could be meant, or for something that is no image of tar layers.
        """
        ...

    def open_blob(self, descriptor: Descriptor, *, hashed: bool = True) -> VerifiedReader:
        """A reader of the blob's bytes, as they are stored (compressed). `NotFound` when it is missing.

        Without `hashed` only their size is checked: for who reads them again, and verifies them in another way.
        """
        ...

    def close(self) -> None:
        """Free what the source holds. Readers are closed before."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class ResolvedImage:
    """An image for one platform. The bytes are verbatim: only they have the digests, and hold every field.

    The manifest of a docker archive, which has none, is made: see docs/format/sources.md.
    """

    manifest_digest: Digest
    manifest_bytes: bytes
    manifest: Manifest
    config_bytes: bytes
    config: ImageConfig


# Blobs


class ByteStream(Protocol):
    """What a blob's bytes come from: a file, a part of one, an HTTP response."""

    def read(self, size: int, /) -> bytes:
        """Up to `size` bytes, none only at the end."""
        ...

    def close(self) -> None: ...


class VerifiedReader(io.BufferedReader):
    """Reads a blob and checks it: `Corrupt`, naming the digest, unless its size and digest are the expected ones.

    The check comes before the last byte is handed out; so whoever has read `size` bytes, the end, or called `finish`
    has verified bytes, and nobody ever gets more than `size`. After an error every further read raises it again.
    """

    def __init__(self, stream: ByteStream, descriptor: Descriptor, *, hashed: bool = True) -> None:
        """Takes over `stream`, and closes it with this reader. Without `hashed`, only the size is checked."""
        super().__init__(_Verifying(stream, descriptor, hashed), BLOCK_SIZE)

    def finish(self) -> None:
        """Read what is left: on return the whole blob is verified."""
        while self.read(BLOCK_SIZE):
            pass


class _Verifying(io.RawIOBase):
    """The unbuffered part of a `VerifiedReader`."""

    def __init__(self, stream: ByteStream, descriptor: Descriptor, hashed: bool) -> None:
        self._stream = stream
        self._descriptor = descriptor
        self._hasher = hasher_for(descriptor.digest.algorithm) if hashed else None
        self._left = descriptor.size
        self._verified = False
        self._error: StoreError | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        if self._error:
            raise self._error
        view = memoryview(buffer)
        try:
            data = self._next(len(view))
        except StoreError as error:
            self._error = error
            raise
        view[: len(data)] = data
        return len(data)

    def _next(self, size: int) -> bytes:
        if self._verified:
            return b""
        data = self._read(min(size, self._left))
        if self._hasher:
            self._hasher.update(data)
        self._left -= len(data)
        if not data and self._left:
            raise self._corrupt(f"ends {self._left} bytes early, its size is {self._descriptor.size}")
        if not self._left:
            self._check_end()
        return data

    def _check_end(self) -> None:
        if self._read(1):
            raise self._corrupt(f"is longer than its size, {self._descriptor.size} bytes")
        if self._hasher and self._hasher.digest() != self._descriptor.digest.raw:
            raise self._corrupt("its bytes do not match the digest")
        self._verified = True

    def _read(self, size: int) -> bytes:
        try:
            return self._stream.read(size) if size else b""
        except OSError as error:
            raise Unavailable(f"blob {self._descriptor.digest}: {error.strerror or error}") from error

    def _corrupt(self, text: str) -> Corrupt:
        return Corrupt(f"blob {self._descriptor.digest}: {text}")

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()


# Resolving


OpenBlob = Callable[[Descriptor], VerifiedReader]


def resolve_image(open_blob: OpenBlob, roots: Sequence[Descriptor], platform: Platform, name: str) -> ResolvedImage:
    """The image for `platform` among `roots`, manifests and indexes that stand for one image; `name` is for errors.

    Where no index says what platform a manifest is for, its config must fit.
    """
    leaves = Index(tuple(_leaves(open_blob, roots)))
    chosen = choose(leaves, platform, name)
    manifest_bytes = read_document(open_blob, chosen, MAX_MANIFEST_SIZE)
    manifest = parse_manifest(manifest_bytes, str(chosen.digest))
    config_bytes = read_document(open_blob, manifest.config, MAX_CONFIG_SIZE)
    config = parse_config(config_bytes, str(manifest.config.digest), len(manifest.layers))
    if chosen.platform is None:
        check_platform(config, platform, name)
    return ResolvedImage(chosen.digest, manifest_bytes, manifest, config_bytes, config)


def check_platform(config: ImageConfig, platform: Platform, name: str) -> None:
    """`NotFound` when the config says that the image is for another platform; `name` is for errors."""
    if config.platform and not platform.matches(config.platform):
        raise NotFound(f"{name}: no image for {platform} (there are: {config.platform})")


def read_document(open_blob: OpenBlob, descriptor: Descriptor, limit: int) -> bytes:
    """The verified bytes of a small blob. `Invalid` when it is larger than `limit` bytes: then nothing is read."""
    if descriptor.size > limit:
        raise Invalid(f"blob {descriptor.digest}: {descriptor.size} bytes are more than the {limit} allowed")
    with open_blob(descriptor) as reader:
        return reader.read()


def _leaves(open_blob: OpenBlob, roots: Sequence[Descriptor]) -> Iterator[Descriptor]:
    """Everything that is no index in `roots` and the indexes below, level by level, each index once a level."""
    level = roots
    for _ in range(MAX_INDEX_DEPTH + 1):
        yield from (entry for entry in level if not entry.is_index)
        nested = {entry.digest: entry for entry in level if entry.is_index}
        if not nested:
            return
        level = [entry for index in nested.values() for entry in _nested(open_blob, index)]
    raise Invalid(f"index {level[0].digest}: indexes are nested more than {MAX_INDEX_DEPTH} deep")


def _nested(open_blob: OpenBlob, index: Descriptor) -> tuple[Descriptor, ...]:
    return parse_index(read_document(open_blob, index, MAX_MANIFEST_SIZE), str(index.digest)).manifests
