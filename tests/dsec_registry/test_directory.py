"""Images in folders, as skopeo's transport `dir:` writes them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from dsec_registry.directory import Directory
from dsec_registry.images import ImageSource, ResolvedImage
from dsec_registry.layouts import OciLayout
from dsec_registry.manifest import MAX_MANIFEST_SIZE, Descriptor, Platform, host_platform
from dsec_store.errors import Corrupt, Invalid, NotFound, StoreError
from tests.ocimaker import (
    Json,
    Layer,
    LayoutMaker,
    blob_path,
    compress,
    digest_of,
    flip_byte,
    read_json,
    tar_of,
    write_layout,
)

TAR = tar_of({"etc/motd": b"hello\n" * 1000})
AMD64, ARM64 = Platform.parse("linux/amd64"), Platform.parse("linux/arm64")
VERSION = "Directory Transport Version: 1.1\n"
DOCKER = "application/vnd.docker."


def write_dir(layout: Path, folder: Path, root: Json) -> Path:
    """The blobs of a layout as `dir:` has them; `root` becomes manifest.json."""
    folder.mkdir()
    (folder / "version").write_text(VERSION)
    for blob in (layout / "blobs" / "sha256").iterdir():
        data = blob.read_bytes()
        is_document = data.startswith(b"{") and "schemaVersion" in json.loads(data)
        (folder / (f"{blob.name}.manifest.json" if is_document else blob.name)).write_bytes(data)
    (folder / f"{root['digest'].removeprefix('sha256:')}.manifest.json").rename(folder / "manifest.json")
    return folder


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A folder with an image of three layers."""
    maker = LayoutMaker(tmp_path / "layout")
    root = maker.image([Layer(TAR, "gzip"), Layer(TAR, "zstd"), Layer(TAR, "plain")], config={"Cmd": ["/bin/sh"]})
    return write_dir(maker.path, tmp_path / "image", root)


def read(source: ImageSource, descriptor: Descriptor) -> bytes:
    with source.open_blob(descriptor) as reader:
        return reader.read()


def resolved(path: Path, platform: Platform | None = None) -> ResolvedImage:
    with Directory(path) as source:
        return source.resolve(None, platform or host_platform())


def layers_of(path: Path, platform: Platform | None = None) -> list[bytes]:
    with Directory(path) as source:
        return [read(source, layer) for layer in source.resolve(None, platform or host_platform()).manifest.layers]


def test_an_image_is_resolved_and_its_blobs_are_read(image: Path) -> None:
    assert layers_of(image) == [compress(TAR, "gzip"), compress(TAR, "zstd"), TAR]
    found = resolved(image)
    assert found.config.run.cmd == ("/bin/sh",)
    assert found.manifest_bytes == (image / "manifest.json").read_bytes()
    assert digest_of(found.manifest_bytes) == str(found.manifest_digest)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_an_index_may_be_nested_and_hold_attestations(tmp_path: Path, depth: int) -> None:
    maker = LayoutMaker(tmp_path / "layout")
    images = {name: maker.image([Layer(TAR, "zstd")], platform=name) for name in ("linux/arm64/v8", "linux/amd64")}
    root = maker.index([maker.attestation(images["linux/amd64"]), *images.values()])
    for _ in range(depth - 1):
        root = maker.index([root])
    folder = write_dir(maker.path, tmp_path / "image", root)
    for platform, name in ((AMD64, "linux/amd64"), (ARM64, "linux/arm64/v8")):
        assert str(resolved(folder, platform).manifest_digest) == images[name]["digest"]
        assert layers_of(folder, platform) == [compress(TAR, "zstd")]
    with pytest.raises(NotFound, match=r"no image for linux/s390x \(there are: linux/amd64, linux/arm64/v8\)"):
        resolved(folder, Platform.parse("linux/s390x"))


@pytest.mark.parametrize("media_type", ["", None])
def test_a_document_without_media_type_is_told_by_its_fields(
    image: Path, tmp_path: Path, media_type: str | None
) -> None:
    path = image / "manifest.json"
    manifest = {**json.loads(path.read_bytes()), "mediaType": media_type}
    path.write_text(json.dumps(manifest))
    assert len(resolved(image).manifest.layers) == 3
    maker = LayoutMaker(tmp_path / "other")
    root = maker.index([maker.image([TAR])])
    index = {**read_json(maker.path, root["digest"]), "mediaType": media_type}
    folder = write_dir(maker.path, tmp_path / "folder", root)
    (folder / "manifest.json").write_text(json.dumps(index))
    assert len(resolved(folder).manifest.layers) == 1


def test_schema_2_of_docker_is_read(tmp_path: Path) -> None:
    maker = LayoutMaker(tmp_path / "layout")
    entry = maker.image([Layer(TAR, "gzip", DOCKER + "image.rootfs.diff.tar.gzip")])
    manifest = read_json(maker.path, entry["digest"])
    manifest["mediaType"] = DOCKER + "distribution.manifest.v2+json"
    manifest["config"]["mediaType"] = DOCKER + "container.image.v1+json"
    docker = maker.document(manifest, manifest["mediaType"], platform=entry["platform"])
    media_type = DOCKER + "distribution.manifest.list.v2+json"
    index = {"schemaVersion": 2, "mediaType": media_type, "manifests": [docker]}
    for number, root in enumerate((docker, maker.document(index, media_type))):
        folder = write_dir(maker.path, tmp_path / str(number), root)
        assert layers_of(folder) == [compress(TAR, "gzip")]


@pytest.mark.parametrize(
    ("document", "kind", "text"),
    [
        ({"schemaVersion": 1, "fsLayers": [], "signatures": []}, Invalid, "Docker's obsolete schema .*skopeo copy"),
        ({"schemaVersion": 3}, Invalid, "schemaVersion: 3 is not supported"),
        ({"mediaType": "text/plain"}, Corrupt, "schemaVersion: missing"),
        ({"schemaVersion": 2, "mediaType": "text/plain"}, Invalid, "'text/plain' is not supported"),
        ({"schemaVersion": 2, "manifests": [], "layers": []}, Invalid, "both a manifest and an index"),
        ({"schemaVersion": 2, "manifests": []}, NotFound, r"no image for .* \(there are: none\)"),
        ({"schemaVersion": 2}, Corrupt, r"config\.mediaType: missing"),
        ([], Corrupt, r"manifest\.json: not a JSON object"),
    ],
)
def test_what_manifest_json_may_not_be(image: Path, document: object, kind: type[StoreError], text: str) -> None:
    (image / "manifest.json").write_text(json.dumps(document))
    with pytest.raises(kind, match=text):
        resolved(image)


def test_a_manifest_that_is_too_large_is_not_read(image: Path) -> None:
    os.truncate(image / "manifest.json", 8 << 30)
    with pytest.raises(Invalid, match=f"more than the {MAX_MANIFEST_SIZE} allowed"):
        resolved(image)


def test_damage_and_missing_files_are_named(image: Path) -> None:
    found = resolved(image)
    for descriptor in (found.manifest.config, *found.manifest.layers):
        path = image / descriptor.digest.hex
        right = path.read_bytes()
        path.write_bytes(flip_byte(right))
        with pytest.raises(Corrupt, match=f"{descriptor.digest}.* do not match"):
            layers_of(image)
        path.unlink()
        with pytest.raises(NotFound, match=f"not a complete image: {descriptor.digest.hex} is missing"):
            layers_of(image)
        path.write_bytes(right)
    assert len(layers_of(image)) == 3


def test_a_missing_manifest_of_an_index_is_named(tmp_path: Path) -> None:
    maker = LayoutMaker(tmp_path / "layout")
    entry = maker.image([TAR])
    folder = write_dir(maker.path, tmp_path / "image", maker.index([entry]))
    name = f"{entry['digest'].removeprefix('sha256:')}.manifest.json"
    (folder / name).write_bytes(flip_byte((folder / name).read_bytes()))
    with pytest.raises(Corrupt, match=entry["digest"]):
        resolved(folder)
    (folder / name).unlink()
    with pytest.raises(NotFound, match=f"{name} is missing"):
        resolved(folder)


def test_a_named_pipe_does_not_block(image: Path) -> None:
    (image / "manifest.json").unlink()
    os.mkfifo(image / "manifest.json")
    with pytest.raises(NotFound, match=r"manifest\.json is missing$"):
        resolved(image)


@pytest.mark.parametrize("version", ["Directory Transport Version: 1.0\n", "1.1", "", "\xff" * 1000])
def test_another_version_is_refused(image: Path, version: str) -> None:
    (image / "version").write_text(version)
    with pytest.raises(
        Invalid, match=r"image/version: .* is not supported \(only 'Directory Transport Version: 1.1'\)"
    ):
        resolved(image)


def test_a_folder_may_have_no_version(image: Path) -> None:
    (image / "version").unlink()
    assert len(resolved(image).manifest.layers) == 3


def test_the_image_has_no_name(image: Path) -> None:
    with Directory(image) as source, pytest.raises(Invalid, match="has no name, so there is none with 'v1'"):
        source.resolve("v1", host_platform())


def test_what_is_another_form_is_told(tmp_path: Path, image: Path) -> None:
    layout = write_layout(tmp_path / "other", [TAR]).path
    with pytest.raises(NotFound, match="oci: reads it"):
        resolved(layout)
    with OciLayout(image) as source, pytest.raises(NotFound, match=r"oci-layout is missing .*perhaps dir: reads it"):
        source.resolve(None, host_platform())
    with pytest.raises(NotFound, match="absent"):
        Directory(tmp_path / "absent")
    with pytest.raises(Invalid, match=r"not a folder \(oci-archive: and docker-archive: read a tar\)"):
        Directory(blob_path(layout, digest_of(compress(TAR, "gzip"))))


@pytest.mark.component
@pytest.mark.skipif(shutil.which("skopeo") is None, reason="skopeo is not installed")
def test_folders_by_skopeo_are_read(tmp_path: Path) -> None:
    maker = LayoutMaker(tmp_path / "layout")
    history = {"history": [{"created_by": "x"}] * 2}
    images = {
        name: maker.image([TAR, tar_of({"f": name.encode()})], platform=name, extra=history)
        for name in ("linux/amd64", "linux/arm64")
    }
    maker.add(maker.index(list(images.values())), tag="t")
    skopeo("--override-arch", "arm64", "copy", f"oci:{maker.path}:t", f"dir:{tmp_path}/one")
    skopeo("copy", "--all", f"oci:{maker.path}:t", f"dir:{tmp_path}/all")
    skopeo("--override-arch", "arm64", "copy", "--format", "v2s2", f"oci:{maker.path}:t", f"dir:{tmp_path}/docker")
    skopeo("--override-arch", "amd64", "copy", "--dest-decompress", f"oci:{maker.path}:t", f"dir:{tmp_path}/plain")
    compressed = [compress(tar, "gzip") for tar in (TAR, tar_of({"f": b"linux/arm64"}))]
    assert layers_of(tmp_path / "one", ARM64) == layers_of(tmp_path / "docker", ARM64) == compressed
    assert layers_of(tmp_path / "all", ARM64) == compressed
    assert layers_of(tmp_path / "plain", AMD64) == [TAR, tar_of({"f": b"linux/amd64"})]
    skopeo("--override-arch", "amd64", "copy", "--format", "v2s1", f"oci:{maker.path}:t", f"dir:{tmp_path}/old")
    with pytest.raises(Invalid, match="Docker's obsolete schema"):
        resolved(tmp_path / "old", AMD64)
    assert str(resolved(tmp_path / "all", AMD64).manifest_digest) == images["linux/amd64"]["digest"]


def skopeo(*arguments: str) -> None:
    subprocess.run(["skopeo", "--insecure-policy", *arguments], check=True, capture_output=True, timeout=60)
