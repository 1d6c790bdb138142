"""Small JSON objects of the store: canonical bytes out, strict reading in.

Canonical: keys sorted, no white space, ASCII, no floats; so equal values have equal digests everywhere.

>>> encode({"b": [1, None], "a": "ü"})
b'{"a":"\\\\u00fc","b":[1,null]}'
>>> Document(b'{"format":1,"size":5}', "example", form=1).number("size")
5
"""

from __future__ import annotations

import json
from typing import Any, Final, TypeVar

from dsec_store.digest import Digest
from dsec_store.errors import Corrupt, Invalid

MAX_DOCUMENT: Final = 4 << 20
"""Bytes of one JSON object of the store."""

MAX_NUMBER: Final = 2**63 - 1
"""The largest size or count that a document may hold."""

_T = TypeVar("_T")


def encode(value: dict[str, Any]) -> bytes:
    """The canonical bytes of `value`."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


class Fields:
    """A JSON object whose fields are taken by name and type; `what` names it in messages.

    Every method raises `Corrupt` when the field is absent (or null) or of another type. Unknown fields are ignored.
    """

    def __init__(self, fields: dict[str, Any], what: str) -> None:
        self._fields = fields
        self._what = what

    def take(self, name: str, kind: type[_T]) -> _T:
        value = self._fields.get(name)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self._wrong(name, kind.__name__)
        return value

    def optional(self, name: str, kind: type[_T]) -> _T | None:
        return None if self._fields.get(name) is None else self.take(name, kind)

    def number(self, name: str) -> int:
        """A size or a count."""
        value = self.take(name, int)
        if not 0 <= value <= MAX_NUMBER:
            raise self._wrong(name, "size")
        return value

    def strings(self, name: str) -> list[str]:
        values = self.take(name, list)
        if not all(isinstance(value, str) for value in values):
            raise self._wrong(name, "list of strings")
        return values

    def digest(self, name: str) -> Digest:
        return self._parsed(name, self.take(name, str))

    def optional_digest(self, name: str) -> Digest | None:
        return None if self._fields.get(name) is None else self.digest(name)

    def digests(self, name: str) -> list[Digest]:
        return [self._parsed(name, text) for text in self.strings(name)]

    def object(self, name: str) -> Fields:
        return Fields(self.take(name, dict), f"{self._what}, field {name!r}")

    def optional_object(self, name: str) -> Fields | None:
        return None if self._fields.get(name) is None else self.object(name)

    def objects(self, name: str) -> list[Fields]:
        values = self.take(name, list)
        if not all(isinstance(value, dict) for value in values):
            raise self._wrong(name, "list of objects")
        return [Fields(value, f"{self._what}, field {name!r}") for value in values]

    def _parsed(self, name: str, text: str) -> Digest:
        try:
            return Digest.parse(text)
        except Invalid:
            raise self._wrong(name, "digest") from None

    def _wrong(self, name: str, kind: str) -> Corrupt:
        return Corrupt(f"{self._what}: field {name!r} is not of type {kind}")


class Document(Fields):
    """A whole document. Raises `Corrupt` unless it is a JSON object, `Invalid` for the format of another release."""

    def __init__(self, data: bytes, what: str, *, form: int) -> None:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            raise Corrupt(f"{what}: not JSON") from None
        if not isinstance(value, dict):
            raise Corrupt(f"{what}: not a JSON object")
        super().__init__(value, what)
        if (found := self.take("format", int)) != form:
            raise Invalid(f"{what}: format {found} is not the one this release reads ({form}); upgrade dsec")
