"""The merged view: what hides what, what shows through, where symlinks lead."""

import stat

import pytest

from dsec_store.layer.stack import MAX_SYMLINKS, Below, Place, Stack, resolve
from dsec_store.layer.tree import OPAQUE_VALUE, OPAQUE_XATTR, Directory, Inode, whiteout

Entries = dict[bytes, Inode | Directory]


def file() -> Inode:
    return Inode(stat.S_IFREG | 0o644)


def symlink(target: bytes) -> Inode:
    return Inode(stat.S_IFLNK | 0o777, target=target)


def folder(entries: Entries | None = None, *, opaque: bool = False) -> Directory:
    xattrs = {OPAQUE_XATTR: OPAQUE_VALUE} if opaque else {}
    return Directory(Inode(stat.S_IFDIR | 0o755, xattrs=xattrs), entries or {})


def provider(stack: Stack, path: bytes) -> int | None:
    """The number of the layer that `path` comes from."""
    found = stack.find(path)
    return found.layer if found else None


# -- finding -----------------------------------------------------------------------------------------------------------


def test_the_topmost_layer_provides() -> None:
    stack = Stack([folder({b"f": file(), b"g": file()}), folder({b"f": file()})])
    assert (provider(stack, b"f"), provider(stack, b"g"), provider(stack, b"h")) == (1, 0, None)
    assert len(stack) == 2


def test_directories_merge_and_the_topmost_gives_the_attributes() -> None:
    stack = Stack([folder({b"d": folder({b"low": file()})}), folder({b"d": folder({b"up": file()})})])
    assert (provider(stack, b"d"), provider(stack, b"d/low"), provider(stack, b"d/up")) == (1, 0, 1)
    assert stack.names(b"d") == [b"low", b"up"]


def test_a_whiteout_hides_a_name_until_a_later_layer_has_it_again() -> None:
    layers = [folder({b"d": folder({b"f": file()})}), folder({b"d": whiteout()}), folder({b"d": folder()})]
    assert provider(Stack(layers[:2]), b"d") is None
    assert provider(Stack(layers[:2]), b"d/f") is None
    assert Stack(layers[:2]).names(b"") == []
    assert provider(Stack(layers), b"d") == 2
    assert provider(Stack(layers), b"d/f") is None


def test_what_is_no_directory_ends_the_merge() -> None:
    layers = [folder({b"d": folder({b"f": file()})}), folder({b"d": file()}), folder({b"d": folder({b"g": file()})})]
    assert Stack(layers).names(b"d") == [b"g"]
    assert provider(Stack(layers[:2]), b"d") == 1
    assert provider(Stack(layers[:2]), b"d/f") is None


def test_an_opaque_directory_shows_nothing_from_below() -> None:
    layers = [folder({b"d": folder({b"f": file()})}), folder({b"d": folder(opaque=True)}), folder({b"d": folder()})]
    assert provider(Stack(layers), b"d") == 2
    assert Stack(layers).names(b"d") == []


def test_the_mark_on_a_root_counts_for_nothing() -> None:
    assert Stack([folder({b"f": file()}), folder(opaque=True)]).names(b"") == [b"f"]


def test_no_symlink_is_followed() -> None:
    stack = Stack([folder({b"d": folder({b"f": file()}), b"l": symlink(b"d")})])
    assert provider(stack, b"l") == 0
    assert provider(stack, b"l/f") is None
    assert stack.names(b"l") == []


def test_the_root_is_found_unless_there_is_no_layer() -> None:
    assert provider(Stack([folder(), folder()]), b"") == 1
    assert Stack([]).find(b"") is None
    assert Stack([]).find(b"f") is None


# -- hardlinks ---------------------------------------------------------------------------------------------------------


def test_links_are_the_visible_names_of_one_inode() -> None:
    inode = file()
    lower = folder({b"a": inode, b"d": folder({b"b": inode}), b"gone": inode, b"other": file()})
    stack = Stack([lower, folder({b"gone": whiteout()})])
    found = stack.find(b"d/b")
    assert found is not None
    assert list(stack.links(found)) == [b"a", b"d/b"]


def test_a_directory_has_no_links() -> None:
    stack = Stack([folder({b"d": folder()})])
    found = stack.find(b"d")
    assert found is not None
    assert list(stack.links(found)) == []


# -- what a new layer leaves -------------------------------------------------------------------------------------------


def seen(below: Below, path: bytes) -> Inode | Directory | None:
    """What a walk of a new layer that has nothing of its own sees at `path`."""
    here, node = Place(), None
    for name in path.split(b"/"):
        node, here = below.look(here, name)
    return node


def below() -> Below:
    return Below(Stack([folder({b"d": folder({b"f": file(), b"e": folder({b"g": file()})}), b"dd": file()})]))


def test_nobody_has_asked_before_somebody_asks() -> None:
    here = below()
    here.hidden.add(b"d")
    assert here.hides(b"d/f")
    assert not here.asked
    seen(here, b"d")
    assert here.asked


def test_a_hidden_path_hides_itself_and_what_is_below() -> None:
    here = below()
    here.hidden.add(b"d")
    assert [seen(here, path) for path in (b"d", b"d/f", b"d/e/g")] == [None] * 3
    assert seen(here, b"dd") is not None
    assert here.find_unmarked(b"d/f") is not None


@pytest.mark.parametrize("marked", ["emptied", "replaced"])
def test_an_emptied_directory_shows_itself_only(marked: str) -> None:
    here = below()
    getattr(here, marked).add(b"d")
    assert seen(here, b"d") is not None
    assert [seen(here, path) for path in (b"d/f", b"d/e", b"d/e/g")] == [None] * 3
    assert (here.find_unmarked(b"d/f") is None) == (marked == "replaced")
    assert here.closes(b"d")
    assert not here.closes(b"")


def test_of_an_unknown_stack_nothing_is_visible() -> None:
    here = Below(None)
    assert seen(here, b"d") is None
    assert here.find_unmarked(b"d") is None
    assert here.names(b"") == []


# -- symlinks ----------------------------------------------------------------------------------------------------------

TREE = folder(
    {
        b"usr": folder({b"lib": folder(), b"up": symlink(b".."), b"abs": symlink(b"/usr/lib")}),
        b"lib": symlink(b"usr/lib"),
        b"chain": symlink(b"./lib/"),
        b"out": symlink(b"../../../usr"),
        b"dangling": symlink(b"var/tmp"),
        b"loop": symlink(b"loop"),
        b"file": file(),
        b"tofile": symlink(b"file"),
        **{b"n%d" % number: symlink(b"n%d" % (number + 1)) for number in range(MAX_SYMLINKS + 1)},
    }
)


@pytest.mark.parametrize(
    ("path", "place"),
    [
        (b"", b""),
        (b"usr/lib", b"usr/lib"),
        (b"lib/x", b"usr/lib/x"),
        (b"chain", b"usr/lib"),
        (b"usr/up/usr/abs/x", b"usr/lib/x"),
        (b"out", b"usr"),
        (b"dangling/x", b"var/tmp/x"),
        (b"new/x", b"new/x"),
        (b"n1", b"n%d" % (MAX_SYMLINKS + 1)),
        (b"n0", None),
        (b"loop", None),
        (b"file", None),
        (b"tofile", None),
        (b"lib/../../file/x", None),
    ],
)
def test_resolve_follows_symlinks_inside_the_root(path: bytes, place: bytes | None) -> None:
    assert resolve(path.split(b"/"), Place(), Below(Stack([TREE])).look) == place
    assert resolve(path.split(b"/"), Place(own=TREE), Below(None).look) == place


def test_a_path_that_symlinks_make_longer_than_linux_allows_leads_nowhere() -> None:
    deep = b"/".join([b"d"] * 2000)
    root = Place(own=folder({b"long": symlink(deep)}))
    look = Below(None).look
    assert resolve([b"long"], root, look) == deep
    assert resolve([b"long", b"n" * 96], root, look) is None
    assert resolve([b"long", b"n" * 95], root, look) == deep + b"/" + b"n" * 95
