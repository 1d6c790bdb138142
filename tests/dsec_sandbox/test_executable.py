"""Looking up programs from outside, and what is said about those that the kernel refuses."""

import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec_sandbox.executable import find_executable, interpreter_of, refusal
from dsec_sandbox.outcome import NotStartedError, Outcome
from dsec_sandbox.rootpath import RootPath

PATH = "/usr/bin:/bin"


def program(path: Path, content: bytes = b"", mode: int = 0o755) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    path.chmod(mode)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    program(tmp_path / "bin/tool")
    program(tmp_path / "usr/bin/tool", mode=0o644)
    program(tmp_path / "bin/data", mode=0o644)
    program(tmp_path / "srv/here")
    (tmp_path / "bin/folder").mkdir()
    (tmp_path / "bin/link").symlink_to("/bin/tool")
    (tmp_path / "bin/dangling").symlink_to("/nowhere")
    return tmp_path


@pytest.fixture
def inside(root: Path) -> Iterator[RootPath]:
    with RootPath(root) as inside:
        yield inside


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("tool", "/bin/tool"),  # the one in /usr/bin is passed over
        ("link", "/bin/link"),
        ("/bin/tool", "/bin/tool"),
        ("./here", "/srv/./here"),
        ("../bin/tool", "/srv/../bin/tool"),
    ],
)
def test_programs_are_found_as_execvp_does(inside: RootPath, name: str, found: str) -> None:
    assert find_executable(inside, name, PATH, "/srv") == found


def test_an_empty_part_of_path_is_the_working_directory(inside: RootPath) -> None:
    assert find_executable(inside, "here", "/bin:", "/srv") == "/srv/here"


def reason(inside: RootPath, name: str) -> Outcome:
    with pytest.raises(NotStartedError) as caught:
        find_executable(inside, name, PATH, "/srv")
    return caught.value.outcome


@pytest.mark.parametrize("name", ["nope", "", "dangling", "/nope", "./tool", "/bin/tool/below"])
def test_what_is_not_there_is_not_found(inside: RootPath, name: str) -> None:
    assert (reason(inside, name).kind, reason(inside, name).exit_code) == ("not-found", 127)


@pytest.mark.parametrize("name", ["data", "/bin/data", "folder", "/bin"])
def test_what_lacks_execute_bits_is_not_executable(inside: RootPath, name: str) -> None:
    assert (reason(inside, name).kind, reason(inside, name).exit_code) == ("not-executable", 126)


@pytest.mark.parametrize(
    ("head", "interpreter"),
    [
        (b"#!/bin/sh\n", "/bin/sh"),
        (b"#! /usr/bin/env python3\n", "/usr/bin/env"),
        (b"#!\t/bin/sh\t-e", "/bin/sh"),
        (b"#!\n", ""),
        (b"echo hello\n", ""),
        (b"", ""),
        (b"\x7fELF", ""),
        (b"\x7fELF\x02\x01" + bytes(200), ""),
    ],
)
def test_interpreters_of_scripts_and_fragments(head: bytes, interpreter: str) -> None:
    assert interpreter_of(head) == interpreter


def elf(bits: int, order: str, interpreter: bytes) -> bytes:
    """The smallest program with an interpreter: header, one program header, the name (elf(5))."""
    ident = b"\x7fELF" + bytes([bits // 32, 1 if order == "<" else 2, 1]) + bytes(9)
    if bits == 64:
        name_at = 64 + 56
        header = struct.pack(order + "HHIQQQIHHHHHH", 2, 62, 1, 0, 64, 0, 0, 64, 56, 1, 0, 0, 0)
        entry = struct.pack(order + "IIQQQQQQ", 3, 4, name_at, 0, 0, len(interpreter), len(interpreter), 1)
    else:
        name_at = 52 + 32
        header = struct.pack(order + "HHIIIIIHHHHHH", 2, 3, 1, 0, 52, 0, 0, 52, 32, 1, 0, 0, 0)
        entry = struct.pack(order + "IIIIIIII", 3, name_at, 0, 0, len(interpreter), len(interpreter), 4, 1)
    return ident + header + entry + interpreter


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("order", ["<", ">"])
def test_interpreters_of_elf_files(bits: int, order: str) -> None:
    assert interpreter_of(elf(bits, order, b"/lib/ld.so\0")) == "/lib/ld.so"


@given(st.binary(max_size=400))
def test_a_damaged_elf_file_has_no_interpreter_or_some(tail: bytes) -> None:
    for head in (tail, b"#!" + tail, b"\x7fELF" + tail):
        assert isinstance(interpreter_of(head), str)


def test_a_missing_interpreter_is_told_from_a_bad_format(root: Path, inside: RootPath) -> None:
    program(root / "bin/script", b"#!/opt/gone -x\n")
    program(root / "bin/chain", b"#!/bin/script\n")
    program(root / "bin/self", b"#!/bin/self\n")
    for name in ("script", "chain"):
        found = refusal(inside, f"/bin/{name}")
        assert (found.kind, found.exit_code) == ("not-found", 127)
        assert "interpreter /opt/gone does not exist" in found.text
    for name in ("tool", "self"):
        assert refusal(inside, f"/bin/{name}").kind == "not-executable"


@pytest.mark.skipif(not interpreter_of(Path("/bin/true").read_bytes()), reason="/bin/true is static here")
def test_a_real_program_names_its_loader(root: Path, inside: RootPath) -> None:
    shutil.copy("/bin/true", root / "bin/true")
    loader = interpreter_of(Path("/bin/true").read_bytes())
    assert Path(loader).exists()
    assert f"interpreter {loader} does not exist" in refusal(inside, "/bin/true").text
