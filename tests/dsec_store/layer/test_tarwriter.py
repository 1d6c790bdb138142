"""The canonical tar: its bytes, and that our reader, GNU tar, Python's tarfile and umoci take back what was put in."""

import hashlib
import io
import json
import os
import re
import shutil
import stat
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec_store.errors import Corrupt, Invalid
from dsec_store.layer.assemble import assemble
from dsec_store.layer.tar import MAJOR_MAX, MINOR_MAX, TarEntry, TarKind, read_entries
from dsec_store.layer.tarheader import SIGNED_64_MAX
from dsec_store.layer.tarwriter import END, header, padding, pax_record, pax_time, tar_of_tree
from dsec_store.layer.tree import ID_MAX, OPAQUE_VALUE, OPAQUE_XATTR, Directory, Inode, whiteout
from dsec_store.layer.unpack import unpack
from tests import tarmaker
from tests.dsec_store.keptcontents import KeptContents
from tests.dsec_store.tarreading import entries
from tests.trees import NAMES, describe

PAGE = Path(__file__).parents[3] / "docs" / "format" / "canonical-tar.md"

EDGES = [0, 1, 8**7 - 1, 8**7, ID_MAX]
PATHS = st.lists(st.one_of(NAMES, st.sampled_from([b"a", b"b" * 60, b"c" * 120])), min_size=1, max_size=8).map(
    b"/".join
)
TEXTS = st.binary(min_size=1, max_size=300).map(lambda raw: raw.replace(b"\0", b"="))
TIMES = st.one_of(
    st.integers(-(SIGNED_64_MAX * 10**9), SIGNED_64_MAX * 10**9),
    st.sampled_from([0, 1, -1, -(10**9), 8**11 * 10**9, 8**11 * 10**9 - 1, (8**11 - 1) * 10**9]),
)
IDS = st.one_of(st.sampled_from(EDGES), st.integers(0, ID_MAX))


@st.composite
def members(draw: st.DrawFn) -> tuple[TarEntry, bytes]:
    """An entry and its content; a file's offset is not yet known."""
    kind = draw(st.sampled_from(list(TarKind)))
    data = draw(st.binary(max_size=1500)) if kind is TarKind.FILE else b""
    link = draw(TEXTS) if kind in {TarKind.SYMLINK, TarKind.HARDLINK} else b""
    devices = st.tuples(st.integers(0, MAJOR_MAX), st.integers(0, MINOR_MAX))
    entry = TarEntry(
        path=draw(PATHS),
        kind=kind,
        mode=draw(st.integers(0, 0o7777)),
        uid=draw(IDS),
        gid=draw(IDS),
        mtime_ns=draw(TIMES),
        size=len(data),
        link=link,
        rdev=draw(devices) if kind in {TarKind.CHAR, TarKind.BLOCK} else (0, 0),
        xattrs=draw(st.dictionaries(TEXTS, st.binary(max_size=300), max_size=3)),
        offset=0,
        runs=None,
    )
    return entry, data


def written(entry: TarEntry, data: bytes = b"") -> bytes:
    fields = ("mode", "uid", "gid", "mtime_ns", "size", "link", "rdev", "xattrs")
    head = header(entry.path, entry.kind, **{field: getattr(entry, field) for field in fields})
    return head + data + padding(len(data))


@given(st.lists(members(), max_size=4))
def test_our_reader_takes_back_every_value(wanted: list[tuple[TarEntry, bytes]]) -> None:
    archive = b"".join(written(*member) for member in wanted) + END
    found = entries(archive)
    assert len(archive) % 512 == 0
    for entry, (expected, data) in zip(found, wanted, strict=True):
        slash = b"/" if expected.kind is TarKind.DIRECTORY else b""
        assert entry.path == expected.path + slash
        for name in ("kind", "mode", "uid", "gid", "mtime_ns", "size", "link", "rdev", "xattrs", "runs"):
            assert getattr(entry, name) == getattr(expected, name), name
        assert archive[entry.offset : entry.offset + entry.size] == data or not data


@given(st.lists(members(), max_size=3))
def test_python_takes_back_what_it_can_hold(wanted: list[tuple[TarEntry, bytes]]) -> None:
    """Its names have no final slash, its times are floats."""
    archive = b"".join(written(*member) for member in wanted) + END
    with tarfile.open(fileobj=io.BytesIO(archive), encoding="utf-8", errors="surrogateescape") as tar:
        for info, (entry, data) in zip(tar, wanted, strict=True):
            assert os.fsencode(info.name) == entry.path
            assert (info.mode, info.uid, info.gid, info.size) == (entry.mode, entry.uid, entry.gid, entry.size)
            assert info.mtime == pytest.approx(entry.mtime_ns / 10**9)
            assert info.linkname.encode("utf-8", "surrogateescape").rstrip(b"/") == entry.link.rstrip(b"/")
            if entry.kind is TarKind.FILE:
                stream = tar.extractfile(info)
                assert stream is not None
                assert stream.read() == data


# -- Bytes -------------------------------------------------------------------------------------------------------------


def test_what_ustar_can_say_is_one_block() -> None:
    assert header(b"f", TarKind.FILE) == tarmaker.file(b"f")
    wide = header(b"p" * 155 + b"/" + b"n" * 100, TarKind.FILE, size=8**11 - 1, mtime_ns=(8**11 - 1) * 10**9)
    assert len(wide) == 512
    assert (wide[:100], wide[345:500]) == (b"n" * 100, b"p" * 155)
    assert len(header(b"l", TarKind.SYMLINK, link=b"t" * 100, uid=8**7 - 1)) == 512


@pytest.mark.parametrize(
    ("path", "name", "prefix"),
    [
        (b"a/" + b"b/" * 60 + b"c", b"b/" * 49 + b"c", b"a/" + b"b/" * 10 + b"b"),
        (b"x/" + b"y" * 98 + b"/z", b"y" * 98 + b"/z", b"x"),
        (b"x/" + b"y" * 99 + b"/z", b"z", b"x/" + b"y" * 99),
    ],
)
def test_the_first_slash_that_leaves_a_name_of_100_bytes_splits(path: bytes, name: bytes, prefix: bytes | None) -> None:
    block = header(path, TarKind.FILE)
    assert len(block) == 512
    assert block[:100].rstrip(b"\0") == name
    assert block[345:500].rstrip(b"\0") == prefix


def test_a_record_is_there_only_when_it_is_needed() -> None:
    block = header(
        b"n" * 101,
        TarKind.FILE,
        uid=8**7,
        gid=8**7,
        mtime_ns=-1,
        size=8**11,
        xattrs={b"user.b=%3D": b"\0\n=", b"user.a": b""},
    )
    data = block[512 : 512 + int(block[124:135], 8)]
    assert data == b"".join(
        pax_record(keyword, value)
        for keyword, value in [
            (b"SCHILY.xattr.user.a", b""),
            (b"SCHILY.xattr.user.b%3D%253D", b"\0\n="),
            (b"gid", b"2097152"),
            (b"mtime", b"-0.000000001"),
            (b"path", b"n" * 101),
            (b"size", b"8589934592"),
            (b"uid", b"2097152"),
        ]
    )
    assert block[:100].rstrip(b"\0") == b"././@PaxHeader"
    assert block[-512:-412] == b"n" * 100
    assert int(block[-512 + 124 : -512 + 135], 8) == int(block[-512 + 136 : -512 + 147], 8) == 0


@given(st.binary(min_size=1, max_size=1200).map(lambda raw: raw.replace(b"=", b".")), st.binary(max_size=12_000))
def test_the_length_of_a_record_counts_itself(keyword: bytes, value: bytes) -> None:
    record = pax_record(keyword, value)
    assert record == tarmaker.pax_record(keyword, value)
    assert int(record.split(b" ")[0]) == len(record)


@pytest.mark.parametrize(
    ("time", "text"),
    [(0, b"0"), (10, b"0.00000001"), (15 * 10**8, b"1.5"), (-(10**10), b"-10"), (-5 * 10**8, b"-0.5")],
)
def test_times(time: int, text: bytes) -> None:
    assert pax_time(time) == text


def test_the_page_shows_what_is_written() -> None:
    section = PAGE.read_text(encoding="utf-8").split("## Test vectors")[1]
    plain = header(b"f", TarKind.FILE) + END
    tree = Directory(Inode(stat.S_IFDIR | 0o755))
    folder = tree.entries[b"d"] = Directory(Inode(stat.S_IFDIR | 0o755, xattrs={OPAQUE_XATTR: OPAQUE_VALUE}))
    hello = Inode(stat.S_IFREG | 0o644, mtime_ns=1_500_000_000, size=5, xattrs={b"user.k": b"v"})
    folder.entries[b"hello"] = hello
    tree.entries[b"gone"] = whiteout()
    tree.entries[b"same"] = hello
    second = b"".join(tar_of_tree(tree, lambda _: iter([b"hello"]), with_root=True))
    sums = [hashlib.sha256(data).hexdigest() for data in (plain, second)]
    assert re.findall(r"\b[0-9a-f]{64}\b", section) == sums
    assert re.findall(r"([0-9,]+) bytes", section) == [f"{len(plain):,}", f"{len(second):,}"]


@pytest.mark.parametrize(
    ("path", "kind", "fields"),
    [
        (b"", TarKind.FILE, {}),
        (b"a/", TarKind.DIRECTORY, {}),
        (b"a\0b", TarKind.FILE, {}),
        (b"x" * 4096, TarKind.FILE, {}),
        (b"x" * 4095, TarKind.DIRECTORY, {}),
        (b"a", TarKind.SYMLINK, {}),
        (b"a", TarKind.FILE, {"link": b"b"}),
        (b"a", TarKind.SYMLINK, {"link": b"b\0"}),
        (b"a", TarKind.FILE, {"mode": stat.S_IFREG | 0o644}),
        (b"a", TarKind.FILE, {"uid": ID_MAX + 1}),
        (b"a", TarKind.FILE, {"gid": -1}),
        (b"a", TarKind.FILE, {"size": -1}),
        (b"a", TarKind.DIRECTORY, {"size": 1}),
        (b"a", TarKind.FILE, {"mtime_ns": (SIGNED_64_MAX + 1) * 10**9}),
        (b"a", TarKind.FILE, {"rdev": (1, 1)}),
        (b"a", TarKind.CHAR, {"rdev": (MAJOR_MAX + 1, 0)}),
        (b"a", TarKind.FILE, {"xattrs": {b"": b""}}),
        (b"a", TarKind.FILE, {"xattrs": {b"user.x": bytes(1 << 20)}}),
    ],
)
def test_what_no_reader_takes_back_is_refused(path: bytes, kind: TarKind, fields: dict[str, object]) -> None:
    with pytest.raises(Invalid, match=re.escape(repr(path[:200])[1:])):
        header(path, kind, **fields)  # type: ignore[arg-type]


# -- Other programs ----------------------------------------------------------------------------------------------------

AWKWARD = [b"plain", b"\xff\xfe", b"new\nline", b"sp ace", b"n" * 200, b"d" * 120 + b"/" + b"e" * 120, b"a%3D=b"]


def extracted(archive: bytes, into: Path) -> None:
    tar = shutil.which("tar")
    if not tar or b"GNU tar" not in subprocess.check_output([tar, "--version"]):
        pytest.skip("needs GNU tar")
    into.mkdir()
    command = [tar, "-C", str(into), "--xattrs", "--xattrs-include=user.*", "-xpf", "-"]
    result = subprocess.run(command, input=archive, capture_output=True, check=False)
    assert (result.returncode, result.stderr) == (0, b"")


def sample() -> tuple[Directory, dict[Inode, bytes]]:
    """A tree with awkward names, hardlinks, symlinks, times, and an xattr."""
    contents: dict[Inode, bytes] = {}
    root = Directory(Inode(stat.S_IFDIR | 0o755))
    for number, name in enumerate(AWKWARD):
        *parents, last = name.split(b"/")
        here = root
        for parent in parents:
            here = here.entries.setdefault(parent, Directory(Inode(stat.S_IFDIR | 0o750)))  # type: ignore[assignment]
        data = b"%d" % number * 700
        inode = Inode(stat.S_IFREG | 0o640, mtime_ns=10**18 + number, size=len(data), xattrs={b"user.k%=": b"\1\n"})
        here.entries[last] = inode
        contents[inode] = data
    root.entries[b"again"] = root.entries[b"plain"]
    root.entries[b"sym"] = Inode(stat.S_IFLNK | 0o777, target=b"\xff" * 150)
    root.entries[b"pipe"] = Inode(stat.S_IFIFO | 0o600)
    return root, contents


def test_gnu_tar_extracts_it(tmp_path: Path) -> None:
    root, contents = sample()
    out = os.fsencode(tmp_path / "out")
    extracted(b"".join(tar_of_tree(root, lambda inode: iter([contents[inode]]))), tmp_path / "out")
    assert sorted(os.listdir(out)) == sorted(root.entries)
    for path, node in root.walk():
        if isinstance(node, Directory):
            continue
        status = os.lstat(os.path.join(out, path))
        assert status.st_mode == node.mode
        if node in contents:
            assert Path(os.fsdecode(os.path.join(out, path))).read_bytes() == contents[node]
            assert status.st_mtime_ns == node.mtime_ns
            assert os.getxattr(os.path.join(out, path), b"user.k%=") == b"\1\n"
    assert os.lstat(out + b"/again").st_ino == os.lstat(out + b"/plain").st_ino
    assert os.readlink(out + b"/sym") == b"\xff" * 150


def test_gnu_tar_lists_a_file_of_more_than_8_gib(tmp_path: Path) -> None:
    """The archive is sparse: its content takes no room on the disk."""
    size = 9 << 30
    with (tmp_path / "big.tar").open("wb") as out:
        out.write(header(b"big", TarKind.FILE, size=size))
        out.seek(size, os.SEEK_CUR)
        out.write(header(b"next", TarKind.FILE) + END)
    with (tmp_path / "big.tar").open("rb") as archive:
        assert [(entry.path, entry.size) for entry in read_entries(archive)] == [(b"big", size), (b"next", 0)]
    with tarfile.open(tmp_path / "big.tar") as tar:
        assert [(info.name, info.size) for info in tar] == [("big", size), ("next", 0)]
    listed = subprocess.check_output(["tar", "-tvf", tmp_path / "big.tar"], env={**os.environ, "LC_ALL": "C"})
    assert [line.split()[2] for line in listed.splitlines()] == [b"%d" % size, b"0"]


def test_umoci_unpacks_it(tmp_path: Path) -> None:
    umoci = shutil.which("umoci")
    if not umoci or os.geteuid() != 0:
        pytest.skip("needs umoci and root")
    root, contents = sample()
    for node in contents:
        node.xattrs = {b"user.k": b"\1\n"}  # umoci keeps GNU's escapes in names as they are
    below = Directory(Inode(stat.S_IFDIR | 0o755))
    below.entries[b"gone"] = Inode(stat.S_IFREG | 0o644)
    below.entries[b"d"] = Directory(Inode(stat.S_IFDIR | 0o755), {b"hidden": Inode(stat.S_IFREG | 0o644)})
    root.entries[b"gone"] = whiteout()
    root.entries[b"d"] = Directory(Inode(stat.S_IFDIR | 0o711, xattrs={OPAQUE_XATTR: OPAQUE_VALUE}))

    def run(*arguments: str) -> None:
        subprocess.run([umoci, *arguments], check=True, capture_output=True, cwd=tmp_path)

    run("init", "--layout", "image")
    run("new", "--image", "image:t")
    for number, tree in enumerate((below, root)):
        layer = b"".join(tar_of_tree(tree, lambda inode: iter([contents[inode]])))
        (tmp_path / f"{number}.tar").write_bytes(layer)
        run("raw", "add-layer", "--image", "image:t", f"{number}.tar")
    run("unpack", "--image", "image:t", "bundle")
    out = os.fsencode(tmp_path / "bundle" / "rootfs")
    assert sorted(os.listdir(out)) == sorted(set(root.entries) - {b"gone"})
    assert os.listdir(out + b"/d") == []
    assert os.lstat(out + b"/d").st_mode == stat.S_IFDIR | 0o711
    for path, found in root.walk():
        if isinstance(found, Inode) and found in contents:
            status = os.lstat(os.path.join(out, path))
            assert (status.st_mode, status.st_mtime_ns) == (found.mode, found.mtime_ns)
            assert os.getxattr(os.path.join(out, path), b"user.k") == b"\1\n"
    assert os.lstat(out + b"/again").st_ino == os.lstat(out + b"/plain").st_ino
    assert json.loads((tmp_path / "image" / "index.json").read_bytes())["manifests"]


# -- Trees -------------------------------------------------------------------------------------------------------------

FILE_NAMES = NAMES.filter(lambda name: not name.startswith(b".wh."))
ALL_XATTRS = st.dictionaries(
    st.sampled_from(
        [b"user.a", b"trusted.overlay.overlay.redirect", b"trusted.overlay.overlay.opaque", b"trusted.x=%"]
    ),
    st.binary(max_size=20),
    max_size=3,
)


def attributes(kind: int) -> st.SearchStrategy[Inode]:
    return st.builds(
        Inode,
        st.integers(0, 0o7777).map(lambda mode: mode | kind),
        IDS,
        IDS,
        st.integers(-(2**62), 2**62),
        xattrs=ALL_XATTRS,
    )


@st.composite
def layers(draw: st.DrawFn) -> tuple[Directory, dict[Inode, bytes]]:
    """A tree as a builder makes it: marks are those that it puts itself, no whiteout is in an opaque directory."""
    contents: dict[Inode, bytes] = {}

    def file(inode: Inode, data: bytes) -> Inode:
        if data:
            inode.size = len(data)
            contents[inode] = data
        return inode

    def link(inode: Inode, target: bytes) -> Inode:
        inode.target = target
        return inode

    def device(inode: Inode, rdev: tuple[int, int]) -> Inode:
        inode.rdev = rdev
        return inode

    def opaque(inode: Inode, names: dict[bytes, Inode | Directory]) -> Directory:
        inode.xattrs[OPAQUE_XATTR] = OPAQUE_VALUE
        return Directory(inode, {name: node for name, node in names.items() if not has_mark(node)})

    numbers = st.tuples(st.integers(0, MAJOR_MAX), st.integers(1, MINOR_MAX))
    leaves = st.one_of(
        st.builds(file, attributes(stat.S_IFREG), st.binary(max_size=1200)),
        st.builds(link, attributes(stat.S_IFLNK), TEXTS),
        st.builds(device, attributes(stat.S_IFCHR), numbers),
        st.builds(device, attributes(stat.S_IFBLK), st.tuples(st.just(0), st.integers(0, MINOR_MAX))),
        attributes(stat.S_IFIFO),
    )
    pool = draw(st.lists(leaves, min_size=1, max_size=5))
    any_leaf: st.SearchStrategy[Inode | Directory] = st.one_of(st.sampled_from(pool), st.builds(whiteout))
    nodes = st.recursive(
        any_leaf,
        lambda inner: st.builds(
            lambda make, inode, names: make(inode, names),
            st.sampled_from([Directory, opaque]),
            attributes(stat.S_IFDIR),
            st.dictionaries(FILE_NAMES, inner, max_size=4),
        ),
        max_leaves=12,
    )
    root = draw(st.builds(Directory, attributes(stat.S_IFDIR), st.dictionaries(FILE_NAMES, nodes, max_size=4)))
    return root, contents


def has_mark(node: Inode | Directory) -> bool:
    if isinstance(node, Inode):
        return node.is_whiteout
    return any(has_mark(child) for child in node.entries.values())


@given(layers())
def test_assembling_it_gives_the_same_tree(layer: tuple[Directory, dict[Inode, bytes]]) -> None:
    root, contents = layer
    archive = b"".join(tar_of_tree(root, lambda inode: iter([contents[inode]]), with_root=True))
    kept = KeptContents()
    again = assemble(unpack(io.BytesIO(archive), kept), kept, None)
    assert again.has_root
    assert describe(again.root) == describe(root)
    for path, node in root.walk():
        twin = again.root.find(path)
        assert isinstance(node, Directory) or kept.of(twin) == contents.get(node, b"")


def test_without_its_root_entry_the_tar_begins_with_the_first_name() -> None:
    root = Directory(Inode(stat.S_IFDIR | 0o700), {b"b": Inode(stat.S_IFREG), b"a": Inode(stat.S_IFREG)})
    assert [entry.path for entry in entries(b"".join(tar_of_tree(root, no_contents)))] == [b"a", b"b"]
    assert entries(b"".join(tar_of_tree(root, no_contents, with_root=True)))[0].path == b"./"


def no_contents(_: Inode) -> Iterator[bytes]:
    raise AssertionError("an empty file is not read")


@pytest.mark.parametrize(
    ("node", "name", "message"),
    [
        (lambda: Inode(stat.S_IFREG), b".wh.x", "d/.wh.x"),
        (whiteout, b".wh.x", "d/.wh.x"),
        (lambda: Inode(stat.S_IFREG, xattrs={b"trusted.overlay.redirect": b"/x"}), b"f", "'d/f'.*redirect"),
        (lambda: Inode(stat.S_IFSOCK), b"s", "'d/s'"),
        (lambda: Directory(Inode(stat.S_IFDIR, xattrs={OPAQUE_XATTR: b"x"})), b"o", "'d/o'"),
    ],
)
def test_what_a_layer_cannot_say_is_refused(node: Callable[[], Inode | Directory], name: bytes, message: str) -> None:
    root = Directory(Inode(stat.S_IFDIR), {b"d": Directory(Inode(stat.S_IFDIR), {name: node()})})
    with pytest.raises(Invalid, match=message):
        list(tar_of_tree(root, no_contents))


def test_an_opaque_root_is_refused() -> None:
    with pytest.raises(Invalid, match="root"):
        list(tar_of_tree(Directory(Inode(stat.S_IFDIR, xattrs={OPAQUE_XATTR: OPAQUE_VALUE})), no_contents))


@pytest.mark.parametrize("pieces", [[], [b"ab"], [b"abc", b"d"]])
def test_a_content_of_another_size_is_an_error(pieces: list[bytes]) -> None:
    root = Directory(Inode(stat.S_IFDIR), {b"f": Inode(stat.S_IFREG, size=3)})
    with pytest.raises(Corrupt, match="'f'"):
        list(tar_of_tree(root, lambda _: iter(pieces)))
