"""Docker archives: what `docker save`, `podman save` and `skopeo copy docker-archive:` write.

    manifest.json       [{"Config": PATH, "RepoTags": ["busybox:latest"], "Layers": [PATH, ...]}, ...]
    <hex>.json          a config: its sha256 is the image's id
    <id>/layer.tar      a layer, or a symlink to another one; elsewhere <hex>.tar, or blobs/sha256/<hex>

Problem: no manifest, no digest and no size of a layer; a layer can be plain or compressed. Choice: the identity of the
image is its config, with the diff_ids in it. The manifest is made: canonical JSON whose descriptors name the bytes that
are stored. A plain layer's digest must be its diff_id, so reading it verifies it; only a compressed layer is read once
more, to learn its digest. The conversion then holds its plain bytes against the diff_id, like those of any other layer.

Source: moby image-spec v1.2 (manifest.json, `Config`, `RepoTags`, `Layers`); containers-transports(5) for names.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dsec_registry.archive import Archive, Member
from dsec_registry.files import FileSource, errors_about
from dsec_registry.images import BLOCK_SIZE, ResolvedImage, VerifiedReader, check_platform
from dsec_registry.jsondoc import Json, parse_json, quoted
from dsec_registry.manifest import (
    MAX_CONFIG_SIZE,
    MAX_MANIFEST_SIZE,
    OCI_CONFIG,
    OCI_LAYER,
    OCI_MANIFEST,
    Descriptor,
    Platform,
    parse_config,
    parse_manifest,
)
from dsec_registry.reference import normalized
from dsec_store import document
from dsec_store.digest import Digest, hasher_for
from dsec_store.errors import Corrupt, Invalid, NotFound
from dsec_store.layer.decompress import GZIP_MAGIC, ZSTD_MAGIC

LISTED_MAX: Final = 20
"""Images that an error lists."""

_MANIFEST: Final = "manifest.json"
_INDEX: Final = re.compile(r"@([0-9]{1,9})")
_CONFIG_DIGEST: Final = re.compile(r"(?:.*/)?(?:sha256:)?([0-9a-f]{64})(?:\.json)?")
_HEAD_SIZE: Final = 4
_SKIPPABLE_MAGIC: Final = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")
"""What a skippable frame of zstd begins with (RFC 8878, section 3.1.2)."""


@dataclass(frozen=True, slots=True)
class ArchivedImage:
    """An image in manifest.json: its names as they are there, and the paths of its config and its layers."""

    config: str
    names: tuple[str, ...]
    layers: tuple[str, ...]


def parse_archive_manifest(data: bytes, name: str) -> tuple[ArchivedImage, ...]:
    """The images in a manifest.json; `name`, its path, is for errors."""
    return tuple(_image(entry) for entry in parse_json(data, name, MAX_MANIFEST_SIZE, list).items())


def _image(entry: Json) -> ArchivedImage:
    return ArchivedImage(entry["Config"].text(), entry["RepoTags"].texts(), entry["Layers"].texts())


class DockerArchive(FileSource):
    """A docker archive, plain or compressed: see the module's text and `Archive`.

    What `resolve` takes for a tag is a name such as `busybox:latest` or `docker.io/library/busybox`, or `@0`, the
    number of the image in the archive. `open_blob` knows the blobs of images that were resolved.
    """

    def __init__(self, path: Path) -> None:
        """Reads the whole tar once. `NotFound` when there is none, `Invalid` or `Corrupt` when it is none."""
        self._archive = Archive(path)
        super().__init__(self._archive)
        self._blobs: dict[Digest, Member] = {}
        self._digests: dict[Member, Digest] = {}

    def resolve(self, tag: str | None, platform: Platform) -> ResolvedImage:
        image = chosen(self._images(), tag, str(self.path))
        config_bytes = self._config(image)
        config_digest = Digest.of(config_bytes, "sha256")
        config = parse_config(config_bytes, str(config_digest), len(image.layers))
        check_platform(config, platform, str(self.path))
        layers = [self._layer(name, diff_id) for name, diff_id in zip(image.layers, config.diff_ids, strict=True)]
        manifest_bytes = _manifest(Descriptor(OCI_CONFIG, config_digest, len(config_bytes)), layers)
        manifest_digest = Digest.of(manifest_bytes, "sha256")
        manifest = parse_manifest(manifest_bytes, str(manifest_digest))
        return ResolvedImage(manifest_digest, manifest_bytes, manifest, config_bytes, config)

    def open_blob(self, descriptor: Descriptor, *, hashed: bool = True) -> VerifiedReader:
        member = self._blobs.get(descriptor.digest)
        if member is None:
            raise NotFound(f"{self.path}: no blob {descriptor.digest} in the images that were resolved")
        return VerifiedReader(self._archive.open_member(member), descriptor, hashed=hashed)

    def _images(self) -> tuple[ArchivedImage, ...]:
        data = self.read(_MANIFEST, MAX_MANIFEST_SIZE)
        if data is None:
            raise self._no_archive()
        return parse_archive_manifest(data, f"{self.path}/{_MANIFEST}")

    def _no_archive(self) -> NotFound:
        hint = ""
        if self._archive.find("oci-layout"):
            hint = " (it is an OCI layout: oci-archive: reads it)"
        elif self._archive.find("repositories"):
            hint = " (it is of a Docker before 1.10: load it into a newer one and save it again)"
        return NotFound(f"{self.path}: not a docker archive: {_MANIFEST} is missing{hint}")

    def _config(self, image: ArchivedImage) -> bytes:
        """The config's bytes. Most tools name it by its digest; then it must have it."""
        member = self._member(image.config, "config")
        if member.size > MAX_CONFIG_SIZE:
            raise Invalid(f"{self.path}: config {quoted(image.config)}: more than the {MAX_CONFIG_SIZE} bytes allowed")
        data = b"".join(self._pieces(member))
        digest = Digest.of(data, "sha256")
        named = _CONFIG_DIGEST.fullmatch(image.config)
        if named and named[1] != digest.hex:
            raise Corrupt(
                f"{self.path}: config {quoted(image.config)}: its bytes do not match its name, they are {digest}"
            )
        self._blobs[digest] = member
        return data

    def _layer(self, name: str, diff_id: Digest) -> Descriptor:
        member = self._member(name, "layer")
        with contextlib.closing(self._archive.open_member(member)) as stream:
            compression = _compression(stream.read(_HEAD_SIZE))
        digest = self._digest(member) if compression else diff_id
        self._blobs[digest] = member
        return Descriptor(OCI_LAYER + compression, digest, member.size)

    def _member(self, name: str, what: str) -> Member:
        member = self._archive.find(name)
        if member is None:
            raise NotFound(f"{self.path}: not a complete docker archive: {what} {quoted(name)} is missing")
        return member

    def _digest(self, member: Member) -> Digest:
        """The digest of the stored bytes. A member that is several layers is read once."""
        if member not in self._digests:
            hasher = hasher_for("sha256")
            for piece in self._pieces(member):
                hasher.update(piece)
            self._digests[member] = Digest("sha256", hasher.digest())
        return self._digests[member]

    def _pieces(self, member: Member) -> Iterator[bytes]:
        """The member's bytes. `Corrupt` when the archive ends in them."""
        left = member.size
        with errors_about(str(self.path)), contextlib.closing(self._archive.open_member(member)) as stream:
            while left:
                piece = stream.read(min(left, BLOCK_SIZE))
                if not piece:
                    raise Corrupt(f"the archive ends {left} bytes before the end of a member")
                left -= len(piece)
                yield piece


def chosen(images: Sequence[ArchivedImage], tag: str | None, name: str) -> ArchivedImage:
    """The image that `tag` means: a name, `@` and a number from 0, or None for the only one; `name` is for errors.

    `NotFound` when there is none, `Invalid` when several could be meant; both list what there is.
    """
    found = [image for number, image in enumerate(images) if _is_meant(image, number, tag)]
    different = {(image.config, image.layers) for image in found}
    if len(different) == 1:
        return found[0]
    wanted = "image" if tag is None else f"image {quoted(tag)}"
    if found:
        raise Invalid(f"{name}: more than one {wanted}: name one by NAME:TAG or @NUMBER ({_listed(images)})")
    raise NotFound(f"{name}: no {wanted} ({_listed(images)})")


def _is_meant(image: ArchivedImage, number: int, tag: str | None) -> bool:
    if tag is None:
        return True
    if tag.startswith("@"):
        index = _INDEX.fullmatch(tag)
        if not index:
            raise Invalid(f"not the number of an image: {quoted(tag)} (expected @0, @1, ...)")
        return int(index[1]) == number
    wanted = normalized(tag)
    return any(_same_name(offered, wanted) for offered in image.names)


def _same_name(offered: str, wanted: str) -> bool:
    try:
        return normalized(offered) == wanted
    except Invalid:  # <none>:<none>, as some tools write: nobody can ask for it
        return False


def _listed(images: Sequence[ArchivedImage]) -> str:
    shown = [
        " ".join((f"@{number}", *(quoted(name) for name in image.names[:LISTED_MAX])))
        for number, image in enumerate(images[:LISTED_MAX])
    ]
    if len(images) > LISTED_MAX:
        shown.append(f"{len(images) - LISTED_MAX} more")
    return f"there are: {', '.join(shown) or 'none'}"


def _compression(head: bytes) -> str:
    """The suffix of a layer's media type, told by its first bytes: docs/format/tar.md."""
    if head.startswith(GZIP_MAGIC):
        return "+gzip"
    return "+zstd" if head == ZSTD_MAGIC or _SKIPPABLE_MAGIC.fullmatch(head) else ""


def _manifest(config: Descriptor, layers: Sequence[Descriptor]) -> bytes:
    return document.encode(
        {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "config": _json(config),
            "layers": [_json(layer) for layer in layers],
        }
    )


def _json(descriptor: Descriptor) -> dict[str, Any]:
    return {"mediaType": descriptor.media_type, "digest": str(descriptor.digest), "size": descriptor.size}
