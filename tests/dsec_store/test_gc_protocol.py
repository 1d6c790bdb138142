"""Builders, nodes and collectors in any order, request by request, with kills and with time passing: nothing that a
name or a mount leads to is ever lost, and in the end nothing else is left."""

import contextlib
from typing import Any

from hypothesis import HealthCheck, settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dsec_store import keys
from dsec_store.backends.memory import MemoryBlobs
from dsec_store.blobs import BlobStore
from dsec_store.check import layer_problems
from dsec_store.digest import Digest
from dsec_store.errors import NotFound, StoreError
from dsec_store.gc import GcReport, collect
from dsec_store.leases import MOUNT, SECONDS, Busy, Lease, build_lease
from dsec_store.objects import Objects
from tests.dsec_store import gcmaker
from tests.dsec_store.stepping import Actor, Clock, Sleep

LAYERS = [(1, 2, 3, 4), (1,), (4, 5), (5, 6, 7, 8, 9), (2, 9)]
NAMES = ["a", "b", "c"]
MOST_ACTORS = 4
LONG = float(SECONDS[MOUNT] + 1000)
"""Seconds after which every lease has lapsed."""

images = strategies.lists(strategies.sampled_from(LAYERS), min_size=1, max_size=3, unique=True)
actors = strategies.integers(0, MOST_ACTORS - 1)


class Watched(MemoryBlobs):
    """Counts what may make an image incomplete, or name another one."""

    changes = 0

    def put(self, key: str, data: bytes | memoryview) -> None:
        super().put(key, data)
        self.changes += keys.family(key) in ("refs", "locators")

    def delete(self, key: str) -> None:
        super().delete(key)
        self.changes += 1


class Protocol(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.clock = Clock()
        self.blobs = Watched(self.clock)
        self.objects = Objects(self.blobs)
        self.actors: list[Actor] = []
        self.mounted: list[tuple[Lease, Digest]] = []
        self.checked = 0
        with build_lease(self.blobs, clock=self.clock, renew=False) as lease:
            gcmaker.build(Objects(lease.blobs), "a", LAYERS[:2])
            gcmaker.build(Objects(lease.blobs), "b", LAYERS[2:])

    @rule(name=strategies.sampled_from(NAMES), layers=images, refreshes=strategies.booleans())
    def start_a_build(self, name: str, layers: list[gcmaker.Numbers], refreshes: bool) -> None:
        """`refreshes`: whether its lease is renewed between layers."""

        def build(blobs: BlobStore, sleep: Sleep) -> None:
            with build_lease(blobs, clock=self.clock, sleep=sleep, renew=False) as lease:
                digests = []
                for each in layers:
                    digests.append(gcmaker.layer(Objects(lease.blobs), each))
                    if refreshes:
                        lease.blobs.refresh()
                gcmaker.commit(Objects(lease.blobs), name, digests)

        self.start(build)

    @rule(min_age=strategies.sampled_from([0.0, 100.0]))
    def start_a_collection(self, min_age: float) -> None:
        def run(blobs: BlobStore, sleep: Sleep) -> GcReport:
            return collect(Objects(blobs), min_age=min_age, clock=self.clock, workers=1, renew=False)

        self.start(run)

    @rule()
    def collect_at_once(self) -> None:
        with contextlib.suppress(Busy):
            collect(self.objects, min_age=0, clock=self.clock, workers=1, renew=False)

    @rule(number=strategies.integers(0, len(LAYERS) - 1))
    def start_a_mount(self, number: int) -> None:
        """A node mounts a layer that it has heard of."""
        layer = self.objects.lookup("build", gcmaker.build_key(LAYERS[number]))
        if layer is None:
            return

        def mount(blobs: BlobStore, sleep: Sleep) -> None:
            lease = Lease(blobs, MOUNT, holds=[keys.layer(layer)], clock=self.clock)
            lease.begin()
            with contextlib.suppress(NotFound):
                Objects(blobs).layer(layer)
                self.mounted.append((lease, layer))

        self.start(mount)

    def start(self, program: Any) -> None:
        self.actors = [actor for actor in self.actors if not actor.ended]
        if len(self.actors) < MOST_ACTORS:
            self.actors.append(Actor(self.blobs, self.clock, program))

    @precondition(lambda self: self.actors)
    @rule(number=actors, steps=strategies.sampled_from([1, 2, 3, 5, 8, 13, 21, 34, 55, 200]))
    def go_on(self, number: int, steps: int) -> None:
        actor = self.actors[number % len(self.actors)]
        actor.step(steps)
        self.look_at(actor)

    @precondition(lambda self: self.actors)
    @rule(number=actors)
    def kill(self, number: int) -> None:
        self.actors[number % len(self.actors)].kill()

    @rule(seconds=strategies.sampled_from([10.0, 200.0, 1100.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds
        self.mounted = [(lease, layer) for lease, layer in self.mounted if self.clock.now <= lease.record.expires]

    @rule(name=strategies.sampled_from(NAMES))
    def remove(self, name: str) -> None:
        with contextlib.suppress(NotFound):
            self.objects.references.remove(name)

    @rule()
    def unmount(self) -> None:
        if self.mounted:
            lease, _ = self.mounted.pop()
            self.blobs.delete(lease.record.key)

    @invariant()
    def nothing_is_lost(self) -> None:
        if self.checked != self.blobs.changes:
            self.checked = self.blobs.changes
            assert gcmaker.problems(self.objects) == []
            assert [layer_problems(self.objects, layer) for _, layer in self.mounted] == [[]] * len(self.mounted)

    @staticmethod
    def look_at(actor: Actor) -> None:
        """Programs may fail by their leases, and in no other way."""
        if isinstance(actor.outcome, BaseException):
            assert isinstance(actor.outcome, StoreError)
            assert "lease" in str(actor.outcome)

    def teardown(self) -> None:
        if not hasattr(self, "actors"):
            return
        for actor in self.actors:
            actor.finish()
            self.look_at(actor)
        self.mounted = []
        self.nothing_is_lost()
        self.clock.now += LONG
        report = collect(self.objects, min_age=0, clock=self.clock, workers=1, renew=False)
        assert (report.condemned.objects, report.young.objects, report.waiting, report.problems) == (0, 0, (), ())
        assert gcmaker.problems(self.objects) == []
        names = {name: self.objects.references.get(name) for name in self.objects.references.names()}
        left = gcmaker.stored(self.objects)
        for name in names:
            self.objects.references.remove(name)
        collect(self.objects, min_age=0, clock=self.clock, workers=1, renew=False)
        assert {each.key for each in self.blobs.list("")} == set()
        assert bool(left) == bool(names)


Protocol.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestProtocol = Protocol.TestCase
