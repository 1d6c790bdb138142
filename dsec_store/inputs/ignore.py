"""Which files of a folder stay out of a layer: patterns as in .gitignore, matched against paths that are bytes.

Problem: users know git's rules, and rules that are nearly git's leave out the wrong file without a word. Libraries
match text and differ from git in classes, escapes and `**`.

Choice: each pattern becomes a regular expression over bytes by the steps that git takes (dir.c, wildmatch.c), and a
property test compares the answers with `git check-ignore`. docs/inputs.md has the rules for users.

>>> ignore = Ignore.parse(b"*.pyc\\n/build/\\n!keep.pyc\\n", "the ignore file")
>>> ignore.excludes(b"a/x.pyc", is_directory=False), ignore.excludes(b"a/keep.pyc", is_directory=False)
(True, False)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from dsec_store.errors import Invalid

FILE_SIZE_MAX: Final = 1 << 20
"""Bytes of an ignore file."""

_BOM: Final = b"\xef\xbb\xbf"
_SPECIAL: Final = re.compile(rb"[*?\[\\]")
_ANY: Final = b"."
_NOT_SLASH: Final = b"[^/]"
_NOTHING: Final = b"(?!)"
_ASCII: Final = range(128)
_CLASSES: Final = {
    b"alnum": frozenset(byte for byte in _ASCII if chr(byte).isalnum()),
    b"alpha": frozenset(byte for byte in _ASCII if chr(byte).isalpha()),
    b"blank": frozenset(b" \t"),
    b"cntrl": frozenset((*range(32), 127)),
    b"digit": frozenset(b"0123456789"),
    b"graph": frozenset(range(33, 127)),
    b"lower": frozenset(range(97, 123)),
    b"print": frozenset(range(32, 127)),
    b"punct": frozenset(byte for byte in range(33, 127) if not chr(byte).isalnum()),
    b"space": frozenset(b" \t\n\r"),
    b"upper": frozenset(range(65, 91)),
    b"xdigit": frozenset(b"0123456789abcdefABCDEF"),
}
"""Members of `[:name:]`, in ASCII whatever the locale is. `space` is git's own: without vertical tab and form feed."""


@dataclass(frozen=True, slots=True)
class _Pattern:
    """One line. `negated` re-includes; `whole` matches the path from the root, else its last name."""

    expression: re.Pattern[bytes]
    negated: bool
    only_directories: bool
    whole: bool

    def matches(self, path: bytes, name: bytes, is_directory: bool) -> bool:
        if self.only_directories and not is_directory:
            return False
        return self.expression.fullmatch(path if self.whole else name) is not None


@dataclass(frozen=True, slots=True)
class Ignore:
    """The patterns of one ignore file, which lies at the root of the folder in thought."""

    patterns: tuple[_Pattern, ...]

    @classmethod
    def parse(cls, data: bytes, what: str) -> Ignore:
        """The patterns in `data`; `what` names it in messages. Raises `Invalid` for what is too large or has a NUL."""
        if len(data) > FILE_SIZE_MAX:
            raise Invalid(f"{what}: {len(data)} bytes (at most {FILE_SIZE_MAX})")
        if b"\0" in data:
            raise Invalid(f"{what}: a NUL; it is no list of patterns")
        lines = data.removeprefix(_BOM).split(b"\n")
        return cls(tuple(pattern for line in lines if (pattern := _parse_line(line))))

    def excludes(self, path: bytes, is_directory: bool) -> bool:
        """Whether the file at `path` (`a/b`, relative to the folder) stays out, by itself or with a parent."""
        end = path.find(b"/")
        while end >= 0:
            if self.decides(path[:end], is_directory=True):
                return True
            end = path.find(b"/", end + 1)
        return self.decides(path, is_directory)

    def decides(self, path: bytes, is_directory: bool) -> bool:
        """Whether `path` stays out, given that its parents stay in: for a walk that skips what is left out."""
        name = path.rpartition(b"/")[2]
        for pattern in reversed(self.patterns):
            if pattern.matches(path, name, is_directory):
                return not pattern.negated
        return False


def _parse_line(line: bytes) -> _Pattern | None:
    """The pattern of a line, None for an empty one and a comment."""
    if line.startswith(b"#"):
        return None
    text = _without_final_spaces(line.removesuffix(b"\r"))
    negated = text.startswith(b"!")
    text = text[negated:]
    only_directories = text.endswith(b"/")
    text = text.removesuffix(b"/")
    if not text:
        return None
    whole = b"/" in text
    text = text.removeprefix(b"/")
    # git compares what comes before the first special character as it is, and takes the rest for a pattern of its own:
    # `**` at the beginning of that rest has no name before it, as in `foo**/bar`.
    special = _SPECIAL.search(text) if whole else None
    start = special.start() if special else len(text) if whole else 0
    source = re.escape(text[:start]) + _expression(text[start:], whole)
    return _Pattern(re.compile(source, re.DOTALL), negated, only_directories, whole)


def _without_final_spaces(line: bytes) -> bytes:
    """The line without spaces at its end; one behind a backslash stays."""
    end = position = 0
    while position < len(line):
        escaped = line[position] == ord("\\")
        position += 2 if escaped else 1
        if escaped and position > len(line):
            return line
        if escaped or line[position - 1] != ord(" "):
            end = position
    return line[:end]


def _expression(pattern: bytes, whole: bool) -> bytes:
    """The regular expression of a pattern. With `whole`, only `**` between slashes matches a slash."""
    any_byte = _NOT_SLASH if whole else _ANY
    parts: list[bytes] = []
    position = 0
    while position < len(pattern):
        char = pattern[position : position + 1]
        if char == b"*":
            part, position = _stars(pattern, position, any_byte)
        elif char == b"?":
            part, position = any_byte, position + 1
        elif char == b"[":
            part, position = _bracket(pattern, position + 1, whole)
        elif char == b"\\":
            part, position = re.escape(pattern[position + 1 : position + 2]) or _NOTHING, position + 2
        else:
            part, position = re.escape(char), position + 1
        parts.append(part)
    return b"".join(parts)


def _stars(pattern: bytes, start: int, any_byte: bytes) -> tuple[bytes, int]:
    """The expression for a run of stars, and where the pattern goes on."""
    end = start
    while pattern[end : end + 1] == b"*":
        end += 1
    rest = pattern[end:]
    between = (start == 0 or pattern[start - 1] == ord("/")) and (not rest or rest.startswith((b"/", b"\\/")))
    if end - start == 1 or not between or any_byte == _ANY:
        return any_byte + b"*", end
    if rest.startswith(b"/"):
        return b"(?:.*/)?", end + 1
    return b".*", end


def _bracket(pattern: bytes, start: int, whole: bool) -> tuple[bytes, int]:
    """The expression for a bracket whose inside begins at `start`, and where the pattern goes on.

    A bracket that is not closed, or has an unknown class, matches nothing, as in git.
    """
    negated = pattern[start : start + 1] in (b"!", b"^")
    position = start + negated
    members: set[int] = set()
    previous: int | None = None
    first = True
    while first or pattern[position : position + 1] != b"]":
        first = False
        found = _item(pattern, position, previous)
        if found is None:
            return _NOTHING, len(pattern)
        added, previous, position = found
        members |= added
    if negated:
        members = set(range(256)) - members
    if whole:
        members.discard(ord("/"))
    return _one_of(members), position + 1


def _item(pattern: bytes, position: int, previous: int | None) -> tuple[frozenset[int], int | None, int] | None:
    """One item of a bracket: its bytes, the byte that a range after it begins with, and where the next item is."""
    char = pattern[position : position + 1]
    if char == b"-" and previous is not None and pattern[position + 1 : position + 2] not in (b"", b"]"):
        literal = _literal(pattern, position + 1)
        return (frozenset(range(previous, literal[0] + 1)), None, literal[1]) if literal else None
    if pattern.startswith(b"[:", position):
        end = pattern.find(b"]", position + 2)
        if end < 0:
            return None
        name = pattern[position + 2 : end]
        if name.endswith(b":"):
            members = _CLASSES.get(name[:-1])
            return None if members is None else (members, None, end + 1)
    literal = _literal(pattern, position)
    return (frozenset(literal[:1]), *literal) if literal else None


def _literal(pattern: bytes, position: int) -> tuple[int, int] | None:
    """The byte at `position`, perhaps behind a backslash, and the position behind it."""
    position += pattern[position : position + 1] == b"\\"
    return (pattern[position], position + 1) if position < len(pattern) else None


def _one_of(members: set[int]) -> bytes:
    return b"[" + b"".join(b"\\x%02x" % byte for byte in sorted(members)) + b"]" if members else _NOTHING
