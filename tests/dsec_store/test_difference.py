"""What differs between two images, and how little is read to know it."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec_store.backends.memory import MemoryBlobs
from dsec_store.browse import Files, LayerTrees
from dsec_store.descriptor import Image
from dsec_store.difference import PIECE, Sharing, differences, shared_chunks
from dsec_store.digest import Digest
from dsec_store.errors import NotFound
from dsec_store.layer.export import RecentChunks
from dsec_store.layer.tree import Inode, whiteout
from dsec_store.meter import MeteredBlobs
from dsec_store.objects import Objects
from dsec_store.usage import Amount
from tests.dsec_snapshotter.making import put_layer
from tests.dsec_store.blobmaker import SMALL, flipped, noise
from tests.dsec_store.singlefile import put_file
from tests.views import merged_view


@pytest.fixture
def metered() -> MeteredBlobs:
    return MeteredBlobs(MemoryBlobs())


@pytest.fixture
def objects(metered: MeteredBlobs) -> Objects:
    return Objects(metered)


def compare(objects: Objects, first: list[Digest], second: list[Digest], path: bytes = b"/") -> dict[str, Any]:
    """The kind of each change by path, or what changed."""
    trees, cache = LayerTrees(objects), RecentChunks()
    one, other = (Files(objects, layers, trees=trees, cache=cache) for layers in (first, second))
    found = differences(one, one.lookup(path), other, other.lookup(path))
    assert [change.path for change in found] == sorted((c.path for c in found), key=lambda name: name.split(b"/"))
    return {change.path.decode(): change.what or change.kind for change in found}


def one_layer(objects: Objects, before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    return compare(objects, [put_layer(objects, before)], [put_layer(objects, after)])


def node(mode: int = stat.S_IFREG | 0o644, **rest: Any) -> Inode:
    return Inode(mode, **rest)


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        (b"one", b"two", ("content",)),
        (b"one", b"longer", ("content",)),
        (b"", b"x", ("content",)),
        (b"", b"", None),
        (b"same", b"same", None),
        ((b"same", 0o600), (b"same", 0o644), ("mode",)),
        ((b"one", 0o600), (b"two", 0o644), ("content", "mode")),
        ("there", "here", ("target",)),
        ("there", "there", None),
        (b"file", "link", ("type", "mode")),
        (node(), node(uid=1), ("owner",)),
        (node(), node(gid=1), ("owner",)),
        (node(), node(mtime_ns=1), ("mtime",)),
        (node(), node(xattrs={b"user.a": b""}), ("xattrs",)),
        (node(xattrs={b"user.a": b"1"}), node(xattrs={b"user.a": b"2"}), ("xattrs",)),
        (node(), node(stat.S_IFIFO | 0o644), ("type",)),
        (node(stat.S_IFCHR, rdev=(1, 3)), node(stat.S_IFCHR, rdev=(1, 5)), ("device",)),
        (node(stat.S_IFCHR, rdev=(1, 3)), node(stat.S_IFBLK, rdev=(1, 3)), ("type",)),
    ],
)
def test_one_path(objects: Objects, before: Any, after: Any, what: tuple[str, ...] | None) -> None:
    """With neighbours, so that the same content lies elsewhere and in other chunks."""
    found = one_layer(objects, {"a": b"neighbour", "x": before}, {"0": b"0" * 5000, "a": b"neighbour", "x": after})
    assert found == {"0": "added"} | ({"x": what} if what else {})


def test_added_and_removed_with_all_that_is_below(objects: Objects) -> None:
    found = one_layer(objects, {"d": {"x": b"", "s": {"y": b""}}, "k": b""}, {"e": {"z": b""}, "k": b""})
    assert found == dict.fromkeys(("d", "d/s", "d/s/y", "d/x"), "removed") | dict.fromkeys(("e", "e/z"), "added")


def test_a_folder_that_becomes_a_file(objects: Objects) -> None:
    assert one_layer(objects, {"d": {"x": b""}}, {"d": b""}) == {"d": ("type", "mode"), "d/x": "removed"}
    assert one_layer(objects, {"d": b""}, {"d": {"x": b""}}) == {"d": ("type", "mode"), "d/x": "added"}


def test_layers_count_by_what_they_show(objects: Objects) -> None:
    base = put_layer(objects, {"a": b"a", "d": {"x": b"x", "y": b"y"}})
    update = put_layer(objects, {"a": whiteout(), "d": {"x": b"new"}})
    flat = put_layer(objects, {"d": {"x": b"new", "y": b"y"}})
    assert compare(objects, [base], [base, update]) == {"a": "removed", "d/x": ("content",)}
    assert compare(objects, [base, update], [flat]) == {}
    assert compare(objects, [base, update], [flat], b"/d") == {}
    assert compare(objects, [base], [flat], b"/d") == {"x": ("content",)}


def test_two_folders_of_one_image_are_compared_as_well(objects: Objects) -> None:
    layer = put_layer(objects, {"d": {"s": {"x": b"one"}}, "e": {"s": {"x": b"two"}}})
    files = Files(objects, [layer])
    (change,) = differences(files, files.lookup(b"/d"), files, files.lookup(b"/e"))
    assert (change.path, change.what) == (b"s/x", ("content",))


def test_the_root_counts(objects: Objects) -> None:
    first, second = (put_layer(objects, {}, root=Inode(0o40755, uid=uid)) for uid in (0, 1))
    assert compare(objects, [first], [second]) == {"": ("owner",)}


def test_of_what_is_shared_nothing_is_read(objects: Objects, metered: MeteredBlobs) -> None:
    """Neither contents nor chunk maps."""
    base = put_layer(objects, {"d": {f"f{number}": noise(9000, str(number)) for number in range(20)}})
    one, two = (put_layer(objects, {name: name.encode()}) for name in ("one", "two"))
    before = metered.snapshot().total
    assert compare(objects, [base, one], [base, two]) == {"one": "removed", "two": "added"}
    cost = metered.snapshot().total - before
    assert cost.requests == 6  # descriptor and metadata of three layers


def test_a_large_content_is_read_to_the_first_difference(objects: Objects, metered: MeteredBlobs) -> None:
    data = noise(5 * PIECE, "large")
    changed = flipped(data, PIECE + 10)
    first = put_file(objects, "x", data, SMALL)
    second = put_file(objects, "x", changed, SMALL)
    before = metered.snapshot().total
    assert compare(objects, [first], [second]) == {"x": ("content",)}
    received = (metered.snapshot().total - before).bytes_received
    assert 2 * PIECE < received < 3 * PIECE, "two of five pieces, and what both have alike only once"


def test_the_same_content_cut_in_another_way_is_the_same(objects: Objects) -> None:
    data = noise(3 * PIECE + 5, "large")
    first, second = put_file(objects, "x", data, SMALL), put_file(objects, "x", data, replace(SMALL, minimum=8192))
    assert first != second
    assert compare(objects, [first], [second]) == {}


def test_a_content_that_cannot_be_read_is_an_error(objects: Objects) -> None:
    first, second = put_layer(objects, {"x": b"one"}), put_layer(objects, {"x": b"two"})
    for stat_ in list(objects.blobs.list("packs/")):
        objects.blobs.delete(stat_.key)
    with pytest.raises(NotFound):
        compare(objects, [first], [second])


TREES = st.dictionaries(
    st.sampled_from(["a", "b", "c", "d"]),
    st.one_of(st.sampled_from([b"", b"1", b"2", b"12"]), st.dictionaries(st.sampled_from(["a", "b"]), st.just(b"x"))),
)


@given(TREES, TREES)
def test_the_same_paths_differ_as_in_two_whole_views(before: dict[str, Any], after: dict[str, Any]) -> None:
    objects = Objects(MemoryBlobs())
    layers = [put_layer(objects, entries) for entries in (before, after)]
    views = [merged_view(objects, Image("base", (layer,))) for layer in layers]
    expected = {path.decode() for path in views[0] | views[1] if views[0].get(path) != views[1].get(path)}
    assert set(compare(objects, layers[:1], layers[1:])) == expected


def test_shared_chunks_go_by_digest(objects: Objects) -> None:
    """Wherever they lie: each of these layers has a pack of its own."""
    first = put_layer(objects, {"a": noise(4096, "a"), "b": noise(8192, "b")})
    second = put_layer(objects, {"b": noise(8192, "b"), "c": noise(12288, "c"), "twice": noise(8192, "b")})
    assert shared_chunks(objects, [first], [second, second]) == Sharing(
        both=Amount(1, 8192, 8192), first=Amount(1, 4096, 4096), second=Amount(1, 12288, 12288)
    )
