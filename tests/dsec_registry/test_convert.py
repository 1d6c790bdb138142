"""Conversion: what is written, what is reused, and what a failure leaves."""

import threading
from pathlib import Path
from typing import Any

import pytest

from dsec_registry.convert import Converted, chain_id, convert
from dsec_registry.layouts import OciLayout
from dsec_registry.manifest import host_platform, parse_config
from dsec_store import keys
from dsec_store.around import Operation, Request
from dsec_store.backends.memory import MemoryBlobs
from dsec_store.check import check_image
from dsec_store.chunker import DEFAULT
from dsec_store.descriptor import Image
from dsec_store.digest import Digest
from dsec_store.errors import Corrupt, Denied, Invalid, NotFound, StoreError, Unavailable
from dsec_store.fault import Fault, FaultBlobs, Plan
from dsec_store.layer.build import build_key
from dsec_store.objects import Objects
from dsec_store.references import References
from tests import tarmaker as tar
from tests.ocimaker import Layer, blob_path, digest_of, read_json, write_layout
from tests.views import folder, merged_view, regular, view

BASE = tar.archive(tar.directory(b"app/", mode=0o711), tar.file(b"etc", b"base"), tar.file(b"old", b"old"))
OTHER = tar.archive(tar.directory(b"app/", mode=0o700), tar.file(b"etc", b"another base"))
ALONE = tar.archive(tar.directory(b"app/"), tar.file(b"app/f", b"copied"))
"""As `COPY --link` writes it: nothing of what it needs lies below."""
IMPLYING = tar.archive(tar.file(b"app/f", b"copied"))
"""Its directory `app` looks as below."""


@pytest.fixture
def objects() -> Objects:
    return Objects(MemoryBlobs())


class Images:
    """Makes layouts, converts them, and can take their blobs away."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made = 0

    def layout(self, *layers: bytes | Layer) -> Path:
        self._made += 1
        return write_layout(self._folder / str(self._made), layers).path

    def convert(self, objects: Objects, *layers: bytes | Layer, name: str = "demo") -> Image:
        return objects.image(converted(objects, self.layout(*layers), name).image)


@pytest.fixture
def images(tmp_path: Path) -> Images:
    return Images(tmp_path)


def converted(objects: Objects, layout: Path, name: str = "demo", *, verify: bool = False) -> Converted:
    with OciLayout(layout) as source:
        return convert(objects, source, "t", host_platform(), name, verify=verify)


def remove_layer(layout: Path, tarball: bytes) -> None:
    """Take away the blob of this layer."""
    blob_path(layout, layer_digest(layout, tarball)).unlink()


def layer_digest(layout: Path, tarball: bytes) -> str:
    manifest, config = documents(layout)
    digest: str = manifest["layers"][config["rootfs"]["diff_ids"].index(digest_of(tarball))]["digest"]
    return digest


def documents(layout: Path) -> tuple[dict[str, list[dict[str, str]]], dict[str, dict[str, list[str]]]]:
    """Manifest and config of the one image."""
    with OciLayout(layout) as source:
        resolved = source.resolve("t", host_platform())
    manifest = read_json(layout, str(resolved.manifest_digest))
    return manifest, read_json(layout, manifest["config"]["digest"])


def diff_id(tarball: bytes) -> Digest:
    return Digest.parse(digest_of(tarball))


# -- what is written ---------------------------------------------------------------------------------------------------


def test_the_image_keeps_manifest_and_config(objects: Objects, images: Images) -> None:
    layout = images.layout(BASE, ALONE)
    done = converted(objects, layout)
    reference = objects.references.read("demo")
    image, origin = objects.image(reference.image), reference.origin
    assert (done.layers, done.built, len(image.layers)) == (2, 2, 2)
    assert (done.new_packs, done.new_bytes > 0) == (2, True)
    assert image.kind == "base"
    assert image.platform == str(host_platform())
    assert image.config == parse_config(blob_path(layout, str(origin.config)).read_bytes(), "config", 2).run
    assert origin.manifest is not None
    assert origin.config is not None
    manifest = read_json(layout, str(origin.manifest))
    assert manifest["config"]["digest"] == str(origin.config)
    assert objects.oci(origin.config) == blob_path(layout, str(origin.config)).read_bytes()
    assert objects.oci(origin.manifest) == blob_path(layout, str(origin.manifest)).read_bytes()
    assert origin.source_bytes == sum(layer["size"] for layer in manifest["layers"])


def test_the_form_of_an_image_does_not_matter(objects: Objects, tmp_path: Path) -> None:
    """Neither compression nor order where none counts: one image, of which each name tells its own origin."""
    config: dict[str, Any] = {
        "Env": ["B=2", "A=1"],
        "Labels": {"b": "2", "a": "1=1"},
        "ExposedPorts": {"80/tcp": {}, "53/udp": {}},
        "Volumes": {"/var": {}, "/data": {}},
    }
    turned = {name: dict(reversed(value.items())) if name != "Env" else value for name, value in config.items()}
    first = write_layout(tmp_path / "first", [Layer(BASE, "gzip")], config=config).path
    second = write_layout(tmp_path / "second", [Layer(BASE, "zstd")], config=dict(reversed(turned.items()))).path
    image = converted(objects, first, "first").image
    assert converted(objects, second, "second").image == image
    run = objects.image(image).config
    assert run.env == (("B", "2"), ("A", "1"))
    assert run.labels == (("a", "1=1"), ("b", "2"))
    assert (run.exposed_ports, run.volumes) == (("53/udp", "80/tcp"), ("/data", "/var"))
    one, other = (objects.references.read(name).origin for name in ("first", "second"))
    assert one.manifest != other.manifest
    assert one.config != other.config
    assert one.source_bytes != other.source_bytes


def test_another_run_configuration_is_another_image(objects: Objects, tmp_path: Path) -> None:
    first = write_layout(tmp_path / "first", [BASE], config={"Env": ["A=1", "B=2"]}).path
    second = write_layout(tmp_path / "second", [BASE], config={"Env": ["B=2", "A=1"]}).path
    one, other = (objects.image(converted(objects, layout).image) for layout in (first, second))
    assert one.layers == other.layers
    assert one != other


def test_lookups_lead_to_the_layers(objects: Objects, images: Images) -> None:
    layout = images.layout(BASE, ALONE)
    layers = objects.image(converted(objects, layout).image).layers
    chain = None
    for layer, tarball in zip(layers, (BASE, ALONE), strict=True):
        chain = chain_id(chain, diff_id(tarball))
        assert objects.lookup("chain", chain) == layer
        assert objects.lookup("diff", diff_id(tarball)) == layer
        assert objects.lookup("digest", Digest.parse(layer_digest(layout, tarball))) == layer
        assert objects.lookup("build", build_key(diff_id(tarball), DEFAULT, None)) == layer
        assert objects.layer(layer).diff_id == diff_id(tarball)


def test_a_layer_that_depends_on_others_is_found_on_those_only(objects: Objects, images: Images) -> None:
    layout = images.layout(BASE, IMPLYING)
    layer = objects.image(converted(objects, layout).image).layers[1]
    parent = diff_id(BASE)
    assert objects.lookup("chain", chain_id(parent, diff_id(IMPLYING))) == layer
    assert objects.lookup("build", build_key(diff_id(IMPLYING), DEFAULT, parent)) == layer
    assert objects.lookup("build", build_key(diff_id(IMPLYING), DEFAULT, None)) is None
    assert objects.lookup("diff", diff_id(IMPLYING)) is None
    assert objects.lookup("digest", Digest.parse(layer_digest(layout, IMPLYING))) is None


def test_chain_ids_are_those_of_the_specification() -> None:
    one, two = Digest.of(b"1", "sha256"), Digest.of(b"2", "sha256")
    assert chain_id(None, one) == one
    assert chain_id(one, two) == Digest.of(f"{one} {two}".encode(), "sha256")


def test_progress_is_told(objects: Objects, images: Images) -> None:
    told: list[tuple[str, int, int]] = []
    with OciLayout(images.layout(BASE, ALONE)) as source:
        convert(objects, source, "t", host_platform(), "demo", progress=lambda *what: told.append(what))
    for number, tarball in enumerate((BASE, ALONE), 1):
        title = f"layer {number} of 2 ({diff_id(tarball).hex[:12]})"
        steps = [(done, total) for what, done, total in told if what == title]
        assert len({total for _, total in steps}) == 1
        assert steps == sorted(steps)
        assert steps[-1] == (steps[0][1], steps[0][1]), "in the end all of its bytes"
    assert len({what for what, _, _ in told}) == 2


# -- what is reused ----------------------------------------------------------------------------------------------------


def test_a_layer_that_the_store_has_is_not_read(objects: Objects, images: Images) -> None:
    first = images.convert(objects, BASE, IMPLYING)
    layout = images.layout(BASE, IMPLYING, ALONE)
    remove_layer(layout, BASE)
    remove_layer(layout, IMPLYING)
    done = converted(objects, layout, "more")
    assert objects.image(done.image).layers[:2] == first.layers
    assert done.built == 1


def test_a_layer_that_stands_alone_is_reused_on_another_base(objects: Objects, images: Images) -> None:
    first = images.convert(objects, BASE, ALONE)
    layout = images.layout(OTHER, ALONE)
    remove_layer(layout, ALONE)
    other = objects.image(converted(objects, layout).image)
    assert other.layers[1] == first.layers[1]
    expected = {b"app": folder(), b"app/f": regular(b"copied"), b"etc": regular(b"another base")}
    assert merged_view(objects, other) == view(expected)
    assert objects.lookup("chain", chain_id(diff_id(OTHER), diff_id(ALONE))) == other.layers[1]


def test_a_layer_that_depends_on_others_is_built_again_on_another_base(objects: Objects, images: Images) -> None:
    first, other = images.convert(objects, BASE, IMPLYING), images.convert(objects, OTHER, IMPLYING)
    assert first.layers[1] != other.layers[1]
    assert merged_view(objects, first)[b"app"] == folder(0o711, twin=b"app")
    assert merged_view(objects, other)[b"app"] == folder(0o700, twin=b"app")


def test_a_bottom_layer_with_implied_directories_is_reused_at_the_bottom_only(objects: Objects, images: Images) -> None:
    first = images.convert(objects, IMPLYING)
    layout = images.layout(IMPLYING, ALONE)
    remove_layer(layout, IMPLYING)
    assert objects.image(converted(objects, layout).image).layers[0] == first.layers[0]
    assert images.convert(objects, BASE, IMPLYING).layers[1] != first.layers[0]


@pytest.mark.parametrize("compression", ["plain", "gzip", "gzip members", "zstd"])
def test_how_a_layer_was_compressed_does_not_matter(compression: str, objects: Objects, images: Images) -> None:
    first = images.convert(objects, BASE)
    layer = Layer(BASE, compression)  # type: ignore[arg-type]
    assert images.convert(objects, layer).layers == first.layers


def test_links_into_layers_that_were_not_built_now_are_read_from_the_store(objects: Objects, images: Images) -> None:
    images.convert(objects, BASE)
    linking = tar.archive(tar.hardlink(b"new", b"old"), tar.hardlink(b"etc2", b"etc"))
    image = images.convert(objects, BASE, linking)
    seen = merged_view(objects, image)
    assert seen[b"new"] == regular(b"old", twin=b"new")
    assert seen[b"old"] == regular(b"old", twin=b"new")
    assert seen[b"etc2"] == regular(b"base", twin=b"etc")


def test_a_layer_whose_descriptor_is_gone_is_built_again(objects: Objects, images: Images) -> None:
    layer = images.convert(objects, BASE).layers[0]
    for blob in list(objects.blobs.list("layers/")):
        objects.blobs.delete(blob.key)
    assert images.convert(objects, BASE).layers[0] == layer
    assert objects.has_layer(layer)


# -- what is repaired --------------------------------------------------------------------------------------------------


def stored_in(objects: Objects, family: str) -> list[str]:
    return [stat.key for stat in objects.blobs.list(family)]


def problems(objects: Objects, image: Digest) -> list[str]:
    reference = objects.references.read("demo")
    assert reference.image == image
    return check_image(objects, reference, deep=True).problems


@pytest.mark.parametrize("family", ["packs/", "maps/", "locators/", "metadata/"])
@pytest.mark.parametrize("cut", [False, True])
def test_what_was_lost_is_stored_by_converting_again(objects: Objects, images: Images, family: str, cut: bool) -> None:
    layout = images.layout(BASE, ALONE)
    image = converted(objects, layout).image
    for key in stored_in(objects, family):
        if cut and family != "metadata/":
            objects.blobs.put(key, objects.blobs.get(key)[:2])
        else:
            objects.blobs.delete(key)
    assert problems(objects, image)
    again = converted(objects, layout)
    assert (again.image, again.built) == (image, 2)
    assert problems(objects, image) == []
    assert converted(objects, layout).built == 0


def test_only_the_layer_that_lacks_something_is_built_again(objects: Objects, images: Images) -> None:
    layout = images.layout(BASE, ALONE)
    image = converted(objects, layout).image
    (blob,) = objects.layer(objects.image(image).layers[1]).blobs
    objects.blobs.delete(keys.locator(blob.name))
    remove_layer(layout, BASE)
    assert converted(objects, layout).built == 1
    assert problems(objects, image) == []


@pytest.mark.parametrize("family", ["packs/", "metadata/", "maps/", "layers/"])
def test_what_was_damaged_is_stored_by_converting_again_with_verify(
    objects: Objects, images: Images, family: str
) -> None:
    layout = images.layout(BASE, ALONE)
    image = converted(objects, layout).image
    for key in stored_in(objects, family):
        data = bytearray(objects.blobs.get(key))
        data[3] ^= 1
        objects.blobs.put(key, bytes(data))
    assert problems(objects, image)
    again = converted(objects, layout, verify=True)
    assert (again.image, again.built) == (image, 2)
    assert problems(objects, image) == []
    assert converted(objects, layout, verify=True).built == 0


# -- what a failure leaves ---------------------------------------------------------------------------------------------


def failing_from(number: int, fault: Fault) -> Plan:
    """Every write fails from the one with this number on."""
    writes = 0

    def plan(request: Request) -> Fault | None:
        nonlocal writes
        writes += request.operation is Operation.PUT
        return fault if writes > number else None

    return plan


def test_wherever_it_breaks_off_there_is_no_name_and_the_next_time_it_works(images: Images) -> None:
    layers = [BASE, IMPLYING]
    expected = images.convert(Objects(MemoryBlobs()), *layers)
    number = 0
    while True:
        memory = MemoryBlobs()
        try:
            images.convert(Objects(FaultBlobs(memory, failing_from(number, Fault.UNAVAILABLE))), *layers)
        except Unavailable:
            assert list(References(memory).names()) == []
            assert images.convert(Objects(memory), *layers) == expected
            number += 1
        else:
            break
    assert number > 20, "each of its writes was the first to fail once"


def test_a_name_that_was_there_stays_what_it_was(objects: Objects, images: Images) -> None:
    images.convert(objects, OTHER)
    before = objects.references.get("demo")
    broken = Objects(FaultBlobs(objects.blobs, failing_from(3, Fault.DENIED)))
    with pytest.raises(Denied):
        images.convert(broken, BASE)
    assert objects.references.get("demo") == before


def test_no_temporary_file_is_needed(
    objects: Objects, images: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    assert len(images.convert(objects, BASE, IMPLYING).layers) == 2


@pytest.mark.parametrize(
    ("layer", "error"),
    [
        (b"no tar" * 999, (Corrupt, "layer sha256:.*tar archive")),
        (tar.archive(tar.hardlink(b"h", b"nowhere")), (Invalid, "layer sha256:.*'h'")),
        (
            tar.archive(tar.long_path(b"n" * 256), tar.file(b"n")),
            (Invalid, "layer sha256:.*not a file name of 1 to 255 bytes"),
        ),
    ],
)
def test_errors_name_the_layer(
    layer: bytes, error: tuple[type[StoreError], str], objects: Objects, images: Images
) -> None:
    with pytest.raises(error[0], match=error[1]):
        images.convert(objects, BASE, layer)
    assert not list(objects.references.names())
    assert objects.lookup("diff", diff_id(BASE)), "what was stored before can be used"


def test_a_missing_blob_is_not_found(objects: Objects, images: Images) -> None:
    layout = images.layout(BASE)
    remove_layer(layout, BASE)
    with pytest.raises(NotFound):
        converted(objects, layout)


def test_a_bad_name_is_refused_before_anything_is_done(objects: Objects, images: Images) -> None:
    with pytest.raises(Invalid, match="not a name"):
        images.convert(objects, BASE, name="Not A Name")
    assert not list(objects.blobs.list(""))


# -- several at once ---------------------------------------------------------------------------------------------------


def test_two_conversions_of_one_image_at_once(objects: Objects, images: Images) -> None:
    layout = images.layout(BASE, IMPLYING, ALONE)
    together = threading.Barrier(4)
    found: list[Digest] = []

    def run(number: int) -> None:
        together.wait()
        found.append(converted(objects, layout, f"demo{number}").image)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert set(found) == {converted(Objects(MemoryBlobs()), layout).image}
    assert "app/f" in {path.decode() for path in merged_view(objects, objects.image(found[0]))}
