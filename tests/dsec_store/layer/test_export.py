"""Layers leave as the tars that they came from, or as the canonical ones of their trees, or with an error."""

import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec_store import keys
from dsec_store.backends.memory import MemoryBlobs
from dsec_store.chunks import ChunkSource, NoCache
from dsec_store.descriptor import LayerDescriptor
from dsec_store.digest import Digest
from dsec_store.errors import Corrupt, Invalid, NotFound
from dsec_store.layer.ahead import ReadAhead
from dsec_store.layer.assemble import assemble
from dsec_store.layer.build import LayerBuild
from dsec_store.layer.contents import PIECE
from dsec_store.layer.erofs import read_image
from dsec_store.layer.export import RecentChunks, Span, layer_tar, read_ahead
from dsec_store.layer.local import LocalBuild, build_local
from dsec_store.layer.unpack import unpack
from dsec_store.objects import Objects
from dsec_store.upload import ChunkIndex
from tests import tarmaker as tar
from tests.dsec_store.blobmaker import flipped, noise

BIG: Final = tar.archive(
    tar.file(b"big", noise(9_000_000, "big")),
    *(tar.file(b"small%d" % number, noise(number, "small")) for number in range(300)),
    tar.file(b"again", noise(9_000_000, "big")),
    end=tar.END + bytes(9000) + b"junk",
)
"""Larger than several batches; with contents that come twice, and with bytes that no entry explains."""


class CountedBlobs(MemoryBlobs):
    """Counts the ranges that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges = 0

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        self.ranges += 1
        return super().get_range(key, offset, length)


@pytest.fixture
def blobs() -> CountedBlobs:
    return CountedBlobs()


@pytest.fixture
def objects(blobs: CountedBlobs) -> Objects:
    return Objects(blobs)


def stored(objects: Objects, data: bytes) -> LayerDescriptor:
    """The layer of a tar, on nothing."""
    with LayerBuild(objects, ChunkIndex(objects), with_recipe=True) as build:
        with ReadAhead(data[at : at + PIECE] for at in range(0, len(data), PIECE)) as stream:
            placed = unpack(stream, build.contents, build.recipe)
        return build.commit(assemble(placed, build.contents, None), Digest.of(data, "sha256")).descriptor


def exported(objects: Objects, layer: LayerDescriptor) -> bytes:
    return b"".join(layer_tar(objects, layer, ChunkSource(objects.blobs, RecentChunks())))


def name_of(layer: LayerDescriptor) -> str:
    return f"layer {Digest.of(layer.encode())}: "


# -- recipes -----------------------------------------------------------------------------------------------------------


def test_a_large_tar_comes_back_in_even_pieces_and_few_requests(objects: Objects, blobs: CountedBlobs) -> None:
    layer = stored(objects, BIG)
    blobs.ranges = 0
    pieces = list(layer_tar(objects, layer, ChunkSource(blobs, RecentChunks())))
    assert b"".join(pieces) == BIG
    assert {len(piece) for piece in pieces[:-1]} == {PIECE}
    assert blobs.ranges < 10


def test_the_result_does_not_depend_on_what_was_kept(objects: Objects) -> None:
    layer = stored(objects, BIG)
    assert b"".join(layer_tar(objects, layer, ChunkSource(objects.blobs, NoCache()))) == BIG


contents = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from((0, 1, 511, 512, 513, 4096, 5000, 65536, 70000, PIECE, PIECE + 1))),
    max_size=8,
)


@given(contents, st.binary(max_size=2000))
def test_any_tar_comes_back(files: Sequence[tuple[int, int]], rest: bytes) -> None:
    """The same content under several names, empty ones, all sizes around a limit, and anything behind the end."""
    entries = [tar.file(b"f%d" % number, noise(size, str(seed))) for number, (seed, size) in enumerate(files)]
    data = tar.archive(*entries, end=tar.END + rest)
    objects = Objects(MemoryBlobs())
    assert exported(objects, stored(objects, data)) == data


def test_a_sparse_file_comes_back_without_its_holes(objects: Objects) -> None:
    data = tar.archive(tar.gnu_sparse(b"s", 900_000, [(0, 512), (500_000, 100)], noise(612)), tar.file(b"f", b"f"))
    assert exported(objects, stored(objects, data)) == data


def test_another_diff_id_is_an_error_at_the_end(objects: Objects) -> None:
    layer = replace(stored(objects, BIG), diff_id=Digest.of(b"", "sha256"))
    with pytest.raises(Corrupt, match=name_of(layer) + "its tar, made again, is sha256:.* but its diff_id is sha256:"):
        exported(objects, layer)


def test_a_layer_with_the_contents_of_another_is_an_error(objects: Objects) -> None:
    layer, other = stored(objects, BIG), stored(objects, tar.archive(tar.file(b"f", b"f" * 100)))
    with pytest.raises(Corrupt, match=name_of(replace(layer, blobs=other.blobs)) + ".*of a blob of 4096 bytes"):
        exported(objects, replace(layer, blobs=other.blobs))
    with pytest.raises(Corrupt, match="of a blob of 0 bytes"):
        exported(objects, replace(layer, blobs=()))


def test_a_damaged_chunk_is_named(objects: Objects) -> None:
    layer = stored(objects, BIG)
    first = objects.chunk_map(layer.blobs[0].chunk_map)[3]
    location = objects.locator(layer.blobs[0].name)[3]
    key = keys.pack(location.pack)
    objects.blobs.put(key, flipped(objects.blobs.get(key), location.offset + 20))
    with pytest.raises(Corrupt, match=name_of(layer) + f"chunk blake3:{first.digest.hex()} in pack {location.pack}"):
        exported(objects, layer)


def test_a_lost_pack_is_named(objects: Objects) -> None:
    layer = stored(objects, BIG)
    pack = objects.locator(layer.blobs[0].name)[-1].pack
    objects.blobs.delete(keys.pack(pack))
    with pytest.raises(NotFound, match=name_of(layer) + f"chunk blake3:.* in pack {pack}"):
        exported(objects, layer)


def test_chunks_that_move_meanwhile_are_followed(objects: Objects) -> None:
    """As gc does it: packs are written anew, locators replaced, the old packs deleted."""
    layer = stored(objects, BIG)
    pieces = layer_tar(objects, layer, ChunkSource(objects.blobs, NoCache()))
    begun = next(pieces)
    moved = {pack: Digest.of(pack.raw) for pack in objects.packs()}
    for blob in layer.stored_blobs:
        locations = [replace(at, pack=moved[at.pack]) for at in objects.locator(blob.name)]
        objects.put_locator(blob.chunk_map, locations)
    for old, new in moved.items():
        objects.blobs.put(keys.pack(new), objects.blobs.get(keys.pack(old)))
        objects.blobs.delete(keys.pack(old))
    assert begun + b"".join(pieces) == BIG


def test_what_was_collapsed_has_no_tar(objects: Objects) -> None:
    layer = stored(objects, BIG)
    for collapsed in (replace(layer, run=(Digest.of(b""),)), replace(layer, blobs=layer.blobs * 2)):
        with pytest.raises(Invalid, match=name_of(collapsed) + "collapsed from several layers"):
            exported(objects, collapsed)


def test_who_leaves_early_leaves_no_thread(objects: Objects) -> None:
    layer = stored(objects, BIG)
    pieces = layer_tar(objects, layer, ChunkSource(objects.blobs, RecentChunks()))
    next(pieces)
    pieces.close()
    with pytest.raises(Corrupt) as kept:  # and with it all frames that were on the way
        exported(objects, replace(layer, blobs=()))
    assert "of a blob of 0 bytes" in str(kept.value)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("batch")]


# -- canonical tars ----------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    top = tmp_path / "folder"
    (top / "z").mkdir(parents=True)
    for number in range(40):
        (top / f"f{number}").write_bytes(noise(number * 20_000, "folder"))
    (top / "z" / "big").write_bytes(noise(6_000_000, "big"))
    os.link(top / "f7", top / "z" / "f7")
    (top / "z" / "twin").write_bytes(noise(6_000_000, "big"))
    (top / "z" / "empty").touch()
    (top / "z" / "link").symlink_to("../f1")
    for path in (*top.rglob("*"), top):
        os.utime(path, ns=(0, 10**18 + 1), follow_symlinks=False)
    return top


def built(objects: Objects, source: Path, prefix: str = "/") -> LayerDescriptor:
    return build_local(objects, source, "demo", LocalBuild("base", prefix)).layer.descriptor


def test_a_folder_leaves_as_its_canonical_tar_and_comes_back(objects: Objects, folder: Path) -> None:
    layer = built(objects, folder)
    data = exported(objects, layer)
    again = stored(objects, data)
    assert (again.metadata, again.blobs, again.has_root) == (layer.metadata, layer.blobs, True)
    assert exported(objects, again) == data


def test_a_tree_without_a_root_of_its_own_has_no_entry_for_it(objects: Objects, folder: Path) -> None:
    layer = built(objects, folder, prefix="/opt/x")
    again = stored(objects, exported(objects, layer))
    assert (again.metadata, again.has_root) == (layer.metadata, False)


def test_a_name_that_would_be_a_marker_is_refused(objects: Objects, folder: Path) -> None:
    (folder / "z" / ".wh.f").touch()
    layer = built(objects, folder)
    with pytest.raises(Invalid, match=name_of(layer) + r"'z/\.wh\.f': .*rename it"):
        exported(objects, layer)


def test_the_tree_of_another_layer_is_an_error(objects: Objects, folder: Path) -> None:
    layer = built(objects, folder)
    assert read_image(objects.metadata(layer.metadata)).root.entries
    with pytest.raises(Corrupt, match=name_of(replace(layer, blobs=())) + "a content at bytes"):
        exported(objects, replace(layer, blobs=()))


# -- the parts of it ---------------------------------------------------------------------------------------------------


def test_parts_without_spans_need_no_blob() -> None:
    assert b"".join(read_ahead([b"a", b"", b"bc"], None)) == b"abc"
    assert b"".join(read_ahead([], None)) == b""


def test_a_span_without_a_blob_is_an_error() -> None:
    with pytest.raises(Corrupt, match="of a blob of 0 bytes"):
        list(read_ahead([Span(0, 5)], None))


def test_recent_chunks_are_few() -> None:
    recent = RecentChunks(limit=10)
    recent.put(b"a", b"1234")
    recent.put(b"b", b"1234")
    assert recent.get(b"a", 4) == b"1234"
    recent.put(b"c", b"1234")
    assert [recent.get(name, 4) for name in (b"a", b"b", b"c")] == [b"1234", None, b"1234"]
    assert recent.get(b"a", 5) is None
    recent.put(b"d", b"12345678901")
    assert [recent.get(name, size) for name, size in ((b"a", 4), (b"c", 4), (b"d", 11))] == [None] * 3
