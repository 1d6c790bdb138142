"""What a user may write where an image is wanted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dsec_registry.layouts import OciLayout
from dsec_registry.manifest import host_platform
from dsec_registry.sources import SourceSpec, open_source, parse_source
from dsec_store.errors import Invalid, NotFound
from tests.dockermaker import DockerMaker
from tests.ocimaker import pack_archive, tar_of, write_layout

FORMS = "oci:DIR[:TAG], oci-archive:FILE[:TAG], docker-archive:FILE[:NAME:TAG], dir:DIR"


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("oci:/no/where", SourceSpec("oci", Path("/no/where"))),
        ("oci:/no/where:v1", SourceSpec("oci", Path("/no/where"), "v1")),
        ("oci:no/where:a:v1", SourceSpec("oci", Path("no/where:a"), "v1")),
        ("oci-archive:/no/where.tar:v1", SourceSpec("oci-archive", Path("/no/where.tar"), "v1")),
        ("docker-archive:/no/where.tar", SourceSpec("docker-archive", Path("/no/where.tar"))),
        ("docker-archive:/no/where.tar:app", SourceSpec("docker-archive", Path("/no/where.tar"), "app")),
        ("docker-archive:/no/where.tar:@0", SourceSpec("docker-archive", Path("/no/where.tar"), "@0")),
        ("docker-archive:no.tar:r:5000/a:v1", SourceSpec("docker-archive", Path("no.tar"), "r:5000/a:v1")),
        ("dir:/no/where:v1", SourceSpec("dir", Path("/no/where:v1"))),
    ],
)
def test_where_nothing_is_a_colon_splits_the_form_says_which(text: str, spec: SourceSpec) -> None:
    assert parse_source(text) == spec
    assert str(spec) == text


def test_a_path_that_exists_wins(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    assert parse_source(f"oci:{folder}:b:c") == SourceSpec("oci", folder, "b:c")
    (tmp_path / "a:b").mkdir()
    assert parse_source(f"oci:{folder}:b") == SourceSpec("oci", tmp_path / "a:b")
    assert parse_source(f"oci:{folder}:b:c") == SourceSpec("oci", tmp_path / "a:b", "c")
    assert parse_source(f"docker-archive:{folder}:b:c") == SourceSpec("docker-archive", tmp_path / "a:b", "c")
    assert parse_source(f"docker-archive:{folder}:r:5000/b:c") == SourceSpec("docker-archive", folder, "r:5000/b:c")
    assert parse_source(f"dir:{folder}:b:c") == SourceSpec("dir", tmp_path / "a:b:c")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "oci",
        "oci:",
        "oci-archive:",
        "oci:/no:",
        "oci::v1",
        "docker-archive:",
        "docker-archive:/no:",
        "docker-archive:/:",
        "docker-archive::app",
        "dir:",
        "ubuntu:24.04",
        "docker://ubuntu",
        "OCI:/x",
        "oci:\0",
    ],
)
def test_anything_else_is_refused_with_the_forms(text: str) -> None:
    with pytest.raises(Invalid, match=re.escape(f"(expected {FORMS})")):
        parse_source(text)


def test_a_very_long_text_is_a_path_that_does_not_exist() -> None:
    assert parse_source("oci:" + "x" * 5000).path == Path("x" * 5000)


def test_a_source_is_opened_and_resolved(tmp_path: Path) -> None:
    layout = write_layout(tmp_path / "layout", [tar_of({"f": b"f"})], tag="v1").path
    archive = pack_archive(layout, tmp_path / "layout.tar")
    docker, folder = DockerMaker(), tmp_path / "folder"
    docker.image([tar_of({"f": b"f"})], "app:latest")
    saved = docker.write(tmp_path / "saved.tar")
    folder.mkdir()
    for blob in (layout / "blobs" / "sha256").iterdir():
        (folder / blob.name).write_bytes(blob.read_bytes())
    with OciLayout(layout) as source:
        (folder / "manifest.json").write_bytes(source.resolve("v1", host_platform()).manifest_bytes)
    texts = [f"oci:{layout}:v1", f"oci:{layout}", f"oci-archive:{archive}:v1", f"dir:{folder}"]
    texts += [f"docker-archive:{saved}{name}" for name in ("", ":app", ":docker.io/library/app:latest", ":@0")]
    for text in texts:
        spec = parse_source(text)
        with open_source(spec) as source:
            assert len(source.resolve(spec.tag, host_platform()).manifest.layers) == 1
    with pytest.raises(NotFound, match="absent"):
        open_source(parse_source(f"oci-archive:{tmp_path}/absent"))
