"""Digests: the names of immutable bytes.

The store names its own objects by BLAKE3-256; what comes from OCI keeps its sha256. A digest is written
`algorithm:hex` everywhere a person or a JSON document sees it, and as 32 raw bytes inside binary formats.

>>> Digest.of(b"abc")
Digest('blake3:6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85')
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final, Protocol

from blake3 import blake3

from dsec_store.errors import Corrupt, Invalid

DIGEST_SIZE: Final = 32
"""Bytes of a raw digest; both algorithms give 32."""


class Hasher(Protocol):
    """The part of hashlib's interface that both algorithms share."""

    def update(self, data: bytes | bytearray | memoryview, /) -> object: ...

    def digest(self) -> bytes: ...


def _new_blake3() -> Hasher:
    return blake3()


_ALGORITHMS: Final = {"blake3": _new_blake3, "sha256": hashlib.sha256}


@dataclass(frozen=True, slots=True, order=True)
class Digest:
    """An algorithm's name and its 32 raw bytes."""

    algorithm: str
    raw: bytes

    def __post_init__(self) -> None:
        if self.algorithm not in _ALGORITHMS or len(self.raw) != DIGEST_SIZE:
            raise Invalid(f"not a digest: {self.algorithm}:{self.raw.hex()}")

    @classmethod
    def of(cls, data: bytes | bytearray | memoryview, algorithm: str = "blake3") -> Digest:
        """The digest of `data`."""
        hasher = hasher_for(algorithm)
        hasher.update(data)
        return cls(algorithm, hasher.digest())

    @classmethod
    def parse(cls, text: str) -> Digest:
        """From `algorithm:hex`. Raises `Invalid` for anything else, uppercase hex included."""
        algorithm, _, digits = text.partition(":")
        if algorithm not in _ALGORITHMS or len(digits) != 2 * DIGEST_SIZE or set(digits) - set("0123456789abcdef"):
            raise Invalid(f"not a digest: {text!r} (expected blake3:<64 hex digits> or sha256:<64 hex digits>)")
        return cls(algorithm, bytes.fromhex(digits))

    @property
    def hex(self) -> str:
        """64 lower-case hex digits."""
        return self.raw.hex()

    def verify(self, data: bytes | bytearray | memoryview, what: str) -> None:
        """Raise `Corrupt` unless `data` is what this digest names; `what` names the thing in the message."""
        if Digest.of(data, self.algorithm) != self:
            raise Corrupt(f"{what}: {len(data)} bytes do not match {self}")

    def __str__(self) -> str:
        return f"{self.algorithm}:{self.hex}"

    def __repr__(self) -> str:
        return f"Digest({str(self)!r})"


def hasher_for(algorithm: str) -> Hasher:
    """A fresh incremental hasher. Raises `Invalid` for an unknown algorithm."""
    try:
        return _ALGORITHMS[algorithm]()
    except KeyError:
        raise Invalid(f"unknown digest algorithm {algorithm!r} (known: blake3, sha256)") from None
