"""Names of files for people and for JSON. Names are bytes of no particular encoding. Pure.

>>> escaped(b"caf\\xc3\\xa9"), escaped(b"caf\\xe9"), escaped(b"a\\\\x2db")
('café', 'caf\\\\xe9', 'a\\\\\\\\x2db')
>>> unescaped("caf\\\\xe9")
b'caf\\xe9'
>>> print(shell_quoted(b"plain"), shell_quoted(b"a b"), shell_quoted(b"it's\\n"))
plain 'a b' 'it'\\''s'$'\\n'
"""

from __future__ import annotations

import re
from typing import Final

from dsec_store.errors import Invalid

_ESCAPE: Final = re.compile(r"\\(?:\\|x([0-9a-f]{2}))")
_STRAY: Final = re.compile("[\udc80-\udcff]")
_SAFE: Final = re.compile(r"[\w@%+=:,./^-]+")
"""Names that a shell takes as they are, letters and digits of all scripts included."""

_CONTROLS: Final = {"\a": "\\a", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\v": "\\v", "\f": "\\f", "\r": "\\r"}


def escaped(name: bytes) -> str:
    r"""`name` as text, reversibly: UTF-8 as it is, a backslash as `\\`, each byte that is no UTF-8 as `\xNN`."""
    text = name.decode("utf-8", "surrogateescape").replace("\\", "\\\\")
    return _STRAY.sub(lambda found: f"\\x{ord(found[0]) - 0xDC00:02x}", text)


def unescaped(text: str) -> bytes:
    r"""The bytes of which `escaped` made `text`; `\xNN` may be any byte. Raises `Invalid` for a stray backslash."""
    out = bytearray()
    at = 0
    for found in _ESCAPE.finditer(text):
        out += _plain(text[at : found.start()], text)
        out += bytes((int(found[1], 16),)) if found[1] else b"\\"
        at = found.end()
    return bytes(out + _plain(text[at:], text))


def shell_quoted(name: bytes) -> str:
    """`name` for a terminal, as `ls` shows it there: what a shell would take for something else is quoted, and nothing
    that a terminal would obey gets through. Pasted into a shell it is the name again."""
    text = name.decode("utf-8", "surrogateescape")
    if _SAFE.fullmatch(text) and text.isprintable():
        return text
    parts: list[str] = []
    special = False
    for character in text:
        plain = character.isprintable() and not _STRAY.match(character)
        if not parts or special == plain:  # another kind than before
            parts.append(("'" if parts else "") + ("'" if plain else "$'"))
        special = not plain
        parts.append(character.replace("'", "'\\''") if plain else _octal(character))
    return "".join(parts) + "'" if parts else "''"


def _octal(character: str) -> str:
    if character in _CONTROLS:
        return _CONTROLS[character]
    return "".join(f"\\{byte:03o}" for byte in character.encode("utf-8", "surrogateescape"))


def _plain(part: str, whole: str) -> bytes:
    if "\\" in part:
        raise Invalid(f"not an escaped name: {whole!r} (a backslash is written twice, a byte as \\xNN)")
    try:
        return part.encode()
    except UnicodeEncodeError:
        raise Invalid(f"not an escaped name: {whole!r} (it is no UTF-8)") from None
