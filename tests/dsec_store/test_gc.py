"""Collecting: what goes, what stays, and who is waited for."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsec_store import keys
from dsec_store.backends.folder import FolderBlobs
from dsec_store.backends.memory import MemoryBlobs
from dsec_store.blobs import BlobStore
from dsec_store.condemned import read_condemned
from dsec_store.digest import Digest
from dsec_store.errors import Corrupt, NotFound
from dsec_store.gc import GcReport, collect
from dsec_store.leases import BUILD, MARGIN, MOUNT, Busy, Lease, LeaseRecord, build_lease, gc_lease, hold, read_leases
from dsec_store.objects import Objects
from dsec_store.retry import RetryBlobs
from tests.dsec_store import gcmaker
from tests.dsec_store.stepping import Actor, Clock

MANY = tuple(range(100, 140))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def objects(clock: Clock) -> Objects:
    return Objects(MemoryBlobs(clock))


def gc(objects: Objects, clock: Clock, **options: Any) -> GcReport:
    return collect(objects, **{"min_age": 0.0, "clock": clock, "workers": 1, "renew": False, **options})


def collector(objects: Objects, clock: Clock) -> Actor:
    return Actor(objects.blobs, clock, lambda blobs, sleep: gc(Objects(blobs), clock))


def stored(objects: Objects, prefix: str = "") -> set[str]:
    return {stat.key for stat in objects.blobs.list(prefix)}


def fresh(*images: tuple[str, list[gcmaker.Numbers]]) -> set[str]:
    """What is in a store into which only these were put, but for where chunks lie."""
    objects = Objects(MemoryBlobs())
    for name, layers in images:
        gcmaker.build(objects, name, layers)
    return {key for key in gcmaker.stored(objects) if keys.family(key) != "packs"}


def but_packs(objects: Objects) -> set[str]:
    return {key for key in gcmaker.stored(objects) if keys.family(key) != "packs"}


# -- what goes -------------------------------------------------------------------------------------------------------


def test_what_has_a_name_stays_and_nothing_else(objects: Objects, clock: Clock) -> None:
    gcmaker.build(objects, "a", [(1, 2), (3,)])
    gcmaker.build(objects, "b", [(1, 2), (4, 5)])
    objects.references.remove("b")
    report = gc(objects, clock)
    assert but_packs(objects) == fresh(("a", [(1, 2), (3,)]))
    assert gcmaker.problems(objects) == []
    assert report.freed.objects > 5
    assert (report.waiting, report.problems, report.condemned.objects) == ((), (), 0)


def test_an_empty_store_stays_empty(objects: Objects, clock: Clock) -> None:
    gc(objects, clock)
    assert stored(objects) == set()


def test_all_goes_with_the_last_name(objects: Objects, clock: Clock) -> None:
    gcmaker.build(objects, "a", [(1, 2), (3,)])
    objects.references.remove("a")
    gc(objects, clock)
    assert stored(objects) == set()


def test_a_second_run_finds_nothing_to_do(objects: Objects, clock: Clock) -> None:
    for name in ("a", "b", "c"):
        gcmaker.build(objects, name, [(ord(name), 1)])
    gc(objects, clock)
    before = {stat.key: objects.blobs.get(stat.key) for stat in objects.blobs.list("")}
    report = gc(objects, clock)
    assert {stat.key: objects.blobs.get(stat.key) for stat in objects.blobs.list("")} == before
    assert (report.freed.objects, report.rewritten.packs) == (0, 0)


def test_a_dry_run_tells_and_changes_nothing(objects: Objects, clock: Clock) -> None:
    gcmaker.build(objects, "a", [(1, 2)])
    gcmaker.build(objects, "b", [(3,)])
    objects.references.remove("b")
    before = stored(objects)
    told = gc(objects, clock, dry_run=True)
    assert stored(objects) == before
    done = gc(objects, clock)
    indexes = 1  # a dry run does not read them
    assert (told.dry_run, told.freed.objects + indexes) == (True, done.freed.objects)


def test_what_is_young_stays(objects: Objects, clock: Clock) -> None:
    gcmaker.build(objects, "a", [(1, 2)])
    objects.references.remove("a")
    clock.now += 99
    before = stored(objects)
    report = gc(objects, clock, min_age=100)
    assert stored(objects) == before
    assert report.young.objects == len(before) - 1 - 1  # an index and a lookup are neither
    clock.now += 1
    gc(objects, clock, min_age=100)
    assert stored(objects) == set()


def test_what_is_not_ours_stays(objects: Objects, clock: Clock) -> None:
    strangers = {"packs/README", "packs/ab/" + "cd" * 32, "backup/ab/" + "ab" * 32, "lookup/x"}
    for key in strangers:
        objects.blobs.put(key, b"x")
    gc(objects, clock)
    assert stored(objects) == strangers


def test_lookups_go_with_their_layers(objects: Objects, clock: Clock) -> None:
    gcmaker.build(objects, "a", [(1,)])
    gcmaker.build(objects, "b", [(2,)])
    objects.blobs.put(keys.lookup("diff", Digest.of(b"x")), b"nonsense")
    objects.references.remove("b")
    gc(objects, clock)
    assert len(stored(objects, "lookup/")) == 1
    assert objects.lookup("build", gcmaker.build_key((1,)))


@pytest.mark.parametrize("family", ["images", "layers", "locators"])
def test_nothing_goes_while_it_cannot_be_told_what_is_in_use(objects: Objects, clock: Clock, family: str) -> None:
    gcmaker.build(objects, "a", [(1,)])
    gcmaker.build(objects, "b", [(2,)])
    objects.references.remove("b")
    for lost in stored(objects, f"{family}/"):
        objects.blobs.put(lost, b"damaged")
    before = stored(objects)
    with pytest.raises(Corrupt, match="gc frees nothing"):
        gc(objects, clock)
    assert stored(objects) == before


def test_a_damaged_reference_stops_it(objects: Objects, clock: Clock) -> None:
    objects.blobs.put("refs/a", b"damaged")
    with pytest.raises(Corrupt, match="reference 'a'"):
        gc(objects, clock)


# -- packs and indexes -----------------------------------------------------------------------------------------------


def test_a_pack_that_is_mostly_dead_is_rewritten(objects: Objects, clock: Clock) -> None:
    gcmaker.build(objects, "big", [MANY])
    gcmaker.build(objects, "small", [MANY[:3], (7,)])
    objects.references.remove("big")
    (before,) = [size for size in objects.packs().values() if size > 100_000]
    report = gc(objects, clock)
    assert (report.rewritten.packs, report.rewritten.into) == (1, 1)
    assert sum(objects.packs().values()) < before / 5
    assert gcmaker.problems(objects) == []
    assert gcmaker.known_chunks(objects).keys() == {Digest.of(gcmaker.chunk(n)).raw for n in (*MANY[:3], 7)}
    assert gc(objects, clock).rewritten.packs == 0


def test_a_pack_that_is_half_alive_is_left(objects: Objects, clock: Clock) -> None:
    gcmaker.build(objects, "big", [MANY])
    gcmaker.build(objects, "half", [MANY[:22]])
    objects.references.remove("big")
    before = objects.packs()
    assert gc(objects, clock).rewritten.packs == 0
    assert objects.packs() == before


def test_a_pack_with_a_damaged_chunk_in_use_is_left_and_told(objects: Objects, clock: Clock) -> None:
    gcmaker.build(objects, "big", [MANY])
    gcmaker.build(objects, "small", [MANY[:1]])
    objects.references.remove("big")
    (pack,) = objects.packs()
    data = bytearray(objects.blobs.get(keys.pack(pack)))
    data[5] ^= 1
    objects.blobs.put(keys.pack(pack), bytes(data))
    report = gc(objects, clock)
    assert len(report.problems) == 1
    assert str(pack) in report.problems[0]
    assert pack in objects.packs()


def test_a_locator_that_changed_since_is_left(objects: Objects, clock: Clock) -> None:
    """A builder stores a layer anew while gc copies its chunks."""
    gcmaker.build(objects, "big", [MANY])
    gcmaker.build(objects, "small", [MANY[:3]])
    objects.references.remove("big")
    layer = objects.image(objects.references.get("small")).layers[0]
    blob = objects.layer(layer).blobs[0]
    pack, packed = gcmaker.put_pack(objects, [gcmaker.chunk(number) for number in reversed(MANY[:3])])
    actor = collector(objects, clock)
    while len(objects.packs()) < 3:
        actor.step()
    places = gcmaker.located(pack, packed)
    objects.put_locator(blob.chunk_map, [places[Digest.of(gcmaker.chunk(number)).raw] for number in MANY[:3]])
    assert isinstance(actor.finish(), GcReport)
    assert {at.pack for at in objects.locator(blob.name)} == {pack}
    assert gcmaker.problems(objects) == []


def test_indexes_are_merged(objects: Objects, clock: Clock) -> None:
    for number in range(20):
        gcmaker.build(objects, f"image{number}", [(number,)])
    known = gcmaker.known_chunks(objects)
    report = gc(objects, clock)
    assert report.indexes == (20, 1)
    assert len(stored(objects, "indexes/")) == 1
    assert gcmaker.known_chunks(objects) == known
    assert gc(objects, clock).indexes == (1, 1)


def test_a_lost_index_is_made_anew(objects: Objects, clock: Clock) -> None:
    gcmaker.build(objects, "a", [(1, 2)])
    gcmaker.build(objects, "b", [(3,)])
    known = gcmaker.known_chunks(objects)
    objects.blobs.put(min(stored(objects, "indexes/")), b"damaged")
    gc(objects, clock)
    assert gcmaker.known_chunks(objects) == known


def test_young_indexes_are_left(objects: Objects, clock: Clock) -> None:
    gcmaker.build(objects, "a", [(1, 2)])
    gcmaker.build(objects, "b", [(3,)])
    before = stored(objects)
    assert gc(objects, clock, min_age=1).indexes == (2, 2)
    assert stored(objects) == before


# -- who is waited for -----------------------------------------------------------------------------------------------


def test_a_build_that_has_not_acknowledged_is_waited_for(objects: Objects, clock: Clock) -> None:
    gcmaker.build(objects, "a", [(1, 2)])
    with build_lease(objects.blobs, clock=clock, renew=False) as lease:
        layer = gcmaker.layer(Objects(lease.blobs), (1, 2))
        objects.references.remove("a")
        before = stored(objects)
        report = gc(objects, clock)
        assert [each.kind for each in report.waiting] == [BUILD]
        assert (report.freed.objects, report.condemned.objects) == (0, len(before) - 1)  # but for the lease
        lease.blobs.refresh()
        second = gc(objects, clock)
        assert (second.waiting, second.freed.objects) == ((), 3)  # image, config and index: nobody counts on them
        assert second.relied_on > 0
        gcmaker.commit(Objects(lease.blobs), "again", [layer])
    assert gcmaker.problems(objects) == []
    gc(objects, clock)
    assert but_packs(objects) == fresh(("again", [(1, 2)]))


def test_what_was_spared_for_a_build_that_ended_goes_with_the_next_run(objects: Objects, clock: Clock) -> None:
    gcmaker.build(objects, "a", [(1, 2)])
    objects.references.remove("a")
    with build_lease(objects.blobs, clock=clock, renew=False) as lease:
        gcmaker.layer(Objects(lease.blobs), (1, 2))
        gc(objects, clock)
        lease.blobs.refresh()
        gc(objects, clock)
        assert read_condemned(objects.blobs)
    gc(objects, clock)
    assert stored(objects) == set()


def test_builds_that_overlap_do_not_keep_dead_packs_for_ever(objects: Objects, clock: Clock) -> None:
    gcmaker.build(objects, "a", [(1, 2)])
    objects.references.remove("a")
    (pack,) = objects.packs()
    with build_lease(objects.blobs, clock=clock, renew=False) as first:
        assert pack in Objects(first.blobs).packs()
        gc(objects, clock)
        first.blobs.refresh()
        gc(objects, clock)
        second_lease = build_lease(objects.blobs, clock=clock, renew=False)
        second = second_lease.__enter__()
        assert pack not in Objects(second.blobs).packs()
    gc(objects, clock)
    assert pack not in objects.packs()
    second_lease.__exit__(None, None, None)


def test_a_build_that_began_later_finds_what_was_condemned_by_asking(objects: Objects, clock: Clock) -> None:
    gcmaker.build(objects, "a", [(1, 2)])
    objects.references.remove("a")
    with build_lease(objects.blobs, clock=clock, renew=False):
        gc(objects, clock)  # condemned, and waits for us
        before = stored(objects)
        with build_lease(objects.blobs, clock=clock, renew=False) as lease:
            gcmaker.build(Objects(lease.blobs), "b", [(1, 2)])
    assert stored(objects, "packs/") == {key for key in before if keys.family(key) == "packs"}
    gc(objects, clock)
    assert gcmaker.problems(objects) == []


def test_a_build_that_lapsed_is_waited_for_no_more(objects: Objects, clock: Clock) -> None:
    gcmaker.build(objects, "a", [(1, 2)])
    objects.references.remove("a")
    with build_lease(objects.blobs, clock=clock, renew=False):
        clock.now += 10_000
        assert gc(objects, clock).waiting == ()
        assert stored(objects) == set()


def test_what_a_node_holds_stays(objects: Objects, clock: Clock) -> None:
    image = objects.image(gcmaker.build(objects, "a", [(1, 2), (3,)]))
    objects.references.remove("a")
    with hold(objects.blobs, [keys.layer(image.layers[1])], clock=clock):
        gc(objects, clock)
        assert gcmaker.is_whole(objects, image.layers[1])
        assert not objects.has_layer(image.layers[0])
    gc(objects, clock)
    assert stored(objects) == set()


def test_a_node_that_mounts_during_the_sweep_has_the_layer_or_is_told(objects: Objects, clock: Clock) -> None:
    """At whichever request of gc it comes."""
    outcomes = set()
    for step in range(200):
        mine = Objects(MemoryBlobs(clock))
        layer = mine.image(gcmaker.build(mine, "a", [(1, 2)])).layers[0]
        mine.references.remove("a")
        actor = collector(mine, clock)
        actor.step(step)
        over = actor.ended
        lease = Lease(mine.blobs, MOUNT, holds=[keys.layer(layer)], clock=clock)
        lease.begin()
        try:
            mine.layer(layer)
        except NotFound:
            outcomes.add("told")
        else:
            actor.finish()
            assert gcmaker.is_whole(mine, layer)
            outcomes.add("mounted")
        assert isinstance(actor.finish(), GcReport)
        if over:
            break
    assert outcomes == {"told", "mounted"}


def test_nothing_is_deleted_after_the_announced_end(objects: Objects, clock: Clock) -> None:
    for number in range(5):
        gcmaker.build(objects, "a", [(number,)])
    objects.references.remove("a")
    actor = collector(objects, clock)
    while not (announced := sweep_until(objects)):
        actor.step()
    clock.now = announced - MARGIN + 1
    before = gcmaker.stored(objects)
    report = actor.finish()
    assert isinstance(report, GcReport)
    assert report.freed.objects == 0
    assert "could not be deleted in time" in report.problems[0]
    assert gcmaker.stored(objects) >= {key for key in before if keys.family(key) != "leases"}
    gc(objects, clock)
    assert stored(objects) == set()


def test_a_sweep_that_takes_long_is_announced_again(objects: Objects, clock: Clock) -> None:
    for number in range(5):
        gcmaker.build(objects, "a", [(number,)])
    objects.references.remove("a")
    actor = collector(objects, clock)
    before = gcmaker.stored(objects)
    while len(gcmaker.stored(objects)) > len(before) - 3:
        actor.step()
    announced, count = sweep_until(objects), 0
    clock.now = announced - MARGIN + 1
    while sweep_until(objects) == announced:
        count = len(stored(objects))
        actor.step()
    assert sweep_until(objects) > announced
    assert len(stored(objects)) == count
    assert isinstance(actor.finish(), GcReport)
    assert stored(objects) == set()


def sweep_until(objects: Objects) -> int:
    return max((lease.sweep_until for lease in read_leases(objects.blobs, "gc")), default=0)


def test_a_second_collector_is_sent_away(objects: Objects, clock: Clock) -> None:
    with gc_lease(objects.blobs, clock=clock), pytest.raises(Busy):
        gc(objects, clock)
    gc(objects, clock)


def test_leases_that_lapsed_are_cleared_away(objects: Objects, clock: Clock) -> None:
    for kind in (BUILD, MOUNT, "gc"):
        record = LeaseRecord(kind, "ab" * 16, 0, 1)
        objects.blobs.put(record.key, record.encode())
    gc(objects, clock)
    assert [read_leases(objects.blobs, kind) for kind in (BUILD, MOUNT, "gc")] == [[], [], []]


def test_killed_at_any_request_it_loses_nothing_and_the_next_run_ends_it(clock: Clock) -> None:
    over = False
    for step in range(400):
        mine = Objects(MemoryBlobs(clock))
        gcmaker.build(mine, "big", [MANY, (1,)])
        gcmaker.build(mine, "small", [MANY[:3], (2,)])
        mine.references.remove("big")
        actor = collector(mine, clock)
        actor.step(step)
        over = actor.ended
        actor.kill()
        assert gcmaker.problems(mine) == []
        clock.now += 10_000
        gc(mine, clock)
        assert gcmaker.problems(mine) == []
        assert but_packs(mine) == fresh(("small", [MANY[:3], (2,)]))
        if over:
            break
    assert over


# -- on every backend ------------------------------------------------------------------------------------------------


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.component)])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BlobStore]:
    if request.param == "folder":
        yield FolderBlobs(tmp_path)
    else:
        yield RetryBlobs(request.getfixturevalue("s3_store"))


def test_backends_are_collected_with_many_threads(backend: BlobStore) -> None:
    objects = Objects(backend)
    with build_lease(backend) as lease:
        for name in ("a", "b", "c"):
            gcmaker.build(Objects(lease.blobs), name, [(1, 2), (ord(name),)])
    objects.references.remove("b")
    assert collect(objects, min_age=3600).freed.objects == 0
    collect(objects, min_age=0)
    assert but_packs(objects) == fresh(("a", [(1, 2), (97,)]), ("c", [(1, 2), (99,)]))
    assert gcmaker.problems(objects) == []


def test_condemnations_are_split(objects: Objects, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsec_store.gc.MAX_KEYS", 3)
    gcmaker.build(objects, "a", [(1, 2)])
    objects.references.remove("a")
    with build_lease(objects.blobs, clock=clock, renew=False):
        gc(objects, clock)
        found = read_condemned(objects.blobs).values()
        assert all(len(each.keys) <= 3 for each in found)
        assert len(found) > 1
    gc(objects, clock)
    assert stored(objects) == set()
