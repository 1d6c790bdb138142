"""The files of an image without a mount: what shows, how paths lead to it, and how little is read for it."""

from __future__ import annotations

import stat
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec_store import keys
from dsec_store.around import Operation
from dsec_store.backends.memory import MemoryBlobs
from dsec_store.browse import PIECE_SIZE, Entry, Files, LayerTrees, shown_xattrs
from dsec_store.descriptor import Image
from dsec_store.digest import Digest
from dsec_store.errors import Corrupt, Invalid, NotFound
from dsec_store.layer.stack import MAX_SYMLINKS
from dsec_store.layer.tree import OPAQUE_VALUE, OPAQUE_XATTR, Directory, Inode, whiteout
from dsec_store.meter import MeteredBlobs
from dsec_store.objects import Objects
from tests.dsec_snapshotter.making import put_layer
from tests.dsec_store.blobmaker import SMALL, noise
from tests.dsec_store.singlefile import put_file
from tests.views import merged_view

OPAQUE = {OPAQUE_XATTR: OPAQUE_VALUE}


@pytest.fixture
def metered() -> MeteredBlobs:
    return MeteredBlobs(MemoryBlobs())


@pytest.fixture
def objects(metered: MeteredBlobs) -> Objects:
    return Objects(metered)


def files_of(objects: Objects, *layers: Mapping[str, Any]) -> Files:
    return Files(objects, [put_layer(objects, entries) for entries in layers])


def opaque(**entries: Any) -> Directory:
    return Directory(
        Inode(stat.S_IFDIR | 0o755, xattrs=dict(OPAQUE)),
        {name.encode(): Inode(stat.S_IFREG | 0o644) for name in entries},
    )


def content(files: Files, path: bytes) -> bytes:
    return b"".join(files.read(files.lookup(path)))


def names(files: Files, path: bytes = b"/") -> list[bytes]:
    return [entry.name for entry in files.entries(files.lookup(path))]


def walked(files: Files, depth: int | None = None) -> list[bytes]:
    return [entry.path for entry in files.walk(files.lookup(b"/"), depth)]


# -- what shows --------------------------------------------------------------------------------------------------------


def test_layers_are_merged(objects: Objects) -> None:
    files = files_of(
        objects,
        {"a": b"lower", "d": {"x": b"x", "gone": b"", "sub": {"deep": b"deep"}}, "f": b"a file", "o": {"old": b""}},
        {"a": b"upper", "d": {"y": b"y", "gone": whiteout()}, "f": {"now": b"a folder"}, "o": opaque(new=0)},
    )
    assert walked(files) == [b"a", b"d", b"d/sub", b"d/sub/deep", b"d/x", b"d/y", b"f", b"f/now", b"o", b"o/new"]
    assert walked(files, 1) == [b"a", b"d", b"f", b"o"]
    assert walked(files, 2) == [b"a", b"d", b"d/sub", b"d/x", b"d/y", b"f", b"f/now", b"o", b"o/new"]
    assert (content(files, b"/a"), content(files, b"/d/x"), content(files, b"/f/now")) == (b"upper", b"x", b"a folder")
    for absent in (b"/d/gone", b"/o/old", b"/nothing", b"/d/sub/no"):
        with pytest.raises(NotFound, match="there is no"):
            files.lookup(absent)
    assert not shown_xattrs(files.lookup(b"/o").inode)


def test_what_an_ancestor_hides_in_the_middle_does_not_show(objects: Objects) -> None:
    """The top layer says nothing of it; the one in the middle hides what the bottom has."""
    top = {"w": {"top": b""}, "f": {"top": b""}, "o": {"top": b""}}
    middle = {"w": whiteout(), "f": b"a file", "o": opaque(middle=0)}
    files = files_of(objects, {name: {"d": {"bottom": b""}} for name in "wfo"}, middle, top)
    assert names(files, b"/w") == [b"top"]
    assert names(files, b"/f") == [b"top"]
    assert names(files, b"/o") == [b"middle", b"top"]
    for name in (b"w", b"f", b"o"):
        with pytest.raises(NotFound):
            files.lookup(b"/%s/d/bottom" % name)


def test_a_layer_with_an_opaque_root_is_the_lowest(objects: Objects) -> None:
    lowest = put_layer(objects, {"hidden": b""}, root=Inode(0o40711, uid=7))
    closed = put_layer(objects, {"a": b""}, root=Inode(0o40700, uid=5, xattrs=dict(OPAQUE)))
    assert walked(Files(objects, [lowest, closed])) == [b"a"]
    assert Files(objects, [lowest, closed]).lookup(b"/").inode.uid == 5


def test_the_root_is_that_of_the_topmost_layer_that_describes_it(objects: Objects) -> None:
    described = put_layer(objects, {"a": b""}, root=Inode(0o41777, uid=5))
    plain = put_layer(objects, {"b": b""})
    root = Files(objects, [described, plain]).lookup(b"/")
    assert (root.inode.mode, root.inode.uid, root.name, root.layer) == (0o41777, 5, b"/", 0)
    bare = Files(objects, [plain]).lookup(b"/")
    assert (bare.inode.mode, bare.inode.mtime_ns) == (0o40755, 0)
    nothing = Files(objects, [])
    assert (nothing.lookup(b"/").inode.mode, walked(nothing), nothing.links(nothing.lookup(b"/"))) == (0o40755, [], 1)


def test_equal_layers_count_once_where_they_lie_topmost(objects: Objects) -> None:
    one, two = put_layer(objects, {"a": b"one"}), put_layer(objects, {"a": b"two"})
    files = Files(objects, [one, two, one])
    assert files.layers == (two, one)
    assert content(files, b"/a") == b"one"


def test_xattrs_for_overlayfs_are_shown_as_it_shows_them(objects: Objects) -> None:
    inode = Inode(
        stat.S_IFREG | 0o644,
        xattrs={b"trusted.overlay.overlay.opaque": b"y", b"trusted.overlay.origin": b"", b"user.a": b"1"},
    )
    assert shown_xattrs(inode) == {b"trusted.overlay.opaque": b"y", b"user.a": b"1"}


def test_links(objects: Objects) -> None:
    twin = Inode(stat.S_IFREG | 0o644)
    files = files_of(objects, {"d": {"low": b""}, "a": twin, "b": {"c": twin}}, {"d": {"sub": {}}, "e": {"s": {}}})
    counts = {entry.path: files.links(entry) for entry in files.walk(files.lookup(b"/"))}
    assert counts == {b"a": 2, b"b": 2, b"b/c": 2, b"d": 1, b"d/low": 1, b"d/sub": 2, b"e": 3, b"e/s": 2}


PATHS = st.sampled_from(["a", "b", "a/a", "a/b", "b/a", "b/b", "a/a/a", "a/a/b", "a/b/a"])
KINDS = st.sampled_from(["file", "directory", "opaque", "whiteout", "link"])


def tree_of(entries: Mapping[str, str], below: Files | None) -> Directory:
    """Where a path cannot be put, it is left out; so is a whiteout of nothing, which no layer has."""
    root = Directory(Inode(stat.S_IFDIR | 0o755))
    for path, what in sorted(entries.items()):
        parent, _, name = path.rpartition("/")
        folder = root.find(parent.encode())
        if isinstance(folder, Directory) and not (what == "whiteout" and not shows(below, path.encode())):
            folder.entries[name.encode()] = node_of(what)
    return root


def shows(below: Files | None, path: bytes) -> bool:
    try:
        return below is not None and below.lookup(b"/" + path, follow=False) is not None
    except (NotFound, Invalid):
        return False


def node_of(what: str) -> Inode | Directory:
    match what:
        case "whiteout":
            return whiteout()
        case "link":
            return Inode(stat.S_IFLNK | 0o777, target=b"a")
        case "file":
            return Inode(stat.S_IFREG | 0o644)
    return Directory(Inode(stat.S_IFDIR | 0o755, xattrs=dict(OPAQUE) if what == "opaque" else {}))


@given(st.lists(st.dictionaries(PATHS, KINDS, max_size=7), min_size=1, max_size=4))
def test_what_shows_is_what_a_plain_merge_shows(layers: Sequence[Mapping[str, str]]) -> None:
    objects = Objects(MemoryBlobs())
    stored: list[Digest] = []
    for entries in layers:
        tree = tree_of(entries, Files(objects, stored) if stored else None)
        digest = put_layer(objects, {name.decode(): node for name, node in tree.entries.items()})
        stored = [*(other for other in stored if other != digest), digest]
    expected = merged_view_or_none(objects, stored)
    if expected is not None:
        assert [b"", *walked(Files(objects, stored))] == sorted(expected, key=lambda path: path.split(b"/"))
        for path in expected:
            found = Files(objects, stored).lookup(b"/" + path, follow=False)
            assert found.inode.mode == expected[path].mode


def merged_view_or_none(objects: Objects, layers: Sequence[Digest]) -> Mapping[bytes, Any] | None:
    """None when a whiteout hides nothing: what is put where equal layers count once."""
    try:
        return merged_view(objects, Image("base", tuple(layers)))
    except AssertionError:
        return None


# -- paths -------------------------------------------------------------------------------------------------------------

LINKS = {
    "usr": {"bin": {"tool": b"tool"}, "up": "..", "self": "."},
    "bin": "usr/bin",
    "abs": "/usr/bin/tool",
    "out": "../../../../usr/bin",
    "slash": "usr/bin/",
    "bad": "usr/bin/tool/",
    "dangling": "nowhere",
    "loop": "loop",
    "one": "two/x",
    "two": "one",
    "chain": "bin",
}


@pytest.fixture
def linked(objects: Objects) -> Files:
    return files_of(objects, LINKS)


@pytest.mark.parametrize(
    ("path", "found"),
    [
        (b"/", b""),
        (b"", b""),
        (b"///", b""),
        (b"/..", b""),
        (b"/../../usr", b"usr"),
        (b"/bin/tool", b"usr/bin/tool"),
        (b"bin//./tool", b"usr/bin/tool"),
        (b"/abs", b"usr/bin/tool"),
        (b"/out/tool", b"usr/bin/tool"),
        (b"/usr/up/usr/self/bin", b"usr/bin"),
        (b"/bin/..", b"usr"),
        (b"/chain/tool", b"usr/bin/tool"),
        (b"/slash/", b"usr/bin"),
        (b"/slash", b"usr/bin"),
        (b"/usr/", b"usr"),
        (b"/usr/.", b"usr"),
    ],
)
def test_paths_lead_where_the_kernel_would_go(linked: Files, path: bytes, found: bytes) -> None:
    assert linked.lookup(path).path == found


@pytest.mark.parametrize(
    ("path", "error", "text"),
    [
        (b"/dangling", NotFound, "there is no '/nowhere'"),
        (b"/dangling/", NotFound, "there is no '/nowhere'"),
        (b"/loop", Invalid, "more than 40 symlinks"),
        (b"/loop/x", Invalid, "more than 40 symlinks"),
        (b"/one", Invalid, "more than 40 symlinks"),
        (b"/abs/", Invalid, "'/usr/bin/tool' is not a directory"),
        (b"/abs/..", Invalid, "is not a directory"),
        (b"/bad", Invalid, "is not a directory"),
        (b"/usr/bin/tool/x", Invalid, "is not a directory"),
        (b"/usr/bin/tool/.", Invalid, "is not a directory"),
    ],
)
def test_paths_that_lead_nowhere(linked: Files, path: bytes, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        linked.lookup(path)


def test_a_symlink_at_the_end_can_be_had_itself(linked: Files) -> None:
    for path in (b"/loop", b"/dangling", b"/chain", b"/usr/up"):
        assert stat.S_ISLNK(linked.lookup(path, follow=False).inode.mode)
    assert linked.lookup(b"/chain/", follow=False).path == b"usr/bin"


def test_as_many_symlinks_as_the_kernel_follows(objects: Objects) -> None:
    links = {f"l{number}": f"l{number + 1}" for number in range(MAX_SYMLINKS + 1)}
    files = files_of(objects, {**links, f"l{MAX_SYMLINKS + 1}": b"end"})
    assert content(files, b"/l1") == b"end"
    with pytest.raises(Invalid, match="more than 40 symlinks"):
        files.lookup(b"/l0")


def test_symlinks_lead_through_the_merged_view(objects: Objects) -> None:
    files = files_of(objects, {"real": {"x": b"low", "y": b"low"}, "l": "gone"}, {"l": "real", "real": {"x": b"up"}})
    assert (content(files, b"/l/x"), content(files, b"/l/y")) == (b"up", b"low")


def test_a_tree_deeper_than_the_stack(objects: Objects) -> None:
    path = b"/d" * 1500 + b"/end"
    root = Directory(Inode(stat.S_IFDIR | 0o755))
    folder = root
    for _ in range(1500):
        folder.entries[b"d"] = folder = Directory(Inode(stat.S_IFDIR | 0o755))
    folder.entries[b"end"] = Inode(stat.S_IFREG | 0o644)
    files = files_of(objects, {"d": root.entries[b"d"]}, {"other": b""})
    assert files.lookup(path).path == path[1:]
    assert len(walked(files)) == 1502


# -- contents ----------------------------------------------------------------------------------------------------------


def test_contents_of_all_sizes_and_devices(objects: Objects) -> None:
    contents = {f"f{size}": noise(size, str(size)) for size in (0, 1, 4096, 4097, 200_000)}
    files = Files(objects, [put_layer(objects, contents, devices=3)])
    assert {name: content(files, b"/" + name.encode()) for name in contents} == contents


def test_a_large_content_comes_in_pieces_and_no_chunk_comes_twice(objects: Objects, metered: MeteredBlobs) -> None:
    data = noise(PIECE_SIZE * 2 + 12345, "large")
    cuts = replace(SMALL, minimum=65536, average=131072, maximum=262144)
    files = Files(objects, [put_file(objects, "large", data, cuts)])
    entry = files.lookup(b"/large")
    pieces = list(files.read(entry))
    assert b"".join(pieces) == data
    assert 2 <= len(pieces) <= 3
    ranges = metered.snapshot().by_operation[Operation.GET_RANGE].bytes_received
    assert ranges <= len(data) + 4096, "noise does not compress; there is the padding, too"


@pytest.mark.parametrize("path", [b"/usr", b"/", b"/null"])
def test_only_files_have_contents(objects: Objects, path: bytes) -> None:
    files = files_of(objects, {"usr": {}, "null": Inode(stat.S_IFCHR | 0o666, rdev=(1, 3))})
    with pytest.raises(Invalid, match=r"is a (directory|character device), not a file"):
        files.read(files.lookup(path))


# -- how little is read ------------------------------------------------------------------------------------------------


def test_a_lookup_reads_no_more_layers_than_it_needs(objects: Objects) -> None:
    layers = [put_layer(objects, {f"f{number}": b"x", "etc": {f"e{number}": b"e"}}) for number in range(5)]

    def read_for(path: bytes) -> int:
        trees = LayerTrees(objects)
        files = Files(objects, layers, trees=trees)
        b"".join(files.read(files.lookup(path)))
        return trees.read

    assert [read_for(b"/f%d" % number) for number in range(5)] == [5, 4, 3, 2, 1]
    assert [read_for(b"/etc/e%d" % number) for number in range(5)] == [5, 4, 3, 2, 1]


def test_a_whiteout_settles_it(objects: Objects) -> None:
    layers = [put_layer(objects, {"a": {"b": b""}}), put_layer(objects, {"a": whiteout()})]
    trees = LayerTrees(objects)
    with pytest.raises(NotFound):
        Files(objects, layers, trees=trees).lookup(b"/a/b")
    assert trees.read == 1


def test_trees_are_shared_between_images(objects: Objects, metered: MeteredBlobs) -> None:
    base, one, two = (put_layer(objects, {name: name.encode()}) for name in ("base", "one", "two"))
    trees = LayerTrees(objects)
    assert walked(Files(objects, [base, one], trees=trees)) == [b"base", b"one"]
    assert walked(Files(objects, [base, two], trees=trees)) == [b"base", b"two"]
    assert trees.read == 3


def test_providers(objects: Objects) -> None:
    low, up = put_layer(objects, {"d": {"a": b""}, "e": {}}), put_layer(objects, {"d": {"b": b""}})
    files = Files(objects, [low, up])
    assert files.providers(files.lookup(b"/d")) == (up, low)
    assert files.providers(files.lookup(b"/e")) == (low,)


# -- damage ------------------------------------------------------------------------------------------------------------


def test_a_lost_metadata_image_is_named(objects: Objects) -> None:
    layer = put_layer(objects, {"a": b"a"})
    metadata = objects.layer(layer).metadata.digest
    objects.blobs.delete(keys.metadata(metadata))
    with pytest.raises(NotFound, match=str(metadata)):
        Files(objects, [layer]).lookup(b"/a")


def test_a_descriptor_of_other_devices_is_refused(objects: Objects) -> None:
    layer = objects.layer(put_layer(objects, {"a": b"a"}))
    other = objects.put_layer(replace(layer, blobs=()))
    with pytest.raises(Corrupt, match="other blob devices"):
        Files(objects, [other]).lookup(b"/a")


def test_an_entry_is_what_it_says(objects: Objects) -> None:
    entry: Entry = files_of(objects, {"d": {"x": b"12345"}}).lookup(b"/d/x")
    assert (entry.path, entry.name, entry.layer, entry.inode.size) == (b"d/x", b"x", 0, 5)
