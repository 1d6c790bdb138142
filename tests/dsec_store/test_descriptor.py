"""Layer descriptors and images: round trips, and hostile bytes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec_store.chunker import DEFAULT, ChunkerParameters
from dsec_store.descriptor import KINDS, Blob, Image, LayerDescriptor, RunConfig, Sized, parse_env
from dsec_store.digest import Digest
from dsec_store.document import MAX_NUMBER, encode
from dsec_store.errors import Corrupt, Invalid
from tests.dsec_store.blobmaker import damaged, unless_refused

SIZES = st.integers(0, MAX_NUMBER)
DIGESTS = st.builds(Digest, st.sampled_from(["blake3", "sha256"]), st.binary(min_size=32, max_size=32))
TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
STRINGS = st.lists(st.text(), max_size=3).map(tuple)
PAIRS = st.lists(st.tuples(TEXTS.filter(lambda key: key and "=" not in key), TEXTS), max_size=3).map(tuple)
SIZED = st.builds(Sized, DIGESTS, SIZES)
BLOBS = st.builds(Blob, SIZED, SIZES)
LAYERS = st.builds(
    LayerDescriptor,
    metadata=SIZED,
    blobs=st.lists(BLOBS, max_size=3).map(tuple),
    inodes=SIZES,
    has_root=st.booleans(),
    chunker=st.none() | st.builds(ChunkerParameters, st.text(), SIZES, SIZES, SIZES, SIZES),
    diff_id=st.none() | DIGESTS,
    recipe=st.none() | BLOBS,
    run=st.lists(DIGESTS, max_size=3).map(tuple),
)
RUN_CONFIGS = st.builds(
    RunConfig,
    env=PAIRS,
    working_dir=st.text(),
    user=st.text(),
    entrypoint=STRINGS,
    cmd=STRINGS,
    labels=PAIRS,
    stop_signal=st.text(),
    exposed_ports=STRINGS,
    volumes=STRINGS,
)
IMAGES = st.builds(
    Image,
    kind=st.sampled_from(KINDS),
    layers=st.lists(DIGESTS, max_size=3).map(tuple),
    lowers=st.lists(DIGESTS, max_size=3).map(tuple),
    platform=st.none() | st.text(),
    config=RUN_CONFIGS,
    env=PAIRS,
    path=STRINGS,
)

LAYER = LayerDescriptor(
    metadata=Sized(Digest.of(b"metadata"), 4096),
    blobs=(Blob(Sized(Digest.of(b"chunk map"), 56), 8192), Blob(Sized(Digest.of(b"another"), 92), 4096)),
    inodes=3,
    has_root=True,
    chunker=DEFAULT,
    diff_id=Digest.of(b"tar", "sha256"),
    recipe=Blob(Sized(Digest.of(b"recipe"), 56), 5),
    run=(Digest.of(b"lower"), Digest.of(b"upper")),
)
IMAGE = Image(
    kind="base",
    layers=(Digest.of(b"layer"),),
    lowers=(Digest.of(b"run"),),
    platform="linux/amd64",
    config=RunConfig(
        env=(("PATH", "/bin"), ("A", "")),
        working_dir="/work",
        user="app",
        entrypoint=("/init",),
        cmd=("run", "it"),
        labels=(("a", "1=2"), ("b", "")),
        stop_signal="SIGINT",
        exposed_ports=("53/udp", "80/tcp"),
        volumes=("/data",),
    ),
    env=(("A", "1=2"), ("B", "")),
    path=("/opt/bin",),
)


@given(LAYERS)
def test_layers_are_read_back(layer: LayerDescriptor) -> None:
    assert LayerDescriptor.decode(layer.encode(), "layer") == layer


@given(IMAGES)
def test_images_are_read_back(image: Image) -> None:
    assert Image.decode(image.encode(), "image") == image


@given(damaged(LAYER.encode()))
def test_a_damaged_layer(data: bytes) -> None:
    layer = unless_refused(lambda: LayerDescriptor.decode(data, "layer"))
    assert layer is None or LayerDescriptor.decode(layer.encode(), "layer") == layer


@given(damaged(IMAGE.encode()))
def test_a_damaged_image(data: bytes) -> None:
    image = unless_refused(lambda: Image.decode(data, "image"))
    assert image is None or Image.decode(image.encode(), "image") == image


HOSTILE: list[object] = [
    *(None, True, -1, 2**63, 1.5, "", "x", [], [1], [[]], [{}], ["="], {}),
    *({"digest": 1, "size": 1}, {"digest": "blake3:", "size": 1}),
]


@pytest.mark.parametrize("field", sorted(json.loads(LAYER.encode())))
@pytest.mark.parametrize("value", HOSTILE)
def test_no_field_of_a_layer_leads_to_another_error(field: str, value: object) -> None:
    changed = encode({**json.loads(LAYER.encode()), field: value})
    layer = unless_refused(lambda: LayerDescriptor.decode(changed, "layer"))
    assert layer is None or json.loads(layer.encode())[field] == value


@pytest.mark.parametrize("field", sorted(json.loads(IMAGE.encode())))
@pytest.mark.parametrize("value", HOSTILE)
def test_no_field_of_an_image_leads_to_another_error(field: str, value: object) -> None:
    changed = encode({**json.loads(IMAGE.encode()), field: value})
    image = unless_refused(lambda: Image.decode(changed, "image"))
    assert image is None or json.loads(image.encode())[field] == value


def test_another_release_says_what_to_do() -> None:
    for form in (1, 3):
        for decode in (LayerDescriptor.decode, Image.decode):
            with pytest.raises(Invalid, match=rf"^it: format {form} .* upgrade dsec$"):
                decode(encode({"format": form, "anything": "else"}), "it")


def without(document: bytes, *way: str | int) -> bytes:
    """The document, less the field to which the way leads."""
    whole = json.loads(document)
    place = whole
    for step in way[:-1]:
        place = place[step]
    del place[way[-1]]
    return encode(whole)


@pytest.mark.parametrize(
    "way",
    [
        *(("metadata",), ("blobs",), ("inodes",), ("has_root",), ("run",)),
        *(("blobs", 1, "chunk_map"), ("blobs", 1, "size"), ("blobs", 1, "chunk_map", "size")),
        *(("recipe", "chunk_map"), ("recipe", "size"), ("chunker", "name"), ("chunker", "solo")),
    ],
)
def test_a_layer_without_a_field_is_corrupt(way: tuple[str | int, ...]) -> None:
    with pytest.raises(Corrupt, match=rf"^layer\b.*: field '{way[-1]}' is not of type"):
        LayerDescriptor.decode(without(LAYER.encode(), *way), "layer")


@pytest.mark.parametrize(
    "way",
    [
        *(("kind",), ("layers",), ("lowers",), ("config",), ("env",), ("path",)),
        *(("config", field) for field in sorted(RunConfig().as_json())),
    ],
)
def test_an_image_without_a_field_is_corrupt(way: tuple[str | int, ...]) -> None:
    with pytest.raises(Corrupt, match=rf"^image\b.*: field '{way[-1]}' is not of type"):
        Image.decode(without(IMAGE.encode(), *way), "image")


@pytest.mark.parametrize(("field", "value"), [("env", ["A"]), ("env", ["=b"]), ("labels", ["a=\0"]), ("cmd", [1])])
def test_a_run_config_that_cannot_be_is_corrupt(field: str, value: object) -> None:
    image = json.loads(IMAGE.encode())
    image["config"][field] = value
    with pytest.raises(Corrupt, match=r"^image\b"):
        Image.decode(encode(image), "image")


def test_what_may_be_absent_is_none() -> None:
    data = LAYER.encode()
    for field in ("chunker", "diff_id", "recipe"):
        data = without(data, field)
    assert LayerDescriptor.decode(data, "layer") == replace(LAYER, chunker=None, diff_id=None, recipe=None)
    assert Image.decode(without(IMAGE.encode(), "platform"), "image") == replace(IMAGE, platform=None)


def test_a_blob_has_the_name_of_its_chunk_map() -> None:
    assert [blob.name for blob in LAYER.blobs] == [Digest.of(b"chunk map"), Digest.of(b"another")]


def test_the_recipe_is_stored_and_is_no_device() -> None:
    assert LAYER.recipe is not None
    assert LAYER.stored_blobs == (*LAYER.blobs, LAYER.recipe)
    assert replace(LAYER, recipe=None).stored_blobs == LAYER.blobs


def test_the_order_of_blobs_counts() -> None:
    """It is that of the device table."""
    turned = replace(LAYER, blobs=LAYER.blobs[::-1])
    assert LayerDescriptor.decode(turned.encode(), "layer") == turned != LAYER


def test_collapsed_runs_are_mounted_in_place_of_the_layers() -> None:
    assert IMAGE.mounted == IMAGE.lowers
    assert replace(IMAGE, lowers=()).mounted == IMAGE.layers


def test_layers_cut_by_another_chunker_are_read() -> None:
    layer = replace(LAYER, chunker=ChunkerParameters("rabin-2030", 1, 2, 3, 4))
    assert LayerDescriptor.decode(layer.encode(), "layer") == layer


def test_environment_entries() -> None:
    assert parse_env("A=b=c") == ("A", "b=c")
    assert parse_env("A=") == ("A", "")
    for entry in ("", "A", "=b", "A=b\0", "A=\udcff", "\udc80=b"):
        with pytest.raises(Invalid, match="NAME=VALUE"):
            parse_env(entry)
