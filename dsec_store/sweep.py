"""Sweeping: deleting what was condemned and nobody counts on. Order is everything here; the proof is in
docs/decisions/0006-gc-leases.md.

    announce the sweep ─> read the leases of builders and mounts ─> mark ─> delete what leads elsewhere
        ─> read the leases of mounts again ─> delete the rest ─> drop the condemnations

A node does not look whether a sweep is under way: it writes its lease, then reads the descriptor of the layer. So
descriptors go first, and who is seen to hold one afterwards may have read it: it is put back, and what it leads to
stays.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from dsec_store import keys
from dsec_store.condemned import Condemned
from dsec_store.document import MAX_DOCUMENT
from dsec_store.errors import NotFound
from dsec_store.leases import BUILD, MARGIN, MOUNT, Clock, Lease, LeaseRecord, read_leases
from dsec_store.objects import Objects
from dsec_store.reachable import Each, closure, mark

SWEEP_SECONDS: Final = 600
"""How long a sweep may last before the leases are looked at again. So long builders wait for a gc that died at it."""

_MARKS: Final = 4
"""A sweep lasts at least this many times as long as marking did, which is a part of it."""

LEADING: Final = ("lookup", "images", "oci", "layers")
"""Families that are deleted first."""

Progress = Callable[[str, int, int], None]


@dataclass(slots=True)
class Swept:
    """What was deleted, and how many of the condemned keys stay because somebody counts on them."""

    objects: int = 0
    bytes: int = 0
    relied_on: int = 0
    unfinished: int = 0


def counting(objects: Objects, kind: str, clock: Clock) -> list[LeaseRecord]:
    """The leases of this kind that must be heeded now."""
    return [lease for lease in read_leases(objects.blobs, kind) if lease.counts(clock())]


def held(objects: Objects, clock: Clock) -> set[str]:
    """Keys of the layers that are mounted somewhere, as leases tell."""
    return {key for lease in counting(objects, MOUNT, clock) for key in lease.holds}


class Sweep:
    """One sweep, by the gc that holds `lease`. `objects` refuses to delete once that has lapsed.

    `sizes` are those of the condemned objects, `leads` the layers that condemned lookups lead to, `spare` keys that are
    not deleted even if they are condemned.
    """

    def __init__(
        self,
        objects: Objects,
        lease: Lease,
        sizes: Mapping[str, int],
        *,
        leads: Mapping[str, str],
        spare: Collection[str],
        each: Each,
        clock: Clock,
        progress: Progress,
        mark_seconds: float,
    ) -> None:
        self._objects = objects
        self._lease = lease
        self._sizes = sizes
        self._leads = leads
        self._spare = spare
        self._each = each
        self._clock = clock
        self._progress = progress
        self._seconds = max(SWEEP_SECONDS, int(_MARKS * mark_seconds))
        self._until = 0
        self._swept = Swept()

    def run(self, ready: Sequence[Condemned]) -> Swept:
        """Delete what these list. All builders whose lease counts must have acknowledged them."""
        pending = {key for condemned in ready for key in condemned.keys}
        relied: set[str] = set()
        live: set[str] = set()
        while pending:
            before = len(pending)
            self._announce()
            relied = closure(self._objects, self._each, self._relied_on())
            live = mark(self._objects, self._each, held(self._objects, self._clock)).keys
            live |= set(self._spare)
            live |= {lookup for lookup, layer in self._leads.items() if layer in live or layer in relied}
            pending -= live | relied
            live |= self._delete(pending)
            pending -= live
            if len(pending) == before:
                break
        self._drop(ready, pending, relied - live)
        self._swept.unfinished = len(pending)
        return self._swept

    def _announce(self) -> None:
        """From now until `self._until` builders wait; what they count on is in their leases before they look here."""
        self._until = int(self._clock()) + self._seconds
        self._lease.write(lambda record: replace(record, sweep_until=self._until))

    def _relied_on(self) -> set[str]:
        return {key for lease in counting(self._objects, BUILD, self._clock) for key in (*lease.relies, *lease.holds)}

    def _delete(self, pending: set[str]) -> set[str]:
        """Delete these keys and take them out of `pending`, while there is time. Returns those that a node holds."""
        first = [key for key in pending if keys.family(key) in LEADING]
        descriptors = self._descriptors(key for key in first if keys.family(key) == "layers")
        self._delete_all(first, pending)
        back = held(self._objects, self._clock) & descriptors.keys()
        for key in sorted(back):
            self._objects.blobs.put(key, descriptors[key])
        spared = closure(self._objects, self._each, back)
        for family in keys.COLLECTED:
            if family not in LEADING:
                self._delete_all([key for key in pending - spared if keys.family(key) == family], pending)
        return spared

    def _descriptors(self, layers: Iterable[str]) -> dict[str, bytes]:
        """Their bytes, to be put back if need be."""

        def read(key: str) -> tuple[str, bytes | None]:
            try:
                return key, self._objects.blobs.get(key, limit=MAX_DOCUMENT)
            except NotFound:
                return key, None

        return {key: data for key, data in self._each(read, sorted(layers)) if data is not None}

    def _delete_all(self, doomed: Collection[str], pending: set[str]) -> None:
        ordered = sorted(doomed)
        for key, deleted in self._each(self._delete_one, ordered):
            if deleted:
                pending.discard(key)
                if key in self._sizes:
                    self._swept.objects += 1
                    self._swept.bytes += self._sizes[key]
                self._progress("deleting", self._swept.objects, self._swept.objects + len(pending))

    def _delete_one(self, key: str) -> tuple[str, bool]:
        """Nothing is begun that might take effect after the sweep has ended for builders."""
        if self._clock() > self._until - MARGIN:
            return key, False
        self._objects.blobs.delete(key)
        return key, True

    def _drop(self, ready: Iterable[Condemned], pending: set[str], relied: set[str]) -> None:
        """Condemnations go, or shrink to what was not deleted and has not become reachable."""
        for condemned in ready:
            left = tuple(key for key in condemned.keys if key in pending or key in relied)
            self._swept.relied_on += sum(1 for key in left if key in relied)
            if left:
                self._objects.blobs.put(condemned.key, replace(condemned, keys=left).encode())
            else:
                self._objects.blobs.delete(condemned.key)
