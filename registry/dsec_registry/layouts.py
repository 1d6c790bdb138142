"""Where images come from: the interface of an image source, and OCI image layouts as its first implementations.

An *image source* leads from a tag to an image for one platform, and hands out its blobs:

    with OciLayout(Path("out")) as source:
        image = source.resolve("v1", host_platform())          # index -> manifest -> config, all verified
        for layer in image.manifest.layers:
            with source.open_blob(layer) as reader:            # lowest layer first
                convert(reader)
                reader.finish()                                # nothing of it counts before this returned

Three words. A *tag* is a name inside the source (annotation `org.opencontainers.image.ref.name`). *Resolved* means that
manifest and config were read, match their digests and each other, and are for a platform that fits. *Verified* means
that size and sha256 are those of the descriptor: whoever stores something on the way lets nobody see it before.

Problem: a layout comes from anybody, and its names may lead out of it or to bytes that lie. Choice: a blob's path is
made from a parsed digest only; a tar is indexed in one scan and read in place, nothing is extracted. Cost: a compressed
archive is unpacked once into an unnamed temporary file.

Source: OCI image-spec 1.1, image-layout.md (files, index.json), annotations.md (ref.name), image-index.md (nesting).
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import shutil
import stat
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, Final, Protocol, Self

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
    parse_layout,
    parse_manifest,
    quoted,
)
from dsec_store.digest import Digest, hasher_for
from dsec_store.errors import Corrupt, Denied, Invalid, NotFound, StoreError, Unavailable
from dsec_store.layer.decompress import open_decompressed
from dsec_store.layer.tar import TarKind, read_entries

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

BLOCK_SIZE: Final = 1 << 20
"""Bytes that are read and hashed at once."""

MAX_INDEX_DEPTH: Final = 4
"""Indexes inside indexes. Tools nest once; the specification sets no end."""

_BLOBS: Final = "blobs/sha256/"
_MEMBER: Final = re.compile(rb"oci-layout|index\.json|blobs/sha256/[0-9a-f]{64}")

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


# The interface


class ImageSource(Protocol):
    """See the module's text. All methods block; what is opened is closed by the `with` statement or `close`."""

    def resolve(self, tag: str | None, platform: Platform) -> ResolvedImage:
        """The image that `tag` names, for a machine of `platform`; without a tag the only image there is.

        `NotFound` for an unknown tag, an absent platform (both list what there is) or a missing blob; `Invalid` when
        no tag is given and several images could be meant, or for something that is no image of tar layers.
        """
        ...

    def open_blob(self, descriptor: Descriptor) -> VerifiedReader:
        """A reader of the blob's bytes, as they are stored (compressed). `NotFound` when it is missing."""
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
    """An image for one platform. The bytes are verbatim: only they have the digests, and hold every field."""

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

    def __init__(self, stream: ByteStream, descriptor: Descriptor) -> None:
        """Takes over `stream`, and closes it with this reader."""
        super().__init__(_Verifying(stream, descriptor), BLOCK_SIZE)

    def finish(self) -> None:
        """Read what is left: on return the whole blob is verified."""
        while self.read(BLOCK_SIZE):
            pass


class _Verifying(io.RawIOBase):
    """The unbuffered part of a `VerifiedReader`."""

    def __init__(self, stream: ByteStream, descriptor: Descriptor) -> None:
        self._stream = stream
        self._descriptor = descriptor
        self._hasher = hasher_for(descriptor.digest.algorithm)
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
        if self._hasher.digest() != self._descriptor.digest.raw:
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
    if chosen.platform is None and config.platform and not platform.matches(config.platform):
        raise NotFound(f"{name}: no image for {platform} (there are: {config.platform})")
    return ResolvedImage(chosen.digest, manifest_bytes, manifest, config_bytes, config)


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


def _tagged(index: Index, tag: str | None, name: str) -> list[Descriptor]:
    """The entries of a layout's index that stand for the one image that `tag` means."""
    images = [entry for entry in index.manifests if entry.is_index or entry.is_image]
    found = [entry for entry in images if tag in (None, entry.tag)]
    if found and _is_one_image(found):
        return found
    tags = ", ".join(sorted({quoted(entry.tag) for entry in images if entry.tag})) or "none"
    wanted = "image" if tag is None else f"image with the tag {quoted(tag)}"
    if found:
        raise Invalid(f"{name}: more than one {wanted}: name one by its tag (there are: {tags})")
    raise NotFound(f"{name}: no {wanted} (there are: {tags})")


def _is_one_image(entries: list[Descriptor]) -> bool:
    """Whether all are the same blob, or one image for different platforms."""
    if len({entry.digest for entry in entries}) == 1:
        return True
    platforms = {entry.platform for entry in entries if entry.platform}
    return len(platforms) == len(entries) and len({entry.tag for entry in entries}) == 1


# Layouts


class _Layout(ABC):
    """An image layout, wherever its files lie: implementations say how to open one of them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held = contextlib.ExitStack()

    @abstractmethod
    def _open(self, name: str) -> ByteStream:
        """The layout's file of this name, a relative path of plain segments. `NotFound` when it is missing."""

    def resolve(self, tag: str | None, platform: Platform) -> ResolvedImage:
        parse_layout(self._read("oci-layout"), f"{self._path}/oci-layout")
        index = parse_index(self._read("index.json"), f"{self._path}/index.json")
        return resolve_image(self.open_blob, _tagged(index, tag, str(self._path)), platform, str(self._path))

    def open_blob(self, descriptor: Descriptor) -> VerifiedReader:
        return VerifiedReader(self._open(_BLOBS + descriptor.digest.hex), descriptor)

    def _read(self, name: str) -> bytes:
        """A file of the layout that no digest names; of a file that is too large one byte too many."""
        with contextlib.closing(self._open(name)) as stream, _errors_name(f"{self._path}/{name}"):
            return stream.read(MAX_MANIFEST_SIZE + 1)

    def _missing(self, name: str) -> NotFound:
        return NotFound(f"{self._path}: not a complete OCI image layout: {name} is missing")

    def close(self) -> None:
        self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class OciLayout(_Layout):
    """A folder with the files `oci-layout` and `index.json`, and blobs in `blobs/sha256/`."""

    def __init__(self, path: Path) -> None:
        """`NotFound` when there is nothing, `Invalid` when it is no folder."""
        super().__init__(path)
        with _errors_name(str(path)):
            is_folder = stat.S_ISDIR(path.stat().st_mode)
        if not is_folder:
            raise Invalid(f"{path}: not a folder (oci-archive: reads a layout in a tar)")

    def _open(self, name: str) -> ByteStream:
        path = self._path / name
        with _errors_name(str(path)):
            if path.is_file():  # a named pipe would block
                return path.open("rb")
        raise self._missing(name)


class OciArchive(_Layout):
    """A tar of such a folder, plain or compressed. Of files with one name the last counts, as where tar extracts."""

    def __init__(self, path: Path) -> None:
        """Reads the whole tar once. `NotFound` when there is none, `Invalid` or `Corrupt` when it is none."""
        super().__init__(path)
        with _errors_name(str(path)), contextlib.ExitStack() as held:
            self._file = held.enter_context(_open_tar(path))
            self._members = _scan(self._file)
            self._held = held.pop_all()

    def _open(self, name: str) -> ByteStream:
        try:
            return _Section(self._file, *self._members[name])
        except KeyError:
            raise self._missing(name) from None


class _Section:
    """A part of a file. Many can be read at the same time: none moves the file's position."""

    def __init__(self, file: BinaryIO, offset: int, size: int) -> None:
        self._file, self._offset, self._end = file, offset, offset + size

    def read(self, size: int, /) -> bytes:
        data = os.pread(self._file.fileno(), min(size, self._end - self._offset), self._offset)
        self._offset += len(data)
        return data

    def close(self) -> None:
        """The file stays open: it belongs to the archive."""


def _open_tar(path: Path) -> BinaryIO:
    """The tar at `path`, or an unnamed temporary file with its uncompressed bytes."""
    with contextlib.ExitStack() as on_error:
        file: BinaryIO = on_error.enter_context(path.open("rb"))
        if not _is_tar(file):
            unpacked: BinaryIO = on_error.enter_context(tempfile.TemporaryFile())
            file.seek(0)
            with file, open_decompressed(file) as plain:
                shutil.copyfileobj(plain, unpacked, BLOCK_SIZE)
            file = unpacked
        on_error.pop_all()
        return file


def _is_tar(file: BinaryIO) -> bool:
    """Whether the first header has the mark of POSIX.1-1988 and later (tar(5)); a file without it may be compressed."""
    file.seek(257)
    return file.read(5) == b"ustar"


def _scan(archive: BinaryIO) -> dict[str, tuple[int, int]]:
    """The layout's files in a tar that lie there in one piece: name -> (offset, size)."""
    members = {}
    for entry in read_entries(archive):
        name = b"/".join(part for part in entry.path.split(b"/") if part not in (b"", b"."))
        if entry.kind is TarKind.FILE and entry.runs is None and _MEMBER.fullmatch(name):
            members[name.decode()] = (entry.offset, entry.size)
    return members


@contextlib.contextmanager
def _errors_name(what: str) -> Iterator[None]:
    """Turn errors of the system, and those of readers that do not know their file, into errors about `what`."""
    try:
        yield
    except StoreError as error:
        raise type(error)(f"{what}: {error}") from error
    except OSError as error:
        kind = _OS_ERRORS.get(error.errno or 0, Unavailable)
        raise kind(f"{what}: {error.strerror or error}") from error
