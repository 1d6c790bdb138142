"""Runs in a store: which there are, that they are found again, and what they depend on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from dsec_store import keys
from dsec_store.backends.memory import MemoryBlobs
from dsec_store.check import check_image
from dsec_store.descriptor import Image, LayerDescriptor
from dsec_store.digest import Digest
from dsec_store.errors import Corrupt, NotFound
from dsec_store.layer.collapse import RUN_LENGTH, automatic_runs, collapse, lowers_of, run_key
from dsec_store.layer.erofs import read_image
from dsec_store.layer.tree import Inode, whiteout
from dsec_store.meter import MeteredBlobs
from dsec_store.objects import Objects
from dsec_store.references import Reference
from tests.dsec_snapshotter.making import put_layer

BASE: dict[str, Any] = {"a": b"base", "d": {"x": b"base x", "y": b"base y"}}
UPDATE: dict[str, Any] = {"a": whiteout(), "d": {"x": whiteout(), "z": b"update z"}}
ROOT = Inode(0o40711, uid=5)


@pytest.fixture
def metered() -> MeteredBlobs:
    return MeteredBlobs(MemoryBlobs())


@pytest.fixture
def objects(metered: MeteredBlobs) -> Objects:
    return Objects(metered)


def put(objects: Objects, *layers: Mapping[str, Any]) -> list[Digest]:
    return [put_layer(objects, entries) for entries in layers]


def put_many(objects: Objects, count: int, start: int = 0) -> list[Digest]:
    return put(objects, *({f"f{number}": b"%d" % number} for number in range(start, start + count)))


def as_one(objects: Objects, layers: Sequence[Digest], **options: bool) -> Digest:
    (run,) = collapse(objects, layers, [range(len(layers))], **options)
    return run


def paths(objects: Objects, layer: Digest) -> list[str]:
    root = read_image(objects.metadata(objects.layer(layer).metadata)).root
    return [path.decode() + "!" * getattr(node, "is_whiteout", False) for path, node in root.walk()]


# -- what a run is -----------------------------------------------------------------------------------------------------


def test_a_run_is_a_layer_over_the_blobs_of_its_layers(objects: Objects) -> None:
    layers = put(objects, BASE, UPDATE)
    base, update = (objects.layer(layer) for layer in layers)
    run = objects.layer(as_one(objects, layers))
    assert run == LayerDescriptor(
        metadata=run.metadata,
        blobs=(*base.blobs, *update.blobs),
        inodes=4,
        has_root=False,
        chunker=None,
        diff_id=None,
        recipe=None,
        run=tuple(layers),
    )
    assert paths(objects, as_one(objects, layers)) == ["d", "d/y", "d/z"]


def test_the_check_of_an_image_covers_its_runs(objects: Objects) -> None:
    layers = put(objects, BASE, UPDATE)
    image = Image("base", tuple(layers), lowers=(as_one(objects, layers),))
    reference = Reference(objects.put_image(image))
    report = check_image(objects, reference, deep=True)
    assert (report.problems, report.layers) == ([], 3)
    objects.blobs.delete(keys.metadata(objects.layer(image.lowers[0]).metadata.digest))
    assert len(check_image(objects, reference, deep=False).problems) == 1


def test_only_what_is_in_the_run_becomes_one(objects: Objects) -> None:
    layers = put_many(objects, 6)
    lowers = collapse(objects, layers, [range(1, 3), range(4, 6)])
    assert [objects.layer(lower).run for lower in lowers] == [(), tuple(layers[1:3]), (), tuple(layers[4:6])]
    assert (lowers[0], lowers[2]) == (layers[0], layers[3])


def test_a_run_on_others_keeps_what_hides_something_there(objects: Objects) -> None:
    lowest, *run = put(objects, BASE, {"a": b"again", "n": b"new"}, {**UPDATE, "n": whiteout()})
    _, upper = collapse(objects, [lowest, *run], [range(1, 3)])
    assert paths(objects, upper) == ["a!", "d", "d/x!", "d/z"]


def test_a_run_on_a_run(objects: Objects) -> None:
    layers = put(objects, BASE, {"b": b"b"}, {**UPDATE, "b": whiteout()}, {"c": b"c"})
    lower, upper = collapse(objects, layers, [range(2), range(2, 4)])
    assert paths(objects, lower) == ["a", "b", "d", "d/x", "d/y"]
    assert paths(objects, upper) == ["a!", "b!", "c", "d", "d/x!", "d/z"]


def test_the_roots_attributes_go_with_the_run(objects: Objects) -> None:
    layers = [put_layer(objects, BASE, root=ROOT), *put(objects, UPDATE)]
    run = objects.layer(as_one(objects, layers))
    assert run.has_root
    root = read_image(objects.metadata(run.metadata)).root.inode
    assert (root.mode, root.uid) == (ROOT.mode, ROOT.uid)


def test_equal_layers_count_once(objects: Objects) -> None:
    base, update, more = put(objects, BASE, UPDATE, {"a": b"more"})
    run = objects.layer(as_one(objects, [base, update, more, base]))
    assert run.run == (base, update, more, base)
    assert paths(objects, as_one(objects, [base, update, more, base])) == ["a", "d", "d/x", "d/y", "d/z"]
    assert run.blobs == objects.layer(base).blobs + objects.layer(update).blobs


def test_one_layer_is_no_run(objects: Objects) -> None:
    (layer,) = put(objects, BASE)
    assert collapse(objects, [layer], [range(1)]) == ()
    assert collapse(objects, [layer, layer], [range(2)]) == (layer,)
    assert collapse(objects, [layer], [range(0), range(1, 1)]) == collapse(objects, [], [range(0)]) == ()


def test_layers_without_contents(objects: Objects) -> None:
    layers = put(objects, {}, {"s": "target"})
    assert objects.layer(as_one(objects, layers)).blobs == ()


# -- the automatic rule ------------------------------------------------------------------------------------------------


def test_complete_runs_from_the_bottom_up() -> None:
    length = RUN_LENGTH
    assert automatic_runs(length - 1) == []
    assert automatic_runs(length) == automatic_runs(2 * length - 1) == [range(length)]
    assert automatic_runs(2 * length) == [range(length), range(length, 2 * length)]


def test_few_layers_stay_as_they_are(objects: Objects) -> None:
    assert lowers_of(objects, put_many(objects, RUN_LENGTH - 1)) == ()


def test_images_that_share_lower_layers_share_runs(objects: Objects) -> None:
    common = put_many(objects, RUN_LENGTH + 2)
    one = lowers_of(objects, [*common, *put_many(objects, 3, start=500)])
    other = lowers_of(objects, [*common, *put_many(objects, RUN_LENGTH, start=600)])
    assert one[0] == other[0]
    assert one[1:] == (*common[RUN_LENGTH:], *put_many(objects, 3, start=500))
    assert len(other) == 2 + 2


# -- found again -------------------------------------------------------------------------------------------------------


def test_a_run_is_found_again_without_work(metered: MeteredBlobs, objects: Objects) -> None:
    layers = put_many(objects, 2 * RUN_LENGTH)
    first = lowers_of(objects, layers)
    before = metered.snapshot().total
    assert lowers_of(objects, layers) == first
    cost = metered.snapshot().total
    assert cost.requests - before.requests == 4 * len(first)
    assert cost.bytes_sent == before.bytes_sent


def test_the_same_layers_give_the_same_run_in_any_store(objects: Objects) -> None:
    elsewhere = Objects(MemoryBlobs())
    assert lowers_of(objects, put_many(objects, 70)) == lowers_of(elsewhere, put_many(elsewhere, 70))


def test_the_key_has_all_that_a_run_depends_on() -> None:
    a, b, c = (Digest.of(name) for name in (b"a", b"b", b"c"))
    assert len({run_key([a, b], []), run_key([b, a], []), run_key([b], [a]), run_key([a, b], [c])}) == 4


def test_the_same_run_on_other_layers_is_another(objects: Objects) -> None:
    run = put(objects, {"b": b"b"}, UPDATE)
    on_base, on_other = (collapse(objects, [lower, *run], [range(1, 3)])[1] for lower in put(objects, BASE, {"e": b""}))
    assert paths(objects, on_base) == ["a!", "b", "d", "d/x!", "d/z"]
    assert paths(objects, on_other) == ["b", "d", "d/z"]


def lose_metadata(objects: Objects, run: Digest) -> None:
    objects.blobs.delete(keys.metadata(objects.layer(run).metadata.digest))


def lose_descriptor(objects: Objects, run: Digest) -> None:
    objects.blobs.delete(keys.layer(run))


def damage_descriptor(objects: Objects, run: Digest) -> None:
    objects.blobs.put(keys.layer(run), b"{}")


def mislead(objects: Objects, run: Digest) -> None:
    objects.set_lookup("build", run_key(objects.layer(run).run, []), objects.layer(run).run[0])


@pytest.mark.parametrize("harm", [lose_metadata, lose_descriptor, damage_descriptor, mislead])
def test_what_was_lost_or_damaged_is_made_again(objects: Objects, harm: Any) -> None:
    layers = put(objects, BASE, UPDATE)
    run = as_one(objects, layers)
    before = paths(objects, run)
    harm(objects, run)
    assert as_one(objects, layers) == run
    assert paths(objects, run) == before


def test_verify_repairs_what_looks_whole(objects: Objects) -> None:
    layers = put(objects, BASE, UPDATE)
    run = as_one(objects, layers)
    objects.blobs.put(keys.metadata(objects.layer(run).metadata.digest), b"\0damaged")
    assert as_one(objects, layers) == run
    with pytest.raises(Corrupt):
        paths(objects, run)
    assert as_one(objects, layers, verify=True) == run
    assert paths(objects, run) == ["d", "d/y", "d/z"]


def test_a_layer_that_is_missing_is_told(objects: Objects) -> None:
    layers = put(objects, BASE, UPDATE)
    lost = objects.layer(layers[1]).metadata.digest
    objects.blobs.delete(keys.metadata(lost))
    with pytest.raises(NotFound, match=f"metadata image {lost} is missing"):
        as_one(objects, layers)


def test_a_layer_whose_parts_do_not_belong_together_is_refused(objects: Objects) -> None:
    base, update = put(objects, BASE, UPDATE)
    wrong = objects.put_layer(replace(objects.layer(base), blobs=objects.layer(update).blobs))
    with pytest.raises(Corrupt, match=f"layer {wrong}: its metadata image has other blob devices"):
        as_one(objects, [wrong, update])
