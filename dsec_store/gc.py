"""Garbage collection: free what nothing leads to, beside builds and mounts on other machines.

    mark ─> rewrite packs that are mostly dead ─> merge indexes ─> condemn what nothing leads to
        ─> grace: every build acknowledges ─> sweep (`dsec_store.sweep`)

Each step may be the last one: what was begun is ended, or begun anew, by the next run. One run does as much as can be
done now. With no build under way that is all of it; else it says which builds it waits for.

    report = collect(Objects(blobs))            # free what is older than an hour
    report = collect(Objects(blobs), dry_run=True)

Protocol and proof: docs/decisions/0006-gc-leases.md. Cost: each reference, image, layer and locator is read twice, each
family is listed once; memory as `dsec_store.reachable` says, and 200 bytes for each dead object.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from dsec_store import keys
from dsec_store.around import AroundBlobs, Operation, Request
from dsec_store.blobs import BlobStat, BlobStore
from dsec_store.condemned import MAX_KEYS, Condemned, read_condemned
from dsec_store.digest import Digest
from dsec_store.errors import Invalid, NotFound
from dsec_store.leases import BUILD, GC, MOUNT, Clock, Lease, LeaseRecord, gc_lease, new_id, read_leases
from dsec_store.mergeindexes import IndexMerger, worth_reading
from dsec_store.objects import Objects
from dsec_store.reachable import READERS, Each, Reached, mark
from dsec_store.rewrite import Rewritten, is_mostly_dead, rewrite
from dsec_store.sweep import Progress, Sweep, Swept, counting, held

T = TypeVar("T")

DEFAULT_MIN_AGE: Final = 3600.0
"""Seconds since an object was stored during which gc leaves it alone. No build needs that, for it has a lease; it keeps
chunks for the one that is started again after a failure."""

_MAX_LOOKUP: Final = 128
"""Bytes of a lookup that is read; a longer one is nonsense."""

_KEY: Final = re.compile(r"(?:lookup/[a-z]+/[a-z0-9]+|[a-z]+)/([0-9a-f]{2})/\1[0-9a-f]{62}")
"""How the keys of `keys.COLLECTED` look. Whatever else lies there is not ours, and stays."""


def silent(what: str, done: int, total: int) -> None:
    """A progress that nobody watches."""


@dataclass(frozen=True, slots=True)
class Count:
    """Some objects, and their stored bytes together."""

    objects: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class GcReport:
    """What gc did; with `dry_run`, what it would do now.

    live        what names or mounts lead to, before anything was done
    freed       what was deleted
    condemned   what is dead and waits for builds, see `waiting`
    young       what nothing leads to, and is younger than the age limit
    relied_on   condemned objects that stay because a build counts on them
    rewritten   packs that were mostly dead: how many, into how many, and the bytes that were copied
    indexes     index objects before and after
    waiting     leases of builds that have not acknowledged yet what was condemned
    problems    what could not be done, one line each
    """

    dry_run: bool
    live: Count
    freed: Count
    condemned: Count
    young: Count
    relied_on: int
    rewritten: Rewritten
    indexes: tuple[int, int]
    waiting: tuple[LeaseRecord, ...]
    problems: tuple[str, ...]


def collect(
    objects: Objects,
    *,
    dry_run: bool = False,
    min_age: float = DEFAULT_MIN_AGE,
    progress: Progress = silent,
    clock: Clock = time.time,
    workers: int = READERS,
    renew: bool = True,
) -> GcReport:
    """Collect once; `min_age` in seconds. With `dry_run` nothing is written.

    `workers` requests are under way at once. Without `renew`, no thread renews the lease of gc. Raises `Invalid`
    (`leases.Busy`) when another gc is at work, `Corrupt` when it cannot be told what is in use, `Unavailable` when the
    lease lapsed. It may be killed at any time.
    """
    settings = _Settings(min_age, progress, clock, Each(workers))
    if dry_run:
        return _Collection(objects, None, settings).run()
    with gc_lease(objects.blobs, clock=clock, renew=renew) as lease:
        return _Collection(Objects(_Guarded(objects.blobs, lease)), lease, settings).run()


class _Guarded(AroundBlobs):
    """Writes and deletes nothing once the lease of gc is about to lapse: another gc may be at work then."""

    def __init__(self, inner: BlobStore, lease: Lease) -> None:
        super().__init__(inner)
        self._lease = lease

    def _around(self, request: Request, call: Callable[[], T]) -> T:
        if request.operation in (Operation.PUT, Operation.DELETE):
            self._lease.check()
        return call()


@dataclass(frozen=True, slots=True)
class _Settings:
    min_age: float
    progress: Progress
    clock: Clock
    each: Each


@dataclass(slots=True)
class _Survey:
    """What is stored: sizes of what is dead and old enough, or was condemned before; and totals of the rest."""

    dead: dict[str, int] = field(default_factory=dict)
    condemned: dict[str, int] = field(default_factory=dict)
    indexes: list[BlobStat] = field(default_factory=list)
    packs: set[Digest] = field(default_factory=set)
    """Those that stay."""
    layers: set[str] = field(default_factory=set)
    """Keys of those that stay."""
    leads: dict[str, str] = field(default_factory=dict)
    """Of lookups that are dead or condemned: the layer's key, if they lead to one that may come back."""
    merged: set[str] = field(default_factory=set)
    """Keys of the indexes that are to stay, whatever was condemned before."""
    live: Count = Count()
    young: Count = Count()


class _Collection:
    """One run. Without a lease it only looks."""

    def __init__(self, objects: Objects, lease: Lease | None, settings: _Settings) -> None:
        self._objects = objects
        self._lease = lease
        self._min_age = settings.min_age
        self._progress = settings.progress
        self._clock = settings.clock
        self._each = settings.each
        self._mark_seconds = 0.0

    def run(self) -> GcReport:
        self._clear_leases()
        before = read_condemned(self._objects.blobs)
        known = {key for condemned in before.values() for key in condemned.keys}
        reached = self._mark(chunks=True)
        rewritten = self._rewrite(reached, known)
        if rewritten.into and self._lease:
            reached = self._mark()
        survey = self._survey(reached, known)
        indexes = self._merge(survey, known)
        condemned = [*before.values(), *self._condemn(survey)]
        ready, waiting = self._ready(condemned)
        swept = self._sweep(ready, survey)
        pending = _count(survey, (key for each in condemned if each not in ready for key in each.keys))
        problems = rewritten.problems
        if swept.unfinished:
            problems += (f"{swept.unfinished} condemned objects could not be deleted in time: run gc again",)
        return GcReport(
            dry_run=self._lease is None,
            live=survey.live,
            freed=Count(swept.objects, swept.bytes),
            condemned=pending,
            young=survey.young,
            relied_on=swept.relied_on,
            rewritten=rewritten,
            indexes=indexes,
            waiting=tuple(waiting),
            problems=problems,
        )

    def _clear_leases(self) -> None:
        """Remove those that count no more. A build that wakes up finds its lease gone, and commits nothing."""
        for kind in (BUILD, MOUNT, GC) if self._lease else ():
            for record in read_leases(self._objects.blobs, kind):
                if not record.counts(self._clock()):
                    self._objects.blobs.delete(record.key)

    def _mark(self, *, chunks: bool = False) -> Reached:
        self._progress("marking", 0, 0)
        started = time.monotonic()
        reached = mark(self._objects, self._each, held(self._objects, self._clock), chunks=chunks)
        self._mark_seconds = time.monotonic() - started
        return reached

    # -- rewriting and merging ---------------------------------------------------------------------------------------

    def _rewrite(self, reached: Reached, known: set[str]) -> Rewritten:
        """Copy what is in use out of packs that are mostly dead."""
        chosen = []
        for stat in self._objects.blobs.list("packs/"):
            if stat.key in reached.keys and stat.key not in known and not self._is_young(stat):
                pack = keys.digest_in(stat.key)
                if is_mostly_dead(stat.size, reached.packs[pack]):
                    chosen.append(pack)
        chosen.sort(key=lambda pack: pack.raw)
        if not self._lease:
            return Rewritten(len(chosen), 0, sum(reached.packs[pack].stored for pack in chosen))
        total = Rewritten()
        self._progress("rewriting packs", 0, len(chosen))
        for done in rewrite(self._objects, chosen, reached):
            total += done
            self._progress("rewriting packs", total.packs, len(chosen))
        return total

    def _merge(self, survey: _Survey, known: set[str]) -> tuple[int, int]:
        """Merge the indexes that are old enough; those that are superseded are dead then."""
        old = [stat for stat in survey.indexes if stat.key not in known and not self._is_young(stat)]
        dead_packs = any(keys.family(key) == "packs" for key in (*survey.dead, *survey.condemned))
        count = sum(1 for stat in survey.indexes if stat.key not in known)
        readable = worth_reading(old, dead_packs)
        if not self._lease or not readable:
            return count, count
        self._progress("merging indexes", 0, len(readable))
        merger = IndexMerger(self._objects, survey.packs.__contains__)
        missing = sorted(survey.packs, key=lambda pack: pack.raw) if len(readable) == count else ()
        merged = merger.run(readable, missing, self._each)
        survey.merged = {keys.index(digest) for digest in merged.indexes}
        sizes = {stat.key: stat.size for stat in readable}
        survey.dead.update({key: sizes[key] for key in merged.superseded})
        return count, count - len(readable) + len(merged.indexes)

    # -- what is dead ------------------------------------------------------------------------------------------------

    def _survey(self, reached: Reached, known: set[str]) -> _Survey:
        """List the store. Indexes come before packs: so a pack that an index names is found, if it is there."""
        survey = _Survey()
        lookups = []
        for number, family in enumerate(keys.COLLECTED):
            self._progress("looking what is stored", number, len(keys.COLLECTED))
            for stat in self._objects.blobs.list(f"{family}/"):
                if family == "lookup":
                    lookups.append(stat)
                elif _KEY.fullmatch(stat.key):
                    self._sort(stat, stat.key in reached.keys, known, survey)
        if any(keys.family(key) == "layers" for key in (*survey.dead, *survey.condemned)):
            lookups = [stat for stat in lookups if _KEY.fullmatch(stat.key)]
            for stat, layer in zip(lookups, self._each(self._led_to, lookups), strict=True):
                self._sort(stat, layer in survey.layers, known, survey)
                if layer and (stat.key in survey.dead or stat.key in survey.condemned):
                    survey.leads[stat.key] = layer
        else:
            for stat in lookups:
                survey.live = _add(survey.live, stat)
        return survey

    def _sort(self, stat: BlobStat, live: bool, known: set[str], survey: _Survey) -> None:
        family = keys.family(stat.key)
        if family == "indexes":
            survey.indexes.append(stat)
            if stat.key in known:
                survey.condemned[stat.key] = stat.size
            else:
                survey.live = _add(survey.live, stat)
            return
        if live:
            survey.live = _add(survey.live, stat)
        elif stat.key in known:
            survey.condemned[stat.key] = stat.size
            return
        elif self._is_young(stat):
            survey.young = _add(survey.young, stat)
        else:
            survey.dead[stat.key] = stat.size
            return
        if family == "packs":
            survey.packs.add(keys.digest_in(stat.key))
        elif family == "layers":
            survey.layers.add(stat.key)

    def _led_to(self, lookup: BlobStat) -> str | None:
        """Key of the layer that a lookup leads to; None when it leads to nonsense or is gone."""
        with contextlib.suppress(Invalid, NotFound, UnicodeDecodeError):
            if lookup.size <= _MAX_LOOKUP:
                return keys.layer(Digest.parse(self._objects.blobs.get(lookup.key).decode()))
        return None

    def _is_young(self, stat: BlobStat) -> bool:
        """An object whose age is not known counts as young, unless there is no limit."""
        if not self._min_age:
            return False
        return stat.modified is None or self._clock() - stat.modified < self._min_age

    def _condemn(self, survey: _Survey) -> list[Condemned]:
        """Store the lists of what is dead. On return nobody who begins a build counts on any of it."""
        order = {family: number for number, family in enumerate(keys.COLLECTED)}
        dead = sorted(survey.dead, key=lambda key: (order[keys.family(key)], key))
        parts = [dead[at : at + MAX_KEYS] for at in range(0, len(dead), MAX_KEYS)]
        condemned = [Condemned(new_id(), int(self._clock()), tuple(part)) for part in parts]
        for each in condemned if self._lease else ():
            self._objects.blobs.put(each.key, each.encode())
        return condemned

    # -- freeing it --------------------------------------------------------------------------------------------------

    def _ready(self, condemned: Iterable[Condemned]) -> tuple[list[Condemned], list[LeaseRecord]]:
        """What every build heeds whose lease is there by now; and the builds that have yet to say so."""
        builds = counting(self._objects, BUILD, self._clock)
        ready, waiting = [], set()
        for each in condemned:
            missing = {build.id for build in builds if each.id not in build.acknowledged}
            waiting |= missing
            if not missing:
                ready.append(each)
        return ready, [build for build in builds if build.id in waiting]

    def _sweep(self, ready: list[Condemned], survey: _Survey) -> Swept:
        sizes = survey.dead | survey.condemned
        if self._lease is None:
            count = _count(survey, (key for each in ready for key in each.keys))
            return Swept(count.objects, count.bytes)
        sweep = Sweep(
            self._objects,
            self._lease,
            sizes,
            leads=survey.leads,
            spare=survey.merged,
            each=self._each,
            clock=self._clock,
            progress=self._progress,
            mark_seconds=self._mark_seconds,
        )
        return sweep.run(ready)


def _add(count: Count, stat: BlobStat) -> Count:
    return replace(count, objects=count.objects + 1, bytes=count.bytes + stat.size)


def _count(survey: _Survey, listed: Iterable[str]) -> Count:
    sizes = survey.dead | survey.condemned
    found = [sizes[key] for key in listed if key in sizes]
    return Count(len(found), sum(found))
