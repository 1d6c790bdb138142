"""What cannot work: one line that names the thing and the way out, an exit code, and a store that is as it was."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from dsec_store.backends.folder import FolderBlobs
from dsec_store.check import check_image
from dsec_store.objects import Objects
from tests import tarmaker as tar
from tests.flows import images
from tests.flows.world import COMMANDS, Ended, World, private_world
from tests.kernel import mount
from tests.ocimaker import LayoutMaker, damage, digest_of, read_json, tar_of, write_layout

pytestmark = pytest.mark.flow

NOBODY: Final = 65534
AS_NOBODY: Final = (
    *("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--inh-caps=-all,+dac_read_search"),
    "--ambient-caps=+dac_read_search",
)
"""Nobody, but for one thing: it may read the interpreter and this tree, wherever they lie."""

FULL: Final = 128 << 10
"""Bytes of a store that is full soon."""


def one_line(done: Ended, code: int, *fragments: str) -> None:
    """The command ended so, and its only words were a line with these fragments."""
    assert (done.code, len(done.errors), done.stdout) == (code, 1, b""), done.errors
    missing = [fragment for fragment in fragments if fragment not in done.errors[0]]
    assert not missing, done.errors[0]
    assert "Traceback" not in done.errors[0]


@pytest.fixture(scope="module")
def good_store(capable: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with one image, `good`."""
    folder = images.make_folder(tmp_path_factory.mktemp("good"), images.TOOLS)
    with private_world() as world:
        world.ok("dsec-image", "build", str(folder), "good", "--kind", "toolkit")
        return shutil.copytree(world.store, tmp_path_factory.mktemp("store") / "store")


@pytest.fixture
def good(world: World, good_store: Path) -> Iterator[World]:
    """A world whose store has the image `good`, and must have it, all of it and nothing else, in the end."""
    shutil.copytree(good_store, world.store)
    yield world
    objects = Objects(FolderBlobs(world.store))
    assert list(objects.references.names()) == ["good"]
    assert check_image(objects, objects.references.read("good"), deep=True).problems == []


# -- images that are not what they should be -------------------------------------------------------------------------


class Broken:
    """A layout with one image, tag `t`, that a test spoils."""

    def __init__(self, path: Path) -> None:
        self.maker = LayoutMaker(path)
        self.image = self.maker.image([tar_of({"f": b"f" * 9999})])
        self.manifest = read_json(path, self.image["digest"])
        self.layer = str(self.manifest["layers"][0]["digest"])

    def blob(self, digest: str) -> Path:
        return self.maker.path / "blobs" / digest.replace(":", "/")

    def replace_layer(self, media_type: str) -> None:
        manifest = {**self.manifest, "layers": [{**self.manifest["layers"][0], "mediaType": media_type}]}
        self.image = self.maker.document(manifest, self.image["mediaType"], platform=self.image["platform"])


def missing_blob(image: Broken) -> str:
    image.blob(image.layer).unlink()
    return image.layer.replace(":", "/")


def damaged_blob(image: Broken) -> str:
    damage(image.maker.path, image.layer)
    return image.layer


def short_blob(image: Broken) -> str:
    damage(image.maker.path, image.layer, lambda data: data[:-1])
    return image.layer


def damaged_config(image: Broken) -> str:
    digest = str(image.manifest["config"]["digest"])
    damage(image.maker.path, digest, lambda data: data.replace(b"linux", b"minix"))
    return digest


def unknown_media_type(image: Broken) -> str:
    image.replace_layer("application/x-rar")
    return "application/x-rar"


@pytest.mark.parametrize("spoil", [missing_blob, damaged_blob, short_blob, damaged_config, unknown_media_type])
def test_an_image_that_is_spoilt(good: World, tmp_path: Path, spoil: Callable[[Broken], str]) -> None:
    image = Broken(tmp_path / "layout")
    named = spoil(image)
    image.maker.add(image.image, tag="t")
    one_line(good.run("dsec-image", "convert", f"oci:{image.maker.path}:t", "bad"), 1, named)


def test_a_layer_whose_content_is_another(good: World, tmp_path: Path) -> None:
    other = {"rootfs": {"type": "layers", "diff_ids": [digest_of(b"other")]}}
    layout = write_layout(tmp_path / "layout", [tar_of({"f": b"f"})], extra=other).path
    one_line(good.run("dsec-image", "convert", f"oci:{layout}", "bad"), 1, digest_of(b"other"))


def test_a_layer_that_climbs_out(good: World, tmp_path: Path) -> None:
    layout = write_layout(tmp_path / "layout", [tar.archive(tar.file(b"../etc/passwd", b"x"))]).path
    one_line(good.run("dsec-image", "convert", f"oci:{layout}", "bad"), 1, "'../etc/passwd'")


@pytest.mark.parametrize(
    ("source", "options", "fragments"),
    [
        ("oci:none", (), ("none", "No such file")),
        ("oci:layout:gone", (), ("no image with the tag 'gone'", "'t'")),
        ("oci:layout:t", ("--platform", "linux/s390x"), ("no image for linux/s390x", "there are: linux/")),
        ("oci-archive:layout", (), ("layout",)),
        ("oci-archive:noise", (), ("noise",)),
        ("oci:noise", (), ("noise",)),
    ],
)
def test_a_source_that_has_no_such_image(
    good: World, source: str, options: tuple[str, ...], fragments: tuple[str, ...]
) -> None:
    write_layout(good.folder / "layout", [tar_of({"f": b"f"})])
    (good.folder / "noise").write_bytes(b"no tar at all" * 100)
    one_line(good.run("dsec-image", "convert", source, "bad", *options), 1, *fragments)


# -- words that are wrong --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "code", "fragments"),
    [
        ("inspect gone", 1, ("'gone'", "dsec-image ls")),
        ("check gone", 1, ("'gone'", "dsec-image ls")),
        ("rm gone", 1, ("'gone'", "dsec-image ls")),
        ("mount gone .", 1, ("'gone'", "dsec-image ls")),
        ("umount .", 1, ("no node runs", "dsec node start")),
        ("build none bad --kind toolkit", 1, ("'none'",)),
        ("build good.tar bad --kind toolkit", 1, ("good.tar",)),
        ("build . bad --kind toolkit --prefix relative", 2, ("'relative'", "absolute")),
        ("build . bad --kind toolkit --prefix /a/../b", 2, ("'/a/../b'",)),
        ("build . bad --kind toolkit --path rel/bin", 2, ("'rel/bin'", "absolute")),
        ("build . bad --kind toolkit --env WRONG", 2, ("'WRONG'", "NAME=VALUE")),
        ("build . bad --kind tool", 2, ("'tool'", "toolkit")),
        ("build . bad", 2, ("--kind",)),
        ("convert docker:x bad", 2, ("'docker:x'", "oci-archive:FILE[:TAG]")),
        ("convert oci:x bad --platform amd64", 2, ("amd64",)),
        ("frobnicate", 2, ("'frobnicate'", "dsec-image --help")),
        ("ls --store ftp://x/y", 1, ("'ftp://x/y'", "file:///folder or s3://bucket/prefix")),
        ("ls --store relative", 1, ("'relative'", "file:///folder")),
        ("ls --store file:///none/such", 1, ("file:///none/such", "no such folder")),
        ("ls --store s3://bucket/x?y=1", 1, ("AWS_ACCESS_KEY_ID",)),
    ],
)
def test_words_that_are_wrong(good: World, command: str, code: int, fragments: tuple[str, ...]) -> None:
    (good.folder / "good.tar").write_bytes(b"no tar at all" * 100)
    one_line(good.run("dsec-image", *command.split()), code, *fragments)


@pytest.mark.parametrize("command", ["status", "stats"])
def test_no_node_is_told_with_the_way_to_start_one(world: World, command: str) -> None:
    one_line(world.run("dsec", "node", command), 1, str(world.root), "dsec node start")


# -- stores that fail ------------------------------------------------------------------------------------------------


def test_a_store_that_nobody_serves(world: World) -> None:
    """Every kind of command tells the address, after tries that end by themselves."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{held.getsockname()[1]}"
        keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
        lost = world.with_(DSEC_STORE="s3://bucket/x", AWS_ENDPOINT_URL=address, **keys)
        one_line(lost.run("dsec-image", "ls"), 1, "s3://bucket/x", address, "AWS_ENDPOINT_URL")
        one_line(lost.run("dsec-image", "mount", "app", str(world.folder)), 1, address)
        one_line(lost.run("dsec", "run", "app", "--", "true"), 125, address)
    assert not world.root.exists()


@pytest.mark.parametrize("given", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"])
def test_keys_that_lack(world: World, given: str) -> None:
    lost = world.with_(**{"DSEC_STORE": "s3://bucket/x", "AWS_ENDPOINT_URL": "http://127.0.0.1:1", given: "given"})
    one_line(lost.run("dsec-image", "ls"), 1, "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


@pytest.mark.parametrize("address", ["127.0.0.1:9000", "notaurl"])
def test_an_endpoint_that_is_no_address(world: World, address: str) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    lost = world.with_(DSEC_STORE="s3://bucket/x", AWS_ENDPOINT_URL=address, **keys)
    one_line(lost.run("dsec-image", "ls"), 1, "AWS_ENDPOINT_URL", "http://HOST:PORT")


def test_a_store_that_is_read_only(good: World, layout: Path, tmp_path: Path) -> None:
    target = tmp_path / "readonly"
    target.mkdir()
    with mount("none", target, "tmpfs"):  # MS_RDONLY is the default
        store = f"file://{target}"
        one_line(good.run("dsec-image", "convert", f"oci:{layout}:plain", "bad", "--store", store), 1, store)
        assert good.ok("dsec-image", "ls", "--store", store, "--json").json == []


def test_a_store_that_is_full(good: World, layout: Path, tmp_path: Path) -> None:
    """No name appears, and when there is room again the same conversion succeeds."""
    target = tmp_path / "full"
    target.mkdir()
    with mount("none", target, "tmpfs", f"size={FULL}", flags=0):
        store = f"file://{target}"
        convert = ("dsec-image", "convert", f"oci:{layout}:plain", "bad", "--store", store)
        one_line(good.run(*convert), 1, store, "full", "make room")
        assert good.ok("dsec-image", "ls", "--store", store, "--json").json == []
        subprocess.run(["mount", "-o", "remount,size=64m", target], check=True)
        good.ok(*convert)
        assert good.ok("dsec-image", "check", "bad", "--deep", "--store", store, "--json").json["problems"] == []


def test_an_object_of_the_store_that_is_gone(good: World, layout: Path) -> None:
    """The image that needs it says so; the others do not care."""
    broken = good.with_store("broken")
    shutil.copytree(good.store, broken.store)
    broken.ok("dsec-image", "convert", f"oci:{layout}:plain", "app")
    layer = broken.json("dsec-image", "inspect", "app")["layers"][0]["descriptor"]
    (file,) = broken.store.rglob(layer.partition(":")[2])
    file.unlink()
    one_line(broken.run("dsec", "run", "app", "--", "true"), 125, layer, "missing")
    one_line(broken.run("dsec-image", "mount", "app", str(broken.make("target"))), 1, layer, "missing")
    done = broken.run("dsec-image", "check", "app")
    assert (done.code, done.errors) == (1, [])
    assert layer in done.lines[0]
    assert broken.json("dsec-image", "check", "good", "--deep")["problems"] == []
    assert broken.compositions() == []


# -- the node's own folder -------------------------------------------------------------------------------------------


def test_a_root_of_another_release(good: World) -> None:
    good.root.mkdir()
    (good.root / "version").write_text("dsec-root 99\n")
    one_line(good.run("dsec", "node", "start"), 1, str(good.root), "'dsec-root 99'", "--root")
    one_line(good.run("dsec", "run", "good", "--", "true"), 125, "'dsec-root 99'", "--root")
    assert os.listdir(good.root) == ["version"]


def test_a_root_that_is_somebody_elses_folder(good: World) -> None:
    good.root.mkdir()
    (good.root / "thesis.txt").touch()
    one_line(good.run("dsec", "node", "start"), 1, str(good.root), "'thesis.txt'", "--root")
    assert os.listdir(good.root) == ["thesis.txt"]


def test_a_root_that_is_bound_to_another_store(good: World) -> None:
    """Whether its node runs or not."""
    good.ok("dsec", "node", "start")
    other = good.with_(DSEC_STORE=f"file://{good.folder}/other")
    shutil.copytree(good.store, other.store)
    fragments = (f"file://{good.store}", f"file://{other.store}", "--root")
    one_line(other.run("dsec", "node", "start"), 1, *fragments)
    good.ok("dsec", "node", "stop")
    one_line(other.run("dsec", "run", "good", "--", "true"), 125, *fragments)


def test_a_root_that_cannot_be_made(good: World) -> None:
    (good.folder / "file").touch()
    one_line(good.run("dsec", "node", "start", "--root", str(good.folder / "file/root")), 1, "file/root", "--root")


# -- not root --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv is not installed")
def test_without_root_images_can_be_made_but_not_mounted(good: World) -> None:
    good.folder.chmod(0o755)
    store = good.make("of nobody")
    os.chown(store, NOBODY, NOBODY)
    other = replace(good, before=AS_NOBODY)
    mine = other.with_(DSEC_STORE=f"file://{store}/store")
    mine.ok("dsec-image", "build", str(good.make("toolkit")), "app", "--kind", "toolkit")
    one_line(other.run("dsec-image", "rm", "good"), 1, str(good.store), "permissions")
    one_line(mine.run("dsec-image", "mount", "app", str(store)), 1, str(good.root), "sudo")
    one_line(mine.run("dsec", "run", "app", "--", "true"), 125, str(good.root), "sudo")
    one_line(mine.run("dsec", "node", "start"), 1, str(good.root), "sudo")
    good.ok("dsec", "node", "start")
    for command in ("status", "stats", "stop"):
        one_line(mine.run("dsec", "node", command), 1, str(good.root), "sudo")


def test_the_commands_are_those_that_are_installed() -> None:
    """The other tests start modules; the scripts of the same names lead to the same functions."""
    for name in COMMANDS:
        script = Path(sys.executable).with_name(name)
        shown = subprocess.run([script, "--version"], check=True, capture_output=True, text=True).stdout
        assert shown.startswith(f"{name}, version ")
