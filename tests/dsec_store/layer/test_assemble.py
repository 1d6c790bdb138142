"""From tar entries to a tree on top of other layers: the rules of docs/format/layers.md."""

import io
import stat
from collections.abc import Iterator

import pytest

from dsec_store.errors import Invalid
from dsec_store.layer.assemble import Assembly, assemble, escape_xattrs, split_path
from dsec_store.layer.stack import Found, Stack
from dsec_store.layer.tree import OPAQUE_VALUE, OPAQUE_XATTR, Directory, Inode, inode_of
from dsec_store.layer.unpack import unpack
from tests import tarmaker as tar
from tests.dsec_store.keptcontents import KeptContents

LOWER_BYTES = b"bytes of a lower layer"


def open_lower(_: Found) -> Iterator[bytes]:
    """Every regular file of the layers below holds the same here."""
    yield LOWER_BYTES


def assembled(*entries: bytes, on: Stack | None, contents: KeptContents | None = None) -> Assembly:
    contents = contents or KeptContents()
    placed = unpack(io.BytesIO(tar.archive(*entries)), contents)
    assembly = assemble(placed, contents, on, open_lower)
    assert not placed, "its entries are let go of"
    return assembly


def layer(*entries: bytes, on: Stack | None = None) -> Directory:
    """A layer that can lie below others."""
    return assembled(*entries, on=on or Stack([])).root


def base() -> Stack:
    """What most tests build on."""
    return Stack(
        [
            layer(
                *(tar.directory(b"usr/", mode=0o711, uid=1, gid=2, mtime=3), tar.directory(b"usr/lib/")),
                *(tar.file(b"usr/lib/x", LOWER_BYTES), tar.hardlink(b"usr/lib/y", b"usr/lib/x")),
                *(tar.symlink(b"lib", b"usr/lib"), tar.file(b"file", LOWER_BYTES, mode=0o600, uid=5)),
            )
        ]
    )


def listed(root: Directory) -> list[str]:
    """Paths with a mark of what they are: `d/`, `d/*` (opaque), `w!` (whiteout), `l@`, a file as it is."""
    return [path.decode() + _mark(node) for path, node in root.walk()]


def _mark(node: Inode | Directory) -> str:
    if isinstance(node, Directory):
        return "/*" if node.is_opaque else "/"
    return "!" if node.is_whiteout else "@" if stat.S_ISLNK(node.mode) else ""


def at(assembly: Assembly, path: bytes) -> Inode:
    node = assembly.root.find(path)
    assert node is not None
    return inode_of(node)


# -- contents ----------------------------------------------------------------------------------------------------------


def test_contents_have_addresses() -> None:
    contents = KeptContents()
    entries = tar.file(b"f", b"data"), tar.file(b"same", b"data"), tar.file(b"empty")
    assembly = assembled(*entries, on=Stack([]), contents=contents)
    assert contents.of(at(assembly, b"f")) == contents.of(at(assembly, b"same")) == b"data"
    assert at(assembly, b"f").address == at(assembly, b"same").address
    assert (at(assembly, b"empty").address, at(assembly, b"empty").size) == (None, 0)


# -- self-contained layers ---------------------------------------------------------------------------------------------


def test_a_layer_that_lists_all_its_directories_needs_nothing_from_below() -> None:
    entries = (
        *(tar.directory(b"usr/"), tar.directory(b"usr/lib/"), tar.file(b"usr/lib/.wh..wh..opq")),
        *(tar.file(b"usr/lib/z", b"z"), tar.hardlink(b"usr/lib/zz", b"usr/lib/z"), tar.symlink(b"usr/s", b"lib")),
        *(tar.file(b".wh.new"), tar.directory(b"new/"), tar.file(b"usr/s/through", b"t")),
    )
    on_base, on_nothing = assembled(*entries, on=base()), assembled(*entries, on=Stack([]))
    assert not on_base.needs_lower
    assert not on_nothing.needs_lower
    assert listed(on_base.root) == listed(on_nothing.root)
    assert "usr/lib/*" in listed(on_base.root)
    assert "new/*" in listed(on_base.root)


@pytest.mark.parametrize(
    "entry",
    [
        tar.file(b"usr/f"),
        tar.file(b".wh.file"),
        tar.file(b".wh.nothing"),
        tar.hardlink(b"h", b"file"),
        tar.file(b"usr/.wh..wh..opq"),
        tar.file(b".wh..wh..opq"),
    ],
)
def test_a_layer_that_looks_below_depends_on_it(entry: bytes) -> None:
    assert assembled(entry, on=base()).needs_lower


# -- the root ----------------------------------------------------------------------------------------------------------


def test_a_root_entry_counts_and_a_missing_one_is_told() -> None:
    assembly = assembled(tar.directory(b"./", mode=0o700, uid=9, mtime=7), on=base())
    assert assembly.has_root
    assert (at(assembly, b"").mode, at(assembly, b"").uid, at(assembly, b"").mtime_ns) == (0o40700, 9, 7 * 10**9)
    assert not assembled(tar.file(b"f"), on=base()).has_root


# -- implied directories -----------------------------------------------------------------------------------------------


def test_implied_directories_look_as_below_or_are_plain() -> None:
    assembly = assembled(tar.file(b"usr/new/f"), on=base())
    usr, new = at(assembly, b"usr"), at(assembly, b"usr/new")
    assert (usr.mode, usr.uid, usr.gid, usr.mtime_ns) == (0o40711, 1, 2, 3 * 10**9)
    assert (new.mode, new.uid, new.gid, new.mtime_ns) == (0o40755, 0, 0, 0)


def test_an_implied_directory_does_not_inherit_the_opaque_mark() -> None:
    stack = base()
    upper = layer(tar.directory(b"usr/"), tar.file(b"usr/.wh..wh..opq"), on=stack)
    again = assembled(tar.file(b"usr/f"), on=Stack([layer(tar.file(b"usr/old")), upper]))
    assert listed(upper) == ["usr/*"]
    assert listed(again.root) == ["usr/", "usr/f"]


def test_a_directory_entry_after_its_children_sets_the_attributes() -> None:
    assembly = assembled(tar.file(b"d/f"), tar.directory(b"d/", mode=0o700), on=base())
    assert at(assembly, b"d").mode == 0o40700
    assert listed(assembly.root) == ["d/", "d/f"]


# -- symlinks on the way -----------------------------------------------------------------------------------------------


def test_a_symlink_below_leads_to_its_directory() -> None:
    assert listed(assembled(tar.file(b"lib/f"), on=base()).root) == ["usr/", "usr/lib/", "usr/lib/f"]


def test_a_directory_entry_takes_the_place_of_the_symlink() -> None:
    root = assembled(tar.file(b"lib/f"), tar.directory(b"lib/"), tar.file(b"lib/g"), on=base()).root
    assert listed(root) == ["lib/", "lib/g", "usr/", "usr/lib/", "usr/lib/f"]


def test_a_symlink_of_the_layer_itself_leads_too() -> None:
    root = assembled(tar.symlink(b"s", b"/d"), tar.file(b"s/f"), on=Stack([])).root
    assert listed(root) == ["d/", "d/f", "s@"]


def test_a_parent_that_is_a_file_is_refused() -> None:
    for entries in ((tar.file(b"file/f"),), (tar.file(b"new"), tar.file(b"new/f"))):
        with pytest.raises(Invalid, match="one of its parents is no directory"):
            assembled(*entries, on=base())


def test_a_very_deep_path_is_no_problem() -> None:
    deep = b"/".join([b"d"] * 2000)
    assembly = assembled(tar.pax({b"path": deep + b"/f"}), tar.file(b"x"), on=base())
    assert assembly.root.find(deep + b"/f") is not None


class Counting(dict[bytes, Inode | Directory]):
    """Entries that count how often any of them is asked for."""

    asked = 0

    def get(self, key: bytes, default: object = None) -> Inode | Directory | None:  # type: ignore[override]
        Counting.asked += 1
        return super().get(key)


@pytest.mark.parametrize(
    "entries",
    [
        (tar.file(b"x"),),
        (tar.file(b"x"), tar.file(b".wh.other")),
        (tar.hardlink(b"x", b"d"), tar.pax({b"path": b"d/" * 900 + b".wh.f"}), tar.file(b"x")),
    ],
)
def test_each_name_of_a_deep_path_is_looked_up_a_few_times(entries: tuple[bytes, ...]) -> None:
    """However deep the directory lies in which it is looked up."""
    deep = b"d/" * 900
    lower = layer(tar.pax({b"path": deep + b"f"}), tar.file(b"x"))
    for _, node in [(b"", lower), *lower.walk()]:
        if isinstance(node, Directory):
            node.entries = Counting(node.entries)
    Counting.asked = 0
    assembled(tar.pax({b"path": deep + b"g", b"linkpath": deep + b"f"}), *entries, on=Stack([lower]))
    assert 900 <= Counting.asked < 10_000


def test_a_path_that_symlinks_make_too_long_is_refused() -> None:
    links = tar.pax({b"path": b"s", b"linkpath": b"d/" * 2000}), tar.symlink(b"x", b"y")
    assembled(*links, tar.file(b"s/" + b"n" * 94 + b"/" * 3), tar.file(b"s/" + b"n" * 93 + b"/f"), on=Stack([]))
    for end in (b"n" * 96, b"n" * 93 + b"/ff", b"n" * 90 + b"/f" * 4):
        with pytest.raises(Invalid, match="symlinks make it longer than 4095 bytes"):
            assembled(*links, tar.file(b"s/" + end), on=Stack([]))


# -- replacing ---------------------------------------------------------------------------------------------------------


def test_later_entries_replace_earlier_ones() -> None:
    entries = (
        tar.file(b"n", b"1"),
        tar.hardlink(b"old", b"n"),
        tar.file(b"n", b"22", mode=0o600),
        tar.symlink(b"l", b"x"),
    )
    contents = KeptContents()
    assembly = assembled(*entries, tar.file(b"l", b"333"), on=Stack([]), contents=contents)
    assert (at(assembly, b"n").size, at(assembly, b"n").mode) == (2, 0o100600)
    assert contents.of(at(assembly, b"old")) == b"1"
    assert contents.of(at(assembly, b"l")) == b"333"


def test_a_directory_keeps_its_entries_when_it_comes_again() -> None:
    entries = tar.directory(b"d/", mode=0o700), tar.file(b"d/f"), tar.directory(b"d/", mode=0o711)
    assembly = assembled(*entries, on=Stack([]))
    assert listed(assembly.root) == ["d/", "d/f"]
    assert at(assembly, b"d").mode == 0o40711


def test_a_directory_that_was_something_else_in_between_is_a_new_one() -> None:
    entries = tar.directory(b"usr/"), tar.file(b"usr/f"), tar.symlink(b"usr", b"x"), tar.directory(b"usr/", mode=0o700)
    assembly = assembled(*entries, tar.file(b"usr/lib/g"), on=base())
    assert listed(assembly.root) == ["usr/*", "usr/lib/", "usr/lib/g"]
    assert at(assembly, b"usr/lib").mtime_ns == 0, "nothing below shows through"


def test_a_link_into_what_was_replaced_is_refused() -> None:
    entries = tar.file(b"usr"), tar.directory(b"usr/"), tar.hardlink(b"h", b"usr/lib/x")
    with pytest.raises(Invalid, match="'h': a hardlink to 'usr/lib/x', which is no file"):
        assembled(*entries, on=base())


# -- hardlinks ---------------------------------------------------------------------------------------------------------


def test_a_link_below_copies_the_file_with_all_its_names() -> None:
    contents = KeptContents()
    assembly = assembled(tar.hardlink(b"z", b"usr/lib/x", mode=0o777, uid=99), on=base(), contents=contents)
    assert listed(assembly.root) == ["usr/", "usr/lib/", "usr/lib/x", "usr/lib/y", "z"]
    assert at(assembly, b"z") is at(assembly, b"usr/lib/x") is at(assembly, b"usr/lib/y")
    assert at(assembly, b"z").mode == 0o100644
    assert contents.of(at(assembly, b"z")) == LOWER_BYTES


def test_a_copy_gets_no_name_that_the_layer_hides_or_replaces() -> None:
    entries = tar.hardlink(b"z", b"usr/lib/x"), tar.file(b"usr/lib/x", b"new"), tar.file(b"usr/lib/.wh.y")
    contents = KeptContents()
    assembly = assembled(*entries, on=base(), contents=contents)
    assert listed(assembly.root) == ["usr/", "usr/lib/", "usr/lib/x", "usr/lib/y!", "z"]
    assert contents.of(at(assembly, b"usr/lib/x")) == b"new"
    assembly = assembled(entries[0], tar.directory(b"usr/lib/"), tar.file(b"usr/lib/.wh..wh..opq"), on=base())
    assert listed(assembly.root) == ["usr/", "usr/lib/*", "z"]


def test_two_links_below_are_one_file() -> None:
    assembly = assembled(tar.hardlink(b"h1", b"file"), tar.hardlink(b"h2", b"file"), on=base())
    assert at(assembly, b"h1") is at(assembly, b"h2") is at(assembly, b"file")
    assert (at(assembly, b"h1").uid, at(assembly, b"h1").mode) == (5, 0o100600)


def test_links_go_through_symlinks() -> None:
    assembly = assembled(tar.hardlink(b"z", b"lib/x"), on=base())
    assert at(assembly, b"z") is at(assembly, b"usr/lib/x")
    assembly = assembled(tar.file(b"lib/own"), tar.hardlink(b"z", b"lib/own"), on=base())
    assert at(assembly, b"z") is at(assembly, b"usr/lib/own")


def test_a_symlink_itself_can_have_two_names() -> None:
    assembly = assembled(tar.hardlink(b"s", b"lib"), on=base())
    assert at(assembly, b"s") is at(assembly, b"lib")
    assert at(assembly, b"s").target == b"usr/lib"


@pytest.mark.parametrize("target", [b"usr", b"nothing", b"file/x", b"./"])
def test_a_link_to_no_file_is_refused(target: bytes) -> None:
    with pytest.raises(Invalid, match="which is no file"):
        assembled(tar.hardlink(b"h", target), on=base())


# -- whiteouts ---------------------------------------------------------------------------------------------------------


def test_a_whiteout_hides_what_is_below() -> None:
    root = assembled(tar.file(b".wh.file"), tar.file(b"usr/lib/.wh.x"), on=base()).root
    assert listed(root) == ["file!", "usr/", "usr/lib/", "usr/lib/x!"]


@pytest.mark.parametrize("path", [b".wh.none", b"usr/.wh.none", b"none/.wh.none", b"file/.wh.none"])
def test_a_whiteout_of_nothing_is_dropped(path: bytes) -> None:
    assert listed(assembled(tar.file(path), on=base()).root) == []


@pytest.mark.parametrize("backwards", [False, True])
def test_a_whiteout_never_hides_what_its_own_layer_brings(backwards: bool) -> None:
    entries = [tar.file(b".wh.file"), tar.file(b"file", b"new"), tar.file(b".wh.usr"), tar.file(b"usr/f")]
    assembly = assembled(*(entries[::-1] if backwards else entries), on=base())
    assert listed(assembly.root) == ["file", "usr/*", "usr/f"]
    assert at(assembly, b"usr").mode == 0o40755, "the attributes are hidden too"


def test_a_whiteout_of_a_symlink_means_the_symlink() -> None:
    root = assembled(tar.file(b"lib/f"), tar.file(b".wh.lib"), on=base()).root
    assert listed(root) == ["lib/*", "lib/f"]


def test_a_whiteout_goes_through_a_symlink_below_but_not_one_that_the_layer_replaces() -> None:
    assert listed(assembled(tar.file(b"lib/.wh.x"), on=base()).root) == ["usr/", "usr/lib/", "usr/lib/x!"]
    assert listed(assembled(tar.directory(b"lib/"), tar.file(b"lib/.wh.x"), on=base()).root) == ["lib/"]
    assert listed(assembled(tar.directory(b"lib/"), tar.file(b"lib/.wh..wh..opq"), on=base()).root) == ["lib/*"]


def test_a_whiteout_below_another_is_left_out() -> None:
    root = assembled(tar.file(b".wh.usr"), tar.file(b"usr/lib/.wh.x"), tar.file(b"usr/.wh..wh..opq"), on=base()).root
    assert listed(root) == ["usr!"]


def test_a_marker_in_a_directory_that_the_layer_replaces_counts_for_nothing() -> None:
    entries = tar.file(b"usr/.wh.lib"), tar.file(b"usr/.wh..wh..opq"), tar.file(b"usr", b"file")
    assert listed(assembled(*entries, on=base()).root) == ["usr"]


@pytest.mark.parametrize("backwards", [False, True])
def test_an_opaque_marker_hides_what_is_below_and_nothing_else(backwards: bool) -> None:
    entries = [tar.directory(b"usr/", mode=0o700), tar.file(b"usr/.wh..wh..opq"), tar.file(b"usr/lib/f")]
    assembly = assembled(*(entries[::-1] if backwards else entries), on=base())
    assert listed(assembly.root) == ["usr/*", "usr/lib/", "usr/lib/f"]
    assert at(assembly, b"usr").mode == 0o40700


def test_an_opaque_marker_alone_keeps_the_attributes() -> None:
    assembly = assembled(tar.file(b"usr/.wh..wh..opq"), on=base())
    assert listed(assembly.root) == ["usr/*"]
    assert (at(assembly, b"usr").uid, at(assembly, b"usr").mtime_ns) == (1, 3 * 10**9)


@pytest.mark.parametrize("path", [b"none/.wh..wh..opq", b"file/.wh..wh..opq"])
def test_an_opaque_marker_in_no_directory_is_dropped(path: bytes) -> None:
    assert listed(assembled(tar.file(path), on=base()).root) == []


def test_an_opaque_marker_on_the_root_becomes_whiteouts() -> None:
    root = assembled(tar.file(b".wh..wh..opq"), tar.directory(b"usr/"), tar.file(b"new"), on=base()).root
    assert listed(root) == ["file!", "lib!", "new", "usr/*"]
    assert not root.is_opaque


@pytest.mark.parametrize("path", [b".wh..wh.aufs", b".wh..wh.plnk/1.2", b"d/.wh..wh.orph/x", b".wh..wh..opq/x"])
def test_leftovers_of_aufs_are_left_out(path: bytes) -> None:
    assert listed(assembled(tar.file(path), on=base()).root) == []


@pytest.mark.parametrize("path", [b".wh.", b".wh..", b".wh...", b".wh.d/f", b".wh.d/.wh.f"])
def test_whiteouts_of_what_can_have_no_name_are_refused(path: bytes) -> None:
    with pytest.raises(Invalid, match="whiteout of nothing"):
        assembled(tar.file(path), on=base())


# -- when it is not known what lies below ------------------------------------------------------------------------------


def test_without_known_layers_markers_are_kept() -> None:
    entries = tar.file(b"usr/.wh.f"), tar.file(b"d/.wh..wh..opq"), tar.directory(b"e/"), tar.file(b".wh.e")
    assert listed(assembled(*entries, on=None).root) == ["d/*", "e/*", "usr/", "usr/f!"]


def test_without_known_layers_the_root_cannot_be_opaque_and_links_stay_inside() -> None:
    with pytest.raises(Invalid, match="opaque marker on the root"):
        assembled(tar.file(b".wh..wh..opq"), on=None)
    with pytest.raises(Invalid, match="which is no file"):
        assembled(tar.hardlink(b"h", b"file"), on=None)


# -- what would steer overlayfs ----------------------------------------------------------------------------------------


def test_marks_of_overlayfs_are_escaped_or_refused() -> None:
    name = OPAQUE_XATTR.removeprefix(b"trusted.overlay.")
    escaped = escape_xattrs({OPAQUE_XATTR: OPAQUE_VALUE, b"user.k": b"v"}, b"d")
    assert escaped == {b"trusted.overlay.overlay." + name: OPAQUE_VALUE, b"user.k": b"v"}
    assert escape_xattrs(escaped, b"d") == {b"trusted.overlay.overlay.overlay." + name: OPAQUE_VALUE, b"user.k": b"v"}
    with pytest.raises(Invalid, match=r"'d': xattr user\.overlay"):
        escape_xattrs({b"user.overlay.redirect": b"/etc"}, b"d")


ACL = bytes.fromhex("0200000001000600ffffffff020004000500000004000400ffffffff10000400ffffffff20000400ffffffff")


@pytest.mark.parametrize("name", [b"system.posix_acl_access", b"system.posix_acl_default"])
def test_acls_that_the_kernel_cannot_read_are_refused(name: bytes) -> None:
    for good in (ACL, ACL[:4]):
        assert escape_xattrs({name: good}, b"f") == {name: good}
    for bad in (b"", b"x", ACL[:3], ACL[:5], ACL[:-1], ACL + b"\0", b"\1" + ACL[1:], ACL[:4] + b"\3" + ACL[5:]):
        with pytest.raises(Invalid, match=rf"'f': the value of xattr {name.decode()} is no ACL"):
            escape_xattrs({name: bad}, b"f")


def test_a_device_0_0_is_refused_others_are_kept() -> None:
    with pytest.raises(Invalid, match=r"'c'.*0:0"):
        assembled(tar.character_device(b"c", 0, 0), on=base())
    assembly = assembled(tar.character_device(b"c", 0, 1), tar.block_device(b"b", 0, 0), on=base())
    assert (at(assembly, b"c").rdev, at(assembly, b"b").rdev) == ((0, 1), (0, 0))


# -- paths -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "parts"),
    [(b"./", []), (b"", []), (b"/abs", [b"abs"]), (b"./a//b/./c/", [b"a", b"b", b"c"]), (b"..a/b..", [b"..a", b"b.."])],
)
def test_spellings_of_paths(path: bytes, parts: list[bytes]) -> None:
    assert split_path(path) == parts


@pytest.mark.parametrize("path", [b"..", b"../a", b"a/../b", b"a/..", b"a\0b"])
def test_paths_that_climb_are_refused(path: bytes) -> None:
    with pytest.raises(Invalid, match="climbs out of its root, or has a NUL"):
        split_path(path)
