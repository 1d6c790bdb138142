"""Images leave as they came: the same tars, the same config, the same image when they come back; or not at all.

Witnesses: the source's own blobs, a conversion into a new store, skopeo and umoci.
"""

import json
import os
import random
import shutil
import signal
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from dsec_registry.convert import Converted, convert
from dsec_registry.export import COMPRESSIONS, Exported, export
from dsec_registry.layouts import OciArchive, OciLayout
from dsec_registry.layoutwriter import STAGE, parse_target
from dsec_registry.manifest import Platform, host_platform
from dsec_store import keys
from dsec_store.backends.folder import FolderBlobs
from dsec_store.backends.memory import MemoryBlobs
from dsec_store.digest import Digest
from dsec_store.errors import Corrupt, Invalid, NotFound
from dsec_store.layer.local import LocalBuild, build_local
from dsec_store.objects import Objects
from tests.dsec_snapshotter.nodes import until
from tests.dsec_store.blobmaker import flipped, noise
from tests.flows import images
from tests.flows.ocicases import CASES, Case
from tests.flows.test_oci_cases import without_folder_times
from tests.flows.world import World, ended, private_world
from tests.kernel import mount, umount
from tests.ocimaker import Layer, blob_path, digest_of, read_json, tar_of, write_layout
from tests.s3server import S3Server
from tests.views import merged_view, view_of

pytestmark = pytest.mark.flow

KILLS: Final = 20

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="owners and devices need root")
with_skopeo = pytest.mark.skipif(shutil.which("skopeo") is None, reason="skopeo is not installed")
with_umoci = pytest.mark.skipif(shutil.which("umoci") is None, reason="umoci is not installed")
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def fresh() -> Objects:
    return Objects(MemoryBlobs())


def converted(objects: Objects, layout: Path) -> Converted:
    """The image with the tag `t`, under the name `demo`."""
    with OciArchive(layout) if layout.is_file() else OciLayout(layout) as source:
        return convert(objects, source, "t", host_platform(), "demo")


def exported(objects: Objects, target: str, **options: Any) -> Exported:
    return export(objects, objects.references.read("demo"), parse_target(target), **options)


def tars_of(case: Case) -> list[bytes]:
    return [layer.tar if isinstance(layer, Layer) else layer for layer in case.layers]


def files_in(top: Path) -> dict[str, bytes]:
    return {str(path.relative_to(top)): path.read_bytes() for path in sorted(top.rglob("*")) if path.is_file()}


def only_manifest(layout: Path) -> Any:
    (entry,) = json.loads((layout / "index.json").read_bytes())["manifests"]
    return read_json(layout, entry["digest"])


# -- images that came as such ------------------------------------------------------------------------------------------


@every_case
def test_every_layer_leaves_as_it_came(case: Case, tmp_path: Path) -> None:
    """Byte for byte, under the same config; and what comes back is the same image, to the last object."""
    source = write_layout(tmp_path / "source", case.layers).path
    objects, elsewhere = fresh(), fresh()
    image = converted(objects, source).image
    done = exported(objects, f"oci:{tmp_path}/out:t", compression="none")
    manifest = only_manifest(tmp_path / "out")
    blobs = [blob_path(tmp_path / "out", layer["digest"]).read_bytes() for layer in manifest["layers"]]
    assert blobs == tars_of(case)
    assert [str(layer.diff_id) for layer in done.layers] == [digest_of(data) for data in tars_of(case)]
    assert done.original_config
    assert manifest["config"] == only_manifest(source)["config"]
    assert converted(elsewhere, tmp_path / "out").image == image
    ours, theirs = ({blob.key for blob in each.blobs.list("")} for each in (objects, elsewhere))
    families = ("packs/", "maps/", "metadata/", "layers/", "images/")
    assert {key for key in ours if key.startswith(families)} == {key for key in theirs if key.startswith(families)}


@pytest.mark.component
@as_root
@with_umoci
@with_skopeo
@every_case
def test_skopeo_and_umoci_take_it(case: Case, tmp_path: Path) -> None:
    source = write_layout(tmp_path / "source", case.layers).path
    objects = fresh()
    converted(objects, source)
    exported(objects, f"oci:{tmp_path}/out:t")
    for command in (
        ["skopeo", "inspect", f"oci:{tmp_path}/out:t"],
        ["skopeo", "copy", f"oci:{tmp_path}/out:t", f"dir:{tmp_path}/copy"],
    ):
        subprocess.run(command, check=True, capture_output=True)
    one, other = (view_of(images.unpack(f"{tmp_path}/{name}:t", tmp_path / f"b-{name}")) for name in ("source", "out"))
    if case.umoci:  # then it gives some folders the time of the unpacking
        one, other = without_folder_times(one), without_folder_times(other)
    assert one == other


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("form", ["oci:{}:t", "oci-archive:{}.tar:t"])
def test_every_form_and_compression_comes_back_and_is_the_same_again(
    form: str, compression: str, tmp_path: Path
) -> None:
    layers: list[Layer | bytes] = [
        tar_of({"a": noise(3_000_000), "b": b"b" * 900_000}),
        Layer(tar_of({"c": b"c"}), "zstd"),
    ]
    objects = fresh()
    image = converted(objects, write_layout(tmp_path / "source", layers, config={"Cmd": ["x"]}).path).image
    outputs = []
    for name in ("one", "two"):
        target = parse_target(form.format(tmp_path / name))
        exported(objects, str(target), compression=compression)
        assert converted(fresh(), target.path).image == image
        outputs.append(files_in(target.path) if target.path.is_dir() else target.path.read_bytes())
    assert outputs[0] == outputs[1]


def test_gzip_says_nothing_of_when_and_what(tmp_path: Path) -> None:
    objects = fresh()
    converted(objects, write_layout(tmp_path / "source", [tar_of({"a": b"a"})]).path)
    (layer,) = exported(objects, f"oci:{tmp_path}/out").layers
    head = blob_path(tmp_path / "out", str(layer.blob.digest)).read_bytes()[:8]
    assert head == b"\x1f\x8b\x08\x00" + bytes(4)


def test_many_layers_some_of_them_twice(tmp_path: Path) -> None:
    tars = [tar_of({f"f{number % 90}": b"%d" % (number % 90)}) for number in range(127)]
    objects = fresh()
    image = converted(objects, write_layout(tmp_path / "source", tars).path).image
    done = exported(objects, f"oci:{tmp_path}/out:t")
    assert [str(layer.diff_id) for layer in done.layers] == [digest_of(data) for data in tars]
    assert converted(fresh(), tmp_path / "out").image == image


def test_an_image_without_layers(tmp_path: Path) -> None:
    objects = fresh()
    image = converted(objects, write_layout(tmp_path / "source", []).path).image
    exported(objects, f"oci:{tmp_path}/out:t")
    assert converted(fresh(), tmp_path / "out").image == image


def test_a_config_that_is_not_that_of_the_image_is_made_anew(tmp_path: Path) -> None:
    """As when somebody gave the name another image with the old origin."""
    objects = fresh()
    converted(objects, write_layout(tmp_path / "one", [tar_of({"a": b"a"})], config={"Cmd": ["one"]}).path)
    origin = objects.references.read("demo").origin
    image = converted(objects, write_layout(tmp_path / "two", [tar_of({"a": b"a"})], config={"Cmd": ["two"]}).path)
    objects.references.set("demo", image.image, origin)
    assert not exported(objects, f"oci:{tmp_path}/out:t").original_config
    assert converted(fresh(), tmp_path / "out").image == image.image


def test_what_an_image_adds_to_its_config_is_in_the_one_that_is_made(tmp_path: Path) -> None:
    objects, elsewhere = fresh(), fresh()
    converted(objects, write_layout(tmp_path / "source", [tar_of({"a": b"a"})], config={"Env": ["A=0", "B=1"]}).path)
    came = objects.references.read("demo")
    image = replace(objects.image(came.image), env=(("A", "2"),))
    objects.references.set("demo", objects.put_image(image), came.origin)
    assert not exported(objects, f"oci:{tmp_path}/out:t").original_config
    back = elsewhere.image(converted(elsewhere, tmp_path / "out").image)
    assert back.config.env == (("A", "2"), ("B", "1"))


# -- images that were built --------------------------------------------------------------------------------------------


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """A folder with what folders can hold."""
    top = tmp_path / "odd"
    (top / "deep" / ("d" * 200) / ("e" * 200)).mkdir(parents=True)
    (top / "deep" / ("d" * 200) / ("e" * 200) / "f").write_bytes(noise(200_000))
    (top / "a=b %3D\n").write_bytes(b"odd")
    (Path(os.fsdecode(os.fsencode(top) + b"/\xff\xfe"))).write_bytes(b"bytes")
    (top / "x").write_bytes(b"xattrs")
    os.setxattr(top / "x", "user.k=1", b"v\0\n")
    (top / "x").chmod(0o4711)
    os.link(top / "x", top / "deep" / "twin")
    (top / "l").symlink_to("deep/nowhere")
    os.mkfifo(top / "pipe")
    os.mknod(top / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mknod(top / "disk", stat.S_IFBLK | 0o600, os.makedev(259, 70000))
    os.utime(top / "x", ns=(0, -1_500_000_000))
    for name in ("deep", "l"):
        os.utime(top / name, ns=(0, 10**18 + 7), follow_symlinks=False)
    return top


@as_root
@pytest.mark.parametrize("kind", ["base", "workspace", "toolkit"])
def test_what_was_built_comes_back_as_the_same_tree(kind: str, odd: Path, tmp_path: Path) -> None:
    objects, elsewhere = fresh(), fresh()
    build = LocalBuild(kind, "/opt/x", env=(("A", "1"),), path=("/opt/x/bin",), keep_owner=True)
    built = build_local(objects, odd, "demo", build)
    done = exported(objects, f"oci:{tmp_path}/out:t", platform=host_platform())
    back = elsewhere.image(converted(elsewhere, tmp_path / "out").image)
    assert merged_view(elsewhere, back) == merged_view(objects, objects.image(built.image))
    again = exported(elsewhere, f"oci:{tmp_path}/again:t")
    assert [layer.diff_id for layer in again.layers] == [layer.diff_id for layer in done.layers]
    assert not done.original_config
    assert dict(back.config.env)["A"] == "1"
    assert dict(back.config.env)["PATH"].startswith("/opt/x/bin:/usr/local/sbin:")
    assert back.platform == str(host_platform())


@pytest.mark.component
@as_root
@with_umoci
def test_umoci_unpacks_what_was_built(odd: Path, tmp_path: Path) -> None:
    """But for the name of one xattr, which Go programs take as it is written."""
    os.removexattr(odd / "x", "user.k=1")
    os.setxattr(odd / "x", "user.k", b"v\0\n")
    objects = fresh()
    build_local(objects, odd, "demo", LocalBuild("base", keep_owner=True))
    exported(objects, f"oci:{tmp_path}/out:t")
    assert view_of(images.unpack(f"{tmp_path}/out:t", tmp_path / "bundle")) == view_of(odd)


def test_a_name_that_would_be_a_marker_is_refused(tmp_path: Path) -> None:
    folder = images.make_folder(tmp_path / "folder", {"d/.wh.x": b""})
    objects = fresh()
    build_local(objects, folder, "demo", LocalBuild("workspace"))
    with pytest.raises(Invalid, match=r"layer 1 of 1: layer blake3:.*'d/\.wh\.x'"):
        exported(objects, f"oci:{tmp_path}/out:t")
    assert sorted(os.listdir(tmp_path)) == ["folder"]


def test_the_platform_is_the_images_own(tmp_path: Path) -> None:
    objects = fresh()
    converted(objects, write_layout(tmp_path / "source", [tar_of({"a": b"a"})]).path)
    with pytest.raises(Invalid, match=r"is for .*cannot be exported for plan9/mips"):
        exported(objects, f"oci:{tmp_path}/out", platform=Platform("plan9", "mips"))
    with pytest.raises(Invalid, match=r"unknown compression 'xz' \(known: gzip, zstd, none\)"):
        exported(objects, f"oci:{tmp_path}/out", compression="xz")
    assert sorted(os.listdir(tmp_path)) == ["source"]


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["flipped", "lost"])
def test_damage_is_named_and_leaves_nothing(damage: str, tmp_path: Path) -> None:
    objects = fresh()
    layers = [tar_of({"a": noise(5_000_000, "a")}), tar_of({"b": noise(100_000, "b")})]
    image = objects.image(converted(objects, write_layout(tmp_path / "source", layers).path).image)
    exported(objects, f"oci:{tmp_path}/old:t")
    before = files_in(tmp_path / "old")
    layer = objects.layer(image.layers[0])
    location = objects.locator(layer.blobs[0].name)[-1]
    key = keys.pack(location.pack)
    if damage == "lost":
        objects.blobs.delete(key)
    else:
        objects.blobs.put(key, flipped(objects.blobs.get(key), location.offset + 9))
    for target in (f"oci:{tmp_path}/old:t", f"oci:{tmp_path}/new:t", f"oci-archive:{tmp_path}/new.tar"):
        with pytest.raises((Corrupt, NotFound), match=r"layer 1 of 2: layer blake3:.*: chunk blake3:.* in pack"):
            exported(objects, target)
    assert files_in(tmp_path / "old") == before
    assert sorted(os.listdir(tmp_path)) == ["old", "source"]


def test_a_damaged_config_is_named(tmp_path: Path) -> None:
    objects = fresh()
    converted(objects, write_layout(tmp_path / "source", [tar_of({"a": b"a"})]).path)
    config = objects.references.read("demo").origin.config
    assert isinstance(config, Digest)
    objects.blobs.put(keys.oci(config), b"{}")
    with pytest.raises(Corrupt, match=f"OCI object {config}"):
        exported(objects, f"oci:{tmp_path}/out")


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source(capable: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layout of several layers that take a while."""
    layers = [Layer(tar_of({f"f{n}": random.Random(n).randbytes(6 << 20)}), "plain") for n in range(4)]
    return write_layout(tmp_path_factory.mktemp("export") / "source", layers, config={"Cmd": ["x"]}).path


@pytest.fixture(scope="module")
def filled(source: Path) -> Iterator[World]:
    """A world whose store has that image, as `app`. Its store is not changed."""
    with private_world() as world:
        world.ok("dsec-image", "convert", f"oci:{source}:t", "app")
        yield world


def test_the_command_says_what_it_wrote(filled: World, source: Path, tmp_path: Path) -> None:
    told = filled.json("dsec-image", "export", "app", f"oci:{tmp_path}/out:v1", "--compression", "zstd")
    manifest = only_manifest(tmp_path / "out")
    assert (told["name"], told["target"], told["original_config"]) == ("app", f"oci:{tmp_path}/out:v1", True)
    assert told["config"] == manifest["config"]["digest"] == only_manifest(source)["config"]["digest"]
    layers = [(layer["digest"], layer["size"], layer["media_type"]) for layer in told["layers"]]
    assert layers == [(layer["digest"], layer["size"], layer["mediaType"]) for layer in manifest["layers"]]
    assert {layer["mediaType"] for layer in manifest["layers"]} == {"application/vnd.oci.image.layer.v1.tar+zstd"}
    done = filled.ok("dsec-image", "export", "app", f"oci:{tmp_path}/out:v2")
    assert done.lines[1].startswith("4 layers, 24.")
    assert done.lines[1].endswith("config original")


def test_wrong_use_and_failures_have_their_codes(filled: World, tmp_path: Path) -> None:
    (tmp_path / "there.tar").touch()
    for code, arguments in (
        (2, ("app", "docker-archive:x")),
        (2, ("app", "oci:x", "--compression", "xz")),
        (2, ("No Name", "oci:x")),
        (1, ("gone", f"oci:{tmp_path}/x")),
        (1, ("app", f"oci-archive:{tmp_path}/there.tar")),
        (1, ("app", f"oci:{tmp_path}/none/x")),
    ):
        done = filled.run("dsec-image", "export", *arguments)
        assert (done.code, done.errors[1:], done.lines) == (code, [], [])
    assert os.listdir(tmp_path) == ["there.tar"]


def test_it_holds_a_lease_and_leaves_none(filled: World, tmp_path: Path) -> None:
    filled.ok("dsec-image", "export", "app", f"oci:{tmp_path}/out")
    assert not [path for path in (filled.store / "leases").rglob("*") if path.is_file()]
    with filled.start("dsec-image", "export", "app", f"oci:{tmp_path}/out") as process:
        until(lambda: any(path.is_file() for path in (filled.store / "leases").rglob("*")))
        assert ended(process).code == 0


@as_root
def test_a_store_that_cannot_be_written_can_be_exported_from(filled: World, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    with read_only(filled.store, tmp_path / "store"):
        done = filled.run("dsec-image", "export", "app", f"oci:{tmp_path}/out:t", "--store", f"file://{tmp_path}/store")
    assert (done.code, len(done.errors)) == (0, 1)
    assert "no lease, so a gc at the same time may end this export" in done.errors[0]
    assert len(only_manifest(tmp_path / "out")["layers"]) == 4


@contextmanager
def read_only(source: Path, target: Path) -> Iterator[None]:
    """The folder `source` at `target`, without write access."""
    subprocess.run(["mount", "--bind", "-o", "ro", str(source), str(target)], check=True, capture_output=True)
    try:
        yield
    finally:
        umount(target)


def test_killed_at_any_moment_it_leaves_what_was_there(filled: World, tmp_path: Path) -> None:
    """Each time when a bit more is written; the last ones while the layout gets its name, and after."""
    filled.ok("dsec-image", "export", "app", f"oci:{tmp_path}/whole:t", "--compression", "none")
    whole = files_in(tmp_path / "whole")
    total = sum(map(len, whole.values()))
    target = tmp_path / "out"
    unfinished = 0
    for number in range(KILLS):
        process = filled.start("dsec-image", "export", "app", f"oci:{target}:t", "--compression", "none")
        limit = total * number // (KILLS - 1)
        until(lambda limit=limit, process=process: process.poll() is not None or written(tmp_path) >= limit)  # type: ignore[misc]
        process.kill()
        code = ended(process).code
        assert code in (0, -signal.SIGKILL)
        if target.exists():
            assert files_in(target) == whole
            shutil.rmtree(target)
        else:
            unfinished += 1
    assert unfinished > KILLS // 2
    filled.ok("dsec-image", "export", "app", f"oci:{target}:t", "--compression", "none")
    assert files_in(target) == whole
    assert sorted(os.listdir(tmp_path)) == ["out", "whole"]


def written(folder: Path) -> int:
    """Bytes in all stages."""
    total = 0
    for path in folder.glob(STAGE + "*/*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


@as_root
def test_a_full_disk_is_an_error_and_leaves_nothing(filled: World, tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    with mount("tmpfs", tmp_path / "small", "tmpfs", "size=8m", flags=0) as small:
        write_layout(small / "old", [tar_of({"a": b"a"})])
        before = files_in(small)
        for target in ("oci:{}/old:u", "oci:{}/new:t", "oci-archive:{}/new.tar"):
            done = filled.run("dsec-image", "export", "app", target.format(small))
            assert (done.code, len(done.errors)) == (1, 1)
            assert "No space left on device" in done.errors[0]
        assert files_in(small) == before
        assert os.listdir(small) == ["old"]


def test_an_interrupt_leaves_nothing(filled: World, tmp_path: Path) -> None:
    process = filled.start("dsec-image", "export", "app", f"oci:{tmp_path}/out:t")
    until(lambda: written(tmp_path) > 0)
    process.send_signal(signal.SIGINT)
    done = ended(process)
    assert (done.code, done.errors) == (130, ["", "dsec-image: interrupted"])
    assert os.listdir(tmp_path) == []


def test_a_real_image_from_a_folder_and_from_s3(
    world: World, layout: Path, tmp_path: Path, s3_server: S3Server, s3_url: str
) -> None:
    """busybox: the same bytes leave both stores, and run after they came back."""
    cloud, again = world.with_(DSEC_STORE=s3_url, **s3_server.environment), world.with_store("again")
    for each, name in ((world, "folder"), (cloud, "s3")):
        each.ok("dsec-image", "convert", f"oci:{layout}:configured", "app")
        each.ok("dsec-image", "export", "app", f"oci:{tmp_path}/{name}:t")
    assert files_in(tmp_path / "folder") == files_in(tmp_path / "s3")
    first = world.json("dsec-image", "inspect", "app")
    again.ok("dsec-image", "convert", f"oci:{tmp_path}/s3:t", "app")
    assert again.json("dsec-image", "inspect", "app")["image"] == first["image"]
    assert FolderBlobs(again.store).stat(keys.image(Digest.parse(first["image"])))
    assert again.ok("dsec", "run", "app", "--", "busybox", "echo", "back").lines == ["back"]
