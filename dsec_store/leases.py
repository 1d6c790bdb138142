"""Leases: objects that say who uses the store right now, so that gc deletes nothing that somebody counts on.

    leases/build/<id>    somebody adds to the store: from before the first look until after the last commit
    leases/mount/<id>    a node has these layers mounted
    leases/gc/<id>       somebody collects; while `sweep_until` lies ahead, deletes

A lease is written by its owner only. It counts until `expires` (plus `MAX_SKEW`, for clocks differ), or until its owner
is seen to be dead. The owner renews it in the background, and may not do what it protects `MARGIN` seconds before it
expires and after. The protocol, and why it is safe: docs/decisions/0006-gc-leases.md. Fields: docs/format/leases.md.

    with build_lease(blobs) as lease:
        objects = Objects(lease.blobs)
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from dsec_store import document, keys
from dsec_store.blobs import BlobStore
from dsec_store.errors import Corrupt, Invalid, NotFound, StoreError, Unavailable
from dsec_store.owner import Owner

if TYPE_CHECKING:
    from dsec_store.leased import LeasedBlobs

FORMAT: Final = 1

BUILD: Final = "build"
MOUNT: Final = "mount"
GC: Final = "gc"

MAX_SKEW: Final = 60
"""Seconds by which the clocks of two machines that use one store may differ."""

MARGIN: Final = 120
"""Seconds before the end of a lease from which on its owner begins nothing that the lease protects: a commit, a
deletion. What was begun before has taken effect by the end, or never does: more than the time that one small request
may take, with all its retries."""

SECONDS: Final = {BUILD: 900, GC: 900, MOUNT: 24 * 3600}
"""How long a lease lasts from each renewal on. A mount outlives the process that renews its lease: that one is long."""

RENEW_EVERY: Final = {BUILD: 60.0, GC: 60.0, MOUNT: 3600.0}
"""Seconds between renewals."""

MAX_LEASE: Final = 64 << 20
"""Bytes of a lease that a reader accepts. One that relies on half a million condemned objects takes 40 MiB."""

_log: Final = logging.getLogger(__name__)

Clock = Callable[[], float]
"""Seconds since 1970."""


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """What a lease says. Times in seconds since 1970, by the clock of its owner.

    holds          keys of layers and images that are in use, with all that they lead to
    acknowledged   ids of the condemnations that a builder heeds
    relies         condemned keys that a builder counts on all the same
    sweep_until    of gc: until then it may delete what is condemned; 0 when it does not
    """

    kind: str
    id: str
    created: int
    expires: int
    owner: Owner | None = None
    holds: tuple[str, ...] = ()
    acknowledged: tuple[str, ...] = ()
    relies: tuple[str, ...] = ()
    sweep_until: int = 0

    @property
    def key(self) -> str:
        return keys.lease(self.kind, self.id)

    def counts(self, now: float) -> bool:
        """Whether others must heed it."""
        return now <= self.expires + MAX_SKEW and not (self.owner and self.owner.is_dead())

    def sweeps(self, now: float) -> bool:
        """Whether its owner may be deleting what is condemned."""
        return now <= self.sweep_until + MAX_SKEW and not (self.owner and self.owner.is_dead())

    def encode(self) -> bytes:
        return document.encode(
            {
                "format": FORMAT,
                "kind": self.kind,
                "created": self.created,
                "expires": self.expires,
                "owner": self.owner.as_json() if self.owner else None,
                "holds": list(self.holds),
                "acknowledged": list(self.acknowledged),
                "relies": list(self.relies),
                "sweep_until": self.sweep_until,
            }
        )

    @classmethod
    def decode(cls, data: bytes, kind: str, id: str) -> LeaseRecord:
        """Raises `Corrupt` or `Invalid`, naming the lease."""
        what = f"lease {keys.lease(kind, id)}"
        fields = document.Document(data, what, form=FORMAT)
        if fields.take("kind", str) != kind:
            raise Corrupt(f"{what}: is of another kind")
        owner = fields.optional_object("owner")
        return cls(
            kind=kind,
            id=id,
            created=fields.number("created"),
            expires=fields.number("expires"),
            owner=Owner.from_fields(owner) if owner else None,
            holds=tuple(fields.strings("holds")),
            acknowledged=tuple(fields.strings("acknowledged")),
            relies=tuple(fields.strings("relies")),
            sweep_until=fields.number("sweep_until"),
        )


def read_leases(blobs: BlobStore, kind: str) -> list[LeaseRecord]:
    """Every lease of this kind that is stored, whether or not it counts. What vanishes meanwhile is left out."""
    found = []
    for stat in blobs.list(f"{keys.LEASES}{kind}/"):
        with contextlib.suppress(NotFound):
            id = stat.key.rpartition("/")[2]
            found.append(LeaseRecord.decode(blobs.get(stat.key, limit=MAX_LEASE), kind, id))
    return sorted(found, key=lambda record: record.id)


def new_id() -> str:
    """An id that nobody else has: 32 hex digits."""
    return secrets.token_hex(16)


class Lease:
    """A lease of this process. Safe for calls from many threads.

    `write` is the only way to change it: what it says in the store only ever moves forward.
    """

    def __init__(self, blobs: BlobStore, kind: str, *, holds: Iterable[str] = (), clock: Clock = time.time) -> None:
        """Nothing is written yet (`begin`)."""
        self._blobs = blobs
        self._clock = clock
        self._writing = threading.Lock()
        self._gone = False
        now = int(clock())
        self._record = LeaseRecord(
            kind, new_id(), created=now, expires=now, owner=Owner.of_this_process(), holds=tuple(sorted(holds))
        )

    @property
    def record(self) -> LeaseRecord:
        """What it said when it was written last."""
        return self._record

    def begin(self) -> None:
        """On return it is stored. Raises `StoreError` when it could not be."""
        with self._writing:
            self._put(self._record)

    def write(self, change: Callable[[LeaseRecord], LeaseRecord]) -> None:
        """Store what `change` makes of it, and renew it by that. Raises `Unavailable` when it has lapsed."""
        with self._writing:
            changed = change(self._record)
            self.check()
            self._put(changed)

    def rely(self, key: str) -> None:
        """On return the lease in the store says that we count on the condemned object `key`."""
        if key not in self._record.relies:
            self.write(lambda record: replace(record, relies=tuple(sorted({*record.relies, key}))))

    def renew(self) -> None:
        """Raises `Unavailable` when it has lapsed, or was taken away because others saw it lapse."""
        self.confirm()
        self.write(lambda record: record)

    def check(self, margin: float = MARGIN) -> None:
        """Raise `Unavailable` unless it lasts for `margin` seconds more."""
        if self._gone or self._clock() > self._record.expires - margin:
            raise Unavailable(self._lapsed())

    def confirm(self) -> None:
        """As `check`, and look whether it is still in the store: the clock of a machine that slept may be wrong."""
        self.check()
        if self._blobs.stat(self._record.key) is None:
            self._gone = True
            raise Unavailable(self._lapsed())

    def end(self) -> None:
        """On return it is gone from the store, or the reason is logged: then it counts until it expires."""
        self._gone = True
        try:
            self._blobs.delete(self._record.key)
        except StoreError as error:
            _log.warning("lease %s stays until it expires: %s", self._record.key, error)

    def _put(self, record: LeaseRecord) -> None:
        """Under the lock."""
        renewed = replace(record, expires=int(self._clock()) + SECONDS[record.kind])
        self._blobs.put(renewed.key, renewed.encode())
        self._record = renewed

    def _lapsed(self) -> str:
        return (
            f"the {self._record.kind} lease of this command lapsed (the machine was suspended, or the store could not "
            "be reached): what it counted on may have been deleted, so nothing was committed; repeat the command"
        )


@contextlib.contextmanager
def renewing(renew: Callable[[], None], every: float) -> Iterator[None]:
    """Call `renew` every `every` seconds in a thread while the body runs. What it raises is logged: the lease then
    lapses in time, and whoever relies on it is told by `Lease.check`."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(every):
            try:
                renew()
            except StoreError as error:
                _log.warning("a lease could not be renewed: %s", error)

    thread = threading.Thread(target=run, name="lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@dataclass(frozen=True, slots=True)
class BuildLease:
    """A build under way: `blobs` is the store as it must see and change it."""

    blobs: LeasedBlobs


@contextlib.contextmanager
def build_lease(
    blobs: BlobStore, *, clock: Clock = time.time, sleep: Callable[[float], None] = time.sleep, renew: bool = True
) -> Iterator[BuildLease]:
    """Build in the body. Whatever is looked for or put through `lease.blobs` is safe from gc until it is committed.

    `blobs` has retries already. Without `renew` no thread renews the lease: then the caller does (`blobs.refresh`).
    Raises `StoreError` when the lease cannot be written.
    """
    from dsec_store.leased import LeasedBlobs

    lease = Lease(blobs, BUILD, clock=clock)
    lease.begin()
    try:
        leased = LeasedBlobs(blobs, lease, clock=clock, sleep=sleep)
        leased.look()
        with renewing(leased.refresh, RENEW_EVERY[BUILD]) if renew else contextlib.nullcontext():
            yield BuildLease(leased)
    finally:
        lease.end()


@contextlib.contextmanager
def hold(blobs: BlobStore, holds: Iterable[str], *, clock: Clock = time.time) -> Iterator[None]:
    """Keep the layers and images of these keys, with all that they lead to, while the body reads them.

    The body must be ready for `NotFound`: what was being deleted already is not brought back.
    """
    lease = Lease(blobs, MOUNT, holds=holds, clock=clock)
    lease.begin()
    try:
        with renewing(lease.renew, RENEW_EVERY[MOUNT]):
            yield
    finally:
        lease.end()


class Busy(Invalid):
    """Another gc is at work on this store."""

    def __init__(self, other: LeaseRecord, location: str) -> None:
        owner = f", {other.owner} of its machine" if other.owner else ""
        super().__init__(
            f"another gc is at work on {location} (lease {other.key}{owner}): wait for its end; if it is dead, its "
            f"lease counts for {SECONDS[GC] // 60} minutes more at most"
        )


@contextlib.contextmanager
def gc_lease(blobs: BlobStore, *, clock: Clock = time.time, renew: bool = True) -> Iterator[Lease]:
    """Be the only gc of the store in the body. Raises `Busy` when there is another; of two that begin at the same
    moment perhaps both do."""
    lease = Lease(blobs, GC, clock=clock)
    lease.begin()
    try:
        for other in read_leases(blobs, GC):
            if other.id != lease.record.id and other.counts(clock()):
                raise Busy(other, blobs.location)
        with renewing(lease.renew, RENEW_EVERY[GC]) if renew else contextlib.nullcontext():
            yield lease
    finally:
        lease.end()
