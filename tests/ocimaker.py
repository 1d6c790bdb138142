"""Makes OCI image layouts for tests: one image in a line, stranger ones piece by piece.

    write_layout(path, [tar_of({"etc/motd": b"hello"})])                     # tag `t`, platform of this machine

    maker = LayoutMaker(path)                                                # an index with two platforms
    images = [maker.image([layer], platform=name) for name in ("linux/amd64", "linux/arm64/v8")]
    maker.add(maker.index([*images, maker.attestation(images[0])]), tag="v1")
    pack_archive(path, path.with_suffix(".tar"), compression="gzip")

Descriptors are plain JSON objects here, so that a test can bend them before they are written.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import zstandard

from dsec_registry.manifest import ATTESTATION_ANNOTATION, REF_NAME, host_platform

Json = dict[str, Any]
Compression = Literal["plain", "gzip", "gzip members", "zstd"]

MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
INDEX: Final = "application/vnd.oci.image.index.v1+json"
CONFIG: Final = "application/vnd.oci.image.config.v1+json"
LAYER: Final = "application/vnd.oci.image.layer.v1.tar"

_SUFFIXES: Final[dict[Compression, str]] = {
    "plain": "",
    "gzip": "+gzip",
    "gzip members": "+gzip",
    "zstd": "+zstd",
}


def tar_of(files: Mapping[str, bytes]) -> bytes:
    """A tar of regular files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def compress(data: bytes, compression: Compression) -> bytes:
    """`gzip members` are three: two halves, and an empty one."""
    if compression == "gzip members":
        half = len(data) // 2
        return b"".join(compress(part, "gzip") for part in (data[:half], data[half:], b""))
    if compression == "gzip":
        return gzip.compress(data, mtime=0)
    return zstandard.compress(data) if compression == "zstd" else data


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer: its tar, how its blob is compressed, and a media type where the usual one will not do."""

    tar: bytes
    compression: Compression = "gzip"
    media_type: str = ""


class LayoutMaker:
    """Writes a layout into a folder: blobs first, then `add` what index.json shall name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries: list[Json] = []
        (path / "blobs" / "sha256").mkdir(parents=True)
        (path / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        self.add()

    def blob(self, data: bytes, media_type: str, **fields: Any) -> Json:
        """Store a blob; its descriptor, with further fields."""
        digest = digest_of(data)
        blob_path(self.path, digest).write_bytes(data)
        return {"mediaType": media_type, "digest": digest, "size": len(data), **fields}

    def document(self, value: object, media_type: str, **fields: Any) -> Json:
        return self.blob(json.dumps(value).encode(), media_type, **fields)

    def layer(self, layer: Layer | bytes) -> Json:
        layer = _layer(layer)
        media_type = layer.media_type or LAYER + _SUFFIXES[layer.compression]
        return self.blob(compress(layer.tar, layer.compression), media_type)

    def image(
        self,
        layers: Sequence[Layer | bytes],
        *,
        platform: str = "",
        config: Mapping[str, Any] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Json:
        """Store an image; its descriptor. `platform` is this machine's where none is given, `config` the run config,
        `extra` further fields of the whole config (`{"history": ...}`)."""
        fields = platform_fields(platform or str(host_platform()))
        rootfs = {"type": "layers", "diff_ids": [digest_of(_layer(layer).tar) for layer in layers]}
        document = {**fields, "config": config or {}, "rootfs": rootfs, **(extra or {})}
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": self.document(document, CONFIG),
            "layers": [self.layer(layer) for layer in layers],
        }
        return self.document(manifest, MANIFEST, platform=fields)

    def attestation(self, image: Json) -> Json:
        """What BuildKit puts beside an image: a manifest whose layer is no tar and whose config has no diff_ids."""
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": self.document({"architecture": "unknown", "os": "unknown"}, CONFIG),
            "layers": [self.blob(b"{}", "application/vnd.in-toto+json")],
        }
        annotations = {ATTESTATION_ANNOTATION: "attestation-manifest", "vnd.docker.reference.digest": image["digest"]}
        unknown = {"architecture": "unknown", "os": "unknown"}
        return self.document(manifest, MANIFEST, platform=unknown, annotations=annotations)

    def index(self, manifests: Sequence[Json]) -> Json:
        """Store an index; its descriptor, which `add` or a further `index` takes."""
        return self.document({"schemaVersion": 2, "mediaType": INDEX, "manifests": list(manifests)}, INDEX)

    def add(self, *descriptors: Json, tag: str | None = None) -> None:
        """Name these in index.json, all with the same tag or without one."""
        annotations = {REF_NAME: tag} if tag else {}
        for entry in descriptors:
            self._entries.append({**entry, "annotations": {**entry.get("annotations", {}), **annotations}})
        (self.path / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": self._entries}))


def write_layout(
    path: Path,
    layers: Sequence[Layer | bytes],
    *,
    tag: str | None = "t",
    platform: str = "",
    config: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> LayoutMaker:
    """A layout with one image; see `LayoutMaker.image`. `path` is made and must not exist."""
    maker = LayoutMaker(path)
    maker.add(maker.image(layers, platform=platform, config=config, extra=extra), tag=tag)
    return maker


def pack_archive(layout: Path, archive: Path, *, compression: Compression = "plain", prefix: str = "") -> Path:
    """The layout as a tar. With the prefix `./` its names look as `tar -C layout -c .` writes them."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path in sorted(layout.rglob("*")):
            tar.add(path, prefix + str(path.relative_to(layout)), recursive=False)
    archive.write_bytes(compress(buffer.getvalue(), compression))
    return archive


def blob_path(layout: Path, digest: str) -> Path:
    return layout / "blobs" / digest.replace(":", "/")


def flip_byte(data: bytes) -> bytes:
    """One bit in the middle is another."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def damage(layout: Path, digest: str, change: Callable[[bytes], bytes] = flip_byte) -> None:
    """Change the bytes of a blob: `damage(path, digest, lambda data: data + b"x")`."""
    path = blob_path(layout, digest)
    path.write_bytes(change(path.read_bytes()))


def read_json(layout: Path, digest: str) -> Json:
    """A document among the blobs."""
    value: Json = json.loads(blob_path(layout, digest).read_bytes())
    return value


def platform_fields(platform: str) -> Json:
    """`linux/arm64/v8` as the fields of a descriptor's platform and of a config."""
    return dict(zip(("os", "architecture", "variant"), platform.split("/"), strict=False))


def _layer(layer: Layer | bytes) -> Layer:
    return Layer(layer) if isinstance(layer, bytes) else layer
