"""Ignore files: the rules one by one, and `git check-ignore` as the judge of random ones."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dsec_store.errors import Invalid
from dsec_store.inputs.ignore import FILE_SIZE_MAX, Ignore


def excluded(patterns: bytes, path: bytes) -> bool:
    """A path that ends in a slash is a directory."""
    return Ignore.parse(patterns, "test").excludes(path.rstrip(b"/"), path.endswith(b"/"))


@pytest.mark.parametrize(
    ("patterns", "inside", "outside"),
    [
        (b"f", [b"f", b"a/f", b"f/x"], [b"ff", b"a/ff"]),
        (b"# f\n\n\\#f\n", [b"#f"], [b"f", b" f"]),
        (b"*.c", [b".c", b"a.c", b"d/a.c"], [b"a.cc", b"c"]),
        (b"?", [b"a", b"\xff"], [b"ab", b"\xc3\xa4"]),
        (b"[a-c]x", [b"ax", b"cx"], [b"dx", b"x"]),
        (b"[!a-c]x\n[^q]y", [b"dx", b"ay"], [b"ax", b"qy"]),
        (b"[]-]x", [b"]x", b"-x"], [b"ax"]),
        (b"[[:digit:][:upper:]]", [b"1", b"Z"], [b"z", b"-"]),
        (b"[\\]]\n[\\-a]", [b"]", b"-", b"a"], [b"\\"]),
        (b"[ab\n*[", [], [b"a", b"[ab", b"x["]),
        (b"[[:nothing:]a]", [], [b"a"]),
        (b"/f", [b"f", b"f/x"], [b"a/f"]),
        (b"a/f", [b"a/f"], [b"b/a/f"]),
        (b"a*/f", [b"a/f", b"ab/f"], [b"a/b/f", b"f"]),
        (b"d/", [b"d/", b"a/d/", b"d/f"], [b"d", b"a/d"]),
        (b"/d/", [b"d/", b"d/f"], [b"d", b"a/d/"]),
        (b"**/f", [b"f", b"a/f", b"a/b/f"], [b"ff"]),
        (b"a/**", [b"a/f", b"a/b/f"], [b"a/", b"a"]),
        (b"a/**/f", [b"a/f", b"a/b/f", b"a/b/c/f"], [b"a/ff", b"b/a/f"]),
        (b"a**f", [b"af", b"abf"], [b"a/f"]),
        (b"x/a**f", [b"x/af", b"x/abf"], [b"x/a/f"]),
        (b"*.o\n!keep.o", [b"a.o"], [b"keep.o", b"d/keep.o"]),
        (b"d/\n!d/keep", [b"d/", b"d/keep"], []),
        (b"d/*\n!d/keep", [b"d/x"], [b"d/", b"d/keep"]),
        (b"\\!f", [b"!f"], [b"f"]),
        (b"f  \ng\\ ", [b"f", b"g "], [b"f  ", b"g"]),
        (b"f\t", [b"f\t"], [b"f"]),
        (b"f\r\ng\r", [b"f", b"g"], [b"f\r"]),
        (b"\xef\xbb\xbff", [b"f"], []),
        (b"f\\", [], [b"f", b"f\\"]),
        (b"/\n!\n//\n!/", [], [b"a", b"a/"]),
        (b"\xff*", [b"\xff", b"\xff\xfe"], [b"\xfe"]),
        (b"a\nb", [b"a", b"b"], [b"a\nb"]),
        (b"a?b", [b"a\nb"], []),
    ],
)
def test_rules(patterns: bytes, inside: list[bytes], outside: list[bytes]) -> None:
    assert [path for path in inside if not excluded(patterns, path)] == []
    assert [path for path in outside if excluded(patterns, path)] == []


def test_a_walk_that_skips_what_is_left_out_asks_for_one_path_only() -> None:
    ignore = Ignore.parse(b"d/\n", "test")
    assert ignore.excludes(b"d/f", False)
    assert not ignore.decides(b"d/f", False)
    assert ignore.decides(b"d", True)


@pytest.mark.parametrize("data", [b"a\0b", b"\n" * (FILE_SIZE_MAX + 1)])
def test_what_is_no_list_of_patterns_is_refused(data: bytes) -> None:
    with pytest.raises(Invalid, match="the file"):
        Ignore.parse(data, "the file")


# -- git ---------------------------------------------------------------------------------------------------------------

NAMES = [
    b"a",
    b"ab",
    b"b",
    b"a.b",
    b"-",
    b"]",
    b"\\",
    b"a b",
    b"a ",
    b"[a",
    b"!a",
    b"#a",
    b"\xff",
    b"A1",
    b"*",
    b"a\tb",
]
PATHS = [*NAMES, *(b"D/" + name for name in NAMES), b"D/E/a", b"D/E/b", b"D/E/a.b", b"D/E/F/a", b"a.d/a", b"ab.d/x/b"]
DIRECTORIES = [b"D/", b"D/E/", b"D/E/F/", b"a.d/", b"ab.d/", b"ab.d/x/"]

Judge = Callable[[bytes], set[bytes]]


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Judge:
    """What git ignores of PATHS and DIRECTORIES under given patterns."""
    git = shutil.which("git")
    if not git:
        pytest.skip("needs git")
    top = tmp_path_factory.mktemp("ignored")
    environment = {"PATH": os.environ["PATH"], "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1"}
    subprocess.run([git, "init", "-q", "--template=", top], check=True, env=environment)
    root = os.fsencode(top)
    for path in DIRECTORIES:
        os.makedirs(root + b"/" + path, exist_ok=True)
    for path in PATHS:
        Path(os.fsdecode(root + b"/" + path)).touch()
    (top / ".git" / "info").mkdir()
    command = [git, "-C", str(top), "check-ignore", "--no-index", "--stdin", "-z"]
    asked = b"".join(path.rstrip(b"/") + b"\0" for path in (*PATHS, *DIRECTORIES))

    def ask(patterns: bytes) -> set[bytes]:
        (top / ".git" / "info" / "exclude").write_bytes(patterns)
        result = subprocess.run(command, input=asked, stdout=subprocess.PIPE, check=False, env=environment)
        assert result.returncode in {0, 1}
        return set(result.stdout.split(b"\0")) - {b""}

    return ask


PIECES = [
    b"*",
    b"**",
    b"?",
    b"/",
    b"**/",
    b"/**",
    b"\\",
    b"[",
    b"]",
    b"!",
    b"^",
    b"-",
    b"[!",
    b"[:",
    b":]",
    b"[[:alpha:]]",
]
LETTERS = [
    b"a",
    b"b",
    b"D",
    b"E",
    b"F",
    b".",
    b"d",
    b" ",
    b"#",
    b"\xff",
    b"1",
    b"A",
    b"x",
    b"\t",
    b"\r",
    b"D/",
    b"[a-b]",
]
LINES = st.lists(st.sampled_from([*PIECES, *LETTERS]), max_size=7).map(b"".join)


@example([b"D**/a"])
@example([b"a\\/"])
@example([b"[]-a]"])
@example([b"[[:alpha:"])
@example([b"[a-"])
@example([b"[[:a]"])
@example([b"D/**\\/a"])
@example([b"\xef\xbb\xbfa"])
@example([b"D/*", b"!D/E", b"D/E/*", b"!D/E/a"])
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(LINES, min_size=1, max_size=4))
def test_git_says_the_same(judge: Judge, lines: list[bytes]) -> None:
    patterns = b"\n".join(lines)
    ignore = Ignore.parse(patterns, "test")
    ours = {path for path in PATHS if ignore.excludes(path, False)}
    ours |= {path[:-1] for path in DIRECTORIES if ignore.excludes(path[:-1], True)}
    assert ours == judge(patterns)
