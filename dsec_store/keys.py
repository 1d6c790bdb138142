"""Where each kind of object lies in a store: the one place that knows key names.

    packs/ab/<blake3>        chunks, named by the stored bytes           immutable
    indexes/ab/<blake3>      which pack holds which chunk (one a build)  immutable
    metadata/ab/<blake3>     metadata images, named by the plain bytes;  immutable
                             stored as a byte of encoding and the encoded bytes
    maps/ab/<blake3>         chunk maps                                  immutable
    layers/ab/<blake3>       layer descriptors (JSON)                    immutable
    images/ab/<blake3>       images (JSON)                               immutable
    oci/ab/<sha256>          OCI manifests and configs, verbatim         immutable
    locators/ab/<blake3>     where the chunks of a chunk map lie         replaceable, named by the chunk map
    lookup/<kind>/<digest>   a build key, layer digest, diff_id or chain_id -> descriptor   replaceable
    refs/<name>              a name -> image                             mutable
    leases/<kind>/<id>       who builds, mounts or collects (JSON)       replaceable, by its owner
    condemned/<id>           keys that gc is about to delete (JSON)      replaceable, by gc

`ab` are the first two hex digits. docs/format/store.md has the write order and the commit point.
"""

from __future__ import annotations

from typing import Final

from dsec_store.digest import Digest
from dsec_store.errors import Invalid

VERBATIM: Final = {
    "packs": "blake3",
    "indexes": "blake3",
    "maps": "blake3",
    "layers": "blake3",
    "images": "blake3",
    "oci": "sha256",
}
"""Families whose name is the digest, of this algorithm, of the bytes as they are stored."""

COLLECTED: Final = (
    "lookup",
    "images",
    "oci",
    "layers",
    "locators",
    "maps",
    "metadata",
    "indexes",
    "packs",
)
"""Families of which gc deletes what nothing leads to, in the order in which it does: first what leads elsewhere."""

LOOKUP_KINDS: Final = ("build", "digest", "diff", "chain")


def _fanned(family: str, digest: Digest) -> str:
    return f"{family}/{digest.hex[:2]}/{digest.hex}"


def pack(digest: Digest) -> str:
    return _fanned("packs", digest)


def index(digest: Digest) -> str:
    return _fanned("indexes", digest)


def metadata(digest: Digest) -> str:
    return _fanned("metadata", digest)


def chunk_map(digest: Digest) -> str:
    return _fanned("maps", digest)


def layer(digest: Digest) -> str:
    return _fanned("layers", digest)


def image(digest: Digest) -> str:
    return _fanned("images", digest)


def oci(digest: Digest) -> str:
    return _fanned("oci", digest)


def locator(chunk_map_digest: Digest) -> str:
    return _fanned("locators", chunk_map_digest)


def lookup(kind: str, digest: Digest) -> str:
    if kind not in LOOKUP_KINDS:
        raise Invalid(f"unknown lookup kind {kind!r}")
    return f"lookup/{kind}/{digest.algorithm}/{digest.hex[:2]}/{digest.hex}"


def reference(escaped_name: str) -> str:
    return f"refs/{escaped_name}"


LEASES: Final = "leases/"
CONDEMNED: Final = "condemned/"


def lease(kind: str, id: str) -> str:
    return f"{LEASES}{kind}/{id}"


def condemned(id: str) -> str:
    return f"{CONDEMNED}{id}"


def family(key: str) -> str:
    """The first segment of a key."""
    return key.partition("/")[0]


def verbatim_digest(key: str) -> Digest | None:
    """The digest that the bytes stored under `key` must have, or None when the key promises none."""
    family, _, rest = key.partition("/")
    if family not in VERBATIM:
        return None
    return Digest.parse(f"{VERBATIM[family]}:{rest.rpartition('/')[2]}")


def digest_in(key: str) -> Digest:
    """The BLAKE3 digest that ends `key`. Raises `Invalid` for a key that ends in anything else."""
    return Digest.parse(f"blake3:{key.rpartition('/')[2]}")
