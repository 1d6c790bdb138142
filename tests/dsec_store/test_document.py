"""JSON objects of the store: one way to write a value, strict reading."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec_store.digest import Digest
from dsec_store.document import MAX_NUMBER, Document, Fields, encode
from dsec_store.errors import Corrupt, Invalid

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(), VALUES, max_size=4)

DIGEST = Digest.of(b"abc", "sha256")


def document(**fields: Any) -> Document:
    return Document(encode({"format": 1, **fields}), "thing", form=1)


@given(OBJECTS)
def test_encoded_bytes_are_the_value_in_ascii(value: dict[str, Any]) -> None:
    data = encode(value)
    assert json.loads(data) == value
    assert data.isascii()


@given(OBJECTS)
def test_the_order_of_fields_does_not_matter(value: dict[str, Any]) -> None:
    assert encode(dict(reversed(value.items()))) == encode(value)


def test_canonical_form() -> None:
    assert encode({"b": ["ä", 1], "a": {"y": None, "x": True}}) == b'{"a":{"x":true,"y":null},"b":["\\u00e4",1]}'
    with pytest.raises(ValueError, match="JSON"):
        encode({"ratio": float("nan")})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b'{"format":1}x',
        b"[1]",
        b"null",
        b"1",
        b'"format"',
        b"[" * 100_000,
        b'{"format":' + b"9" * 10_000 + b"}",
        b'{"format":true}',
        b'{"format":1.0}',
        b'{"format":"1"}',
        b'{"format":null}',
        b"{}",
    ],
)
def test_what_is_no_document_is_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt, match=r"^thing: "):
        Document(data, "thing", form=1)


@given(st.binary())
def test_no_other_error(data: bytes) -> None:
    with pytest.raises((Corrupt, Invalid)):
        Document(data, "thing", form=1)


@pytest.mark.parametrize("found", [0, 2, -1, 10**30])
def test_another_format_says_what_to_do(found: int) -> None:
    with pytest.raises(Invalid, match=rf"^thing: format {found} is not the one .* \(1\); upgrade dsec$"):
        Document(encode({"format": found}), "thing", form=1)


Take = Callable[[Fields], object]

TAKERS: dict[str, Take] = {
    "text": lambda fields: fields.take("x", str),
    "flag": lambda fields: fields.take("x", bool),
    "number": lambda fields: fields.number("x"),
    "digest": lambda fields: fields.digest("x"),
    "strings": lambda fields: fields.strings("x"),
    "digests": lambda fields: fields.digests("x"),
    "object": lambda fields: fields.object("x"),
}

WHO_TAKES: list[tuple[Any, set[str]]] = [
    (None, set()),
    ("", {"text"}),
    ("sha256:00", {"text"}),
    (str(DIGEST), {"text", "digest"}),
    (True, {"flag"}),
    (1, {"number"}),
    (1.0, set()),
    ([], {"strings", "digests"}),
    (["x"], {"strings"}),
    ([str(DIGEST)], {"strings", "digests"}),
    ([1], set()),
    ([None], set()),
    ({}, {"object"}),
]


@pytest.mark.parametrize("kind", TAKERS)
@pytest.mark.parametrize(("value", "kinds"), WHO_TAKES)
def test_only_fields_of_the_right_type_are_taken(kind: str, value: Any, kinds: set[str]) -> None:
    fields = document(x=value)
    if kind in kinds:
        TAKERS[kind](fields)
    else:
        with pytest.raises(Corrupt, match="thing: field 'x' is not of type"):
            TAKERS[kind](fields)


def test_an_absent_field_is_corrupt() -> None:
    with pytest.raises(Corrupt, match="'x'"):
        document().take("x", str)


def test_optional_fields() -> None:
    for fields in (document(), document(x=None)):
        assert fields.optional("x", str) is None
        assert fields.optional_digest("x") is None
    assert document(x="text").optional("x", str) == "text"
    assert document(x=str(DIGEST)).optional_digest("x") == DIGEST
    with pytest.raises(Corrupt):
        document(x=5).optional("x", str)
    with pytest.raises(Corrupt):
        document(x="").optional_digest("x")


@pytest.mark.parametrize("value", [-1, MAX_NUMBER + 1, 10**400])
def test_numbers_out_of_range_are_corrupt(value: int) -> None:
    assert document(x=MAX_NUMBER).number("x") == MAX_NUMBER
    with pytest.raises(Corrupt, match="'x' is not of type size"):
        document(x=value).number("x")


def test_fields_inside_name_their_place() -> None:
    with pytest.raises(Corrupt, match=r"^thing, field 'x': field 'y' is not of type digest$"):
        document(x={"y": "sha256:00"}).object("x").digest("y")
