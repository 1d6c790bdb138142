"""Layer descriptors and images: the two small JSON objects that lead to everything else.

A *layer descriptor* names a layer's metadata image and chunk map by digest. An *image* is an ordered list of layers
with the run configuration: what a name in the store stands for. An OCI image becomes an image of kind `base` with a
layer each; a folder becomes a workspace or toolkit with one layer. Neither says where anything lies. Fields:
docs/format/descriptor.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from dsec_store import document
from dsec_store.chunker import ChunkerParameters
from dsec_store.digest import Digest
from dsec_store.errors import Corrupt, Invalid

FORMAT: Final = 1
"""Version of metadata image, chunk map and descriptor together; part of every build key."""

KINDS: Final = ("base", "workspace", "toolkit")


@dataclass(frozen=True, slots=True)
class Sized:
    """A digest and the size in bytes of what it names: both are checked before a byte is used."""

    digest: Digest
    size: int

    def as_json(self) -> dict[str, Any]:
        return {"digest": str(self.digest), "size": self.size}


@dataclass(frozen=True, slots=True)
class LayerDescriptor:
    """One layer.

    metadata    the EROFS metadata image           blob_size   bytes of the blob's address space
    chunk_map   digest of the chunk map: this is   diff_id     digest of the uncompressed tar, None for a layer that was
                also the blob's name                           built from a folder
    inodes      how many the layer has             has_root    whether the source had an entry for the root directory:
                                                               only then its attributes count in a composition
    """

    metadata: Sized
    chunk_map: Sized
    blob_size: int
    inodes: int
    has_root: bool
    chunker: ChunkerParameters
    diff_id: Digest | None

    def encode(self) -> bytes:
        return document.encode(
            {
                "format": FORMAT,
                "metadata": self.metadata.as_json(),
                "chunk_map": self.chunk_map.as_json(),
                "blob_size": self.blob_size,
                "inodes": self.inodes,
                "has_root": self.has_root,
                "chunker": self.chunker.as_json(),
                "diff_id": str(self.diff_id) if self.diff_id else None,
            }
        )

    @classmethod
    def decode(cls, data: bytes, what: str) -> LayerDescriptor:
        fields = document.Document(data, what, form=FORMAT)
        return cls(
            metadata=_sized(fields.object("metadata")),
            chunk_map=_sized(fields.object("chunk_map")),
            blob_size=fields.number("blob_size"),
            inodes=fields.number("inodes"),
            has_root=fields.take("has_root", bool),
            chunker=_chunker(fields.object("chunker")),
            diff_id=fields.optional_digest("diff_id"),
        )


@dataclass(frozen=True, slots=True)
class Image:
    """What a name stands for: layers from the bottom up and how to run in them.

    config, manifest   the OCI objects it came from, verbatim in the store   env    set in this order, after the base's
    platform           "linux/amd64", None when it runs anywhere             path   put in front of PATH
    source_bytes       compressed bytes of the source's layers (folder: the files' plain bytes)
    """

    kind: str
    layers: tuple[Digest, ...]
    config: Digest | None = None
    manifest: Digest | None = None
    platform: str | None = None
    env: tuple[tuple[str, str], ...] = ()
    path: tuple[str, ...] = ()
    source_bytes: int = 0

    def encode(self) -> bytes:
        return document.encode(
            {
                "format": FORMAT,
                "kind": self.kind,
                "layers": [str(layer) for layer in self.layers],
                "config": str(self.config) if self.config else None,
                "manifest": str(self.manifest) if self.manifest else None,
                "platform": self.platform,
                "env": [f"{key}={value}" for key, value in self.env],
                "path": list(self.path),
                "source_bytes": self.source_bytes,
            }
        )

    @classmethod
    def decode(cls, data: bytes, what: str) -> Image:
        fields = document.Document(data, what, form=FORMAT)
        kind = fields.take("kind", str)
        if kind not in KINDS:
            raise Corrupt(f"{what}: unknown kind {kind!r}")
        return cls(
            kind=kind,
            layers=tuple(fields.digests("layers")),
            config=fields.optional_digest("config"),
            manifest=fields.optional_digest("manifest"),
            platform=fields.optional("platform", str),
            env=_environment(fields.strings("env"), what),
            path=tuple(fields.strings("path")),
            source_bytes=fields.number("source_bytes"),
        )


def parse_env(entry: str) -> tuple[str, str]:
    """`K=V` as a pair. Raises `Invalid` when there is no `=`, no key, a NUL in it, or what is no UTF-8."""
    key, equals, value = entry.partition("=")
    if not key or not equals or "\0" in entry or not is_unicode(entry):
        raise Invalid(f"not an environment entry: {entry!r} (expected NAME=VALUE in UTF-8)")
    return key, value


def is_unicode(text: str) -> bool:
    """Whether `text` can be UTF-8: an argument of a command can hold bytes that are not, as lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _sized(fields: document.Fields) -> Sized:
    return Sized(fields.digest("digest"), fields.number("size"))


def _chunker(fields: document.Fields) -> ChunkerParameters:
    sizes = {name: fields.number(name) for name in ("minimum", "average", "maximum", "solo")}
    return ChunkerParameters(name=fields.take("name", str), **sizes)


def _environment(entries: list[str], what: str) -> tuple[tuple[str, str], ...]:
    try:
        return tuple(parse_env(entry) for entry in entries)
    except Invalid as error:
        raise Corrupt(f"{what}: {error}") from None
