"""OCI manifests, indexes and image configs: from bytes to frozen values, without I/O.

Problem: these documents come from anybody. They are small, but name everything else, so whatever passes here is trusted
further on: digests become paths, sizes become limits, the config becomes a process.

Choice: one cursor (`jsondoc.Json`) walks each document and is the only code that looks at a type. What the format does
not allow is `Corrupt`; what it allows and DSec cannot use (a layer's media type, an obsolete schema) is `Invalid`; a
text names the document, the field and what was expected. `null` means absent, as Go's encoders mean it; unknown and
repeated fields are ignored, as the specification asks. Docker's schema 2 has the same fields and is read by the same
functions.

Source: OCI image-spec 1.1, descriptor.md, manifest.md, image-index.md, config.md; containerd's `platforms` for the
names of architectures and variants.

>>> choose(parse_index(data, "index.json"), Platform.parse("linux/arm64"))
Descriptor(media_type='application/vnd.oci.image.manifest.v1+json', digest=Digest('sha256:…'), size=525, …)
"""

from __future__ import annotations

import platform as host
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from dsec_registry.jsondoc import Json, parse_json, quoted
from dsec_store.descriptor import Pairs, RunConfig
from dsec_store.digest import Digest
from dsec_store.errors import Corrupt, Invalid, NotFound

MAX_MANIFEST_SIZE: Final = 4 << 20
"""Bytes of a manifest or index: what registries must take at least (distribution-spec, "Pushing manifests")."""

MAX_CONFIG_SIZE: Final = 8 << 20
"""Bytes of an image config."""

OCI_MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
OCI_INDEX: Final = "application/vnd.oci.image.index.v1+json"
OCI_CONFIG: Final = "application/vnd.oci.image.config.v1+json"
OCI_LAYER: Final = "application/vnd.oci.image.layer.v1.tar"
"""A plain one; with `+gzip` or `+zstd` it is compressed."""

MANIFEST_MEDIA_TYPES: Final = frozenset(
    {
        OCI_MANIFEST,
        "application/vnd.docker.distribution.manifest.v2+json",
    }
)
INDEX_MEDIA_TYPES: Final = frozenset(
    {
        OCI_INDEX,
        "application/vnd.docker.distribution.manifest.list.v2+json",
    }
)
CONFIG_MEDIA_TYPES: Final = frozenset(
    {
        OCI_CONFIG,
        "application/vnd.docker.container.image.v1+json",
    }
)
LAYER_MEDIA_TYPES: Final = frozenset(
    stem + compression
    for stem, compressions in {
        OCI_LAYER: ("", "+gzip", "+zstd"),
        "application/vnd.oci.image.layer.nondistributable.v1.tar": ("", "+gzip", "+zstd"),
        "application/vnd.docker.image.rootfs.diff.tar": ("", ".gzip", ".zstd"),
        "application/vnd.docker.image.rootfs.foreign.diff.tar": ("", ".gzip", ".zstd"),
    }.items()
    for compression in compressions
)
"""Layers that are a tar. Those that a registry may not pass on are read like the others where their blob is present."""

REF_NAME: Final = "org.opencontainers.image.ref.name"
"""Annotation of a descriptor in a layout's index.json: its tag (annotations.md)."""

ATTESTATION_ANNOTATION: Final = "vnd.docker.reference.type"
"""Annotation of the provenance and SBOM manifests that BuildKit puts beside images; they hold no file system."""


# Platforms

_ARCHITECTURES: Final = {
    "x86_64": ("amd64", ""),
    "x86-64": ("amd64", ""),
    "aarch64": ("arm64", ""),
    "i386": ("386", ""),
    "i686": ("386", ""),
    "armhf": ("arm", "v7"),
    "armv7l": ("arm", "v7"),
    "armel": ("arm", "v6"),
    "armv6l": ("arm", "v6"),
}
"""What uname(2) and distributions call an architecture -> its OCI name and variant."""

_BASELINES: Final = {"amd64": "v1", "arm64": "v8", "arm": "v7"}
"""The variant that is meant where none is given."""

_PLATFORM_PART: Final = re.compile(r"[a-z0-9_.-]+")
_NUMBERED_VARIANT: Final = re.compile(r"v?([0-9]{1,4})(?:\.([0-9]{1,4}))?")


@dataclass(frozen=True, slots=True)
class Platform:
    """An operating system, an architecture and its variant ("" where none is given), in OCI's (Go's) words."""

    os: str
    architecture: str
    variant: str = ""

    @classmethod
    def parse(cls, text: str) -> Platform:
        """From `os/architecture[/variant]`; uname's names of architectures are understood. Else `Invalid`."""
        parts = text.lower().split("/")
        if len(parts) not in (2, 3) or not all(_PLATFORM_PART.fullmatch(part) for part in parts):
            raise Invalid(f"not a platform: {quoted(text)} (expected os/architecture[/variant], as in linux/arm64/v8)")
        architecture, variant = _ARCHITECTURES.get(parts[1], (parts[1], ""))
        return cls(parts[0], architecture, parts[2] if len(parts) == 3 else variant)

    def matches(self, offered: Platform) -> bool:
        """Whether a machine of this platform runs what was built for `offered`.

        Same system and architecture, and a variant no newer than ours: arm/v7 runs v6, amd64 does not run amd64/v3.
        """
        if (self.os, self.architecture) != (offered.os, offered.architecture):
            return False
        ours, theirs = self.level, offered.level
        if not ours or not theirs:  # variants that are names ("softfloat") have no order
            return offered.variant in ("", self.variant)
        return theirs <= ours

    @property
    def level(self) -> tuple[int, int] | None:
        """A numbered variant as something to compare: v8.2 is (8, 2). None for others."""
        numbered = _NUMBERED_VARIANT.fullmatch(self.variant or _BASELINES.get(self.architecture, ""))
        return (int(numbered[1]), int(numbered[2] or 0)) if numbered else None

    def __str__(self) -> str:
        return "/".join(filter(None, (self.os, self.architecture, self.variant)))


def host_platform() -> Platform:
    """Linux on the architecture of this machine."""
    return Platform.parse(f"linux/{host.machine()}")


# Values


@dataclass(frozen=True, slots=True)
class Descriptor:
    """Names a blob: what it is, its sha256 digest, its size in bytes (descriptor.md)."""

    media_type: str
    digest: Digest
    size: int
    platform: Platform | None = None
    annotations: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def tag(self) -> str | None:
        return self.annotations.get(REF_NAME)

    @property
    def is_index(self) -> bool:
        return self.media_type in INDEX_MEDIA_TYPES

    @property
    def is_image(self) -> bool:
        """Whether it names the manifest of an image: not an index, an attestation or something unknown."""
        return self.media_type in MANIFEST_MEDIA_TYPES and not self._is_attestation

    @property
    def _is_attestation(self) -> bool:
        return self.platform == Platform("unknown", "unknown") or ATTESTATION_ANNOTATION in self.annotations


@dataclass(frozen=True, slots=True)
class Manifest:
    """One image for one platform: its config, and its layers from the lowest up (manifest.md)."""

    config: Descriptor
    layers: tuple[Descriptor, ...]


@dataclass(frozen=True, slots=True)
class Index:
    """Manifests, further indexes and what else a tool put there, in the document's order (image-index.md)."""

    manifests: tuple[Descriptor, ...]


@dataclass(frozen=True, slots=True)
class History:
    """How a layer, or with `empty_layer` none, came to be. For people: nothing may rely on it."""

    created: str
    created_by: str
    empty_layer: bool


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """An image's config (config.md): `diff_ids` are the digests of the uncompressed layers, from the lowest up.

    `platform` is None where the config does not say. Fields that are not here are in the bytes, which the caller keeps.
    """

    platform: Platform | None
    diff_ids: tuple[Digest, ...]
    run: RunConfig
    history: tuple[History, ...] = ()


# Documents


def parse_manifest(data: bytes, name: str) -> Manifest:
    """The manifest in `data`; `name`, its digest or path, is for errors. `Invalid` for a layer that is not a tar."""
    document = parse_json(data, f"manifest {name}", MAX_MANIFEST_SIZE)
    _check_kind(document, MANIFEST_MEDIA_TYPES, foreign=("manifests",))
    config = _descriptor(document["config"])
    _check_media_type(document["config"]["mediaType"], CONFIG_MEDIA_TYPES)
    for layer in document["layers"].items():
        _check_media_type(layer["mediaType"], LAYER_MEDIA_TYPES)
    return Manifest(config, _descriptors(document["layers"]))


def parse_index(data: bytes, name: str) -> Index:
    """The index in `data`; `name`, its digest or path, is for errors."""
    document = parse_json(data, f"index {name}", MAX_MANIFEST_SIZE)
    _check_kind(document, INDEX_MEDIA_TYPES, foreign=("config", "layers"))
    return Index(_descriptors(document["manifests"]))


def media_type_of(data: bytes, name: str) -> str:
    """The media type of a manifest or index that no descriptor names: its own, or told by its fields.

    `Invalid` for one that is neither, Docker's obsolete schema 1 among them.
    """
    document = parse_json(data, name, MAX_MANIFEST_SIZE)
    _check_version(document)
    _check_media_type(document["mediaType"], MANIFEST_MEDIA_TYPES | INDEX_MEDIA_TYPES, optional=True)
    inferred = OCI_MANIFEST if document["manifests"].value is None else OCI_INDEX
    return document["mediaType"].text("") or inferred


def parse_layout(data: bytes, name: str) -> None:
    """The file `oci-layout` in `data` (image-layout.md). `Invalid` for another version than 1; it has nothing else."""
    version = parse_json(data, name, MAX_MANIFEST_SIZE)["imageLayoutVersion"]
    if version.text().split(".")[0] != "1":
        raise Invalid(f"{version}: {quoted(version.text())} is not supported (only 1)")


def parse_config(data: bytes, name: str, layers: int) -> ImageConfig:
    """The config in `data` of an image with so many layers; `Corrupt` when it has not one diff_id for each."""
    document = parse_json(data, f"config {name}", MAX_CONFIG_SIZE)
    rootfs = document["rootfs"]
    if rootfs["type"].text("layers") != "layers":
        raise Invalid(f"{rootfs['type']}: {quoted(rootfs['type'].text())} is not supported (only layers)")
    diff_ids = tuple(item.digest() for item in rootfs["diff_ids"].items())
    if len(diff_ids) != layers:
        raise Corrupt(f"{rootfs['diff_ids']}: there are {len(diff_ids)} for the {layers} layers of the manifest")
    return ImageConfig(
        platform=_platform(document),
        diff_ids=diff_ids,
        run=_run_config(document["config"]),
        history=tuple(_history(item) for item in document["history"].items()),
    )


def choose(index: Index, platform: Platform, name: str = "index") -> Descriptor:
    """The manifest in `index` for a machine of `platform`: the newest variant that it runs, the first among equals.

    Nested indexes are not looked into. A manifest without a platform may be for any, and is taken when nothing matches.
    `NotFound`, with the platforms that exist, when there is none.
    """
    images = [descriptor for descriptor in index.manifests if descriptor.is_image]
    fitting = [image for image in images if image.platform is None or platform.matches(image.platform)]
    if not fitting:
        offered = sorted({str(image.platform) for image in images})
        raise NotFound(f"{name}: no image for {platform} (there are: {', '.join(offered) or 'none'})")
    return max(fitting, key=_fitness)


def _fitness(image: Descriptor) -> tuple[bool, tuple[int, int]]:
    return image.platform is not None, (image.platform and image.platform.level) or (0, 0)


# Reading


def _check_kind(document: Json, media_types: Collection[str], foreign: Collection[str]) -> None:
    """Refuse another schema, and a document that could be read as a manifest and as an index (CVE-2021-41190)."""
    _check_version(document)
    _check_media_type(document["mediaType"], media_types, optional=True)
    for name in foreign:
        if document[name].value is not None:
            raise Invalid(f"{document[name]}: does not belong here: the document is both a manifest and an index")


def _check_version(document: Json) -> None:
    version = document["schemaVersion"]
    if version.number() == 1:
        raise Invalid(
            f"{version}: 1 is not supported, it is Docker's obsolete schema (skopeo copy --format oci converts)"
        )
    if version.number() != 2:
        raise Invalid(f"{version}: {version.number()} is not supported (only 2)")


def _check_media_type(media_type: Json, accepted: Collection[str], *, optional: bool = False) -> None:
    text = media_type.text("" if optional else None)
    if text not in accepted and not (optional and not text):
        raise Invalid(f"{media_type}: {quoted(text)} is not supported (only {', '.join(sorted(accepted))})")


def _descriptors(array: Json) -> tuple[Descriptor, ...]:
    return tuple(_descriptor(item) for item in array.items())


def _descriptor(value: Json) -> Descriptor:
    return Descriptor(
        media_type=value["mediaType"].text(),
        digest=value["digest"].digest(),
        size=value["size"].number(),
        platform=_platform(value["platform"]),
        annotations=value["annotations"].text_map(),
    )


def _platform(value: Json) -> Platform | None:
    """The platform in an object's fields. Tools that do not know it leave them out or empty."""
    os, architecture, variant = (value[name].text("") for name in ("os", "architecture", "variant"))
    if not os or not architecture:
        return None
    try:
        return Platform.parse("/".join(filter(None, (os, architecture, variant))))
    except Invalid as error:
        raise Corrupt(f"{value}: {error}") from None


def _run_config(value: Json) -> RunConfig:
    return RunConfig(
        env=_variables(value["Env"]),
        working_dir=value["WorkingDir"].text(""),
        user=value["User"].text(""),
        entrypoint=value["Entrypoint"].texts(),
        cmd=value["Cmd"].texts(),
        labels=tuple(sorted(_named(value["Labels"].text_map()))),
        stop_signal=value["StopSignal"].text(""),
        exposed_ports=tuple(sorted(value["ExposedPorts"].keys())),
        volumes=tuple(sorted(value["Volumes"].keys())),
    )


def _variables(entries: Json) -> Pairs:
    """`NAME=value` each; a name alone has the empty value, and what has no name cannot be asked for: it is left out."""
    parts = (entry.partition("=") for entry in entries.texts())
    return tuple((name, value) for name, _, value in parts if name)


def _named(labels: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Labels without those that `NAME=value` cannot tell apart: a name that is empty or has an `=`."""
    return ((name, value) for name, value in labels.items() if name and "=" not in name)


def _history(value: Json) -> History:
    return History(value["created"].text(""), value["created_by"].text(""), value["empty_layer"].flag())
