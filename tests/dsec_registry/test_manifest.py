"""Manifests, indexes and configs from anybody: read as the specification says, refused with the field's name."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec_registry.manifest import (
    CONFIG_MEDIA_TYPES,
    LAYER_MEDIA_TYPES,
    MAX_MANIFEST_SIZE,
    Descriptor,
    History,
    ImageConfig,
    Index,
    Platform,
    choose,
    host_platform,
    parse_config,
    parse_index,
    parse_layout,
    parse_manifest,
)
from dsec_store.descriptor import RunConfig
from dsec_store.digest import Digest
from dsec_store.errors import Corrupt, Invalid, NotFound, StoreError
from tests.ocimaker import CONFIG, INDEX, LAYER, MANIFEST, Json

NAME = "sha256:" + "a" * 64
ABSENT = object()


def descriptor_json(media_type: str, digit: str = "1", **fields: Any) -> Json:
    return {"mediaType": media_type, "digest": "sha256:" + digit * 64, "size": 3, **fields}


MANIFEST_JSON: Json = {
    "schemaVersion": 2,
    "mediaType": MANIFEST,
    "config": descriptor_json(CONFIG),
    "layers": [descriptor_json(LAYER + "+gzip", "2"), descriptor_json(LAYER, "3", annotations={"k": "v"})],
    "annotations": {"anything": "at all"},
}
INDEX_JSON: Json = {
    "schemaVersion": 2,
    "manifests": [
        descriptor_json(MANIFEST, "4", platform={"os": "linux", "architecture": "arm64", "variant": "v8"}),
        descriptor_json(MANIFEST, "5", platform={"os": "linux", "architecture": "amd64"}),
        descriptor_json(INDEX, "6"),
    ],
}
CONFIG_JSON: Json = {
    "architecture": "amd64",
    "os": "linux",
    "config": {
        "Env": ["PATH=/usr/bin:/bin", "A=1=2", "EMPTY=", "ALONE", "=nameless", "A=again"],
        "WorkingDir": "/work",
        "User": "app:users",
        "Entrypoint": ["/init"],
        "Cmd": ["run", "it"],
        "Labels": {"two": "2=2", "one": "1", "": "nameless", "a=b": "?"},
        "StopSignal": "SIGINT",
        "ExposedPorts": {"80/tcp": {}, "53/udp": {}},
        "Volumes": {"/data": {}, "/cache": {}},
    },
    "rootfs": {"type": "layers", "diff_ids": ["sha256:" + "7" * 64, "sha256:" + "7" * 64]},
    "history": [{"created_by": "COPY", "created": "2024-01-01T00:00:00Z"}, {"created_by": "ENV", "empty_layer": True}],
}


def encoded(value: object) -> bytes:
    return json.dumps(value).encode()


def changed(value: Json, path: str, replacement: object) -> bytes:
    """The document with the field at `path` ("layers.0.size") replaced, or left out with `ABSENT`."""
    copy: Any = json.loads(encoded(value))
    *way, last = (int(step) if step.isdigit() else step for step in path.split("."))
    target = copy
    for step in way:
        target = target[step]
    if replacement is ABSENT:
        del target[last]
    else:
        target[last] = replacement
    return encoded(copy)


def parse_config_of_two(data: bytes, name: str) -> ImageConfig:
    return parse_config(data, name, layers=2)


# Platforms


@pytest.mark.parametrize("text", ["linux/amd64", "linux/arm64/v8", "linux/arm/v7", "windows/amd64"])
def test_a_platform_reads_as_it_is_written(text: str) -> None:
    assert str(Platform.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "platform"),
    [
        ("Linux/X86_64", Platform("linux", "amd64")),
        ("linux/aarch64", Platform("linux", "arm64")),
        ("linux/armv7l", Platform("linux", "arm", "v7")),
        ("linux/armhf/v6", Platform("linux", "arm", "v6")),
        ("linux/riscv64", Platform("linux", "riscv64")),
    ],
)
def test_names_of_uname_are_understood(text: str, platform: Platform) -> None:
    assert Platform.parse(text) == platform


@pytest.mark.parametrize("text", ["", "linux", "linux/", "/amd64", "linux/arm/v7/x", "linux/a\nb", "linux/x/", "a b/c"])
def test_what_is_no_platform_is_refused_on_one_line(text: str) -> None:
    with pytest.raises(Invalid, match="expected os/architecture") as error:
        Platform.parse(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("ours", "offered", "runs"),
    [
        ("linux/amd64", "linux/amd64", True),
        ("linux/amd64", "linux/arm64", False),
        ("linux/amd64", "windows/amd64", False),
        ("linux/amd64", "linux/386", False),
        ("linux/arm64", "linux/arm64/v8", True),
        ("linux/arm64/v8", "linux/arm64", True),
        ("linux/arm64", "linux/arm64/v9", False),
        ("linux/arm64/v8.2", "linux/arm64/v8.1", True),
        ("linux/amd64/v3", "linux/amd64/v2", True),
        ("linux/amd64", "linux/amd64/v3", False),
        ("linux/arm", "linux/arm/v7", True),
        ("linux/arm", "linux/arm/v6", True),
        ("linux/arm/v6", "linux/arm/v7", False),
        ("linux/arm/7", "linux/arm/v7", True),
        ("linux/mips/softfloat", "linux/mips/softfloat", True),
        ("linux/mips/softfloat", "linux/mips/hardfloat", False),
        ("linux/mips/softfloat", "linux/mips", True),
    ],
)
def test_a_machine_runs_its_own_variant_and_older_ones(ours: str, offered: str, runs: bool) -> None:
    assert Platform.parse(ours).matches(Platform.parse(offered)) is runs


def test_the_host_runs_what_is_built_for_it() -> None:
    assert host_platform().os == "linux"
    assert host_platform().matches(host_platform())


# Choosing


def an_image(digit: str, platform: str | None, **annotations: str) -> Descriptor:
    digest = Digest.parse("sha256:" + digit * 64)
    return Descriptor(MANIFEST, digest, 3, Platform.parse(platform) if platform else None, annotations)


ATTESTATION = an_image("e", "unknown/unknown", **{"vnd.docker.reference.type": "attestation-manifest"})


@pytest.mark.parametrize(
    ("offered", "wanted", "position"),
    [
        (["linux/amd64", "linux/arm64/v8"], "linux/amd64", 0),
        (["linux/amd64", "linux/arm64/v8"], "linux/arm64", 1),
        (["linux/arm/v5", "linux/arm/v7", "linux/arm/v6"], "linux/arm", 1),
        (["linux/arm/v5", "linux/arm/v7", "linux/arm/v6"], "linux/arm/v6", 2),
        (["linux/amd64/v3", "linux/amd64", "linux/amd64/v2"], "linux/amd64/v2", 2),
        (["linux/amd64", "linux/amd64"], "linux/amd64", 0),
        ([None, "linux/amd64"], "linux/amd64", 1),
        ([None, "linux/arm64"], "linux/amd64", 0),
    ],
)
@pytest.mark.parametrize("attestation_first", [True, False])
def test_the_best_platform_is_chosen(
    offered: list[str | None], wanted: str, position: int, attestation_first: bool
) -> None:
    images = [an_image(str(i), platform) for i, platform in enumerate(offered)]
    index = Index((ATTESTATION, *images) if attestation_first else (*images, ATTESTATION))
    assert choose(index, Platform.parse(wanted)) is images[position]


def test_an_absent_platform_lists_those_that_exist() -> None:
    index = Index((an_image("1", "linux/arm64/v8"), ATTESTATION, an_image("2", "linux/amd64")))
    with pytest.raises(NotFound, match=r"^x: no image for linux/s390x \(there are: linux/amd64, linux/arm64/v8\)$"):
        choose(index, Platform.parse("linux/s390x"), "x")


@pytest.mark.parametrize(
    "entry",
    [
        an_image("1", "unknown/unknown"),
        an_image("1", "linux/amd64", **{"vnd.docker.reference.type": "attestation-manifest"}),
        Descriptor("application/vnd.example.thing", Digest.parse("sha256:" + "1" * 64), 3),
    ],
    ids=["unknown platform", "annotation", "unknown media type"],
)
def test_what_is_no_image_is_never_chosen(entry: Descriptor) -> None:
    with pytest.raises(NotFound, match="there are: none"):
        choose(Index((entry,)), Platform.parse("linux/amd64"))


# Documents


def test_a_manifest_gives_config_and_layers_in_order() -> None:
    manifest = parse_manifest(encoded(MANIFEST_JSON), NAME)
    assert manifest.config == Descriptor(CONFIG, Digest.parse("sha256:" + "1" * 64), 3)
    assert [layer.digest.hex[0] for layer in manifest.layers] == ["2", "3"]
    assert manifest.layers[1].annotations == {"k": "v"}


def test_an_index_gives_its_entries_in_order() -> None:
    entries = parse_index(encoded(INDEX_JSON), NAME).manifests
    assert [str(entry.platform) for entry in entries] == ["linux/arm64/v8", "linux/amd64", "None"]
    assert [entry.is_index for entry in entries] == [False, False, True]


def test_a_config_gives_all_that_starts_a_process() -> None:
    config = parse_config_of_two(encoded(CONFIG_JSON), NAME)
    assert config.platform == Platform("linux", "amd64")
    assert [diff_id.hex for diff_id in config.diff_ids] == ["7" * 64] * 2
    assert config.run == RunConfig(
        env=(("PATH", "/usr/bin:/bin"), ("A", "1=2"), ("EMPTY", ""), ("ALONE", ""), ("A", "again")),
        working_dir="/work",
        user="app:users",
        entrypoint=("/init",),
        cmd=("run", "it"),
        labels=(("one", "1"), ("two", "2=2")),
        stop_signal="SIGINT",
        exposed_ports=("53/udp", "80/tcp"),
        volumes=("/cache", "/data"),
    )
    assert config.history == (History("2024-01-01T00:00:00Z", "COPY", False), History("", "ENV", True))


@pytest.mark.parametrize("nothing", [ABSENT, None])
@pytest.mark.parametrize(
    "path", ["history", "config", "config.Env", "config.Labels", "config.ExposedPorts", "config.Volumes", "os"]
)
def test_absent_and_null_are_the_same_in_a_config(path: str, nothing: object) -> None:
    parse_config_of_two(changed(CONFIG_JSON, path, nothing), NAME)


def test_docker_manifests_are_read_too() -> None:
    docker = "application/vnd.docker."
    manifest = {
        "schemaVersion": 2,
        "mediaType": docker + "distribution.manifest.v2+json",
        "config": descriptor_json(docker + "container.image.v1+json"),
        "layers": [descriptor_json(docker + "image.rootfs.diff.tar.gzip")],
    }
    assert len(parse_manifest(encoded(manifest), NAME).layers) == 1
    index = {"schemaVersion": 2, "mediaType": docker + "distribution.manifest.list.v2+json", "manifests": []}
    assert parse_index(encoded(index), NAME) == Index(())


@pytest.mark.parametrize("media_type", sorted(LAYER_MEDIA_TYPES))
def test_layers_that_are_a_tar_are_accepted(media_type: str) -> None:
    parse_manifest(changed(MANIFEST_JSON, "layers.0.mediaType", media_type), NAME)


@pytest.mark.parametrize("media_type", ["application/vnd.in-toto+json", LAYER + "+gzip+encrypted", ""])
def test_another_layer_is_refused_with_those_that_are_accepted(media_type: str) -> None:
    with pytest.raises(Invalid) as error:
        parse_manifest(changed(MANIFEST_JSON, "layers.1.mediaType", media_type), NAME)
    assert f"{NAME}: layers[1].mediaType: {media_type!r} is not supported" in str(error.value)
    assert all(accepted in str(error.value) for accepted in LAYER_MEDIA_TYPES)


def test_something_else_than_an_image_is_refused() -> None:
    with pytest.raises(Invalid, match=r"config\.mediaType") as error:
        parse_manifest(changed(MANIFEST_JSON, "config.mediaType", "application/vnd.cncf.helm.config.v1+json"), NAME)
    assert all(accepted in str(error.value) for accepted in CONFIG_MEDIA_TYPES)


def test_unknown_and_repeated_fields_are_ignored() -> None:
    text = encoded({**MANIFEST_JSON, "subject": 7, "unknown": [None]}).decode()
    repeated = text.replace('"schemaVersion": 2', '"schemaVersion": 2, "schemaVersion": 2')
    assert parse_manifest(repeated.encode(), NAME) == parse_manifest(encoded(MANIFEST_JSON), NAME)


def test_a_document_that_is_manifest_and_index_is_refused() -> None:
    with pytest.raises(Invalid, match="both"):
        parse_manifest(encoded({**INDEX_JSON, **MANIFEST_JSON}), NAME)
    with pytest.raises(Invalid, match="both"):
        parse_index(encoded({**MANIFEST_JSON, **INDEX_JSON, "mediaType": INDEX}), NAME)
    with pytest.raises(Invalid, match="mediaType"):
        parse_manifest(changed(MANIFEST_JSON, "mediaType", INDEX), NAME)


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_every_layer_has_one_diff_id(layers: int) -> None:
    with pytest.raises(Corrupt, match=rf"^config {NAME}: rootfs\.diff_ids: there are 2 for the {layers} layers"):
        parse_config(encoded(CONFIG_JSON), NAME, layers)


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ("schemaVersion", ABSENT, "schemaVersion: missing"),
        ("schemaVersion", "2", "schemaVersion: a whole number expected"),
        ("schemaVersion", True, "schemaVersion: a whole number expected"),
        ("config", ABSENT, "config.mediaType: missing"),
        ("config", [], "config: an object expected"),
        ("layers", {}, "layers: an array expected"),
        ("layers.1", "x", "layers[1]: an object expected"),
        ("layers.1.size", -1, "layers[1].size: negative"),
        ("layers.1.size", 2**63, "layers[1].size: more than 63 bits"),
        ("layers.1.size", 3.0, "layers[1].size: a whole number expected"),
        ("layers.1.digest", None, "layers[1].digest: missing"),
        ("layers.1.digest", "sha256:../../../etc/passwd", "layers[1].digest: not a digest: "),
        ("layers.1.digest", "sha256:" + "A" * 64, "layers[1].digest: not a digest: "),
        ("layers.1.annotations", {"k": 1}, "layers[1].annotations: a text expected"),
        ("layers.1.annotations", {"k": "\0"}, "layers[1].annotations: holds a character"),
        ("layers.1.mediaType", "\ud800", "layers[1].mediaType: holds a character"),
        ("layers.1.platform", {"os": "li\nnux", "architecture": "x"}, "layers[1].platform: not a platform"),
    ],
)
def test_a_malformed_field_is_named(path: str, value: object, text: str) -> None:
    with pytest.raises(Corrupt) as error:
        parse_manifest(changed(MANIFEST_JSON, path, value), NAME)
    assert str(error.value).startswith(f"manifest {NAME}: {text}")


@pytest.mark.parametrize(
    ("parse", "data", "text"),
    [
        (parse_manifest, changed(MANIFEST_JSON, "schemaVersion", 1), "schemaVersion: 1 is not supported"),
        (parse_manifest, changed(MANIFEST_JSON, "layers.0.digest", "sha512:" + "1" * 128), "sha512"),
        (parse_manifest, changed(MANIFEST_JSON, "layers.0.digest", "blake3:" + "1" * 64), "blake3"),
        (parse_manifest, b" " * (MAX_MANIFEST_SIZE + 1), "more than the 4194304 allowed"),
        (parse_layout, b'{"imageLayoutVersion": "2.0.0"}', "imageLayoutVersion: '2.0.0' is not supported"),
        (parse_config_of_two, changed(CONFIG_JSON, "rootfs.type", "cow"), "rootfs.type: 'cow' is not supported"),
    ],
)
def test_what_is_well_formed_but_not_for_us_is_invalid(
    parse: Callable[[bytes, str], object], data: bytes, text: str
) -> None:
    with pytest.raises(Invalid) as error:
        parse(data, NAME)
    assert text in str(error.value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"7",
        b"{",
        b"\xff\xfe{}",
        b'{"schemaVersion": NaN}',
        b'{"schemaVersion": -Infinity}',
        b'{"a": "\xff"}',
        b'{"schemaVersion": ' + b"9" * 5000 + b"}",
        b'{"a":' * 100_000,
        b"[" * 1_000_000,
    ],
    ids=lambda data: repr(data[:20]),
)
def test_what_is_no_json_object_is_corrupt(data: bytes) -> None:
    for parse in (parse_manifest, parse_index, parse_layout):
        with pytest.raises(Corrupt, match="not "):
            parse(data, NAME)


# Mutations

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("sha256:" + "1" * 64),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=4), values, max_size=3),
    max_leaves=6,
)


def mutate(draw: st.DrawFn, value: Any) -> Any:
    """`value` with something in it, at any depth, replaced, left out or repeated."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    if not keys or draw(st.integers(0, 3)) == 0:
        return draw(JSON_VALUES)
    key = draw(st.sampled_from(keys))
    copy: Any = value.copy()
    if draw(st.integers(0, 4)) == 0:
        del copy[key]
    else:
        copy[key] = mutate(draw, value[key])
    return copy


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    value: Any = draw(st.sampled_from([MANIFEST_JSON, INDEX_JSON, CONFIG_JSON]))
    for _ in range(draw(st.integers(1, 3))):
        value = mutate(draw, value)
    return encoded(value)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A document with some bytes replaced by others."""
    data = encoded(draw(st.sampled_from([MANIFEST_JSON, INDEX_JSON, CONFIG_JSON])))
    at = draw(st.integers(0, len(data)))
    return data[:at] + draw(st.binary(max_size=4)) + data[at + draw(st.integers(0, 4)) :]


@given(mutated() | damaged())
def test_no_document_raises_anything_but_our_errors_on_one_line(data: bytes) -> None:
    for parse in (parse_manifest, parse_index, parse_layout, parse_config_of_two):
        text = NAME
        try:
            parse(data, NAME)
        except StoreError as error:
            text = str(error)
        assert NAME in text
        assert text.isprintable()
