"""Docker archives: what is in them, under which name, and that bytes which lie are found."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsec_registry.archive import Archive, Member
from dsec_registry.convert import convert
from dsec_registry.docker_archive import DockerArchive
from dsec_registry.images import ByteStream, ImageSource, ResolvedImage
from dsec_registry.layouts import OciArchive
from dsec_registry.manifest import MAX_CONFIG_SIZE, MAX_MANIFEST_SIZE, Descriptor, Platform, host_platform
from dsec_store.backends.memory import MemoryBlobs
from dsec_store.descriptor import Image
from dsec_store.digest import Digest
from dsec_store.errors import Corrupt, Invalid, NotFound, StoreError
from dsec_store.objects import Objects
from tests import tarmaker as tar
from tests.dockermaker import FORMS, DockerMaker, Form
from tests.ocimaker import Compression, Json, Layer, compress, digest_of, flip_byte, tar_of, write_layout
from tests.views import merged_view, regular, view

ONE, TWO = tar_of({"one": b"1" * 3000}), tar_of({"two": b"2" * 3000})

every_form = pytest.mark.parametrize("form", FORMS)


def read(source: ImageSource, descriptor: Descriptor) -> bytes:
    with source.open_blob(descriptor) as reader:
        return reader.read()


def resolved(maker: DockerMaker, path: Path, tag: str | None = None) -> ResolvedImage:
    with DockerArchive(maker.write(path)) as source:
        return source.resolve(tag, host_platform())


def refused(maker: DockerMaker, path: Path, kind: type[StoreError], text: str, tag: str | None = None) -> None:
    with pytest.raises(kind, match=text):
        resolved(maker, path, tag)


def converted(path: Path) -> tuple[Objects, Image]:
    objects = Objects(MemoryBlobs())
    with DockerArchive(path) as source:
        return objects, objects.image(convert(objects, source, None, host_platform(), "demo").image)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "image.tar"


# What is read


@every_form
@pytest.mark.parametrize("compression", ["plain", "gzip", "zstd"])
def test_an_image_and_its_layers_are_read(path: Path, form: Form, compression: Compression) -> None:
    layers = [
        Layer(ONE, "plain"),
        Layer(TWO, "gzip"),
        Layer(TWO, "zstd"),
        Layer(ONE, "gzip members"),
        Layer(b"", "plain"),
    ]
    maker = DockerMaker(form)
    maker.image(layers, "demo:v1", config={"Cmd": ["/bin/sh"]})
    stored = [compress(layer.tar, layer.compression) for layer in layers]
    with DockerArchive(maker.write(path, compression)) as source:
        image = source.resolve(None, host_platform())
        assert [read(source, layer) for layer in image.manifest.layers] == stored
        assert read(source, image.manifest.config) == image.config_bytes
    assert image.config.run.cmd == ("/bin/sh",)
    assert [layer.size for layer in image.manifest.layers] == [len(data) for data in stored]
    assert [str(layer.digest) for layer in image.manifest.layers] == [digest_of(data) for data in stored]
    kinds = [layer.media_type.removeprefix("application/vnd.oci.image.layer.v1.tar") for layer in image.manifest.layers]
    assert kinds == ["", "+gzip", "+zstd", "+gzip", ""]


def test_the_manifest_that_is_made_is_canonical(path: Path) -> None:
    """A test vector of docs/format/sources.md."""
    config = b'{"architecture":"amd64","os":"linux","rootfs":{"diff_ids":["%s"],"type":"layers"}}'
    empty = bytes(1024)
    maker = DockerMaker()
    maker.file("c", config % digest_of(empty).encode())
    maker.file("l", empty)
    maker.images.append({"Config": "c", "RepoTags": None, "Layers": ["l"]})
    with DockerArchive(maker.write(path)) as source:
        image = source.resolve(None, Platform("linux", "amd64"))
    assert image.manifest_bytes.decode() == (
        '{"config":{"digest":"sha256:1cdd5c60472991ccbd1f7e2756cfe75203e1f6b05cad61bacc372d06d669fc62",'
        '"mediaType":"application/vnd.oci.image.config.v1+json","size":151},'
        '"layers":[{"digest":"sha256:5f70bf18a086007016e948b04aed3b82103a36bea41755b6cddfaf10ace3c6ef",'
        '"mediaType":"application/vnd.oci.image.layer.v1.tar","size":1024}],'
        '"mediaType":"application/vnd.oci.image.manifest.v1+json","schemaVersion":2}'
    )
    assert Digest.of(image.manifest_bytes, "sha256") == image.manifest_digest


@every_form
def test_all_forms_are_one_image(path: Path, form: Form) -> None:
    """Neither names nor the way in which layers are stored matter, as long as their bytes are the same."""
    images = []
    for number, other in enumerate((form, "old")):
        maker = DockerMaker(other)
        maker.image([ONE, TWO, ONE], f"demo:v{number}")
        images.append(resolved(maker, path))
    assert images[0] == images[1]


def test_layers_that_are_links_to_links(path: Path) -> None:
    maker = DockerMaker("old")
    entry = maker.image([ONE, ONE, TWO, ONE])
    assert [maker.members[name][156:157] for name in entry["Layers"]] == [b"0", b"2", b"0", b"2"]
    assert [layer.size for layer in resolved(maker, path).manifest.layers] == [len(ONE), len(ONE), len(TWO), len(ONE)]


def test_a_skippable_frame_may_come_first(path: Path) -> None:
    layer = b"\x5a\x2a\x4d\x18" + (3).to_bytes(4, "little") + b"abc" + compress(ONE, "zstd")
    maker = DockerMaker()
    maker.image([ONE])
    maker.file(maker.images[0]["Layers"][0], layer)
    objects, image = converted(maker.write(path))
    assert merged_view(objects, image) == view({b"one": regular(b"1" * 3000)})


@every_form
def test_an_image_without_layers(path: Path, form: Form) -> None:
    maker = DockerMaker(form)
    maker.image([])
    assert resolved(maker, path).manifest.layers == ()


def test_a_compressed_layer_of_many_layers_is_read_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maker = DockerMaker("old")
    maker.image([Layer(ONE, "gzip")] * 5)
    open_member = Archive.open_member
    with DockerArchive(maker.write(path)) as source:
        opened = []

        def counted(archive: Archive, member: Member) -> ByteStream:
            opened.append(member)
            return open_member(archive, member)

        monkeypatch.setattr(Archive, "open_member", counted)
        layers = source.resolve(None, host_platform()).manifest.layers
    assert len(set(layers)) == 1
    assert len(opened) == 2 + 5 + 1, "both documents, the first bytes of each layer, all bytes of one"


# Names


@pytest.mark.parametrize(
    ("tag", "number"),
    [
        ("busybox", 0),
        ("busybox:latest", 0),
        ("docker.io/library/busybox:latest", 0),
        ("index.docker.io/busybox", 0),
        ("busybox:musl", 0),
        ("localhost/app", 1),
        ("localhost:5000/app:v1", 1),
        ("@0", 0),
        ("@2", 2),
        ("@02", 2),
    ],
)
def test_a_name_or_a_number_chooses(path: Path, tag: str, number: int) -> None:
    maker = DockerMaker("oci")
    maker.image([ONE], "busybox:latest", "busybox:musl", config={"User": "0"})
    maker.image([ONE], "localhost/app:latest", "localhost:5000/app:v1", config={"User": "1"})
    maker.image([ONE], config={"User": "2"})
    assert resolved(maker, path, tag).config.run.user == str(number)


def two_images() -> DockerMaker:
    maker = DockerMaker()
    maker.image([ONE], "busybox:latest", "b:1")
    maker.image([TWO])
    return maker


@pytest.mark.parametrize(
    ("tag", "kind", "text"),
    [
        (
            None,
            Invalid,
            r"more than one image: name one by NAME:TAG or @NUMBER \(there are: @0 'busybox:latest' 'b:1', @1\)",
        ),
        ("busybox:musl", NotFound, r"no image 'busybox:musl' \(there are: @0 'busybox:latest' 'b:1', @1\)"),
        ("app", NotFound, "no image 'app'"),
        ("localhost/busybox", NotFound, "no image"),
        ("@2", NotFound, r"no image '@2' \(there are"),
        ("@-1", Invalid, "not the number of an image: '@-1'"),
        ("@", Invalid, "not the number"),
        ("@9999999999", Invalid, "not the number"),
        ("Busybox", Invalid, "not a name of an image: 'Busybox'"),
        ("busybox@sha256:" + "0" * 64, Invalid, "a digest names nothing here"),
    ],
)
def test_what_a_name_does_not_lead_to(path: Path, tag: str | None, kind: type[StoreError], text: str) -> None:
    refused(two_images(), path, kind, text, tag)


def test_an_archive_without_images(path: Path) -> None:
    refused(DockerMaker(), path, NotFound, r"image\.tar: no image \(there are: none\)")


def test_a_name_of_two_images_is_refused_but_not_of_one_that_is_there_twice(path: Path) -> None:
    maker = DockerMaker()
    maker.image([ONE], "a:1")
    maker.images.append({**maker.images[0], "RepoTags": ["a:1", "a:2"]})
    assert resolved(maker, path, "a:1") == resolved(maker, path)
    maker.image([TWO], "docker.io/library/a:1")
    refused(maker, path, Invalid, "more than one image 'a:1'", "a:1")


def test_names_that_nobody_can_ask_for_are_passed_over(path: Path) -> None:
    maker = DockerMaker()
    maker.image([ONE], "<none>:<none>", "a:1")
    maker.image([TWO], "<none>:<none>")
    assert len(resolved(maker, path, "a:1").manifest.layers) == 1
    refused(maker, path, Invalid, "not a name", "<none>:<none>")


def test_a_long_list_is_cut(path: Path) -> None:
    maker = DockerMaker()
    for number in range(30):
        maker.image([ONE], f"a:{number}", config={"User": str(number)})
    refused(maker, path, Invalid, r"@19 'a:19', 10 more\)")


def test_an_image_for_another_platform(path: Path) -> None:
    maker = DockerMaker()
    maker.image([ONE], platform="linux/s390x")
    refused(maker, path, NotFound, r"no image for linux/.* \(there are: linux/s390x\)")


# What lies, lacks or climbs


def without(name: str) -> DockerMaker:
    maker = DockerMaker()
    entry = maker.image([ONE])
    members = {"config": entry["Config"], "layer": entry["Layers"][0]}
    del maker.members[members[name]]
    return maker


@pytest.mark.parametrize("what", ["config", "layer"])
def test_a_missing_member_is_named(path: Path, what: str) -> None:
    refused(without(what), path, NotFound, rf"image\.tar: not a complete docker archive: {what} '0*.*' is missing")


@pytest.mark.parametrize(
    ("entry", "kind", "text"),
    [
        ({"Config": "../../etc/shadow"}, Invalid, r"'../../etc/shadow' leads out of the archive"),
        ({"Config": "/etc/shadow"}, Invalid, "absolute"),
        ({"Layers": ["../x"]}, Invalid, "leads out of the archive"),
        ({"Layers": ["up"]}, Invalid, "'up' leads out of the archive"),
        ({"Layers": ["root"]}, Invalid, "absolute"),
        ({"Layers": ["circle"]}, Invalid, "in a circle"),
        ({"Layers": ["absent"]}, NotFound, "'absent' is missing"),
        ({"Layers": []}, Corrupt, "there are 1 for the 0 layers"),
        ({"Layers": None}, Corrupt, "there are 1 for the 0 layers"),
        ({"Layers": ["x", "x"]}, Corrupt, "there are 1 for the 2 layers"),
        ({"Layers": "x"}, Corrupt, r"manifest\.json: \[0\]\.Layers: an array expected"),
        ({"Layers": [1]}, Corrupt, r"\[0\]\.Layers\[0\]: a text expected"),
        ({"Layers": ["a\0b"]}, Corrupt, "a character that UTF-8 text cannot"),
        ({"Layers": ["\ud800"]}, Corrupt, "a character that UTF-8 text cannot"),
        ({"Config": None}, Corrupt, r"\[0\]\.Config: missing"),
        ({"Config": "manifest.json"}, Corrupt, "not a JSON object"),
        ({"RepoTags": {}}, Corrupt, r"\[0\]\.RepoTags: an array expected"),
    ],
)
def test_a_manifest_that_lies(path: Path, entry: Json, kind: type[StoreError], text: str) -> None:
    maker = DockerMaker()
    maker.image([ONE], "a:1")
    maker.link("up", "../x")
    maker.link("root", "/etc/passwd")
    maker.link("circle", "circle")
    maker.images[0] |= entry
    refused(maker, path, kind, text)


@pytest.mark.parametrize(
    ("data", "kind", "text"),
    [
        (b"{}", Corrupt, r"image\.tar/manifest\.json: not a JSON array"),
        (b"[1]", Corrupt, r"manifest\.json: \[0\]: an object expected"),
        (b"[", Corrupt, "not JSON"),
        (b"[" * 100_000, Corrupt, "not JSON"),
        (b" " * (MAX_MANIFEST_SIZE + 1), Invalid, f"more than the {MAX_MANIFEST_SIZE} allowed"),
    ],
    ids=["object", "number", "cut", "deep", "large"],
)
def test_a_manifest_that_is_none(path: Path, data: bytes, kind: type[StoreError], text: str) -> None:
    path.write_bytes(tar.archive(tar.file(b"manifest.json", data)))
    with DockerArchive(path) as source, pytest.raises(kind, match=text):
        source.resolve(None, host_platform())


def test_gigabytes_are_not_read(path: Path) -> None:
    """A manifest and a config of 8 GiB, of which the tar has nothing but holes."""
    size = 8 << 30
    header = tar.header(b"manifest.json", b"0", size=size)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + size)
    with DockerArchive(path) as source, pytest.raises(Invalid, match="more than the"):
        source.resolve(None, host_platform())


def test_a_large_config_is_refused(path: Path) -> None:
    maker = DockerMaker()
    entry = maker.image([ONE])
    maker.file(entry["Config"], bytes(MAX_CONFIG_SIZE + 1))
    refused(maker, path, Invalid, f"more than the {MAX_CONFIG_SIZE} bytes allowed")


@pytest.mark.parametrize("name", ["{}.json", "sha256:{}", "folder/{}", "{}"])
def test_a_config_that_is_named_by_its_digest_must_have_it(path: Path, name: str) -> None:
    maker = DockerMaker()
    entry = maker.image([ONE])
    data = maker.members[entry["Config"]][512:].rstrip(b"\0")
    right = maker.file(name.format(digest_of(data).removeprefix("sha256:")), data)
    entry["Config"] = right
    assert resolved(maker, path).config_bytes == data
    maker.file(right, data + b" ")
    refused(maker, path, Corrupt, "its bytes do not match its name")
    entry["Config"] = maker.file("config.json", data + b" ")
    assert resolved(maker, path).config_bytes == data + b" "


@pytest.mark.parametrize("compression", ["plain", "gzip"])
def test_layers_that_are_not_those_of_the_config_are_reported(path: Path, compression: Compression) -> None:
    maker = DockerMaker()
    entry = maker.image([ONE])
    maker.file(entry["Layers"][0], compress(flip_byte(ONE), compression))
    with pytest.raises(Corrupt, match=rf"{digest_of(ONE)}|diff_id"):
        converted(maker.write(path))


def test_a_damaged_layer_is_reported(path: Path) -> None:
    maker = DockerMaker()
    entry = maker.image([ONE])
    maker.file(entry["Layers"][0], compress(ONE, "gzip")[:-9])
    with pytest.raises(Corrupt, match="gzip stream is damaged or cut"):
        converted(maker.write(path))


def test_of_members_with_one_name_the_last_counts(path: Path) -> None:
    maker = DockerMaker()
    maker.image([ONE])
    right = maker.packed()
    first = tar.file(b"manifest.json", b"[]") + tar.file(maker.images[0]["Layers"][0].encode(), b"old")
    path.write_bytes(first + right)
    objects, image = converted(path)
    assert merged_view(objects, image) == view({b"one": regular(b"1" * 3000)})


def test_only_blobs_of_images_that_were_resolved_are_known(path: Path) -> None:
    maker = DockerMaker()
    maker.image([ONE])
    descriptor = Descriptor("", Digest.parse(digest_of(ONE)), len(ONE))
    with DockerArchive(maker.write(path)) as source:
        with pytest.raises(NotFound, match=f"no blob {digest_of(ONE)}"):
            source.open_blob(descriptor)
        source.resolve(None, host_platform())
        assert read(source, descriptor) == ONE


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_anywhere_is_an_error_of_ours_or_changes_nothing(tmp_path: Path, data: st.DataObject) -> None:
    """Any byte of the archive may be another: the image is the same, or refused."""
    maker = DockerMaker(data.draw(st.sampled_from(FORMS)))
    maker.image([ONE, Layer(ONE, "gzip"), ONE], "a:1")
    good = maker.packed()
    place, value = data.draw(st.integers(0, len(good) - 1)), data.draw(st.integers(0, 255))
    path = tmp_path / "image.tar"
    path.write_bytes(good[:place] + bytes([value]) + good[place + 1 :])
    objects = Objects(MemoryBlobs())
    try:
        with DockerArchive(path) as source:
            image = objects.image(convert(objects, source, None, host_platform(), "demo").image)
    except StoreError:
        return
    assert merged_view(objects, image) == view({b"one": regular(b"1" * 3000)})


# Other kinds of archives


def test_what_is_another_archive_is_told(path: Path, tmp_path: Path) -> None:
    maker = DockerMaker("oci")
    maker.image([ONE], "v1")
    with OciArchive(maker.write(path)) as source:
        assert len(source.resolve("v1", host_platform()).manifest.layers) == 1
    path.write_bytes(tar.archive(*(entry for name, entry in maker.members.items() if name != "manifest.json")))
    with DockerArchive(path) as archive, pytest.raises(NotFound, match="oci-archive: reads it"):
        archive.resolve(None, host_platform())
    path.write_bytes(tar.archive(tar.file(b"repositories", b"{}")))
    with DockerArchive(path) as archive, pytest.raises(NotFound, match=r"a Docker before 1\.10"):
        archive.resolve(None, host_platform())
    path.write_bytes(tar.archive(tar.file(b"x", b"{}")))
    with (
        DockerArchive(path) as archive,
        pytest.raises(NotFound, match=r"not a docker archive: manifest\.json is missing$"),
    ):
        archive.resolve(None, host_platform())
    maker = DockerMaker("old")
    maker.image([ONE])
    with OciArchive(maker.write(path)) as source, pytest.raises(NotFound, match="perhaps docker-archive: reads it"):
        source.resolve(None, host_platform())


@pytest.mark.component
@pytest.mark.skipif(shutil.which("skopeo") is None, reason="skopeo is not installed")
def test_an_archive_by_skopeo_is_read_and_ours_by_skopeo(path: Path, tmp_path: Path) -> None:
    layout = write_layout(tmp_path / "layout", [ONE, Layer(TWO, "gzip members"), ONE], config={"Env": ["A=1"]}).path
    skopeo("copy", f"oci:{layout}:t", f"docker-archive:{path}:busybox:v1")
    with DockerArchive(path) as source:
        image = source.resolve("busybox:v1", host_platform())
        assert image.config.run.env == (("A", "1"),)
        assert [read(source, layer) for layer in image.manifest.layers] == [ONE, TWO, ONE]
    for form in FORMS:
        maker = DockerMaker(form)
        maker.image([ONE, TWO, ONE], "busybox:latest")
        theirs = skopeo("inspect", "--config", "--raw", f"docker-archive:{maker.write(path)}:busybox")
        assert theirs == resolved(maker, path, "busybox").config_bytes
        assert json.loads(theirs)["rootfs"]["diff_ids"] == [digest_of(ONE), digest_of(TWO), digest_of(ONE)]


def skopeo(command: str, *arguments: str) -> bytes:
    line = ["skopeo", "--insecure-policy", command, *arguments]
    return subprocess.run(line, check=True, capture_output=True, timeout=60).stdout
