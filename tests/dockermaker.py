"""Makes docker archives for tests, in the three forms that are about.

    maker = DockerMaker("old")
    maker.image([tar_of({"etc/motd": b"hello"})], "busybox:latest")
    maker.write(tmp_path / "image.tar", compression="gzip")

    old     <hex>.json, <id>/layer.tar, repositories; a layer that was there before is a symlink to the last such one
    skopeo  <hex>.json, <hex>.tar, and <id>/layer.tar symlinks to them
    oci     blobs/sha256/<hex> for all, with the files of an OCI layout beside (Docker 25 and later)

The entries of manifest.json and the members can be bent before the archive is written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from dsec_registry.manifest import REF_NAME, host_platform
from tests import tarmaker as tar
from tests.ocimaker import CONFIG, LAYER, MANIFEST, Compression, Json, Layer, compress, digest_of, platform_fields

Form = Literal["old", "skopeo", "oci"]
FORMS: Final[tuple[Form, ...]] = ("old", "skopeo", "oci")


class DockerMaker:
    """`members`: name -> the entry in the tar, header and content. `images`: what manifest.json holds."""

    def __init__(self, form: Form = "old") -> None:
        self.form = form
        self.members: dict[str, bytes] = {}
        self.images: list[Json] = []
        self._last: dict[str, str] = {}
        self._count = 0

    def file(self, name: str, data: bytes) -> str:
        self.members[name] = tar.file(name.encode(), data)
        return name

    def link(self, name: str, target: str) -> str:
        self.members[name] = tar.symlink(name.encode(), target.encode())
        return name

    def image(
        self,
        layers: Sequence[Layer | bytes],
        *names: str,
        platform: str = "",
        config: Mapping[str, Any] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Json:
        """Add an image; its entry in manifest.json. See `LayoutMaker.image` for the rest."""
        given = [Layer(layer, "plain") if isinstance(layer, bytes) else layer for layer in layers]
        stored = [compress(layer.tar, layer.compression) for layer in given]
        rootfs = {"type": "layers", "diff_ids": [digest_of(layer.tar) for layer in given]}
        fields = platform_fields(platform or str(host_platform()))
        document = json.dumps({**fields, "config": config or {}, "rootfs": rootfs, **(extra or {})}).encode()
        entry: Json = {
            "Config": self._config(document),
            "RepoTags": list(names),
            "Layers": [self._layer(data) for data in stored],
        }
        self.images.append(entry)
        if self.form == "oci":
            self._layout(document, stored, names)
        return entry

    def packed(self) -> bytes:
        """The plain tar."""
        if self.form != "oci":
            self.file("repositories", b"{}")
        self.file("manifest.json", json.dumps(self.images).encode())
        return tar.archive(*self.members.values())

    def write(self, path: Path, compression: Compression = "plain") -> Path:
        path.write_bytes(compress(self.packed(), compression))
        return path

    def _config(self, document: bytes) -> str:
        return self._blob(document) if self.form == "oci" else self.file(f"{_hex(document)}.json", document)

    def _blob(self, data: bytes) -> str:
        return self.file(f"blobs/sha256/{_hex(data)}", data)

    def _layer(self, stored: bytes) -> str:
        if self.form == "oci":
            return self._blob(stored)
        self._count += 1
        identity = f"{self._count:064x}"
        if self.form == "skopeo":
            name = self.file(f"{_hex(stored)}.tar", stored)
            self.link(f"{identity}/layer.tar", f"../{name}")
            return name
        name = f"{identity}/layer.tar"
        if stored_before := self._last.get(_hex(stored)):
            self.link(name, f"../{stored_before}")
        else:
            self.file(name, stored)
        self._last[_hex(stored)] = name
        return name

    def _layout(self, config: bytes, layers: Sequence[bytes], names: Sequence[str]) -> None:
        manifest = json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST,
                "config": _descriptor(CONFIG, config),
                "layers": [_descriptor(LAYER, layer) for layer in layers],
            }
        ).encode()
        self._blob(manifest)
        entries = [{**_descriptor(MANIFEST, manifest), "annotations": {REF_NAME: name}} for name in names]
        self.file("oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
        self.file("index.json", json.dumps({"schemaVersion": 2, "manifests": entries}).encode())


def _descriptor(media_type: str, data: bytes) -> Json:
    return {"mediaType": media_type, "digest": digest_of(data), "size": len(data)}


def _hex(data: bytes) -> str:
    return digest_of(data).removeprefix("sha256:")
