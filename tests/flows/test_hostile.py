"""Archives that mean harm: nothing outside is read or written, and every one ends soon, in bounded memory.

Each comes as an image through the real command, whose memory is limited by the kernel. It is either refused, in one
line and with exit code 1, and then nothing of it is visible in the store; or it is harmless, and then the image is what
a careful program would unpack, inside of its root.
"""

import gzip
import hashlib
import io
import os
import resource
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Final

import pytest
import zstandard

from dsec_store.backends.folder import FolderBlobs
from dsec_store.errors import Invalid
from dsec_store.layer import assemble as assemble_module
from dsec_store.layer import stack as stack_module
from dsec_store.layer import unpack as unpack_module
from dsec_store.layer.assemble import assemble
from dsec_store.layer.stack import Stack
from dsec_store.layer.unpack import unpack
from dsec_store.objects import Objects
from tests import tarmaker as tar
from tests.dsec_store.keptcontents import KeptContents
from tests.flows.world import Ended, World
from tests.ocimaker import CONFIG, LAYER, MANIFEST, Json, LayoutMaker, digest_of, pack_archive, platform_fields
from tests.views import View, merged_view

pytestmark = pytest.mark.flow

MEMORY: Final = 768 << 20
"""Bytes of memory that the command may use for an archive, whatever it claims."""

MEMORY_PER_ENTRY: Final = 2048
"""Bytes more for each entry of a layer."""

SECRET: Final = b"a secret of the host"

EIB: Final = 1 << 60
PIECE: Final = 1 << 20

Blob = tuple[bytes, str, str]
"""A layer's blob, its media type and its diff_id."""


# -- layers that are larger than their blobs ---------------------------------------------------------------------------


def plain(*entries: bytes, end: bytes = tar.END) -> Blob:
    data = tar.archive(*entries, end=end)
    return data, LAYER, digest_of(data)


def gzipped(pieces: Iterable[bytes]) -> Blob:
    """In one gzip stream."""
    hasher, packer = hashlib.sha256(), zlib.compressobj(1, wbits=31)
    out = bytearray()
    for piece in pieces:
        hasher.update(piece)
        out += packer.compress(piece)
    return bytes(out + packer.flush()), LAYER + "+gzip", f"sha256:{hasher.hexdigest()}"


def gzip_members(first: bytes, again: bytes, count: int, last: bytes = tar.END) -> Blob:
    """`first`, then `count` times the same, each a gzip member."""
    hasher = hashlib.sha256()
    for piece in chain([first], repeat(again, count), [last]):
        hasher.update(piece)
    packed = [gzip.compress(piece, mtime=0) for piece in (first, again, last)]
    blob = packed[0] + packed[1] * count + packed[2]
    return blob, LAYER + "+gzip", f"sha256:{hasher.hexdigest()}"


def zstd(pieces: Iterable[bytes]) -> Blob:
    hasher, out = hashlib.sha256(), io.BytesIO()
    with zstandard.ZstdCompressor().stream_writer(out, closefd=False) as writer:
        for piece in pieces:
            hasher.update(piece)
            writer.write(piece)
    return out.getvalue(), LAYER + "+zstd", f"sha256:{hasher.hexdigest()}"


def zeros_in_a_file(size: int) -> Iterator[bytes]:
    yield tar.header(b"zeros", b"0", size=size)
    yield from repeat(bytes(PIECE), size // PIECE)
    yield tar.END


def layout_of(path: Path, *blobs: Blob) -> Path:
    maker = LayoutMaker(path)
    fields = platform_fields("linux/amd64")
    document = {**fields, "config": {}, "rootfs": {"type": "layers", "diff_ids": [blob[2] for blob in blobs]}}
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": maker.document(document, CONFIG),
        "layers": [maker.blob(data, media_type) for data, media_type, _ in blobs],
    }
    maker.add(maker.document(manifest, MANIFEST, platform=fields), tag="t")
    return path


# -- what the command does ---------------------------------------------------------------------------------------------


def limited(memory: int) -> Callable[[], None]:
    """For a process to be: no more memory than this, and no core of what dies of it."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    return limit


def convert(world: World, source: str, memory: int = MEMORY) -> Ended:
    arguments = ("dsec-image", "convert", source, "hostile", "--platform", "linux/amd64")
    return world.run(*arguments, preexec_fn=limited(memory))


def build(world: World, archive: Path, memory: int = MEMORY) -> Ended:
    arguments = ("dsec-image", "build", str(archive), "hostile", "--kind", "workspace")
    return world.run(*arguments, preexec_fn=limited(memory))


def objects_of(world: World) -> Objects:
    return Objects(FolderBlobs(world.store))


def assert_refused(world: World, done: Ended, *texts: str) -> None:
    """In one line, and nothing of it is visible: no name, no layer, no image, no way to a layer."""
    assert (done.code, len(done.errors), done.stdout) == (1, 1, b""), done.errors
    assert all(text in done.errors[0] for text in texts), done.errors[0]
    if world.store.exists():
        objects = objects_of(world)
        assert not list(objects.references.names())
        assert not [blob.key for place in ("layers/", "images/", "lookup/") for blob in objects.blobs.list(place)]


def shown(world: World) -> View:
    objects = objects_of(world)
    return merged_view(objects, objects.image(objects.references.get("hostile")))


@pytest.fixture
def outside(world: World) -> Iterator[World]:
    """A world that has something to lose beside the store: a file with a secret, and a folder to write in."""
    (world.folder / "secret").write_bytes(SECRET)
    world.make("writable")
    (world.folder / "tmp").mkdir()
    before = state_of(world)
    yield world.with_(TMPDIR=str(world.folder / "tmp"))
    assert state_of(world) == before


def state_of(world: World) -> dict[str, tuple[int, int, int]]:
    """All that lies in the world's folder but the store: mode, links and time of the last change."""
    paths = [path for path in world.folder.rglob("*") if path != world.store and world.store not in path.parents]
    found = {str(path.relative_to(world.folder)): path.lstat() for path in paths}
    return {name: (status.st_mode, status.st_nlink, status.st_mtime_ns) for name, status in found.items()}


# -- paths and links that lead out -------------------------------------------------------------------------------------

CLIMBING: Final = {
    "a path that climbs": [tar.file(b"../../writable/escaped", b"x")],
    "an absolute path that climbs": [tar.file(b"/../writable/escaped", b"x")],
    "a path that climbs from inside": [tar.directory(b"a/"), tar.file(b"a/../../writable/escaped", b"x")],
    "a PAX path that climbs": [tar.pax({b"path": b"../writable/escaped"}) + tar.file(b"harmless", b"x")],
    "a GNU path that climbs": [tar.long_path(b"../writable/escaped") + tar.file(b"harmless", b"x")],
    "a prefix that climbs": [tar.file(b"escaped", b"x", prefix=b"../writable")],
    "a directory that climbs": [tar.directory(b"../writable/", mode=0o777)],
    "a symlink that climbs": [tar.symlink(b"../writable/escaped", b"x")],
    "a whiteout that climbs": [tar.file(b"../.wh.secret")],
    "an opaque marker that climbs": [tar.file(b"../.wh..wh..opq")],
    "a hardlink to a path that climbs": [tar.hardlink(b"h", b"../secret")],
}


@pytest.mark.parametrize("entries", CLIMBING.values(), ids=CLIMBING)
def test_what_climbs_is_refused(entries: list[bytes], outside: World, tmp_path: Path) -> None:
    layout = layout_of(tmp_path / "layout", plain(*entries))
    assert_refused(outside, convert(outside, f"oci:{layout}"), "climbs")


def test_a_hardlink_never_leads_to_a_file_of_the_host(outside: World, tmp_path: Path) -> None:
    secret = str(outside.folder / "secret").encode()
    cases = {
        "absolute": [tar.long_link(secret) + tar.hardlink(b"h", b"cut")],
        "through a symlink": [
            tar.long_link(str(outside.folder).encode()) + tar.symlink(b"s", b"cut"),
            tar.hardlink(b"h", b"s/secret"),
        ],
        "through a symlink that climbs": [
            tar.symlink(b"s", b"../" * 40),
            tar.long_link(b"s" + secret) + tar.hardlink(b"h", b"cut"),
        ],
        "to a symlink's own target": [tar.long_link(secret) + tar.symlink(b"s", b"cut"), tar.hardlink(b"h", b"s/")],
    }
    for name, entries in cases.items():
        layout = layout_of(tmp_path / name, plain(*entries))
        done = convert(outside, f"oci:{layout}")
        if done.code:
            assert_refused(outside, done, "a hardlink to")
        else:
            assert name == "to a symlink's own target"
            assert stat.S_ISLNK(shown(outside)[b"h"].mode)


def test_symlinks_never_lead_out_of_the_root(outside: World, tmp_path: Path) -> None:
    folder = str(outside.folder / "writable").encode()
    layers = [
        plain(
            tar.long_link(folder) + tar.symlink(b"absolute", b"cut"),
            tar.long_link(b"../" * 40 + folder[1:]) + tar.symlink(b"relative", b"cut"),
            tar.symlink(b"first", b"second"),
            tar.long_link(folder) + tar.symlink(b"second", b"cut"),
            tar.file(b"absolute/escaped1", b"x"),
        ),
        plain(tar.file(b"relative/escaped2", b"x"), tar.file(b"first/escaped3", b"x"), tar.file(b"absolute/.wh.no")),
    ]
    layout = layout_of(tmp_path / "layout", *layers)
    assert convert(outside, f"oci:{layout}").code == 0
    inside = {path for path, seen in shown(outside).items() if stat.S_ISREG(seen.mode)}
    assert inside == {folder[1:] + b"/escaped%d" % number for number in (1, 2, 3)}


# -- numbers without measure -------------------------------------------------------------------------------------------

ABSURD: Final = {
    "8 EiB less a byte": ([tar.header(b"f", b"0", size=8 * EIB - 1)], "bytes of content"),
    "8 EiB": ([tar.header(b"f", b"0", size=8 * EIB)], "bytes of content"),
    "more than 64 bits": ([tar.header(b"f", b"0", size=1 << 80)], "bytes of content"),
    "less than nothing": ([tar.header(b"f", b"0", size=-512)], "bytes of content"),
    "8 EiB by PAX": ([tar.pax({b"size": b"9223372036854775807"}), tar.file(b"f")], "bytes of content"),
    "a directory of 1 EiB": ([tar.header(b"d/", b"D", size=EIB, magic=tar.GNU)], "bytes of content"),
    "a volume label of 1 EiB": ([tar.header(b"v", b"V", size=EIB, magic=tar.GNU)], "bytes of content"),
    "a sparse file of 4 EiB": ([tar.gnu_sparse(b"f", 4 * EIB, [], b"")], "bytes of holes"),
    "a sparse file of 4 EiB with an end": (
        [tar.gnu_sparse(b"f", 4 * EIB, [(4 * EIB - 512, 512)], bytes(512))],
        "bytes of holes",
    ),
    "a sparse file beyond 64 bits": ([tar.gnu_sparse(b"f", 1 << 64, [], b"")], "sparse runs"),
    "sparse files of 64 GiB and a bit": (
        [tar.gnu_sparse(b"f", 1, [], b""), tar.gnu_sparse(b"g", 64 << 30, [], b"")],
        "bytes of holes",
    ),
    "more runs than a map may have": (
        [
            tar.pax({b"GNU.sparse.major": b"1", b"GNU.sparse.minor": b"0", b"GNU.sparse.realsize": b"9"}),
            tar.file(b"f", b"999999999999\n0\n0\n"),
        ],
        "runs",
    ),
    "an extension header of 1 GiB": ([tar.header(b"x", b"x", size=1 << 30)], "an extension header of"),
    "a long name of 2 MiB": ([tar.long_path(b"n" * (2 << 20)), tar.file(b"f")], "an extension header of"),
    "a long name of 1 MiB less a byte": ([tar.long_path(b"n" * ((1 << 20) - 1)), tar.file(b"f")], "4095 bytes"),
    "a name of 256 bytes": ([tar.long_path(b"n" * 256), tar.file(b"f")], "nnnn"),
    "2,000 global records": (
        [tar.pax({b"DSEC.%d" % number: b"v"}, b"g") for number in range(2000)],
        "global PAX records",
    ),
    "a global header after the other, without an entry": (
        [tar.pax({b"comment": b"v"}, b"g")] * 50_000,
        "ends after an extension header",
    ),
    "an xattr of 1 MiB": ([tar.pax({b"SCHILY.xattr.user.x": bytes(1 << 19)}), tar.file(b"f")], "xattr"),
    "a device beyond Linux": ([tar.character_device(b"c", 1 << 20, 1 << 30)], "device"),
    "a time beyond all": ([tar.header(b"f", b"0", mtime=1 << 80)], "mtime"),
}


@pytest.mark.parametrize(("entries", "text"), ABSURD.values(), ids=ABSURD)
def test_what_cannot_be_is_refused(entries: list[bytes], text: str, outside: World, tmp_path: Path) -> None:
    layout = layout_of(tmp_path / "layout", plain(*entries))
    assert_refused(outside, convert(outside, f"oci:{layout}"), text)


def test_the_same_through_build(outside: World, tmp_path: Path) -> None:
    """A tar as a workspace goes another way to the same reader."""
    for number, (entries, text) in enumerate([*ABSURD.values(), *((each, "climbs") for each in CLIMBING.values())]):
        if number % 3 == 0:
            archive = tmp_path / f"{number}.tar"
            archive.write_bytes(plain(*entries)[0])
            assert_refused(outside, build(outside, archive), text)


def test_the_deepest_path_is_stored_and_one_deeper_is_not(outside: World, tmp_path: Path) -> None:
    """Two thousand directories: no part of the way calls itself for each."""
    deepest = b"/".join([b"d"] * 2047 + [b"f"])
    assert len(deepest) == 4095
    archive = tmp_path / "deep.tar"
    for path in (deepest, deepest + b"ff"):
        archive.write_bytes(tar.archive(tar.long_path(path), tar.file(b"f", b"deep")))
        if path == deepest:
            assert convert(outside, f"oci:{layout_of(tmp_path / 'layout', plain(archive.read_bytes()))}").code == 0
            assert shown(outside)[deepest].data == b"deep"
            assert outside.run("dsec-image", "rm", "hostile").code == 0
        else:
            done = convert(outside, f"oci:{layout_of(tmp_path / 'deeper', plain(archive.read_bytes()))}")
            assert (done.code, len(done.errors)) == (1, 1)
            assert "4095 bytes" in done.errors[0]


# -- bombs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pack", [gzipped, zstd])
def test_a_gigabyte_of_zeros_is_a_file_like_others(
    pack: Callable[[Iterable[bytes]], Blob], outside: World, tmp_path: Path
) -> None:
    blob = pack(zeros_in_a_file(1 << 30))
    assert len(blob[0]) < 6 << 20
    assert convert(outside, f"oci:{layout_of(tmp_path / 'layout', blob)}").code == 0
    stored = sum(found.size for found in objects_of(outside).blobs.list(""))
    assert stored < 6 << 20


def test_zeros_behind_the_end_are_read_to_their_end(outside: World, tmp_path: Path) -> None:
    blob = gzip_members(tar.archive(tar.file(b"f", b"x")), bytes(PIECE), 512)
    assert convert(outside, f"oci:{layout_of(tmp_path / 'layout', blob)}").code == 0
    assert shown(outside)[b"f"].data == b"x"


def test_half_a_million_empty_extension_headers_take_no_memory(outside: World, tmp_path: Path) -> None:
    empty = tar.header(b"x", b"x")
    blob = gzip_members(empty, empty * 4096, 122, tar.archive(tar.file(b"f", b"x")))
    assert convert(outside, f"oci:{layout_of(tmp_path / 'layout', blob)}").code == 0
    assert shown(outside)[b"f"].data == b"x"


def test_a_hundred_thousand_entries_take_a_kilobyte_each(outside: World, tmp_path: Path) -> None:
    """`make corpus` converts a million."""
    count = 100_000
    blob = gzipped(
        chain((tar.file(b"d%d/f%d" % (number % 1000, number), b"%d" % number) for number in range(count)), [tar.END])
    )
    done = convert(outside, f"oci:{layout_of(tmp_path / 'layout', blob)}", MEMORY + count * MEMORY_PER_ENTRY)
    assert (done.code, done.errors) == (0, [])
    assert "1 layers, 1 built" in done.lines[1]


# -- limits that no test can wait for, made small ----------------------------------------------------------------------


def unpacked(*entries: bytes, lower: Stack | None = None) -> None:
    contents = KeptContents()
    assemble(unpack(io.BytesIO(tar.archive(*entries)), contents), contents, lower or Stack([]))


def test_the_bytes_of_a_layer_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tar.archive(tar.file(b"f", bytes(1000)))
    monkeypatch.setattr(unpack_module, "LAYER_SIZE_MAX", len(archive))
    unpack(io.BytesIO(archive), KeptContents())
    with pytest.raises(Invalid, match=rf"a tar of more than {len(archive)} bytes uncompressed"):
        unpack(io.BytesIO(archive + b"\0"), KeptContents())


def test_the_entries_of_a_layer_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpack_module, "ENTRIES_MAX", 3)
    unpacked(*[tar.file(b"same")] * 3)
    with pytest.raises(Invalid, match="'same': more than 3 entries"):
        unpacked(*[tar.file(b"same")] * 4)


def test_the_directories_that_a_layer_implies_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assemble_module, "ENTRIES_MAX", 3)
    unpacked(tar.file(b"a/b/f"), tar.file(b"a/c/f"), tar.file(b"a/c/g"), tar.directory(b"d/"))
    with pytest.raises(Invalid, match="'e': a layer whose paths imply more than 3"):
        unpacked(tar.file(b"a/b/f"), tar.file(b"a/c/f"), tar.file(b"e/f"))


ATTRIBUTES: Final = {
    "paths": tar.file(b"p" * 90),
    "targets": tar.symlink(b"s", b"t" * 90),
    "xattrs": tar.pax({b"SCHILY.xattr.user.x": b"v"}) + tar.file(b"f"),
    "sparse maps": tar.gnu_sparse(b"s", 512, [(0, 512)], bytes(512)),
}


@pytest.mark.parametrize("entry", ATTRIBUTES.values(), ids=ATTRIBUTES)
def test_the_attributes_of_a_layer_are_limited(entry: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpack_module, "ATTRIBUTES_MAX", 200)
    unpacked(entry)
    with pytest.raises(Invalid, match=r"bytes of paths, link targets, xattrs and sparse maps so far \(at most 200"):
        unpacked(*[entry] * 3)


def test_the_names_that_are_looked_up_for_a_layer_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_module, "STEPS_MAX", 1000)
    links = [tar.symlink(b"l0", b"."), *(tar.symlink(b"l%d" % n, b"./" * 20 + b"l%d" % (n - 1)) for n in range(1, 20))]
    unpacked(*links, tar.file(b"l19/f"))
    with pytest.raises(Invalid, match="too many symlinks lead through symlinks"):
        unpacked(*links, *(tar.file(b"l19/f%d" % number) for number in range(3)))


# -- images whose documents mean harm ----------------------------------------------------------------------------------


def nested(maker: LayoutMaker, depth: int, width: int) -> Json:
    """Indexes in indexes, each naming the one below many times: `width` ** `depth` ways to one image."""
    found = maker.image([tar.archive(tar.file(b"f", b"x"))], platform="linux/amd64")
    for _ in range(depth):
        found = maker.index([found] * width)
    return found


def test_indexes_that_unfold_without_end_are_refused(outside: World, tmp_path: Path) -> None:
    maker = LayoutMaker(tmp_path / "layout")
    maker.add(nested(maker, 12, 1000), tag="t")
    assert_refused(outside, convert(outside, f"oci:{maker.path}"), "nested")


def test_documents_without_measure_are_refused(outside: World, tmp_path: Path) -> None:
    for number, depth in enumerate((100_000, 0)):
        maker = LayoutMaker(tmp_path / str(number))
        document = b"[" * depth if depth else b'{"schemaVersion": 2, "x": "' + b"x" * (64 << 20) + b'"}'
        maker.add({**maker.blob(document, MANIFEST), "platform": platform_fields("linux/amd64")}, tag="t")
        assert_refused(outside, convert(outside, f"oci:{maker.path}"), "manifest" if depth else "")


def test_blobs_of_a_layout_that_are_no_files_are_refused(outside: World, tmp_path: Path) -> None:
    """Nothing is waited for, and nothing of the host is shown."""
    places: dict[str, Callable[[Path], object]] = {
        "a fifo": os.mkfifo,
        "a folder": os.mkdir,
        "a symlink to a file": lambda path: path.symlink_to(outside.folder / "secret"),
        "a symlink to an endless file": lambda path: path.symlink_to("/dev/zero"),
    }
    for name, make in places.items():
        layout = layout_of(tmp_path / name, plain(tar.file(b"f", b"x")))
        (blob,) = [path for path in (layout / "blobs/sha256").iterdir() if path.stat().st_size == 2048]
        blob.unlink()
        make(blob)
        done = convert(outside, f"oci:{layout}")
        assert_refused(outside, done)
        assert SECRET.decode() not in done.errors[0]


def test_an_archive_that_climbs_is_read_and_never_unpacked(outside: World, tmp_path: Path) -> None:
    layout = layout_of(tmp_path / "layout", plain(tar.file(b"f", b"x")))
    archive = pack_archive(layout, tmp_path / "image.tar")
    escaping = tar.file(b"../writable/escaped", b"x") + tar.symlink(b"blobs/sha256/s", str(outside.folder).encode())
    archive.write_bytes(escaping + archive.read_bytes())
    done = convert(outside, f"oci-archive:{archive}")
    if done.code:
        assert_refused(outside, done)
    else:
        assert shown(outside)[b"f"].data == b"x"
