"""What to run: the command, its environment, its user and its place, as frozen values and pure functions.

An image's config, the layers of an environment and the caller each have a word in it. The rules of the OCI image
configuration ("Conversion Specification") and of `docker run` hold: CMD on the command line replaces the image's Cmd
and keeps its Entrypoint; of two values of one variable the later one wins.

    env = merge_env(base, [((), ("/opt/tool/bin",))], (("SEED", "7"),))
    RunConfig(env=env, args=command_of(("/bin/sh", "-c"), ("true",), ()))
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from dsec_store.descriptor import DEFAULT_PATH, Pairs, with_additions
from dsec_store.errors import Invalid

MAX_HOSTNAME: Final = 64
"""Bytes of a host name that the kernel takes (`__NEW_UTS_LEN`)."""


@dataclass(frozen=True, slots=True)
class RunConfig:
    """One command and its surroundings. Construction raises `Invalid` for what no process can be given.

    `args` is the whole argv. `workdir` is a path inside, made when it is missing. `user` is "", a uid, a name,
    "uid:gid" or "name:group"; names are looked up inside. An empty `hostname` leaves the choice to us.
    """

    env: Pairs
    args: tuple[str, ...]
    workdir: str = "/"
    user: str = ""
    hostname: str = ""
    terminal: bool = False

    def __post_init__(self) -> None:
        if not self.args:
            raise Invalid("no command to run")
        for number, argument in enumerate(self.args):
            _check_text(f"argument {number}", argument)
        for name, value in self.env:
            if not name or "=" in name:
                raise Invalid(f"environment variable {name!r}: a name is not empty and has no '='")
            _check_text(f"environment variable {name!r}", name + value)
        _check_text("the working directory", self.workdir)
        _check_text("the user", self.user)
        _check_text("the host name", self.hostname)
        if len(self.hostname.encode()) > MAX_HOSTNAME:
            raise Invalid(f"the host name is longer than {MAX_HOSTNAME} bytes: {self.hostname!r}")


def command_of(entrypoint: Sequence[str], cmd: Sequence[str], override: Sequence[str]) -> tuple[str, ...]:
    """The argv of a run: `override`, the command line's CMD, replaces `cmd`. Raises `Invalid` when nothing is left."""
    args = (*entrypoint, *(override or cmd))
    if not args:
        raise Invalid("the image names no command: give one")
    return args


def merge_env(base: Pairs, layers: Iterable[tuple[Pairs, Sequence[str]]], extra: Pairs) -> Pairs:
    """The environment of a run: the base image's, each layer's `env` and `path_prepend`, then the caller's `extra`.

    A variable keeps the place at which it first came. The folders of one `path_prepend` stay in their order, and those
    of a later layer come before those of an earlier one. PATH is always set.
    """
    merged: Pairs = (("PATH", DEFAULT_PATH), *base)
    for env, path_prepend in layers:
        merged = with_additions(merged, env, path_prepend)
    return with_additions(merged, extra, ())


def with_defaults(env: Pairs, home: str, terminal: bool) -> Pairs:
    """`env` with what every command may rely on: PATH, HOME, and on a terminal TERM."""
    defaults = {"PATH": DEFAULT_PATH, "HOME": home, **({"TERM": "xterm"} if terminal else {})}
    return tuple({**defaults, **dict(env)}.items())


def absolute(path: str) -> str:
    """`path` inside a root, without "..", "." and double slashes; a relative one starts at the root."""
    return "/" + posixpath.normpath("/" + path).lstrip("/")


def _check_text(what: str, text: str) -> None:
    """Refuse what the runtime's configuration cannot carry: it is JSON, in UTF-8, read into C strings."""
    if "\0" in text:
        raise Invalid(f"{what} contains a NUL byte")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Invalid(f"{what} is not UTF-8: {text!r}") from None
