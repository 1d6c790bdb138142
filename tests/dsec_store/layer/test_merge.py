"""A run of layers, merged: with anything below and above it, the view is that of the plain layers."""

import stat
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsec_store.layer.merge import Part, from_opaque_root, merge
from dsec_store.layer.stack import Stack, join
from dsec_store.layer.tree import OPAQUE_VALUE, OPAQUE_XATTR, Address, Directory, Inode, inode_of, whiteout
from tests.trees import addresses, describe

NOTHING = Stack([])
OPAQUE = {OPAQUE_XATTR: OPAQUE_VALUE}


def file(offset: int = 0, device: int = 0, **rest: Any) -> Inode:
    """A file of one block; where it lies tells it from others."""
    return Inode(stat.S_IFREG | 0o644, size=10, address=Address(device, offset), **rest)


def folder(entries: dict[str, Any] | None = None, *, opaque: bool = False, **rest: Any) -> Directory:
    """Values: an inode, a directory, or the entries of a plain one; None is a whiteout."""
    inode = Inode(stat.S_IFDIR | 0o755, xattrs=dict(OPAQUE if opaque else {}), **rest)
    return Directory(inode, {name.encode(): node(value) for name, value in (entries or {}).items()})


def node(value: Any) -> Inode | Directory:
    if value is None:
        return whiteout()
    return folder(value) if isinstance(value, dict) else value


def part(entries: dict[str, Any], *devices: str, root: Inode | None = None, opaque: bool = False) -> Part[str]:
    tree = folder(entries, opaque=opaque)
    if root:
        tree.inode = root
    return Part(tree, root is not None, devices or ("blob",))


def below(*layers: dict[str, Any]) -> Stack:
    return Stack([folder(entries) for entries in layers])


def listed(result: Part[Any]) -> list[str]:
    """Paths with a mark of what they are: `d/`, `d/*` (opaque), `w!` (whiteout), a file as it is."""
    return [path.decode() + _mark(node) for path, node in result.tree.walk()]


def _mark(node: Inode | Directory) -> str:
    if isinstance(node, Directory):
        return "/*" if node.is_opaque else "/"
    return "!" if node.is_whiteout else ""


# -- whiteouts ---------------------------------------------------------------------------------------------------------


def test_a_whiteout_inside_the_run_is_resolved() -> None:
    run = [part({"a": file(), "d": {"x": file(), "y": file()}}), part({"a": None, "d": {"x": None}})]
    assert listed(merge(run, NOTHING)) == ["d/", "d/y"]


def test_a_whiteout_of_what_lies_below_is_kept() -> None:
    run = [part({"a": file(), "d": {"x": file()}}), part({"a": None, "b": None, "d": {"x": None, "z": None}})]
    assert listed(merge(run, below({"a": file(), "d": {"z": file()}}))) == ["a!", "d/", "d/z!"]


def test_a_whiteout_is_dropped_where_its_directory_is_not_merged_with_one_below() -> None:
    run = [part({"d": {"x": file()}}), part({"d": {"x": None}})]
    assert listed(merge(run, below({"d": file()}))) == ["d/"]
    assert listed(merge(run, below({"d": {"x": file()}}, {"d": None}))) == ["d/"]


def test_what_a_later_layer_brings_back_hides_by_itself() -> None:
    run = [part({"a": None}), part({"a": file()})]
    assert listed(merge(run, below({"a": file()}))) == ["a"]


# -- directories that are not merged -----------------------------------------------------------------------------------


@pytest.mark.parametrize("between", [None, file(), Inode(stat.S_IFLNK | 0o777, target=b"x")])
def test_a_directory_that_was_something_else_meanwhile_is_opaque(between: Inode | None) -> None:
    run = [part({"d": {"old": file()}}), part({"d": between}), part({"d": {"new": file()}})]
    assert listed(merge(run, below({"d": {"lowest": file()}}))) == ["d/*", "d/new"]
    assert listed(merge(run, NOTHING)) == ["d/", "d/new"]


def test_an_opaque_directory_ends_what_is_merged() -> None:
    run = [part({"d": {"old": file()}}), part({"d": folder({"mid": file()}, opaque=True)}), part({"d": {"x": None}})]
    assert listed(merge(run, below({"d": {"x": file()}}))) == ["d/*", "d/mid"]


@pytest.mark.parametrize("lowest", [{}, {"d": file()}, {"other": file()}])
def test_an_opaque_mark_is_dropped_where_no_directory_lies_below(lowest: dict[str, Any]) -> None:
    assert listed(merge([part({"d": folder(opaque=True)})], below(lowest))) == ["d/"]


def test_what_lies_in_an_opaque_directory_has_nothing_below() -> None:
    run = [part({"d": folder({"e": folder(opaque=True), "x": None}, opaque=True)})]
    assert listed(merge(run, below({"d": {"e": {"f": file()}, "x": file()}}))) == ["d/*", "d/e/"]


# -- the root ----------------------------------------------------------------------------------------------------------


def test_the_roots_attributes_are_those_of_the_topmost_layer_that_has_some() -> None:
    described = Inode(stat.S_IFDIR | 0o711, uid=3, gid=4, mtime_ns=5, xattrs={b"user.a": b"b"})
    lowest = replace(described, uid=9)
    result = merge([part({}, root=lowest), part({}, root=described), part({"f": file()})], NOTHING)
    assert result.has_root
    assert describe(result.tree)[b""] == describe(Directory(described))[b""]


def test_no_layer_that_has_attributes_of_the_root() -> None:
    result = merge([part({"f": file()}), part({})], NOTHING)
    assert not result.has_root
    assert (result.tree.inode.mode, result.tree.inode.mtime_ns) == (stat.S_IFDIR | 0o755, 0)


def test_an_opaque_root_hides_all_below_in_the_run_and_under_it() -> None:
    run = [part({"old": file()}), part({"new": file(), "x": None}, opaque=True), part({"newest": file()})]
    on_nothing, on_something = merge(run, NOTHING), merge(run, below({"x": file()}))
    assert listed(on_nothing) == listed(on_something) == ["new", "newest"]
    assert (on_nothing.tree.is_opaque, on_something.tree.is_opaque) == (False, True)
    assert from_opaque_root(run) == run[1:]
    assert from_opaque_root(run[:1]) == run[:1]
    assert list(from_opaque_root([])) == []


# -- inodes ------------------------------------------------------------------------------------------------------------


def test_a_merged_directory_has_the_attributes_of_the_topmost() -> None:
    upper = folder({}, uid=1, mtime_ns=2)
    upper.inode.xattrs[b"user.a"] = b"upper"
    lower = folder({"f": file()}, uid=7)
    lower.inode.xattrs[b"user.b"] = b"lower"
    made = merge([part({"d": lower}), part({"d": upper})], NOTHING).tree.find(b"d")
    assert isinstance(made, Directory)
    assert (made.inode.uid, made.inode.mtime_ns, made.inode.xattrs) == (1, 2, {b"user.a": b"upper"})


def test_names_of_one_inode_stay_names_of_one_inode() -> None:
    shared = file()
    first = part({"a": shared, "b": shared, "c": shared, "d": {"e": shared}})
    tree = merge([first, part({"b": file(4096), "c": None})], NOTHING).tree
    assert tree.find(b"a") is tree.find(b"d/e")
    assert tree.find(b"a") is not tree.find(b"b")
    assert describe(tree)[b"a"].links == 2


def test_nothing_is_shared_with_the_layers() -> None:
    run = [part({"f": file(xattrs={b"user.a": b"1"}), "d": {}}), part({"d": {}})]
    before = [describe(layer.tree) for layer in run]
    result = merge(run, NOTHING)
    given = {id(inode_of(node)) for layer in run for _, node in [(b"", layer.tree), *layer.tree.walk()]}
    for _, made in [(b"", result.tree), *result.tree.walk()]:
        assert id(inode_of(made)) not in given
        inode_of(made).xattrs[b"user.changed"] = b"1"
    assert [describe(layer.tree) for layer in run] == before


# -- devices -----------------------------------------------------------------------------------------------------------


def test_devices_are_numbered_anew() -> None:
    run = [
        part({"a": file(0, 0), "b": file(4096, 1)}, "one", "two"),
        part({"c": file(8192, 0), "d": file(12288, 1)}, "three", "one"),
    ]
    result = merge(run, NOTHING)
    assert result.devices == ("one", "two", "three")
    assert addresses(result.tree) == {
        b"a": Address(0, 0),
        b"b": Address(1, 4096),
        b"c": Address(2, 8192),
        b"d": Address(0, 12288),
    }


def test_devices_are_in_the_order_of_a_walk() -> None:
    tree = {"a": {"b": {"f": file(device=3)}, "c": file(device=1)}, "b": {"f": file(device=0)}, "c": file(device=2)}
    assert merge([part(tree, "fourth", "second", "last", "first")], NOTHING).devices == (
        "first",
        "second",
        "fourth",
        "last",
    )


def test_a_device_of_which_nothing_shows_is_left_out() -> None:
    run = [part({"a": file()}, "hidden"), part({"a": file()}, "shown"), part({"empty": Inode(stat.S_IFREG | 0o600)})]
    assert merge(run, NOTHING).devices == ("shown",)


def test_a_very_deep_tree() -> None:
    def deep(inode: Inode) -> Directory:
        tree = folder({"f": inode})
        for _ in range(2000):
            tree = folder({"d": tree})
        return tree

    result = merge([Part(deep(file()), False, ("b",)), Part(deep(file(4096)), False, ("b",))], Stack([deep(file())]))
    assert addresses(result.tree)[b"d/" * 2000 + b"f"] == Address(0, 4096)


# -- any layers --------------------------------------------------------------------------------------------------------

PATHS = st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=3)
KINDS = st.sampled_from(["file", "file", "name", "whiteout", "whiteout", "fifo", "folder", "folder", "opaque"])
ENTRIES = st.tuples(PATHS, KINDS, st.integers(0, 3))


def made(entries: list[tuple[list[str], str, int]], devices: tuple[str, ...], root: int | None) -> Part[str]:
    """A small tree of few names, so that trees meet; marks also where they mean nothing. Later entries replace."""
    linked = file(4096 * 9)
    layer = part({}, *devices, root=None if root is None else Inode(stat.S_IFDIR | 0o700, uid=root))
    for path, kind, number in entries:
        *parents, name = (name.encode() for name in path)
        place = layer.tree
        for parent in parents:
            inner = place.entries.get(parent)
            if not isinstance(inner, Directory):
                inner = place.entries[parent] = folder(uid=number)
            place = inner
        place.entries[name] = _made_node(kind, number, linked)
    return layer


def _made_node(kind: str, number: int, linked: Inode) -> Inode | Directory:
    match kind:
        case "file":
            return file(4096 * number, number % 2, uid=number)
        case "name":
            return linked
        case "whiteout":
            return whiteout()
        case "fifo":
            return Inode(stat.S_IFIFO | 0o600, uid=number)
    return folder(opaque=kind == "opaque", uid=number)


DEVICES = st.sampled_from([("x", "y"), ("y", "x"), ("y", "z")])
LAYERS = st.builds(made, st.lists(ENTRIES, max_size=7), DEVICES, st.one_of(st.none(), st.integers(0, 3)))


class Shown(NamedTuple):
    """What a composition shows at a path; `inode` is its file, None for a directory."""

    attributes: tuple[Any, ...]
    inode: Inode | None


def shown(parts: Sequence[Part[str]]) -> dict[bytes, Shown]:
    """Everything that a composition of these layers shows, by path, but for its root."""
    stack = Stack([layer.tree for layer in parts])
    seen = {}
    pending = [b""]
    while pending:
        path = pending.pop()
        for name in stack.names(path):
            found = stack.find(join(path, name))
            assert found is not None
            inode = inode_of(found.node)
            content = None
            if inode.address:
                content = parts[found.layer].devices[inode.address.device], inode.address.offset
            xattrs = {key: value for key, value in inode.xattrs.items() if key != OPAQUE_XATTR}
            attributes = (inode.mode, inode.uid, inode.gid, inode.mtime_ns, inode.size, xattrs, content)
            seen[join(path, name)] = Shown(attributes, None if isinstance(found.node, Directory) else inode)
            if isinstance(found.node, Directory):
                pending.append(join(path, name))
    return seen


def twins(seen: dict[bytes, Shown]) -> dict[bytes, tuple[Any, ...]]:
    """The same, comparable: each path with its attributes and the first path of the same inode."""
    first: dict[Inode, bytes] = {}
    for path in sorted(seen):
        if (inode := seen[path].inode) is not None:
            first.setdefault(inode, path)
    return {path: (*facts.attributes, first[facts.inode] if facts.inode else path) for path, facts in seen.items()}


def marks(tree: Directory) -> Iterator[tuple[bytes, bool]]:
    """The paths of whiteouts (True) and opaque directories (False)."""
    for path, found in tree.walk():
        if isinstance(found, Directory):
            if found.is_opaque:
                yield path, False
        elif found.is_whiteout:
            yield path, True


any_layers = st.lists(LAYERS, max_size=3)
quick = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@quick
@given(any_layers, st.lists(LAYERS, min_size=1, max_size=5), any_layers)
def test_the_view_is_that_of_the_plain_layers(
    lower: list[Part[str]], run: list[Part[str]], upper: list[Part[str]]
) -> None:
    merged = merge(run, Stack([layer.tree for layer in lower]))
    assert twins(shown([*lower, merged, *upper])) == twins(shown([*lower, *run, *upper]))
    described = [layer.tree.inode for layer in run if layer.has_root]
    assert merged.has_root == bool(described)
    assert merged.tree.inode.uid == (described[-1].uid if described else 0)


@quick
@given(any_layers, st.lists(LAYERS, min_size=1, max_size=5))
def test_every_mark_of_the_result_hides_something(lower: list[Part[str]], run: list[Part[str]]) -> None:
    beneath = Stack([layer.tree for layer in lower])
    merged = merge(run, beneath)
    for path, hides_name in marks(merged.tree):
        found = beneath.find(path)
        assert found is not None
        assert hides_name or isinstance(found.node, Directory)
        assert all(_is_open(merged.tree, above) for above in _above(path)), "hidden by a mark above"


def _is_open(tree: Directory, path: bytes) -> bool:
    directory = tree.find(path)
    return isinstance(directory, Directory) and not directory.is_opaque


def _above(path: bytes) -> Iterator[bytes]:
    while path:
        path = path.rpartition(b"/")[0]
        yield path


@quick
@given(any_layers, st.lists(LAYERS, min_size=2, max_size=5), st.data())
def test_it_does_not_matter_in_which_steps_it_is_done(
    lower: list[Part[str]], run: list[Part[str]], data: st.DataObject
) -> None:
    trees = [layer.tree for layer in lower]
    cut = data.draw(st.integers(1, len(run) - 1))
    first = merge(run[:cut], Stack(trees))
    second = merge(run[cut:], Stack([*trees, first.tree]))
    stepwise, at_once = merge([first, second], Stack(trees)), merge(run, Stack(trees))
    assert listed(stepwise) == listed(at_once)
    assert stepwise.devices == at_once.devices
    assert addresses(stepwise.tree) == addresses(at_once.tree)
    assert describe(stepwise.tree) == describe(at_once.tree)


@quick
@given(any_layers, st.lists(LAYERS, min_size=1, max_size=4), st.data())
def test_of_equal_layers_the_topmost_counts(lower: list[Part[str]], run: list[Part[str]], data: st.DataObject) -> None:
    again = data.draw(st.sampled_from(run))
    beneath = Stack([layer.tree for layer in lower])
    without = [layer for layer in run if layer is not again]
    twice, once = merge([*run, again], beneath), merge([*without, again], beneath)
    assert describe(twice.tree) == describe(once.tree)
    assert addresses(twice.tree) == addresses(once.tree)
