"""What a user may write where an image is wanted."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec_registry.manifest import host_platform
from dsec_registry.sources import SourceSpec, open_source, parse_source
from dsec_store.errors import Invalid, NotFound
from tests.ocimaker import pack_archive, tar_of, write_layout


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("oci:/no/where", SourceSpec("oci", Path("/no/where"))),
        ("oci:/no/where:v1", SourceSpec("oci", Path("/no/where"), "v1")),
        ("oci:no/where:a:v1", SourceSpec("oci", Path("no/where:a"), "v1")),
        ("oci-archive:/no/where.tar:v1", SourceSpec("oci-archive", Path("/no/where.tar"), "v1")),
    ],
)
def test_the_last_colon_splits(text: str, spec: SourceSpec) -> None:
    assert parse_source(text) == spec
    assert str(spec) == text


def test_a_path_that_exists_wins(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    assert parse_source(f"oci:{folder}:b:c") == SourceSpec("oci", folder, "b:c")
    (tmp_path / "a:b").mkdir()
    assert parse_source(f"oci:{folder}:b") == SourceSpec("oci", tmp_path / "a:b")
    assert parse_source(f"oci:{folder}:b:c") == SourceSpec("oci", tmp_path / "a:b", "c")


@pytest.mark.parametrize(
    "text",
    ["", "oci", "oci:", "oci-archive:", "oci:/no:", "oci::v1", "ubuntu:24.04", "docker://ubuntu", "OCI:/x", "oci:\0"],
)
def test_anything_else_is_refused_with_the_forms(text: str) -> None:
    with pytest.raises(Invalid, match=r"expected oci:DIR\[:TAG\] or oci-archive:FILE\[:TAG\]"):
        parse_source(text)


def test_a_very_long_text_is_a_path_that_does_not_exist() -> None:
    assert parse_source("oci:" + "x" * 5000).path == Path("x" * 5000)


def test_a_source_is_opened_and_resolved(tmp_path: Path) -> None:
    layout = write_layout(tmp_path / "layout", [tar_of({"f": b"f"})], tag="v1").path
    archive = pack_archive(layout, tmp_path / "layout.tar")
    for text in (f"oci:{layout}:v1", f"oci:{layout}", f"oci-archive:{archive}:v1"):
        spec = parse_source(text)
        with open_source(spec) as source:
            assert len(source.resolve(spec.tag, host_platform()).manifest.layers) == 1
    with pytest.raises(NotFound, match="absent"):
        open_source(parse_source(f"oci-archive:{tmp_path}/absent"))
