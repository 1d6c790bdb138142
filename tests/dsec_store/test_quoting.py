"""Names of files as text: reversible, and harmless on a terminal."""

from __future__ import annotations

import json
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec_store.errors import Invalid
from dsec_store.quoting import escaped, shell_quoted, unescaped

NAMES = st.one_of(st.binary(max_size=40), st.text(max_size=40).map(lambda text: text.encode("utf-8", "surrogatepass")))


@given(NAMES)
def test_escaping_is_reversible(name: bytes) -> None:
    """And any reader of JSON takes it: there are no lone surrogates."""
    document = json.dumps(escaped(name), ensure_ascii=False).encode("utf-8")
    assert unescaped(json.loads(document)) == name


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (b"plain", "plain"),
        ("grün".encode(), "grün"),
        (b"gr\xfcn", "gr\\xfcn"),
        (b"dev-disk\\x2d1", "dev-disk\\\\x2d1"),
        (b"a\nb\0", "a\nb\0"),
        (b"\xed\xb2\x80", "\\xed\\xb2\\x80"),
    ],
)
def test_escaped_names(name: bytes, text: str) -> None:
    assert escaped(name) == text
    assert unescaped(text) == name


@pytest.mark.parametrize("text", ["\\", "a\\b", "\\x", "\\x1", "\\xFF", "\\\\\\", "\udc80"])
def test_what_is_no_escaped_name(text: str) -> None:
    with pytest.raises(Invalid, match="not an escaped name"):
        unescaped(text)


@given(st.lists(st.binary(min_size=1, max_size=30).filter(lambda name: 0 not in name), min_size=1, max_size=30))
def test_a_terminal_obeys_nothing_and_a_shell_gives_the_name_back(names: list[bytes]) -> None:
    quoted = [shell_quoted(name) for name in names]
    assert all(text.isprintable() for text in quoted)
    command = "printf '%s\\0' -- " + " ".join(quoted)
    answer = subprocess.run(["bash", "-c", command.encode()], capture_output=True, check=True).stdout
    assert answer.split(b"\0")[1:-1] == names


@pytest.mark.parametrize(
    ("name", "text"),
    [(b"", "''"), (b"a b", "'a b'"), (b"a'b", "'a'\\''b'"), (b"\x1b[31m", "$'\\033''[31m'"), (b"a\n", "'a'$'\\n'")],
)
def test_quoted_names(name: bytes, text: str) -> None:
    assert shell_quoted(name) == text
