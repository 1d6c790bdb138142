"""Layer descriptors and images: the two small JSON objects that lead to everything else.

A *layer descriptor* names a layer's metadata image and its blobs by digest. An *image* is an ordered list of layers
with the run configuration: what a name in the store stands for. An OCI image becomes an image of kind `base` with a
layer each; a folder becomes a workspace or toolkit with one layer. Neither says where anything lies, nor in which form
it came: the same files and configuration have the same digests whether they came as gzip, zstd or plain, from a
registry or a tar (where it came from is told by the name, see `dsec_store.references`). Fields:
docs/format/descriptor.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from dsec_store import document
from dsec_store.chunker import ChunkerParameters
from dsec_store.digest import Digest
from dsec_store.errors import Corrupt, Invalid

FORMAT: Final = 2
"""Version of metadata image, chunk map and descriptor together; part of every build key."""

KINDS: Final = ("base", "workspace", "toolkit")

DEFAULT_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""PATH where an image sets none."""

Pairs = tuple[tuple[str, str], ...]
"""Names and values, in an order that counts."""


@dataclass(frozen=True, slots=True)
class Sized:
    """A digest and the size in bytes of what it names: both are checked before a byte is used."""

    digest: Digest
    size: int

    def as_json(self) -> dict[str, Any]:
        return {"digest": str(self.digest), "size": self.size}


@dataclass(frozen=True, slots=True)
class Blob:
    """A blob: its chunk map, whose digest is the blob's name, and the bytes of its address space (more than 0)."""

    chunk_map: Sized
    size: int

    @property
    def name(self) -> Digest:
        return self.chunk_map.digest

    def as_json(self) -> dict[str, Any]:
        return {"chunk_map": self.chunk_map.as_json(), "size": self.size}


@dataclass(frozen=True, slots=True)
class LayerDescriptor:
    """One layer, or a run of layers that was collapsed into one.

    metadata    the EROFS metadata image           inodes      how many the layer has
    blobs       its blob devices, in the order of  has_root    whether the source had an entry for the root directory:
                the image's device table; none if              only then its attributes count in a composition
                no file has contents               chunker     how the blob was cut; None for a run
    recipe      the blob from which its tar is     diff_id     digest of the uncompressed tar, None for a layer that was
                made again, byte for byte; None                built from a folder, and for a run
                if it came from none               run         of a run: the layers that it stands for, bottom first
    """

    metadata: Sized
    blobs: tuple[Blob, ...]
    inodes: int
    has_root: bool
    chunker: ChunkerParameters | None = None
    diff_id: Digest | None = None
    recipe: Blob | None = None
    run: tuple[Digest, ...] = ()

    @property
    def stored_blobs(self) -> tuple[Blob, ...]:
        """Every blob that the layer needs in the store: its devices, and the recipe."""
        return (*self.blobs, self.recipe) if self.recipe else self.blobs

    def encode(self) -> bytes:
        return document.encode(
            {
                "format": FORMAT,
                "metadata": self.metadata.as_json(),
                "blobs": [blob.as_json() for blob in self.blobs],
                "inodes": self.inodes,
                "has_root": self.has_root,
                "chunker": self.chunker.as_json() if self.chunker else None,
                "diff_id": _text(self.diff_id),
                "recipe": self.recipe.as_json() if self.recipe else None,
                "run": [str(layer) for layer in self.run],
            }
        )

    @classmethod
    def decode(cls, data: bytes, what: str) -> LayerDescriptor:
        fields = document.Document(data, what, form=FORMAT)
        chunker, recipe = fields.optional_object("chunker"), fields.optional_object("recipe")
        return cls(
            metadata=_sized(fields.object("metadata")),
            blobs=tuple(_blob(blob) for blob in fields.objects("blobs")),
            inodes=fields.number("inodes"),
            has_root=fields.take("has_root", bool),
            chunker=_chunker(chunker) if chunker else None,
            diff_id=fields.optional_digest("diff_id"),
            recipe=_blob(recipe) if recipe else None,
            run=tuple(fields.digests("run")),
        )


@dataclass(frozen=True, slots=True)
class RunConfig:
    """How a process of the image starts (OCI image-spec, config.md, "config"). Empty values for what it does not say.

    `labels` are sorted by name and `exposed_ports` and `volumes` are sorted; the others are in an order that counts.
    """

    env: Pairs = ()
    working_dir: str = ""
    user: str = ""
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    labels: Pairs = ()
    stop_signal: str = ""
    exposed_ports: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {
            "env": _joined(self.env),
            "working_dir": self.working_dir,
            "user": self.user,
            "entrypoint": list(self.entrypoint),
            "cmd": list(self.cmd),
            "labels": _joined(self.labels),
            "stop_signal": self.stop_signal,
            "exposed_ports": list(self.exposed_ports),
            "volumes": list(self.volumes),
        }


@dataclass(frozen=True, slots=True)
class Image:
    """What a name stands for: layers from the bottom up and how to run in them.

    layers      as they were built or converted     config   how a process starts, if the image says so
    lowers      what a node mounts for them: the    env      set in this order, after the base's
                layers, long runs of them collapsed path     put in front of PATH
    platform    "linux/amd64", None when it runs anywhere
    """

    kind: str
    layers: tuple[Digest, ...]
    lowers: tuple[Digest, ...] = ()
    platform: str | None = None
    config: RunConfig = RunConfig()
    env: Pairs = ()
    path: tuple[str, ...] = ()

    @property
    def mounted(self) -> tuple[Digest, ...]:
        """The layers to be mounted, bottom first."""
        return self.lowers or self.layers

    def encode(self) -> bytes:
        return document.encode(
            {
                "format": FORMAT,
                "kind": self.kind,
                "layers": [str(layer) for layer in self.layers],
                "lowers": [str(layer) for layer in self.lowers],
                "platform": self.platform,
                "config": self.config.as_json(),
                "env": _joined(self.env),
                "path": list(self.path),
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
            lowers=tuple(fields.digests("lowers")),
            platform=fields.optional("platform", str),
            config=_run_config(fields.object("config"), what),
            env=_pairs(fields.strings("env"), what),
            path=tuple(fields.strings("path")),
        )


def with_additions(base: Pairs, env: Pairs, path: Iterable[str]) -> Pairs:
    """Variables `base` with what a layer adds: `env` replaces them, and the folders of `path` come in front of PATH.

    A variable keeps the place at which it first came. PATH is set if a folder is.
    """
    merged = dict(base) | dict(env)
    if folders := list(path):
        merged["PATH"] = ":".join([*folders, *filter(None, [merged.get("PATH", DEFAULT_PATH)])])
    return tuple(merged.items())


def parse_env(entry: str) -> tuple[str, str]:
    """`NAME=VALUE` as a pair. Raises `Invalid` when there is no `=`, no key, a NUL in it, or what is no UTF-8."""
    key, equals, value = entry.partition("=")
    if not key or not equals or "\0" in entry or not is_unicode(entry):
        raise Invalid(f"not an environment entry: {entry!r} (expected NAME=VALUE in UTF-8)")
    return key, value


def is_unicode(text: str) -> bool:
    """Whether `text` can be UTF-8: an argument of a command can hold bytes that are not, as lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _text(digest: Digest | None) -> str | None:
    return str(digest) if digest else None


def _sized(fields: document.Fields) -> Sized:
    return Sized(fields.digest("digest"), fields.number("size"))


def _blob(fields: document.Fields) -> Blob:
    return Blob(_sized(fields.object("chunk_map")), fields.number("size"))


def _chunker(fields: document.Fields) -> ChunkerParameters:
    sizes = {name: fields.number(name) for name in ("minimum", "average", "maximum", "solo")}
    return ChunkerParameters(name=fields.take("name", str), **sizes)


def _run_config(fields: document.Fields, what: str) -> RunConfig:
    return RunConfig(
        env=_pairs(fields.strings("env"), what),
        working_dir=fields.take("working_dir", str),
        user=fields.take("user", str),
        entrypoint=tuple(fields.strings("entrypoint")),
        cmd=tuple(fields.strings("cmd")),
        labels=_pairs(fields.strings("labels"), what),
        stop_signal=fields.take("stop_signal", str),
        exposed_ports=tuple(fields.strings("exposed_ports")),
        volumes=tuple(fields.strings("volumes")),
    )


def _joined(pairs: Iterable[tuple[str, str]]) -> list[str]:
    return [f"{name}={value}" for name, value in pairs]


def _pairs(entries: list[str], what: str) -> Pairs:
    try:
        return tuple(parse_env(entry) for entry in entries)
    except Invalid as error:
        raise Corrupt(f"{what}: {error}") from None
