"""Layer descriptors and images: round trips, and hostile bytes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec_store.chunker import DEFAULT, ChunkerParameters
from dsec_store.descriptor import KINDS, Image, LayerDescriptor, Sized, parse_env
from dsec_store.digest import Digest
from dsec_store.document import MAX_NUMBER, encode
from dsec_store.errors import Invalid
from tests.dsec_store.blobmaker import damaged, unless_refused

SIZES = st.integers(0, MAX_NUMBER)
DIGESTS = st.builds(Digest, st.sampled_from(["blake3", "sha256"]), st.binary(min_size=32, max_size=32))
TEXTS = st.text(st.characters(exclude_characters="\0"))
LAYERS = st.builds(
    LayerDescriptor,
    metadata=st.builds(Sized, DIGESTS, SIZES),
    chunk_map=st.builds(Sized, DIGESTS, SIZES),
    blob_size=SIZES,
    inodes=SIZES,
    has_root=st.booleans(),
    chunker=st.builds(ChunkerParameters, st.text(), SIZES, SIZES, SIZES, SIZES),
    diff_id=st.none() | DIGESTS,
)
IMAGES = st.builds(
    Image,
    kind=st.sampled_from(KINDS),
    layers=st.lists(DIGESTS, max_size=3).map(tuple),
    config=st.none() | DIGESTS,
    manifest=st.none() | DIGESTS,
    platform=st.none() | st.text(),
    env=st.lists(st.tuples(TEXTS.filter(lambda key: key and "=" not in key), TEXTS), max_size=3).map(tuple),
    path=st.lists(st.text(), max_size=3).map(tuple),
    source_bytes=SIZES,
)

LAYER = LayerDescriptor(
    metadata=Sized(Digest.of(b"metadata"), 4096),
    chunk_map=Sized(Digest.of(b"chunk map"), 56),
    blob_size=8192,
    inodes=3,
    has_root=True,
    chunker=DEFAULT,
    diff_id=Digest.of(b"tar", "sha256"),
)
IMAGE = Image(
    kind="base",
    layers=(Digest.of(b"layer"),),
    config=Digest.of(b"{}", "sha256"),
    platform="linux/amd64",
    env=(("A", "1=2"), ("B", "")),
    path=("/opt/bin",),
    source_bytes=12,
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


HOSTILE = [None, True, -1, 2**63, 1.5, "", "x", [], [1], {}, {"digest": 1, "size": 1}, {"digest": "blake3:", "size": 1}]


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
    newer = {"format": 2, "anything": "else"}
    for decode in (LayerDescriptor.decode, Image.decode):
        with pytest.raises(Invalid, match=r"^it: format 2 .* upgrade dsec$"):
            decode(encode(newer), "it")


def test_layers_cut_by_another_chunker_are_read() -> None:
    layer = replace(LAYER, chunker=ChunkerParameters("rabin-2030", 1, 2, 3, 4))
    assert LayerDescriptor.decode(layer.encode(), "layer") == layer


def test_environment_entries() -> None:
    assert parse_env("A=b=c") == ("A", "b=c")
    assert parse_env("A=") == ("A", "")
    for entry in ("", "A", "=b", "A=b\0", "A=\udcff", "\udc80=b"):
        with pytest.raises(Invalid, match="NAME=VALUE"):
            parse_env(entry)
