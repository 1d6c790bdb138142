"""OCI image layouts: a folder, or a tar of it.

    oci-layout               {"imageLayoutVersion": "1.0.0"}
    index.json               what images there are; a tag is the annotation `org.opencontainers.image.ref.name`
    blobs/sha256/<hex>       indexes, manifests, configs, layers

Problem: a layout comes from anybody, and its names may lead out of it or to bytes that lie. Choice: a blob's path is
made from a parsed digest only, and its bytes count once they are verified.

Source: OCI image-spec 1.1, image-layout.md (files, index.json), annotations.md (ref.name).
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Final

from dsec_registry.archive import Archive
from dsec_registry.files import FileSource, Folder
from dsec_registry.images import ByteStream, ResolvedImage, VerifiedReader, resolve_image
from dsec_registry.jsondoc import quoted
from dsec_registry.manifest import MAX_MANIFEST_SIZE, Descriptor, Index, Platform, parse_index, parse_layout
from dsec_store.errors import Invalid, NotFound

_LAYOUT: Final = "oci-layout"
_BLOBS: Final = "blobs/sha256/"


class _Layout(FileSource):
    """An image layout, wherever its files lie. `_cousin` is the transport for what else may lie there."""

    _cousin: ClassVar[str]

    def resolve(self, tag: str | None, platform: Platform) -> ResolvedImage:
        parse_layout(self._document(_LAYOUT), f"{self.path}/{_LAYOUT}")
        index = parse_index(self._document("index.json"), f"{self.path}/index.json")
        return resolve_image(self.open_blob, _tagged(index, tag, str(self.path)), platform, str(self.path))

    def open_blob(self, descriptor: Descriptor, *, hashed: bool = True) -> VerifiedReader:
        return VerifiedReader(self._open(_BLOBS + descriptor.digest.hex), descriptor, hashed=hashed)

    def _document(self, name: str) -> bytes:
        data = self.read(name, MAX_MANIFEST_SIZE)
        if data is None:
            raise self._missing(name)
        return data

    def _open(self, name: str) -> ByteStream:
        stream = self.files.open(name)
        if stream is None:
            raise self._missing(name)
        return stream

    def _missing(self, name: str) -> NotFound:
        hint = ""
        if name == _LAYOUT and self.read("manifest.json", 0) is not None:
            hint = f" (there is a manifest.json: perhaps {self._cousin}: reads it)"
        return NotFound(f"{self.path}: not a complete OCI image layout: {name} is missing{hint}")


class OciLayout(_Layout):
    """A folder with the files of a layout."""

    _cousin = "dir"

    def __init__(self, path: Path) -> None:
        """`NotFound` when there is nothing, `Invalid` when it is no folder."""
        super().__init__(Folder(path, "oci-archive: reads a layout in a tar"))


class OciArchive(_Layout):
    """A tar of such a folder, plain or compressed: see `Archive`."""

    _cousin = "docker-archive"

    def __init__(self, path: Path) -> None:
        """Reads the whole tar once. `NotFound` when there is none, `Invalid` or `Corrupt` when it is none."""
        super().__init__(Archive(path))


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
