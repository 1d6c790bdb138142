"""Writing OCI image layouts: into a folder, which may hold one already, or into a new tar.

    with open_target(target) as layout:
        with layout.blob() as out: out.write(b"...")              # any number, in any threads
        layout.commit(Descriptor(OCI_MANIFEST, out.digest, out.size))

Problem: writing takes minutes, and may end at any moment. Choice: all blobs are written to a *stage*, a folder
`.dsec-export-*` beside what it will become part of, on the same file system. `commit` moves them in place, and last the
one file by which they count: `index.json` replaces the old one; a new folder or tar gets its name. What a crash leaves
is a stage, or blobs that no index names: neither belongs to any image. The owner of a stage holds flock(2) on it for as
long as it lives, so the next export that passes by removes stages of the dead and leaves those of the living alone.
Exports into one layout may run side by side: each changes the index under a flock on the layout's folder.

Source: OCI image-spec 1.1, image-layout.md.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, Self

from dsec_registry.files import errors_about
from dsec_registry.jsondoc import quoted
from dsec_registry.manifest import (
    MAX_MANIFEST_SIZE,
    OCI_INDEX,
    OCI_MANIFEST,
    REF_NAME,
    Descriptor,
    Platform,
    parse_index,
    parse_layout,
)
from dsec_registry.ociconfig import platform_fields
from dsec_registry.sources import parse_source
from dsec_store import document
from dsec_store.digest import Digest, hasher_for
from dsec_store.errors import Invalid, NotFound
from dsec_store.layer.tar import TarKind
from dsec_store.layer.tarwriter import END, header, padding

STAGE: Final = ".dsec-export-"
"""How the name of a stage begins."""

FORMS: Final = "oci:DIR[:TAG], oci-archive:FILE[:TAG]"

_TRANSPORTS: Final = ("oci", "oci-archive")
_LAYOUT: Final = "oci-layout"
_INDEX: Final = "index.json"
_BLOBS: Final = "blobs/sha256"
_LAYOUT_CONTENT: Final = b'{"imageLayoutVersion":"1.0.0"}'
_COPY: Final = 1 << 20
_COMPONENT: Final = r"[A-Za-z0-9]+(?:(?:[-._:@+]|--)[A-Za-z0-9]+)*"
_TAG: Final = re.compile(rf"{_COMPONENT}(?:/{_COMPONENT})*")
"""What `org.opencontainers.image.ref.name` may be (annotations.md)."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where an image goes. Without a tag it has no name there."""

    transport: str
    path: Path
    tag: str | None = None

    def __str__(self) -> str:
        return ":".join(filter(None, (self.transport, str(self.path), self.tag)))


def parse_target(text: str) -> Target:
    """`oci:DIR[:TAG]` or `oci-archive:FILE[:TAG]`; paths may hold colons, as for sources. Else `Invalid`."""
    try:
        if text.partition(":")[0] not in _TRANSPORTS:
            raise Invalid("another form")
        source = parse_source(text)
    except Invalid:
        raise Invalid(f"not where an image can go: {quoted(text)} (expected {FORMS})") from None
    if source.tag is not None and not _TAG.fullmatch(source.tag):
        raise Invalid(
            f"not a tag: {quoted(source.tag)} (expected letters and digits, joined by one of -._:@+/, as in app:1.2)"
        )
    return Target(source.transport, source.path, source.tag)


class BlobOut:
    """One blob on its way to the stage. It counts when the `with` statement has ended without an error."""

    def __init__(self, stage: Path) -> None:
        self._stage = stage
        self._hasher = hasher_for("sha256")
        self._size = 0
        self._file: BinaryIO
        self._path: Path

    @property
    def digest(self) -> Digest:
        return Digest("sha256", self._hasher.digest())

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._size

    def write(self, data: bytes) -> None:
        """Append. Raises `Denied` when the disk is full."""
        self._hasher.update(data)
        self._size += len(data)
        with errors_about(str(self._stage)):
            left = memoryview(data)
            while left:
                left = left[self._file.write(left) :]

    def __enter__(self) -> Self:
        with errors_about(str(self._stage)):
            self._path = self._stage / f"part-{secrets.token_hex(8)}"
            self._file = open(self._path, "xb", buffering=0)  # closed by __exit__
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with errors_about(str(self._stage)), self._file:
            if kind is None:
                os.fsync(self._file.fileno())
                os.replace(self._path, self._stage / self.digest.hex)
            else:
                self._path.unlink()


class LayoutOut:
    """A layout that an image is being added to: see the module's text. Made by `open_target`."""

    def __init__(self, target: Target, stage: Path) -> None:
        self._target = target
        self._path = target.path
        self._stage = stage

    def blob(self) -> BlobOut:
        """A new blob; what has the same bytes becomes the same blob."""
        return BlobOut(self._stage)

    def put(self, data: bytes, media_type: str, platform: Platform | None = None) -> Descriptor:
        """A whole small blob."""
        with self.blob() as out:
            out.write(data)
        return Descriptor(media_type, out.digest, out.size, platform)

    def commit(self, manifest: Descriptor) -> None:
        """On return the target has the image, safe from a crash of the machine. Raises `StoreError`; then the target
        is as it was, but perhaps for blobs that no index names."""
        with errors_about(str(self._path)):
            if self._target.transport == "oci-archive":
                self._commit_archive(manifest)
            elif self._path.exists() or not self._commit_new(manifest):
                self._commit_into(manifest)

    # -- a folder ------------------------------------------------------------------------------------------------------

    def _commit_new(self, manifest: Descriptor) -> bool:
        """The whole folder gets its name. False when somebody else has made one meanwhile."""
        new = self._stage / "new"
        (new / _BLOBS).mkdir(parents=True)
        for blob in self._blobs():
            os.replace(blob, new / _BLOBS / blob.name)
        _write(new / _LAYOUT, _LAYOUT_CONTENT)
        _write(new / _INDEX, index_with(None, manifest, self._target.tag))
        for folder in (new / _BLOBS, new / "blobs", new):
            _sync(folder)
        try:
            os.rename(new, self._path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            for blob in (new / _BLOBS).iterdir():
                os.replace(blob, self._stage / blob.name)
            return False
        _sync(self._path.parent)
        return True

    def _commit_into(self, manifest: Descriptor) -> None:
        """The blobs first, then the index, under a lock that every export into this layout takes."""
        with _locked(self._path):
            old = read_index(self._path)
            new = index_with(old, manifest, self._target.tag)
            (self._path / _BLOBS).mkdir(parents=True, exist_ok=True)
            for blob in self._blobs():
                os.replace(blob, self._path / _BLOBS / blob.name)
            for folder in (_BLOBS, "blobs"):
                _sync(self._path / folder)
            for name, data in ((_LAYOUT, None if old is not None else _LAYOUT_CONTENT), (_INDEX, new)):
                if data is not None:
                    _write(self._stage / name, data)
                    os.replace(self._stage / name, self._path / name)
            _sync(self._path)

    # -- a tar ---------------------------------------------------------------------------------------------------------

    def _commit_archive(self, manifest: Descriptor) -> None:
        """A tar of the folder, in canonical form. Blobs leave the stage as they enter the tar, to save space."""
        whole = self._stage / "archive"
        with open(whole, "xb") as out:
            out.writelines(header(folder, TarKind.DIRECTORY, mode=0o755) for folder in (b"blobs", b"blobs/sha256"))
            for blob in self._blobs():
                size = blob.stat().st_size
                out.write(header(f"{_BLOBS}/{blob.name}".encode(), TarKind.FILE, size=size))
                with open(blob, "rb") as content:
                    shutil.copyfileobj(content, out, _COPY)
                out.write(padding(size))
                blob.unlink()
            documents = {_INDEX: index_with(None, manifest, self._target.tag), _LAYOUT: _LAYOUT_CONTENT}
            out.writelines(_member(name, data) for name, data in documents.items())
            out.write(END)
            out.flush()
            os.fsync(out.fileno())
        _refuse_existing(self._path)
        os.rename(whole, self._path)
        _sync(self._path.parent)

    # -- both ----------------------------------------------------------------------------------------------------------

    def _blobs(self) -> list[Path]:
        return sorted(path for path in self._stage.iterdir() if re.fullmatch("[0-9a-f]{64}", path.name))


@contextlib.contextmanager
def open_target(target: Target) -> Iterator[LayoutOut]:
    """To add one image. What is in the way is refused before anything is written.

    Raises `Invalid` for a file that exists, or a folder that is neither empty nor a layout; `NotFound` when the folder
    around it does not exist; `Denied` when nothing can be written there.
    """
    check_target(target)
    inside = target.transport == "oci" and target.path.exists()
    with _stage(target.path if inside else target.path.parent) as stage:
        yield LayoutOut(target, stage)


def check_target(target: Target) -> None:
    """Raise `Invalid` when an image cannot go there."""
    with errors_about(str(target.path)):
        if target.transport == "oci-archive":
            _refuse_existing(target.path)
        elif os.path.lexists(target.path):
            if not target.path.is_dir():
                raise Invalid("not a folder (oci-archive: writes a layout in a tar)")
            read_index(target.path)


def _refuse_existing(path: Path) -> None:
    if os.path.lexists(path):
        raise Invalid("it exists: remove it first, or name another file")


def read_index(folder: Path) -> bytes | None:
    """The `index.json` of a layout that is well formed; None for an empty folder. `Invalid` for anything else."""
    if all(name.startswith(STAGE) for name in os.listdir(folder)):
        return None
    if not (folder / _LAYOUT).is_file():
        raise Invalid("neither empty nor an OCI image layout (oci-layout is missing): name another folder")
    parse_layout(_read(folder / _LAYOUT), _LAYOUT)
    if not (folder / _INDEX).is_file():
        raise NotFound(f"not a complete OCI image layout: {_INDEX} is missing")
    data = _read(folder / _INDEX)
    parse_index(data, _INDEX)
    return data


def index_with(old: bytes | None, manifest: Descriptor, tag: str | None) -> bytes:
    """An `index.json` with one image more, in the place of those with the same tag. All else in it stays.

    Without a tag it takes the place of the same image without a tag only.
    """
    index: dict[str, Any] = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": []}
    if old is not None:
        index = json.loads(old)  # well formed, by `read_index`
    entry = _entry(manifest, tag)
    kept: list[Any] = []
    place = None
    for other in index.get("manifests") or []:
        name = (other.get("annotations") or {}).get(REF_NAME)
        if name == tag and (tag is not None or other["digest"] == entry["digest"]):
            place = len(kept) if place is None else place
        else:
            kept.append(other)
    kept.insert(len(kept) if place is None else place, entry)
    data = json.dumps({**index, "manifests": kept}, sort_keys=True, separators=(",", ":")).encode()
    if len(data) > MAX_MANIFEST_SIZE:
        raise Invalid(f"its {_INDEX} would have more than {MAX_MANIFEST_SIZE} bytes")
    return data


def make_manifest(config: Descriptor, layers: list[Descriptor]) -> bytes:
    """The OCI manifest of an image, in canonical JSON."""
    return document.encode(
        {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "config": _entry(config, None),
            "layers": [_entry(layer, None) for layer in layers],
        }
    )


def _entry(descriptor: Descriptor, tag: str | None) -> dict[str, Any]:
    fields = {"mediaType": descriptor.media_type, "digest": str(descriptor.digest), "size": descriptor.size}
    platform = {"platform": platform_fields(descriptor.platform)} if descriptor.platform else {}
    return {**fields, **platform, **({"annotations": {REF_NAME: tag}} if tag else {})}


def _member(name: str, data: bytes) -> bytes:
    """A small file of an archive."""
    return header(name.encode(), TarKind.FILE, size=len(data)) + data + padding(len(data))


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(MAX_MANIFEST_SIZE + 1)


# -- stages ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _stage(folder: Path) -> Iterator[Path]:
    """A new stage in `folder`, gone at the end with what is still in it."""
    with errors_about(str(folder)):
        _remove_stale(folder)
        path, lock = _new_stage(folder)
    try:
        yield path
    finally:
        with errors_about(str(path)):
            shutil.rmtree(path)
            os.close(lock)


def _new_stage(folder: Path) -> tuple[Path, int]:
    """A stage and the descriptor that locks it. Between its making and the lock it looks like one of a dead owner."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=STAGE, dir=folder))
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _still_there(path, lock):
                return path, lock
            os.close(lock)


def _still_there(path: Path, opened: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(opened))
    except FileNotFoundError:
        return False


def _remove_stale(folder: Path) -> None:
    """Remove our own stages whose owners are dead."""
    for path in folder.glob(STAGE + "*"):
        with contextlib.suppress(FileNotFoundError, BlockingIOError, NotADirectoryError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.geteuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path)
            finally:
                os.close(lock)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
