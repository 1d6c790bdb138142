"""What a user writes where an image is wanted, and the source that it opens.

    oci:DIR[:TAG]              an OCI image layout in a folder
    oci-archive:FILE[:TAG]     the same in a tar, plain or compressed

Problem: paths and tags may both hold colons (`registry:5000/app:v1` is a legal tag). Choice: the longest path that
exists wins, so that nothing on the disk is out of reach; if none does, the last colon splits. The forms are those of
skopeo (containers-transports(5)), which splits at the first one.

>>> parse_source("oci:/srv/out:v1")
SourceSpec(transport='oci', path=PosixPath('/srv/out'), tag='v1')
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec_registry.layouts import ImageSource, OciArchive, OciLayout
from dsec_registry.manifest import quoted
from dsec_store.errors import Invalid

_TRANSPORTS: Final[dict[str, Callable[[Path], ImageSource]]] = {"oci": OciLayout, "oci-archive": OciArchive}
_FORMS: Final = "oci:DIR[:TAG] or oci-archive:FILE[:TAG]"


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
    transport, _, rest = text.partition(":")
    path, tag = _split(rest)
    if transport not in _TRANSPORTS or not path or tag == "" or "\0" in text:
        raise Invalid(f"not an image source: {quoted(text)} (expected {_FORMS})")
    return SourceSpec(transport, Path(path), tag)


def open_source(spec: SourceSpec) -> ImageSource:
    """The source that `spec` names, to be used in a `with` statement: `source.resolve(spec.tag, platform)`."""
    return _TRANSPORTS[spec.transport](spec.path)


def _split(text: str) -> tuple[str, str | None]:
    """Path and tag: see the module's text."""
    parts = text.split(":")
    for count in range(len(parts), 0, -1):
        path = ":".join(parts[:count])
        if _exists(path):
            return path, ":".join(parts[count:]) if count < len(parts) else None
    path, colon, tag = text.rpartition(":")
    return (path, tag) if colon else (text, None)


def _exists(path: str) -> bool:
    try:
        return bool(path) and Path(path).exists()
    except (OSError, ValueError):  # unreadable, too long, or with a NUL
        return False
