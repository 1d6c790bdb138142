"""Configs that are made: what is in them, and that the same image gives the same bytes."""

import json
from typing import Any

from dsec_registry.manifest import Platform, parse_config
from dsec_registry.ociconfig import environment, make_config
from dsec_store.descriptor import DEFAULT_PATH, Image, RunConfig
from dsec_store.digest import Digest

LAYERS = (Digest.of(b"1"), Digest.of(b"2"))
DIFF_IDS = (Digest.of(b"1", "sha256"), Digest.of(b"2", "sha256"))
WHOLE = RunConfig(
    env=(("B", "b"), ("A", "a=ü")),
    working_dir="/w",
    user="u:g",
    entrypoint=("sh", "-c"),
    cmd=("x y",),
    labels=(("k", "v"), ("l", "")),
    stop_signal="SIGINT",
    exposed_ports=("1/tcp", "80/udp"),
    volumes=("/v",),
)


def made(image: Image) -> bytes:
    return make_config(image, Platform("linux", "arm64", "v8"), DIFF_IDS)


def image(**fields: Any) -> Image:
    return Image("toolkit", LAYERS, **fields)


def test_a_run_config_is_read_back_as_it_was() -> None:
    parsed = parse_config(made(image(config=WHOLE)), "made", 2)
    assert (parsed.run, parsed.diff_ids, parsed.platform) == (WHOLE, DIFF_IDS, Platform("linux", "arm64", "v8"))
    assert [entry.created_by for entry in parsed.history] == [f"dsec-image: toolkit layer {layer}" for layer in LAYERS]
    assert not any(entry.empty_layer for entry in parsed.history)


def test_what_is_empty_is_left_out() -> None:
    document = json.loads(made(image()))
    assert document["config"] == {}
    assert sorted(document) == ["architecture", "config", "created", "history", "os", "rootfs", "variant"]


def test_the_bytes_are_canonical() -> None:
    data = made(image(config=WHOLE))
    assert data == json.dumps(json.loads(data), sort_keys=True, separators=(",", ":")).encode()
    assert data == made(image(config=WHOLE))


def test_variables_of_the_image_come_over_those_of_its_config() -> None:
    config = RunConfig(env=(("A", "1"), ("PATH", "/bin"), ("B", "2")))
    assert environment(image(config=config)) == config.env
    assert environment(image(config=config, env=(("B", "3"), ("C", "4")), path=("/x", "/y"))) == (
        ("A", "1"),
        ("PATH", "/x:/y:/bin"),
        ("B", "3"),
        ("C", "4"),
    )


def test_folders_are_put_in_front_of_the_usual_path() -> None:
    assert environment(image(path=("/x",))) == (("PATH", f"/x:{DEFAULT_PATH}"),)
    assert environment(image(config=RunConfig(env=(("PATH", ""),)), path=("/x",))) == (("PATH", "/x"),)
    assert environment(image(env=(("A", "1"),))) == (("A", "1"),)
