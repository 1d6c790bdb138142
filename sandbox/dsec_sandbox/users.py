"""Who the command runs as: the image's User, looked up in the image's own /etc/passwd and /etc/group.

The rules are docker's: a name must be known; a number need not be, and then has no home but "/"; a user without an
explicit group has the groups that list it. Files of images are often odd, so lines that are malformed are ignored, and
all is bytes. Source: the OCI image configuration ("User"), passwd(5), group(5).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from dsec_store.errors import Invalid

MAX_ID: Final = (1 << 31) - 1
"""The largest uid or gid, as docker has it."""

_PASSWD_FIELDS: Final = 7
_GROUP_FIELDS: Final = 4


@dataclass(frozen=True, slots=True)
class Identity:
    """The ids of a process and the home of its user. `additional_gids` has `gid` in it, as login(1) sets it."""

    uid: int
    gid: int
    additional_gids: tuple[int, ...]
    home: str


@dataclass(frozen=True, slots=True)
class _User:
    name: bytes
    uid: int
    gid: int
    home: bytes


@dataclass(frozen=True, slots=True)
class _Group:
    name: bytes
    gid: int
    members: tuple[bytes, ...]


def resolve(user: str, passwd: bytes, group: bytes) -> Identity:
    """The identity that `user` means: "", a uid or a name, each with or without ":gid" or ":group".

    `passwd` and `group` are the contents of the two files. Raises `Invalid` for a name that they do not have.
    """
    who, _, which = user.partition(":")
    known = _find_user(who or "0", passwd)
    uid = known.uid if known else _number(who or "0", f"the image has no user {who!r}")
    gid = _find_gid(which, group) if which else known.gid if known else 0
    listed = () if which or not known else _groups_listing(known.name, group)
    return Identity(uid, gid, tuple(dict.fromkeys((gid, *listed))), _home(known))


def _find_user(who: str, passwd: bytes) -> _User | None:
    """The first entry whose name or number is `who`."""
    name, number = os.fsencode(who), _id(os.fsencode(who))
    return next((entry for entry in _users(passwd) if entry.name == name or entry.uid == number), None)


def _find_gid(which: str, group: bytes) -> int:
    name, number = os.fsencode(which), _id(os.fsencode(which))
    known = next((entry for entry in _groups(group) if entry.name == name or entry.gid == number), None)
    return known.gid if known else _number(which, f"the image has no group {which!r}")


def _groups_listing(member: bytes, group: bytes) -> tuple[int, ...]:
    return tuple(entry.gid for entry in _groups(group) if member in entry.members)


def _home(known: _User | None) -> str:
    home = known.home.decode(errors="replace") if known else ""
    return home if home.startswith("/") and "\0" not in home else "/"


def _users(passwd: bytes) -> Iterator[_User]:
    for name, _, uid, gid, _, home, _ in _rows(passwd, _PASSWD_FIELDS):
        if (user_id := _id(uid)) is not None and (group_id := _id(gid)) is not None:
            yield _User(name, user_id, group_id, home)


def _groups(group: bytes) -> Iterator[_Group]:
    for name, _, gid, members in _rows(group, _GROUP_FIELDS):
        if (group_id := _id(gid)) is not None:
            yield _Group(name, group_id, tuple(members.split(b",")))


def _rows(text: bytes, fields: int) -> Iterator[list[bytes]]:
    """The lines with exactly so many fields and a name."""
    for line in text.splitlines():
        row = line.strip().split(b":")
        if len(row) == fields and row[0]:
            yield row


def _id(text: bytes) -> int | None:
    """The uid or gid that `text` is, if it is one."""
    if not text.isdigit() or len(text) > len(str(MAX_ID)) or int(text) > MAX_ID:
        return None
    return int(text)


def _number(text: str, otherwise: str) -> int:
    number = _id(os.fsencode(text))
    if number is None:
        raise Invalid(otherwise)
    return number
