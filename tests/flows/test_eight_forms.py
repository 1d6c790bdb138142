"""One image in eight forms: whatever skopeo makes of it, it is the same image of the store, to the last digest."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from dsec_registry.convert import Converted, convert
from dsec_registry.manifest import host_platform
from dsec_registry.sources import open_source, parse_source
from dsec_store.backends.memory import MemoryBlobs
from dsec_store.descriptor import Image
from dsec_store.objects import Objects
from tests import tarmaker as tar
from tests.views import merged_view

pytestmark = [
    pytest.mark.flow,
    pytest.mark.component,
    pytest.mark.skipif(shutil.which("umoci") is None, reason="umoci is not installed"),
    pytest.mark.skipif(shutil.which("skopeo") is None, reason="skopeo is not installed"),
]

NAME: Final = "docker.io/library/demo:v1"
LAYERS: Final = 4

KINDS: Final = {
    "oci": {"+gzip"},
    "oci zstd": {"+zstd"},
    "oci plain": {""},
    "oci-archive": {"+gzip"},
    "docker-archive": {""},
    "oci from docker-archive": {"+gzip"},
    "dir": {"+gzip"},
    "dir schema 2": {".gzip"},
}
"""The forms, and how the media types of their layers end: that they are really different."""

WHITEOUTS: Final = tar.archive(
    tar.directory(b"app/"),
    tar.file(b"app/.wh.old"),
    tar.directory(b"srv/"),
    tar.file(b"srv/.wh..wh..opq"),
    tar.file(b"srv/new", b"new"),
    tar.symlink(b"app/link", b"../srv/new"),
)
BACK_AGAIN: Final = tar.archive(
    tar.file(b"app/old", b"another", mode=0o755, uid=1000, gid=1000),
    tar.hardlink(b"app/twin", b"app/old"),
    tar.pax({b"SCHILY.xattr.user.k": b"v", b"mtime": b"1000000000.123456789"}),
    tar.file(b"app/attributes", b"x"),
)
EMPTY: Final = tar.archive()

CONFIG: Final = (
    ("--config.env", "PATH=/app:/bin"),
    ("--config.env", "EMPTY="),
    ("--config.cmd", "serve"),
    ("--config.cmd", "--port=80"),
    ("--config.entrypoint", "/app/start"),
    ("--config.workingdir", "/srv"),
    ("--config.user", "1000:1000"),
    ("--config.label", "b=2"),
    ("--config.label", "a=1"),
    ("--config.stopsignal", "SIGINT"),
    ("--config.exposedports", "80/tcp"),
    ("--config.volume", "/srv/data"),
)


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The image in every form: what it is called -> what `dsec-image convert` takes."""
    folder = tmp_path_factory.mktemp("forms")
    made = f"oci:{make_image(folder)}:v1"
    plain = copied(made, f"dir:{folder}/decompressed", "--dest-decompress")
    return {
        "oci": copied(made, f"oci:{folder}/copy:v1"),
        "oci zstd": copied(made, f"oci:{folder}/zstd:v1", "--dest-compress-format", "zstd"),
        "oci-archive": copied(made, f"oci-archive:{folder}/oci.tar:v1"),
        "docker-archive": (docker := copied(made, f"docker-archive:{folder}/docker.tar:{NAME}")),
        "oci from docker-archive": copied(docker, f"oci:{folder}/back:v1"),
        "oci plain": copied(plain, f"oci:{folder}/plain:v1", "--dest-oci-accept-uncompressed-layers"),
        "dir": copied(made, f"dir:{folder}/dir"),
        "dir schema 2": copied(made, f"dir:{folder}/dir2", "--format", "v2s2"),
    }


def make_image(folder: Path) -> Path:
    """A layout by umoci. Its bottom layer is a folder's tar by GNU tar, with hardlinks and some bytes to it."""
    root = folder / "root"
    for name in ("app/old", "app/start", "srv/data/f", "srv/gone", "etc/motd"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode() * 5000)
    (root / "app/again").hardlink_to(root / "app/start")
    (root / "lib").symlink_to("app")
    for path in (root, *root.rglob("*")):
        os.utime(path, (10**9, 10**9), follow_symlinks=False)
    run("tar", "-C", root, "--sort=name", "--numeric-owner", "-cf", folder / "0.tar", ".")
    for number, layer in enumerate((WHITEOUTS, BACK_AGAIN, EMPTY), 1):
        (folder / f"{number}.tar").write_bytes(layer)
    layout = folder / "layout"
    run("umoci", "init", "--layout", layout)
    run("umoci", "new", "--image", f"{layout}:v1")
    for number in range(LAYERS):
        run("umoci", "raw", "add-layer", "--image", f"{layout}:v1", folder / f"{number}.tar")
    run("umoci", "config", "--image", f"{layout}:v1", *(word for option in CONFIG for word in option))
    return layout


def copied(source: str, target: str, *options: str) -> str:
    run("skopeo", "--insecure-policy", "copy", "--quiet", *options, source, target)
    return target


def run(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=120)


def converted(text: str, objects: Objects) -> Converted:
    spec = parse_source(text)
    with open_source(spec) as source:
        return convert(objects, source, spec.tag, host_platform(), "demo")


@pytest.fixture(scope="module")
def images(forms: Mapping[str, str]) -> dict[str, tuple[Objects, Converted]]:
    """Every form in a store of its own."""
    stores = {form: Objects(MemoryBlobs()) for form in forms}
    return {form: (stores[form], converted(text, stores[form])) for form, text in forms.items()}


def image_of(objects: Objects, done: Converted) -> Image:
    return objects.image(done.image)


def test_the_forms_are_really_different(forms: Mapping[str, str]) -> None:
    found = {}
    for form, text in forms.items():
        spec = parse_source(text)
        with open_source(spec) as source:
            layers = source.resolve(spec.tag, host_platform()).manifest.layers
        found[form] = {layer.media_type.rpartition(".tar")[2] for layer in layers}
    assert found == KINDS


def test_all_have_the_same_layers(images: Mapping[str, tuple[Objects, Converted]]) -> None:
    layers = {form: image_of(*made).layers for form, made in images.items()}
    assert len(layers["oci"]) == LAYERS
    assert layers == dict.fromkeys(KINDS, layers["oci"])


def test_all_are_the_same_image(images: Mapping[str, tuple[Objects, Converted]]) -> None:
    digests = {form: done.image for form, (_, done) in images.items()}
    assert digests == dict.fromkeys(KINDS, digests["oci"])


def test_the_image_is_what_its_layers_say(images: Mapping[str, tuple[Objects, Converted]]) -> None:
    for objects, done in images.values():
        seen = merged_view(objects, image_of(objects, done))
        assert {path for path in seen if path.startswith((b"app/", b"srv/"))} == {
            *(b"app/" + name for name in (b"again", b"attributes", b"link", b"old", b"start", b"twin")),
            b"srv/new",
        }
        assert seen[b"app/again"].twin == seen[b"app/start"].twin
        assert seen[b"app/old"].data == b"another"


def test_what_one_form_stored_serves_all(forms: Mapping[str, str]) -> None:
    objects = Objects(MemoryBlobs())
    converted(forms["oci"], objects)
    for text in forms.values():
        done = converted(text, objects)
        assert (done.built, done.new_packs, done.new_bytes) == (0, 0, 0)
