"""One image in a folder, as skopeo's transport `dir:` writes it.

    version                    Directory Transport Version: 1.1
    manifest.json              the manifest, or the index of an image for several platforms
    <hex>.manifest.json        the manifests and further indexes that an index names
    <hex>                      configs and layers

Problem: nothing says what manifest.json is but itself. Choice: it is told by its media type, or its fields where it has
none; from there on everything has a digest. The image has no name: the folder holds only one.

Source: containers/image, directory transport; containers-transports(5).
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from dsec_registry.files import FileSource, Folder
from dsec_registry.images import ResolvedImage, VerifiedReader, resolve_image
from dsec_registry.jsondoc import quoted
from dsec_registry.manifest import (
    INDEX_MEDIA_TYPES,
    MANIFEST_MEDIA_TYPES,
    MAX_MANIFEST_SIZE,
    Descriptor,
    Platform,
    media_type_of,
)
from dsec_store.digest import Digest
from dsec_store.errors import Invalid, NotFound

_ROOT: Final = "manifest.json"
_VERSION: Final = b"Directory Transport Version: 1.1"
_MAX_VERSION: Final = 256
"""Bytes of the file `version` that are looked at."""


class Directory(FileSource):
    """See the module's text."""

    def __init__(self, path: Path) -> None:
        """`NotFound` when there is nothing, `Invalid` when it is no folder."""
        super().__init__(Folder(path, "oci-archive: and docker-archive: read a tar"))
        self._root: Digest | None = None

    def resolve(self, tag: str | None, platform: Platform) -> ResolvedImage:
        if tag is not None:
            raise Invalid(f"{self.path}: the image in a dir: has no name, so there is none with {quoted(tag)}")
        self._check_version()
        data = self.read(_ROOT, MAX_MANIFEST_SIZE)
        if data is None:
            hint = " (it is an OCI layout: oci: reads it)" if self.read("oci-layout", 0) is not None else ""
            raise NotFound(f"{self.path}: not an image as skopeo's dir: writes it: {_ROOT} is missing{hint}")
        media_type = media_type_of(data, f"{self.path}/{_ROOT}")
        root = Descriptor(media_type, Digest.of(data, "sha256"), len(data))
        self._root = root.digest
        return resolve_image(self.open_blob, [root], platform, str(self.path))

    def open_blob(self, descriptor: Descriptor, *, hashed: bool = True) -> VerifiedReader:
        name = self._name(descriptor)
        stream = self.files.open(name)
        if stream is None:
            raise NotFound(f"{self.path}: not a complete image: {name} is missing")
        return VerifiedReader(stream, descriptor, hashed=hashed)

    def _name(self, descriptor: Descriptor) -> str:
        if descriptor.media_type not in MANIFEST_MEDIA_TYPES | INDEX_MEDIA_TYPES:
            return descriptor.digest.hex
        return _ROOT if descriptor.digest == self._root else f"{descriptor.digest.hex}.manifest.json"

    def _check_version(self) -> None:
        """Version 1.0 named its blobs otherwise. Some tools write no version; skopeo itself does not ask for one."""
        version = self.read("version", _MAX_VERSION)
        if version is not None and version.strip() != _VERSION:
            text = quoted(version.decode("utf-8", "replace"))
            raise Invalid(f"{self.path}/version: {text} is not supported (only {_VERSION.decode()!r})")
