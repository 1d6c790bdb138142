"""Layouts are written whole or not at all, next to what is there, by many at once, and the same each time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any, Final

import pytest

from dsec_registry.images import ResolvedImage
from dsec_registry.layouts import OciArchive, OciLayout
from dsec_registry.layoutwriter import STAGE, Target, index_with, make_manifest, open_target, parse_target
from dsec_registry.manifest import OCI_CONFIG, OCI_LAYER, OCI_MANIFEST, Descriptor, host_platform, parse_manifest
from dsec_store import document
from dsec_store.digest import Digest
from dsec_store.errors import Corrupt, Invalid, NotFound
from tests.dsec_store.blobmaker import in_threads
from tests.ocimaker import LayoutMaker, digest_of, platform_fields, write_layout

TAR: Final = bytes(1024)
CONFIG: Final = document.encode(
    {**platform_fields(str(host_platform())), "rootfs": {"type": "layers", "diff_ids": [digest_of(TAR)]}}
)


def oci(path: Path, tag: str | None = "t") -> Target:
    return Target("oci", path, tag)


def add(target: Target, text: str = "") -> Descriptor:
    """Add an image of one empty layer; `text` makes it another one."""
    with open_target(target) as layout:
        config = layout.put(CONFIG + b" " * len(text), OCI_CONFIG)
        layer = layout.put(TAR, OCI_LAYER)
        manifest = layout.put(make_manifest(config, [layer]), OCI_MANIFEST)
        layout.commit(manifest)
    return manifest


def resolved(path: Path, tag: str | None = "t") -> ResolvedImage:
    with OciLayout(path) as source:
        return source.resolve(tag, host_platform())


def contents(top: Path) -> dict[str, bytes]:
    return {str(path.relative_to(top)): path.read_bytes() for path in sorted(top.rglob("*")) if path.is_file()}


# -- where it goes -----------------------------------------------------------------------------------------------------


def test_targets_are_split_as_sources_are(tmp_path: Path) -> None:
    (tmp_path / "a:b").mkdir()
    assert parse_target(f"oci:{tmp_path}/a:b") == oci(tmp_path / "a:b", None)
    assert parse_target(f"oci:{tmp_path}/a:b:v1") == oci(tmp_path / "a:b", "v1")
    assert parse_target(f"oci:{tmp_path}/new:v1") == oci(tmp_path / "new", "v1")
    assert parse_target("oci-archive:x.tar:team/app-1.2") == Target("oci-archive", Path("x.tar"), "team/app-1.2")
    assert str(parse_target("oci:x:v1")) == "oci:x:v1"


@pytest.mark.parametrize("text", ["", "x", "oci:", "oci::t", "dir:x", "docker-archive:x.tar", "oci:x:", "oci:a\0b"])
def test_other_targets_are_refused(text: str) -> None:
    with pytest.raises(Invalid, match=r"not where an image can go: .*oci-archive:FILE"):
        parse_target(text)


@pytest.mark.parametrize("tag", ["a b", "-a", "a_", "a..b", "ä", "a\nb"])
def test_tags_are_those_of_the_specification(tag: str) -> None:
    with pytest.raises(Invalid, match="not a tag"):
        parse_target(f"oci:nowhere:{tag}")


# -- folders -----------------------------------------------------------------------------------------------------------


def test_a_new_layout_has_nothing_but_the_image(tmp_path: Path) -> None:
    manifest = add(oci(tmp_path / "new"))
    assert resolved(tmp_path / "new").manifest_digest == manifest.digest
    assert os.listdir(tmp_path) == ["new"]
    assert len(contents(tmp_path / "new")) == 5
    (tmp_path / "empty").mkdir()
    add(oci(tmp_path / "empty"))
    assert contents(tmp_path / "empty") == contents(tmp_path / "new")


def test_a_relative_path_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    add(oci(Path("new")))
    add(oci(Path("new"), "u"))
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "inside")
    add(oci(Path()))
    assert (tmp_path / "inside/index.json").exists()


def test_an_image_is_added_and_its_tag_replaced(tmp_path: Path) -> None:
    maker = write_layout(tmp_path / "layout", [bytes(2048)], tag="other")
    before = contents(maker.path)
    first = add(oci(maker.path))
    assert resolved(maker.path).manifest_digest == first.digest
    second = add(oci(maker.path), "another")
    assert resolved(maker.path).manifest_digest == second.digest != first.digest
    assert resolved(maker.path, "other").config_bytes
    after = contents(maker.path)
    assert after.items() >= {name: data for name, data in before.items() if name != "index.json"}.items()
    assert not [name for name in os.listdir(maker.path) if name.startswith(".")]


def test_a_damaged_blob_that_is_there_is_replaced(tmp_path: Path) -> None:
    manifest = add(oci(tmp_path / "l"))
    blob = tmp_path / "l/blobs/sha256" / manifest.digest.hex
    whole = blob.read_bytes()
    blob.write_bytes(b"x")
    add(oci(tmp_path / "l"))
    assert blob.read_bytes() == whole


def test_what_is_in_the_way_is_refused_and_left(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").write_text("x")
    LayoutMaker(tmp_path / "bad")
    (tmp_path / "bad/index.json").write_text("[]")
    LayoutMaker(tmp_path / "cut")
    (tmp_path / "cut/index.json").unlink()
    before = contents(tmp_path)
    for target, text in (
        (oci(tmp_path / "file"), "file: not a folder"),
        (oci(tmp_path / "folder"), "folder: neither empty nor an OCI image layout"),
        (oci(tmp_path / "bad"), "bad: .*index.json: not a JSON object"),
        (oci(tmp_path / "cut"), "cut: .*index.json is missing"),
        (oci(tmp_path / "none" / "new"), "none"),
        (Target("oci-archive", tmp_path / "file"), "file: it exists: remove it"),
        (Target("oci-archive", tmp_path / "folder"), "folder: it exists"),
    ):
        with pytest.raises((Corrupt, Invalid, NotFound), match=text):
            add(target)
    assert contents(tmp_path) == before


def test_an_error_leaves_the_layout_as_it_was(tmp_path: Path) -> None:
    add(oci(tmp_path / "l"))
    before = contents(tmp_path)

    def fail(target: Target) -> None:
        with open_target(target) as layout, layout.blob() as out:
            out.write(b"half")
            raise NotFound("a chunk")

    for target in (oci(tmp_path / "l"), oci(tmp_path / "new"), Target("oci-archive", tmp_path / "new.tar")):
        with pytest.raises(NotFound, match="a chunk"):
            fail(target)
    assert contents(tmp_path) == before
    assert os.listdir(tmp_path) == ["l"]


def test_many_may_write_into_one_layout(tmp_path: Path) -> None:
    """Into one that none of them finds, and that each of them makes."""
    tags = [f"t{number}" for number in range(8)]
    done = in_threads([lambda tag=tag: add(oci(tmp_path / "l", tag), tag).digest for tag in tags])  # type: ignore[misc]
    assert {tag: resolved(tmp_path / "l", tag).manifest_digest for tag in tags} == dict(zip(tags, done, strict=True))
    assert os.listdir(tmp_path) == ["l"]


# -- archives ----------------------------------------------------------------------------------------------------------


def test_an_archive_is_a_canonical_tar_of_the_layout(tmp_path: Path) -> None:
    archive = Target("oci-archive", tmp_path / "a.tar", "t")
    manifest = add(archive)
    with OciArchive(archive.path) as source:
        assert source.resolve("t", host_platform()).manifest_digest == manifest.digest
    add(oci(tmp_path / "l"))
    with tarfile.open(archive.path) as tar:
        names = [member.name for member in tar]
        files = {name: file.read() for name in names if (file := tar.extractfile(name))}
        assert {member.mtime for member in tar} == {0}
    assert files == contents(tmp_path / "l")
    first = archive.path.read_bytes()
    archive.path.unlink()
    add(archive)
    assert archive.path.read_bytes() == first
    assert sorted(os.listdir(tmp_path)) == ["a.tar", "l"]


# -- the index ---------------------------------------------------------------------------------------------------------


def index(*entries: tuple[str, str | None], **fields: Any) -> bytes:
    manifests = [
        {"mediaType": OCI_MANIFEST, "digest": digest_of(text.encode()), "size": 1, "x": text}
        | ({"annotations": {"org.opencontainers.image.ref.name": tag, "more": "y"}} if tag else {})
        for text, tag in entries
    ]
    return json.dumps({"schemaVersion": 2, "manifests": manifests, **fields}).encode()


def tags_of(data: bytes) -> list[tuple[str, str | None]]:
    """Of each entry its mark ("" for a new one) and its tag."""
    entries = json.loads(data)["manifests"]
    return [(e.get("x", ""), e.get("annotations", {}).get("org.opencontainers.image.ref.name")) for e in entries]


def test_an_entry_takes_the_place_of_its_tag() -> None:
    new = Descriptor(OCI_MANIFEST, Digest.of(b"c", "sha256"), 1)
    old = index(("a", "one"), ("b", "t"), ("c", None), ("d", "t"), ("c", "two"), annotations={"k": "v"})
    assert tags_of(index_with(old, new, "t")) == [("a", "one"), ("", "t"), ("c", None), ("c", "two")]
    assert tags_of(index_with(old, new, "new"))[-1] == ("", "new")
    assert tags_of(index_with(old, new, None)) == [("a", "one"), ("b", "t"), ("", None), ("d", "t"), ("c", "two")]
    assert json.loads(index_with(old, new, "t"))["annotations"] == {"k": "v"}
    assert tags_of(index_with(None, new, "t")) == [("", "t")]
    assert tags_of(index_with(b'{"schemaVersion":2,"manifests":null}', new, "t")) == [("", "t")]


def test_a_manifest_is_canonical_and_can_be_read() -> None:
    config, layer = (Descriptor(kind, Digest.of(b"x", "sha256"), 1) for kind in (OCI_CONFIG, OCI_LAYER))
    data = make_manifest(config, [layer])
    assert parse_manifest(data, "made").layers == (layer,)
    assert data == json.dumps(json.loads(data), sort_keys=True, separators=(",", ":")).encode()


# -- crashes -----------------------------------------------------------------------------------------------------------

DYING: Final = """
import os, signal, sys
from pathlib import Path
from dsec_registry.layoutwriter import parse_target
from tests.dsec_registry.test_layoutwriter import add, found

form, folder = sys.argv[1], Path(sys.argv[2])
CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir")

def die_before(change):
    def count(event, arguments):
        nonlocal change
        if event in CHANGES or event == "open" and str(folder) in str(arguments[0]):
            change -= 1
            if change < 0:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(count)

for change in range(100):
    child = os.fork()
    if not child:
        target = parse_target(form.format(folder))
        die_before(change)
        add(target, "new")
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(code, found(form, folder), flush=True)
    if code == 0 or found(form, folder) == sys.argv[3]:
        break
"""
"""Adds an image again and again, and dies before the first, second, ... change to the file system. Ends when the image
is there: what dies after that cleans up."""


@pytest.mark.parametrize("form", ["oci:{}/new:t", "oci:{}/old:t", "oci-archive:{}/new.tar:t"])
def test_a_crash_at_any_change_leaves_the_target_as_it_was_or_complete(form: str, tmp_path: Path) -> None:
    add(oci(tmp_path / "old"))
    before = found(form, tmp_path)
    (tmp_path / "reference").mkdir()
    add(oci(tmp_path / "reference" / "old"))
    complete = str(add(parse_target(form.format(tmp_path / "reference")), "new").digest)
    command = [sys.executable, "-c", DYING, form, str(tmp_path), complete]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    outcomes = [line.split() for line in done.stdout.splitlines()]
    assert len(outcomes) > 8
    assert outcomes[-1][1] == complete
    assert {tuple(outcome) for outcome in outcomes[:-1]} == {(str(-signal.SIGKILL), before)}
    add(oci(tmp_path / "other"))
    add(oci(tmp_path / "old", "u"))
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(STAGE)]


def found(form: str, folder: Path) -> str:
    """The digest of the image that is there now, "nothing" if there is none."""
    name = form.removesuffix(":t").rpartition("/")[2]
    if not (folder / name).exists():
        return "nothing"
    with OciArchive(folder / name) if name.endswith(".tar") else OciLayout(folder / name) as source:
        return str(source.resolve("t", host_platform()).manifest_digest)


def test_the_stage_of_somebody_alive_is_left_alone(tmp_path: Path) -> None:
    with open_target(oci(tmp_path / "l")) as layout:
        layout.put(TAR, OCI_LAYER)
        add(oci(tmp_path / "l"))
        assert len(list(tmp_path.glob(STAGE + "*"))) == 1
    assert not list(tmp_path.glob(STAGE + "*"))


def test_what_only_looks_like_a_stage_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / (STAGE + "file")).touch()
    (tmp_path / "kept").mkdir()
    (tmp_path / (STAGE + "link")).symlink_to("kept")
    add(oci(tmp_path / "l"))
    assert sorted(os.listdir(tmp_path)) == [STAGE + "file", STAGE + "link", "kept", "l"]
