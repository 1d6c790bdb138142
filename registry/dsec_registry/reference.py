"""Names of Docker images, as `docker load` and `docker pull` understand them.

    reference = [host [":" port] "/"] path [":" tag]

The first segment is a host if it holds a `.` or `:`, has a capital, or is `localhost`; else the host is docker.io,
where a path of one segment lies in `library/`. Without a tag, `latest` is meant. So these are one name:

>>> {normalized(text) for text in ("busybox", "busybox:latest", "library/busybox", "docker.io/library/busybox:latest")}
{'docker.io/library/busybox:latest'}

Source: distribution/reference, the packages' grammar and `ParseNormalizedNamed`.
"""

from __future__ import annotations

import re
from typing import Final

from dsec_registry.jsondoc import quoted
from dsec_store.errors import Invalid

DEFAULT_HOST: Final = "docker.io"
DEFAULT_TAG: Final = "latest"

NAME_MAX: Final = 255
"""Characters of host and path together."""

_LEGACY_HOST: Final = "index.docker.io"
_OFFICIAL: Final = "library/"

_LABEL: Final = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"
_HOST: Final = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9a-fA-F:]+\])(?::[0-9]+)?")
_COMPONENT: Final = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_PATH: Final = re.compile(rf"{_COMPONENT}(?:/{_COMPONENT})*")
_TAG: Final = re.compile(r"[a-zA-Z0-9_][a-zA-Z0-9_.-]{0,127}")


def normalized(text: str) -> str:
    """`text` as `host/path:tag`, with nothing left out. `Invalid` for what is no reference, or one with a digest."""
    if "@" in text:
        raise Invalid(f"not a name of an image: {quoted(text)} (a digest names nothing here: use NAME[:TAG])")
    name, tag = _split_tag(text)
    host, path = _split_host(name)
    fits = _HOST.fullmatch(host) and _PATH.fullmatch(path) and _TAG.fullmatch(tag)
    if not fits or len(host) + 1 + len(path) > NAME_MAX:
        raise Invalid(f"not a name of an image: {quoted(text)} (expected [HOST[:PORT]/]NAME[:TAG], as in busybox:1.36)")
    return f"{host}/{path}:{tag}"


def _split_tag(text: str) -> tuple[str, str]:
    """A colon before the last slash is that of a port."""
    name, colon, tag = text.rpartition(":")
    return (name, tag) if colon and "/" not in tag else (text, DEFAULT_TAG)


def _split_host(name: str) -> tuple[str, str]:
    host, slash, path = name.partition("/")
    if not slash or not _is_host(host):
        host, path = DEFAULT_HOST, name
    if host == _LEGACY_HOST:
        host = DEFAULT_HOST
    if host == DEFAULT_HOST and "/" not in path:
        path = _OFFICIAL + path
    return host, path


def _is_host(segment: str) -> bool:
    return segment == "localhost" or "." in segment or ":" in segment or segment != segment.lower()
