"""Image layouts in folders and tars: what a tag leads to, and that no byte is used before it is verified."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from dsec_registry.images import ImageSource
from dsec_registry.layouts import OciArchive, OciLayout
from dsec_registry.manifest import MAX_MANIFEST_SIZE, Descriptor, Platform, host_platform
from dsec_store.errors import Corrupt, Invalid, NotFound
from tests.ocimaker import (
    MANIFEST,
    Layer,
    LayoutMaker,
    blob_path,
    compress,
    damage,
    digest_of,
    pack_archive,
    read_json,
    tar_of,
    write_layout,
)

TAR = tar_of({"etc/motd": b"hello\n" * 1000})
AMD64, ARM64 = Platform.parse("linux/amd64"), Platform.parse("linux/arm64")
EMPTY_TAR = bytes(1024)

Opener = Callable[[Path], ImageSource]


def open_archive(layout: Path) -> ImageSource:
    return OciArchive(pack_archive(layout, layout.with_suffix(".tar")))


def open_archive_as_tar_writes_it(layout: Path) -> ImageSource:
    return OciArchive(pack_archive(layout, layout.with_suffix(".tar"), prefix="./"))


def open_gzip_archive(layout: Path) -> ImageSource:
    return OciArchive(pack_archive(layout, layout.with_suffix(".tar.gz"), compression="gzip"))


def open_zstd_archive(layout: Path) -> ImageSource:
    return OciArchive(pack_archive(layout, layout.with_suffix(".tar.zst"), compression="zstd"))


@pytest.fixture(params=[OciLayout, open_archive, open_archive_as_tar_writes_it, open_gzip_archive, open_zstd_archive])
def opener(request: pytest.FixtureRequest) -> Opener:
    """Every way in which a layout can lie on the disk."""
    opener: Opener = request.param
    return opener


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "layout"


def read(source: ImageSource, descriptor: Descriptor) -> bytes:
    with source.open_blob(descriptor) as reader:
        return reader.read()


def chosen(source: ImageSource, tag: str | None = None, platform: Platform = AMD64) -> str:
    """The digest of the manifest that is resolved."""
    return str(source.resolve(tag, platform).manifest_digest)


# Images


def test_an_image_is_resolved_and_its_blobs_are_read(path: Path, opener: Opener) -> None:
    layers = [Layer(TAR, "gzip"), Layer(TAR, "zstd"), Layer(TAR, "plain")]
    write_layout(path, layers, config={"Cmd": ["/bin/sh"]})
    with opener(path) as source:
        image = source.resolve("t", host_platform())
        assert image.config.run.cmd == ("/bin/sh",)
        assert json.loads(image.config_bytes)["config"] == {"Cmd": ["/bin/sh"]}
        assert digest_of(image.manifest_bytes) == str(image.manifest_digest)
        assert [str(diff_id) for diff_id in image.config.diff_ids] == [digest_of(TAR)] * 3
        blobs = [read(source, layer) for layer in image.manifest.layers]
    assert blobs == [compress(layer.tar, layer.compression) for layer in layers]


def test_blobs_are_read_side_by_side(path: Path, opener: Opener) -> None:
    write_layout(path, [Layer(TAR, "plain"), Layer(EMPTY_TAR, "plain")])
    with opener(path) as source:
        first, second = source.resolve("t", host_platform()).manifest.layers
        with source.open_blob(first) as one, source.open_blob(second) as two:
            start = one.read(100)
            assert two.read() == EMPTY_TAR
            assert start + one.read() == TAR


def test_empty_and_repeated_layers_are_kept(path: Path, opener: Opener) -> None:
    write_layout(path, [EMPTY_TAR, TAR, EMPTY_TAR])
    with opener(path) as source:
        layers = source.resolve("t", host_platform()).manifest.layers
    assert len(layers) == 3
    assert layers[0] == layers[2]


@pytest.mark.parametrize("extra", [{}, {"history": []}, {"history": [{"created_by": "x", "empty_layer": True}] * 3}])
def test_history_may_be_absent_or_wrong(path: Path, extra: dict[str, object]) -> None:
    write_layout(path, [TAR], extra=extra)
    assert OciLayout(path).resolve("t", host_platform()).config.diff_ids


# Tags


def test_without_a_tag_the_only_image_is_meant(path: Path) -> None:
    maker = LayoutMaker(path)
    image = maker.image([TAR], platform="linux/amd64")
    maker.add(image)
    assert chosen(OciLayout(path)) == image["digest"]
    maker.add(image, tag="v1")
    maker.add(image, tag="v2")
    assert chosen(OciLayout(path)) == image["digest"], "several tags of the same image"


def test_a_tag_chooses_among_images(path: Path, opener: Opener) -> None:
    maker = LayoutMaker(path)
    images = {tag: maker.image([TAR], platform="linux/amd64", config={"User": tag}) for tag in ("v2", "v1")}
    for tag, image in images.items():
        maker.add(image, tag=tag)
    with opener(path) as source:
        assert chosen(source, "v1") == images["v1"]["digest"]
        assert chosen(source, "v2") == images["v2"]["digest"]
        with pytest.raises(Invalid, match=r"more than one image.*\(there are: 'v1', 'v2'\)$"):
            source.resolve(None, AMD64)
        with pytest.raises(NotFound, match=r"no image with the tag 'v3' \(there are: 'v1', 'v2'\)$"):
            source.resolve("v3", AMD64)


def test_a_tag_that_names_two_images_is_refused(path: Path) -> None:
    maker = LayoutMaker(path)
    for user in "ab":
        maker.add(maker.image([TAR], platform="linux/amd64", config={"User": user}), tag="v1")
    with pytest.raises(Invalid, match="more than one image with the tag 'v1'"):
        OciLayout(path).resolve("v1", AMD64)


def test_an_empty_layout_holds_no_image(path: Path, opener: Opener) -> None:
    LayoutMaker(path)
    with opener(path) as source, pytest.raises(NotFound, match=r"no image \(there are: none\)"):
        source.resolve(None, AMD64)


# Platforms


@pytest.mark.parametrize("tag", [None, "v1"])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_the_platform_is_found_beside_an_attestation_and_in_nested_indexes(
    path: Path, order: tuple[int, ...], depth: int, tag: str | None
) -> None:
    maker = LayoutMaker(path)
    amd64, arm64 = (maker.image([TAR], platform=name) for name in ("linux/amd64", "linux/arm64/v8"))
    entries = [amd64, arm64, maker.attestation(amd64)]
    entries = [entries[i] for i in order]
    for _ in range(depth):
        entries = [maker.index(entries)]
    maker.add(*entries, tag="v1")
    assert chosen(OciLayout(path), tag, AMD64) == amd64["digest"]
    assert chosen(OciLayout(path), tag, ARM64) == arm64["digest"]
    with pytest.raises(NotFound, match=r"no image for linux/s390x \(there are: linux/amd64, linux/arm64/v8\)"):
        OciLayout(path).resolve(tag, Platform.parse("linux/s390x"))


def test_nested_indexes_and_mixed_compressions_are_read_wherever_a_layout_lies(path: Path, opener: Opener) -> None:
    maker = LayoutMaker(path)
    layers = [Layer(TAR, "gzip"), Layer(TAR, "zstd"), Layer(TAR, "plain"), Layer(TAR, "gzip members")]
    amd64, arm64 = (maker.image(layers, platform=name) for name in ("linux/amd64", "linux/arm64/v8"))
    maker.add(maker.index([maker.attestation(amd64), maker.index([arm64, amd64])]), tag="v1")
    with opener(path) as source:
        assert chosen(source, "v1", ARM64) == arm64["digest"]
        image = source.resolve("v1", AMD64)
        assert str(image.manifest_digest) == amd64["digest"]
        blobs = [read(source, layer) for layer in image.manifest.layers]
    assert blobs == [compress(TAR, layer.compression) for layer in layers]


def test_blobs_of_an_archive_may_be_links(path: Path) -> None:
    maker = write_layout(path, [Layer(TAR, "plain")])
    blob = blob_path(path, digest_of(TAR))
    blob.rename(path / "elsewhere")
    blob.symlink_to("../../elsewhere")
    with open_archive(path) as source:
        assert read(source, source.resolve("t", host_platform()).manifest.layers[0]) == TAR
    blob.unlink()
    blob.symlink_to(path / "elsewhere")
    with open_archive(maker.path) as source, pytest.raises(Invalid, match="by an absolute path"):
        read(source, source.resolve("t", host_platform()).manifest.layers[0])


def test_indexes_are_not_followed_for_ever(path: Path) -> None:
    maker = LayoutMaker(path)
    entry = maker.image([TAR])
    for _ in range(5):
        entry = maker.index([entry])
    maker.add(entry)
    with pytest.raises(Invalid, match="nested more than 4 deep"):
        OciLayout(path).resolve(None, host_platform())


def test_indexes_that_repeat_are_read_once_a_level(path: Path) -> None:
    maker = LayoutMaker(path)
    entry = image = maker.image([TAR])
    for _ in range(4):
        entry = maker.index([entry] * 100)
    maker.add(entry)
    assert chosen(OciLayout(path), None, host_platform()) == image["digest"]


def test_without_a_platform_in_the_index_the_config_decides(path: Path) -> None:
    maker = LayoutMaker(path)
    image = maker.image([TAR], platform="linux/arm64/v8")
    del image["platform"]
    maker.add(image)
    assert chosen(OciLayout(path), None, ARM64) == image["digest"]
    with pytest.raises(NotFound, match=r"no image for linux/amd64 \(there are: linux/arm64/v8\)"):
        OciLayout(path).resolve(None, AMD64)


# Damage


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (None, "do not match the digest"),
        (lambda data: data + b"x", "is longer than its size"),
        (lambda data: data[:-1], "ends 1 bytes early"),
        (lambda data: b"", "bytes early"),
    ],
    ids=["a bit", "longer", "shorter", "empty"],
)
@pytest.mark.parametrize("what", ["manifest", "config", "layer"])
def test_damage_is_found_and_the_digest_named(
    path: Path, opener: Opener, what: str, change: Callable[[bytes], bytes] | None, text: str
) -> None:
    maker = LayoutMaker(path)
    image = maker.image([TAR])
    maker.add(image)
    manifest = read_json(path, image["digest"])
    digest: str = {"manifest": image, "config": manifest["config"], "layer": manifest["layers"][0]}[what]["digest"]
    damage(path, digest, *([change] if change else []))
    with opener(path) as source, pytest.raises(Corrupt, match=f"{digest}.*{text}"):
        read(source, source.resolve(None, host_platform()).manifest.layers[0])


@pytest.mark.parametrize("what", ["oci-layout", "index.json", "manifest", "config", "layer"])
def test_a_missing_file_is_named(path: Path, opener: Opener, what: str) -> None:
    maker = LayoutMaker(path)
    image = maker.image([TAR])
    maker.add(image)
    manifest = read_json(path, image["digest"])
    digests = {"manifest": image, "config": manifest["config"], "layer": manifest["layers"][0]}
    missing = path / what if what not in digests else blob_path(path, digests[what]["digest"])
    missing.unlink()
    with opener(path) as source, pytest.raises(NotFound, match=f"{missing.name} is missing"):
        read(source, source.resolve(None, host_platform()).manifest.layers[0])


def test_a_document_that_is_too_large_is_not_read(path: Path) -> None:
    maker = LayoutMaker(path)
    image = maker.image([TAR])
    maker.add({**image, "size": MAX_MANIFEST_SIZE + 1})
    with pytest.raises(Invalid, match=f"{image['digest']}: .* more than the {MAX_MANIFEST_SIZE} allowed"):
        OciLayout(path).resolve(None, host_platform())
    (path / "index.json").write_bytes(b" " * (MAX_MANIFEST_SIZE + 2))
    with pytest.raises(Invalid, match=r"index\.json: .* more than"):
        OciLayout(path).resolve(None, host_platform())


def test_an_index_cannot_name_a_path(path: Path) -> None:
    maker = LayoutMaker(path)
    maker.add({"mediaType": MANIFEST, "digest": "sha256:../../secret", "size": 3})
    with pytest.raises(Corrupt, match="not a digest"):
        OciLayout(path).resolve(None, host_platform())


def test_a_config_without_a_diff_id_for_each_layer_is_corrupt(path: Path) -> None:
    write_layout(path, [TAR], extra={"rootfs": {"type": "layers", "diff_ids": []}})
    with pytest.raises(Corrupt, match="there are 0 for the 1 layers"):
        OciLayout(path).resolve(None, host_platform())


def test_a_named_pipe_among_the_blobs_does_not_block(path: Path) -> None:
    maker = LayoutMaker(path)
    image = maker.image([TAR])
    maker.add(image)
    blob_path(path, image["digest"]).unlink()
    os.mkfifo(blob_path(path, image["digest"]))
    with pytest.raises(NotFound, match="is missing"):
        OciLayout(path).resolve(None, host_platform())


# Opening


def test_a_layout_is_a_folder_and_an_archive_a_tar(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"no tar at all" * 100)
    for opener in (OciLayout, OciArchive):
        with pytest.raises(NotFound, match="absent"):
            opener(tmp_path / "absent")
    with pytest.raises(Invalid, match="not a folder"):
        OciLayout(tmp_path / "file")
    with pytest.raises(Invalid, match="directory"):
        OciArchive(tmp_path)
    with pytest.raises(Corrupt, match=str(tmp_path / "file")):
        OciArchive(tmp_path / "file")


def test_a_cut_archive_is_corrupt(path: Path) -> None:
    write_layout(path, [Layer(TAR, "plain")])
    archive = pack_archive(path, path.with_suffix(".tar"), compression="gzip")
    archive.write_bytes(archive.read_bytes()[:-100])
    with pytest.raises(Corrupt, match=str(archive)):
        OciArchive(archive)


def test_of_members_with_one_name_the_last_counts(path: Path) -> None:
    write_layout(path, [TAR])
    index = path / "index.json"
    right = index.read_bytes()
    index.write_bytes(b"old")
    first = pack_archive(path, path.with_suffix(".first")).read_bytes().rstrip(b"\0")
    index.write_bytes(right)
    second = pack_archive(path, path.with_suffix(".second")).read_bytes()
    archive = path.with_suffix(".tar")
    archive.write_bytes(first + bytes(-len(first) % 512) + second)
    with OciArchive(archive) as source:
        assert len(source.resolve("t", host_platform()).manifest.layers) == 1


# Layouts of others


def run(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)


@pytest.mark.component
def test_a_layout_by_umoci_is_read(path: Path, tmp_path: Path) -> None:
    if not shutil.which("umoci"):
        pytest.skip("umoci is not installed")
    run("umoci", "init", "--layout", path)
    run("umoci", "new", "--image", f"{path}:v1")
    (tmp_path / "file").write_bytes(b"hello")
    run("umoci", "insert", "--rootless", "--image", f"{path}:v1", tmp_path / "file", "/file")
    run("umoci", "config", "--image", f"{path}:v1", "--config.env", "A=1", "--config.cmd", "/file")
    with OciLayout(path) as source:
        image = source.resolve("v1", host_platform())
        assert ("A", "1") in image.config.run.env
        assert image.config.run.cmd == ("/file",)
        assert all(read(source, layer) for layer in image.manifest.layers)


@pytest.mark.component
@pytest.mark.parametrize("transport", ["oci", "oci-archive"])
def test_a_layout_by_skopeo_is_read(path: Path, tmp_path: Path, transport: str) -> None:
    if not shutil.which("skopeo"):
        pytest.skip("skopeo is not installed")
    write_layout(path, [TAR, Layer(EMPTY_TAR, "zstd")], tag="t", config={"Env": ["A=1"]})
    copy = tmp_path / "copy"
    run("skopeo", "copy", "--insecure-policy", f"oci:{path}:t", f"{transport}:{copy}:v1")
    opener: Opener = OciLayout if transport == "oci" else OciArchive
    with opener(copy) as source:
        image = source.resolve("v1", host_platform())
        assert image.config.run.env == (("A", "1"),)
        assert [len(read(source, layer)) > 0 for layer in image.manifest.layers] == [True, True]
