"""Condemnations: lists of keys that gc is about to delete, once nobody counts on them.

`condemned/<id>` is written before the first of its keys is deleted, and goes when the last is. Who builds treats what
it lists as absent (`dsec_store.leased`). It only ever shrinks. Fields: docs/format/leases.md.

>>> Condemned.decode("01", Condemned("01", 5, ("maps/ab/cd",)).encode()).keys
('maps/ab/cd',)
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from dsec_store import document, keys
from dsec_store.blobs import BlobStore, check_key
from dsec_store.errors import Corrupt, NotFound

FORMAT: Final = 1

MAX_KEYS: Final = 20_000
"""Keys of one condemnation: some 1.6 MB. What is more is split over several."""


@dataclass(frozen=True, slots=True)
class Condemned:
    """One condemnation. `created` in seconds since 1970, for people."""

    id: str
    created: int
    keys: tuple[str, ...]

    @property
    def key(self) -> str:
        return keys.condemned(self.id)

    def encode(self) -> bytes:
        return document.encode({"format": FORMAT, "created": self.created, "keys": list(self.keys)})

    @classmethod
    def decode(cls, id: str, data: bytes) -> Condemned:
        """Raises `Corrupt` for what is none, or lists a key that gc never deletes."""
        what = f"condemnation {id}"
        fields = document.Document(data, what, form=FORMAT)
        listed = tuple(map(check_key, fields.strings("keys")))
        if wrong := next((key for key in listed if keys.family(key) not in keys.COLLECTED), None):
            raise Corrupt(f"{what}: lists {wrong!r}, which gc never deletes")
        return cls(id, fields.number("created"), listed)


def read_condemned(blobs: BlobStore, known: Mapping[str, Condemned] | None = None) -> dict[str, Condemned]:
    """All condemnations by id. Those in `known` are not read again: they only shrink, and need not be up to date."""
    known = known or {}
    found = {}
    for stat in blobs.list(keys.CONDEMNED):
        id = stat.key.rpartition("/")[2]
        with contextlib.suppress(NotFound):
            found[id] = known.get(id) or Condemned.decode(id, blobs.get(stat.key, limit=document.MAX_DOCUMENT))
    return found
