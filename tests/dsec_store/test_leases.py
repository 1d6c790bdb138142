"""Leases, condemnations, and the store as a builder sees it."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from dsec_store.backends.memory import MemoryBlobs
from dsec_store.condemned import Condemned, read_condemned
from dsec_store.errors import Corrupt, NotFound, Unavailable
from dsec_store.leases import (
    BUILD,
    GC,
    MARGIN,
    MAX_SKEW,
    MOUNT,
    SECONDS,
    Busy,
    Lease,
    LeaseRecord,
    build_lease,
    gc_lease,
    hold,
    read_leases,
)
from dsec_store.meter import MeteredBlobs
from dsec_store.owner import Owner
from tests.dsec_store.stepping import Clock

KEY = "maps/ab/" + "ab" * 32
OTHER = "packs/cd/" + "cd" * 32


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def blobs(clock: Clock) -> MemoryBlobs:
    return MemoryBlobs(clock)


def condemn(blobs: MemoryBlobs, *listed: str, id: str = "01" * 16) -> Condemned:
    condemned = Condemned(id, 5, listed)
    blobs.put(condemned.key, condemned.encode())
    return condemned


def only(blobs: MemoryBlobs, kind: str) -> LeaseRecord:
    (record,) = read_leases(blobs, kind)
    return record


def dead_owner() -> Owner:
    """A process that has ended, and was seen alive."""
    me = Owner.of_this_process()
    assert me is not None
    with subprocess.Popen(["sleep", "60"]) as process:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        process.kill()
    return replace(me, pid=process.pid, started=int(fields[19]))


# -- leases ----------------------------------------------------------------------------------------------------------


def test_what_a_lease_says_is_read_back() -> None:
    record = LeaseRecord(BUILD, "ab", 5, 905, Owner("boot", "pid:[4]", 7, 8), ("h",), ("a",), ("r",), 77)
    assert LeaseRecord.decode(record.encode(), BUILD, "ab") == record


def test_the_vectors_of_the_document() -> None:
    record = LeaseRecord(BUILD, "00" * 16, 1_000_000_000, 1_000_000_900, Owner("b", "pid:[1]", 7, 8))
    assert record.key == "leases/build/" + "00" * 16
    assert record.encode() == (
        b'{"acknowledged":[],"created":1000000000,"expires":1000000900,"format":1,"holds":[],"kind":"build",'
        b'"owner":{"boot":"b","namespace":"pid:[1]","pid":7,"started":8},"relies":[],"sweep_until":0}'
    )
    condemned = Condemned("00" * 16, 1_000_000_000, (KEY,))
    assert condemned.key == "condemned/" + "00" * 16
    assert condemned.encode() == b'{"created":1000000000,"format":1,"keys":["' + KEY.encode() + b'"]}'


def test_a_lease_counts_until_it_expires_by_any_clock() -> None:
    record = LeaseRecord(BUILD, "ab", 0, 1000)
    assert record.counts(1000 + MAX_SKEW)
    assert not record.counts(1000 + MAX_SKEW + 1)


def test_the_lease_of_a_dead_process_counts_no_more_where_that_can_be_seen() -> None:
    dead = dead_owner()
    assert dead.is_dead()
    assert not LeaseRecord(BUILD, "ab", 0, 1000, dead).counts(0)
    for elsewhere in (replace(dead, boot="other"), replace(dead, namespace="pid:[1]")):
        assert LeaseRecord(BUILD, "ab", 0, 1000, elsewhere).counts(0)


def test_this_process_lives_and_one_that_has_its_id_later_is_another() -> None:
    me = Owner.of_this_process()
    assert me is not None
    assert me.pid == os.getpid()
    assert not me.is_dead()
    assert replace(me, started=me.started + 1).is_dead()


def test_a_build_has_a_lease_for_as_long_as_it_lasts(blobs: MemoryBlobs, clock: Clock) -> None:
    with build_lease(blobs, clock=clock):
        record = only(blobs, BUILD)
        assert (record.created, record.expires) == (int(clock.now), int(clock.now) + SECONDS[BUILD])
    assert list(blobs.list("")) == []


def test_a_build_that_fails_leaves_no_lease(blobs: MemoryBlobs) -> None:
    with pytest.raises(NotFound), build_lease(blobs) as lease:
        lease.blobs.get("refs/none")
    assert list(blobs.list("")) == []


def test_renewing_moves_the_end(blobs: MemoryBlobs, clock: Clock) -> None:
    with build_lease(blobs, clock=clock, renew=False) as lease:
        clock.now += 300
        lease.blobs.refresh()
        assert only(blobs, BUILD).expires == int(clock.now) + SECONDS[BUILD]


@pytest.mark.parametrize("key", [KEY, "refs/demo"])
def test_a_lapsed_build_puts_nothing(blobs: MemoryBlobs, clock: Clock, key: str) -> None:
    with build_lease(blobs, clock=clock, renew=False) as lease:
        clock.now += SECONDS[BUILD] - MARGIN + 1
        with pytest.raises(Unavailable, match="lease of this command lapsed"):
            lease.blobs.put(key, b"x")
        with pytest.raises(Unavailable, match="lapsed"):
            lease.blobs.refresh()
    assert list(blobs.list("")) == []


def test_a_build_whose_lease_was_taken_away_commits_nothing_whatever_its_clock_says(blobs: MemoryBlobs) -> None:
    with build_lease(blobs, renew=False) as lease:
        lease.blobs.put(KEY, b"x")
        blobs.delete(only(blobs, BUILD).key)
        with pytest.raises(Unavailable, match="lapsed"):
            lease.blobs.put("refs/demo", b"x")
    assert blobs.stat("refs/demo") is None


def test_two_collectors_exclude_each_other(blobs: MemoryBlobs, clock: Clock) -> None:
    with gc_lease(blobs, clock=clock):
        with pytest.raises(Busy, match="another gc is at work"), gc_lease(blobs, clock=clock):
            pass
        assert len(read_leases(blobs, GC)) == 1
    with gc_lease(blobs, clock=clock):
        pass


def test_a_dead_collector_is_in_nobodys_way(blobs: MemoryBlobs, clock: Clock) -> None:
    record = LeaseRecord(GC, "ab" * 16, 0, int(clock.now) + 900, dead_owner())
    blobs.put(record.key, record.encode())
    with gc_lease(blobs, clock=clock):
        pass


def test_holding_is_a_mount_lease(blobs: MemoryBlobs) -> None:
    with hold(blobs, ["layers/ab/cd"]):
        assert only(blobs, MOUNT).holds == ("layers/ab/cd",)
    assert read_leases(blobs, MOUNT) == []


@pytest.mark.parametrize("data", [b"", b"[]", b'{"format":1}', b'{"format":1,"created":1,"keys":["refs/demo"]}'])
def test_what_is_no_condemnation_is_corrupt(blobs: MemoryBlobs, data: bytes) -> None:
    blobs.put("condemned/ab", data)
    with pytest.raises(Corrupt, match="condemnation ab"):
        read_condemned(blobs)


# -- what a builder sees ---------------------------------------------------------------------------------------------


def test_a_quiet_store_costs_nothing_more(clock: Clock, blobs: MemoryBlobs) -> None:
    blobs.put(KEY, b"x")
    metered = MeteredBlobs(blobs)
    with build_lease(metered, clock=clock, renew=False) as lease:
        before = metered.snapshot().total.requests
        assert lease.blobs.get(KEY) == b"x"
        lease.blobs.put(OTHER, b"y")
        assert [stat.key for stat in lease.blobs.list("packs/")] == [OTHER]
        assert metered.snapshot().total.requests - before == 3


def test_a_condemned_object_is_listed_no_more_and_counts_once_it_is_asked_for(blobs: MemoryBlobs) -> None:
    blobs.put(KEY, b"x")
    condemn(blobs, KEY)
    with build_lease(blobs, renew=False) as lease:
        assert only(blobs, BUILD).acknowledged == ("01" * 16,)
        assert list(lease.blobs.list("maps/")) == []
        assert lease.blobs.stat(KEY) is not None
        assert only(blobs, BUILD).relies == (KEY,)
        assert [stat.key for stat in lease.blobs.list("maps/")] == [KEY]


def sweeping(blobs: MemoryBlobs, clock: Clock, seconds: int = 300) -> Lease:
    lease = Lease(blobs, GC, clock=clock)
    lease.begin()
    until = int(clock.now) + seconds
    lease.write(lambda record: replace(record, sweep_until=until))
    return lease


def test_while_a_sweep_is_under_way_it_is_absent(blobs: MemoryBlobs, clock: Clock) -> None:
    blobs.put(KEY, b"x")
    condemn(blobs, KEY)
    sweeping(blobs, clock)
    with build_lease(blobs, clock=clock, renew=False) as lease:
        assert lease.blobs.stat(KEY) is None
        with pytest.raises(NotFound, match="being deleted by gc"):
            lease.blobs.get(KEY)


def test_who_puts_it_waits_for_the_end_of_the_sweep(blobs: MemoryBlobs, clock: Clock) -> None:
    condemn(blobs, KEY)
    gc = sweeping(blobs, clock)
    relied = []

    def sleep(seconds: float) -> None:
        relied.append(only(blobs, BUILD).relies)
        assert blobs.stat(KEY) is None
        if len(relied) == 3:
            gc.end()

    with build_lease(blobs, clock=clock, sleep=sleep, renew=False) as lease:
        lease.blobs.put(KEY, b"new")
    assert relied == [(KEY,)] * 3
    assert blobs.get(KEY) == b"new"


def test_who_puts_it_outlasts_a_collector_that_vanished(blobs: MemoryBlobs, clock: Clock) -> None:
    condemn(blobs, KEY)
    sweeping(blobs, clock, seconds=300)
    began = clock.now

    def sleep(seconds: float) -> None:
        clock.now += 50

    with build_lease(blobs, clock=clock, sleep=sleep, renew=False) as lease:
        lease.blobs.put(KEY, b"new")
    assert clock.now > began + 300 + MAX_SKEW


def test_what_was_seen_before_it_was_condemned_is_told_and_stays(blobs: MemoryBlobs) -> None:
    for key in (KEY, OTHER):
        blobs.put(key, b"x")
    with build_lease(blobs, renew=False) as lease:
        list(lease.blobs.list("packs/"))
        condemn(blobs, KEY, OTHER)
        lease.blobs.refresh()
        record = only(blobs, BUILD)
        assert (record.acknowledged, record.relies) == (("01" * 16,), (OTHER,))
        assert lease.blobs.get(OTHER) == b"x"
        assert list(lease.blobs.list("maps/")) == []


def test_a_locator_that_was_replaced_meanwhile_is_put_again_before_the_commit(blobs: MemoryBlobs) -> None:
    locator = "locators/ab/" + "ab" * 32
    with build_lease(blobs, renew=False) as lease:
        lease.blobs.put(locator, b"ours")
        blobs.put(locator, b"overtaken")
        lease.blobs.put("refs/demo", b"x")
    assert blobs.get(locator) == b"ours"
