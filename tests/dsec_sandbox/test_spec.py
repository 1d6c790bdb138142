"""Values and pure functions of a run's description."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec_sandbox.spec import RunConfig, absolute, command_of, merge_env, with_defaults
from dsec_store.descriptor import DEFAULT_PATH, Pairs
from dsec_store.errors import Invalid


@pytest.mark.parametrize(
    ("entrypoint", "cmd", "override", "args"),
    [
        ((), ("sh",), (), ("sh",)),
        (("env",), ("sh",), (), ("env", "sh")),
        (("env",), ("sh", "-l"), ("ls",), ("env", "ls")),
        (("env",), (), (), ("env",)),
    ],
)
def test_an_override_replaces_cmd_and_keeps_the_entrypoint(
    entrypoint: tuple[str, ...], cmd: tuple[str, ...], override: tuple[str, ...], args: tuple[str, ...]
) -> None:
    assert command_of(entrypoint, cmd, override) == args


def test_an_image_without_a_command_needs_one() -> None:
    with pytest.raises(Invalid, match="the image names no command"):
        command_of((), (), ())


def test_the_environment_is_merged_in_the_order_of_the_layers() -> None:
    base: Pairs = (("PATH", "/bin"), ("A", "base"), ("B", "base"))
    layers = [((("A", "one"), ("C", "one")), ("/one/x", "/one/y")), ((("C", "two"),), ("/two",))]
    assert merge_env(base, layers, (("B", "caller"), ("D", "caller"))) == (
        ("PATH", "/two:/one/x:/one/y:/bin"),
        ("A", "one"),
        ("B", "caller"),
        ("C", "two"),
        ("D", "caller"),
    )


def test_folders_are_put_in_front_of_the_default_path_and_of_a_layers_own() -> None:
    assert dict(merge_env((), [((), ("/opt/bin",))], ()))["PATH"] == f"/opt/bin:{DEFAULT_PATH}"
    assert dict(merge_env((), [((("PATH", "/own"),), ("/opt/bin",))], ()))["PATH"] == "/opt/bin:/own"
    assert dict(merge_env((("PATH", ""),), [((), ("/opt/bin",))], ()))["PATH"] == "/opt/bin"


def test_the_callers_path_is_final() -> None:
    assert dict(merge_env((), [((), ("/opt/bin",))], (("PATH", "/mine"),)))["PATH"] == "/mine"


def test_what_is_given_beats_the_defaults() -> None:
    assert dict(with_defaults((), "/root", False)) == {"PATH": DEFAULT_PATH, "HOME": "/root"}
    given_home = (("HOME", "/mine"), ("TERM", "dumb"))
    assert dict(with_defaults(given_home, "/root", True)) == {"PATH": DEFAULT_PATH, **dict(given_home)}
    assert dict(with_defaults((), "/", True))["TERM"] == "xterm"


@pytest.mark.parametrize(
    ("path", "clean"),
    [("", "/"), ("/", "/"), ("//", "/"), ("//a", "/a"), ("a/b", "/a/b"), ("/a/../../b/./", "/b"), ("/a//b", "/a/b")],
)
def test_a_working_directory_becomes_absolute(path: str, clean: str) -> None:
    assert absolute(path) == clean


@given(st.text())
def test_a_path_cannot_lead_above_the_root(path: str) -> None:
    clean = absolute(path)
    assert clean.startswith("/")
    assert ".." not in clean.split("/")
    assert absolute(clean) == clean


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"args": ()}, "no command"),
        ({"args": ("a\0b",)}, "argument 0 contains a NUL"),
        ({"args": ("sh", "\udcff")}, "argument 1 is not UTF-8"),
        ({"env": (("", "x"),)}, "environment variable ''"),
        ({"env": (("A=B", "x"),)}, "environment variable 'A=B'"),
        ({"env": (("A", "x\0"),)}, "'A' contains a NUL"),
        ({"workdir": "/a\0"}, "working directory contains"),
        ({"hostname": "h" * 65}, "longer than 64 bytes"),
    ],
)
def test_what_no_process_can_be_given_is_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(Invalid, match=text):
        RunConfig(**{"env": (), "args": ("true",), **fields})
