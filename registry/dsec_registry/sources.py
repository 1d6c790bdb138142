"""What a user writes where an image is wanted, and the source that it opens.

    oci:DIR[:TAG]                    an OCI image layout in a folder
    oci-archive:FILE[:TAG]           the same in a tar, plain or compressed
    docker-archive:FILE[:NAME:TAG]   what `docker save` writes, plain or compressed; `:@0` is the first image in it
    dir:DIR                          one image in a folder, as `skopeo copy` writes it

Problem: paths and tags may both hold colons (`registry:5000/app:v1` is a legal tag). Choice: the longest path that
exists wins, so that nothing on the disk is out of reach. If none does, an error is on its way, and only what it says
depends on the rest: the last colon splits, but the first one before names of Docker, which have colons themselves. The
forms are those of skopeo (containers-transports(5)), which splits at the first one. After `dir:` all is the path.

>>> parse_source("oci:/srv/out:v1")
SourceSpec(transport='oci', path=PosixPath('/srv/out'), tag='v1')
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec_registry.directory import Directory
from dsec_registry.docker_archive import DockerArchive
from dsec_registry.images import ImageSource
from dsec_registry.jsondoc import quoted
from dsec_registry.layouts import OciArchive, OciLayout
from dsec_store.errors import Invalid

Parts = tuple[str, str | None]
"""A path, and the tag where there is one."""


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """Where an image comes from. Without a tag the source must hold only one."""

    transport: str
    path: Path
    tag: str | None = None

    def __str__(self) -> str:
        return ":".join(filter(None, (self.transport, str(self.path), self.tag)))


def parse_source(text: str) -> SourceSpec:
    """`Invalid`, with the forms that there are, for anything else. Opening shows whether there is such an image."""
    name, _, rest = text.partition(":")
    transport = _TRANSPORTS.get(name)
    if transport and "\0" not in text:
        path, tag = transport.split(rest)
        if path and tag != "":
            return SourceSpec(name, Path(path), tag)
    raise Invalid(f"not an image source: {quoted(text)} (expected {_FORMS})")


def open_source(spec: SourceSpec) -> ImageSource:
    """The source that `spec` names, to be used in a `with` statement: `source.resolve(spec.tag, platform)`."""
    return _TRANSPORTS[spec.transport].open(spec.path)


def _at_last_colon(text: str) -> Parts:
    path, colon, tag = text.rpartition(":")
    return _at_existing(text) or ((path, tag) if colon else (text, None))


def _at_first_colon(text: str) -> Parts:
    path, colon, tag = text.partition(":")
    return _at_existing(text) or (path, tag if colon else None)


def _nowhere(text: str) -> Parts:
    return text, None


def _at_existing(text: str) -> Parts | None:
    """Split behind the longest path that exists, None when there is none."""
    parts = text.split(":")
    for count in range(len(parts), 0, -1):
        path = ":".join(parts[:count])
        if _exists(path):
            return path, ":".join(parts[count:]) if count < len(parts) else None
    return None


def _exists(path: str) -> bool:
    try:
        return bool(path) and Path(path).exists()
    except (OSError, ValueError):  # unreadable, too long, or with a NUL
        return False


@dataclass(frozen=True, slots=True)
class _Transport:
    """How it is written, split into path and tag, and opened."""

    form: str
    split: Callable[[str], Parts]
    open: Callable[[Path], ImageSource]


_TRANSPORTS: Final = {
    "oci": _Transport("oci:DIR[:TAG]", _at_last_colon, OciLayout),
    "oci-archive": _Transport("oci-archive:FILE[:TAG]", _at_last_colon, OciArchive),
    "docker-archive": _Transport("docker-archive:FILE[:NAME:TAG]", _at_first_colon, DockerArchive),
    "dir": _Transport("dir:DIR", _nowhere, Directory),
}
_FORMS: Final = ", ".join(transport.form for transport in _TRANSPORTS.values())
