"""References: the names that people use, each leading to an image. The only mutable objects of a store.

A reference also tells the image's *origin*: the manifest and config that it came with, verbatim in the store. They are
no part of the image, since the same files and configuration come in many forms.

    name = component ("/" component)* [":" tag]        as in an OCI reference, without registry host and digest
    component = lower-case letters and digits, with one "." or "_", two "_", or any number of "-" between them
    tag = up to 128 of letters, digits, "_", ".", "-"; not starting with "." or "-"

A name without tag is that name itself: nothing is added. Two writers of one name: the last one wins, never a torn
state. A key is one path segment: `/` and `:` are escaped, so no name is a folder of another one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from dsec_store import document, keys
from dsec_store.blobs import BlobStore
from dsec_store.digest import Digest
from dsec_store.errors import Invalid, NotFound

MAX_NAME: Final = 255
"""Characters of a name; `/` and `:` count as three. It becomes a file name in folder stores."""

_FORMAT: Final = 1
_COMPONENT: Final = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_NAME: Final = re.compile(rf"{_COMPONENT}(?:/{_COMPONENT})*(?::[A-Za-z0-9_][A-Za-z0-9._-]{{0,127}})?")
_ESCAPES: Final = {"/": "%2F", ":": "%3A"}


def check_name(name: str) -> str:
    """`name` itself if the grammar accepts it, else `Invalid`."""
    if not _NAME.fullmatch(name):
        raise Invalid(f"not a name: {name!r} (use lower-case words joined by '/', '.', '-' or '_', and perhaps ':tag')")
    if len(_escape(name)) > MAX_NAME:
        raise Invalid(f"a name too long: {name!r} (at most {MAX_NAME} characters; '/' and ':' count as three)")
    return name


@dataclass(frozen=True, slots=True)
class Origin:
    """What an image was made from.

    manifest, config   the OCI objects it came with, verbatim in the store; None for what was built from a folder
    source_bytes       compressed bytes of the source's layers (folder: the files' plain bytes)
    """

    manifest: Digest | None = None
    config: Digest | None = None
    source_bytes: int = 0

    def as_json(self) -> dict[str, Any]:
        return {
            "manifest": str(self.manifest) if self.manifest else None,
            "config": str(self.config) if self.config else None,
            "source_bytes": self.source_bytes,
        }

    @property
    def oci(self) -> tuple[Digest, ...]:
        """The OCI objects that must be in the store."""
        return tuple(filter(None, (self.config, self.manifest)))


@dataclass(frozen=True, slots=True)
class Reference:
    """Where a name leads."""

    image: Digest
    origin: Origin = Origin()


class References:
    """The names of one store."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs

    def set(self, name: str, image: Digest, origin: Origin = Origin()) -> None:
        """From now on `name` leads to `image`. It and the origin's objects must be stored already."""
        fields = {"format": _FORMAT, "image": str(image), "origin": origin.as_json()}
        self._blobs.put(self._key(name), document.encode(fields))

    def get(self, name: str) -> Digest:
        """The image that `name` leads to. Raises `NotFound`, which names the name."""
        return self.read(name).image

    def read(self, name: str) -> Reference:
        """All that the store knows under `name`. Raises `NotFound`, which names the name."""
        try:
            data = self._blobs.get(self._key(name), limit=document.MAX_DOCUMENT)
        except NotFound:
            raise self._not_found(name) from None
        fields = document.Document(data, f"reference {name!r}", form=_FORMAT)
        return Reference(fields.digest("image"), _origin(fields.optional_object("origin")))

    def remove(self, name: str) -> None:
        """`name` leads nowhere any more; what it led to stays until gc. Raises `NotFound`."""
        if self._blobs.stat(self._key(name)) is None:
            raise self._not_found(name)
        self._blobs.delete(self._key(name))

    def names(self) -> Iterator[str]:
        """Every name, sorted. What lies among the references and is none is left out."""
        stored = [stat.key for stat in self._blobs.list(keys.reference(""))]
        names = [(_unescape(key.removeprefix(keys.reference(""))), key) for key in stored]
        yield from sorted(name for name, key in names if _NAME.fullmatch(name) and self._key(name) == key)

    @staticmethod
    def _key(name: str) -> str:
        return keys.reference(_escape(check_name(name)))

    def _not_found(self, name: str) -> NotFound:
        return NotFound(f"no image named {name!r} in {self._blobs.location} (see 'dsec-image ls')")


def _origin(fields: document.Fields | None) -> Origin:
    if fields is None:
        return Origin()
    return Origin(fields.optional_digest("manifest"), fields.optional_digest("config"), fields.number("source_bytes"))


def _escape(name: str) -> str:
    for plain, code in _ESCAPES.items():
        name = name.replace(plain, code)
    return name


def _unescape(escaped: str) -> str:
    for plain, code in _ESCAPES.items():
        escaped = escaped.replace(code, plain)
    return escaped
