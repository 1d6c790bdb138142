"""JSON documents from anybody: one cursor that is the only code to look at a type.

>>> parse_json(b'{"layers": [{"size": -1}]}', "manifest", 4096)["layers"].items()[0]["size"].number()
dsec_store.errors.Corrupt: manifest: layers[0].size: negative
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeVar

from dsec_store.digest import Digest
from dsec_store.errors import Corrupt, Invalid

_MAX_NUMBER: Final = 2**63 - 1
_MAX_QUOTED: Final = 80
"""Characters of a foreign text that an error quotes."""

_T = TypeVar("_T", str, int, bool, list[Any], dict[str, Any])

_KINDS: Final = {str: "a text", int: "a whole number", bool: "true or false", list: "an array", dict: "an object"}


def quoted(text: str) -> str:
    """A foreign text for an error: quoted, on one line, not too long."""
    return repr(text if len(text) <= _MAX_QUOTED else text[:_MAX_QUOTED] + "…")


@dataclass(frozen=True, slots=True)
class Json:
    """A value in a document, and the way to it for errors. Absent and null are the same."""

    document: str
    path: str
    value: object

    def __getitem__(self, name: str) -> Json:
        """The field of an object, perhaps absent; an absent object has only absent fields."""
        return Json(self.document, f"{self.path}.{name}".lstrip("."), self._as(dict, {}).get(name))

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.document, self.path)))

    def items(self) -> list[Json]:
        """The items of an array, none if it is absent."""
        return [Json(self.document, f"{self.path}[{i}]", item) for i, item in enumerate(self._as(list, []))]

    def text(self, default: str | None = None) -> str:
        return self._plain(self._as(str, default))

    def texts(self) -> tuple[str, ...]:
        return tuple(item.text() for item in self.items())

    def keys(self) -> tuple[str, ...]:
        return tuple(self._plain(key) for key in self._as(dict, {}))

    def text_map(self) -> dict[str, str]:
        values = (Json(self.document, self.path, value).text("") for value in self._as(dict, {}).values())
        return dict(zip(self.keys(), values, strict=True))

    def number(self) -> int:
        """From 0 to what a file's size can be."""
        value = self._as(int)
        if not 0 <= value <= _MAX_NUMBER:
            raise Corrupt(f"{self}: {'negative' if value < 0 else 'more than 63 bits'}")
        return value

    def flag(self) -> bool:
        return self._as(bool, False)

    def digest(self) -> Digest:
        text = self.text()
        if not text.startswith("sha256:"):
            raise Invalid(f"{self}: {quoted(text)} is not supported (only sha256:<64 hex digits>)")
        try:
            return Digest.parse(text)
        except Invalid:
            raise Corrupt(f"{self}: not a digest: {quoted(text)}") from None

    def _as(self, kind: type[_T], default: _T | None = None) -> _T:
        value = default if self.value is None else self.value
        if isinstance(value, kind) and isinstance(value, bool) == (kind is bool):
            return value
        raise Corrupt(f"{self}: {'missing' if value is None else f'{_KINDS[kind]} expected'}")

    def _plain(self, text: str) -> str:
        """`text`, if a C string and UTF-8 can hold it: JSON can escape NUL and half a surrogate pair."""
        if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
            raise Corrupt(f"{self}: holds a character that UTF-8 text cannot: {quoted(text)}")
        return text


def parse_json(data: bytes, what: str, limit: int, kind: type[dict[str, Any]] | type[list[Any]] = dict) -> Json:
    """The object in `data`, or with `kind` the array; `what` names the document in errors.

    `Invalid` when it has more than `limit` bytes, `Corrupt` when it is no JSON in UTF-8 or of another kind.
    """
    if len(data) > limit:
        raise Invalid(f"{what}: {len(data)} bytes are more than the {limit} allowed")
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{what}: not JSON: {error}") from None
    if not isinstance(value, kind):
        raise Corrupt(f"{what}: not a JSON {'object' if kind is dict else 'array'}")
    return Json(what, "", value)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number")
