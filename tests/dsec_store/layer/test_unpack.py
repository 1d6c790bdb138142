"""Unpacking: every tar that we can make comes back from its contents and its recipe, however it arrives."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec_store.backends.memory import MemoryBlobs
from dsec_store.chunkmap import ChunkMap
from dsec_store.chunks import ChunkSource, LazyBlob, NoCache
from dsec_store.errors import Corrupt, Invalid
from dsec_store.layer import unpack as unpack_module
from dsec_store.layer.contents import StoredContents
from dsec_store.layer.recipe import RecipeWriter, read_recipe
from dsec_store.layer.tar import PIECE, TarReader
from dsec_store.layer.unpack import Placed, is_marker, unpack
from dsec_store.objects import Objects
from dsec_store.upload import ChunkIndex, Upload
from tests import tarmaker as tar
from tests.dsec_store.blobmaker import SMALL, noise
from tests.dsec_store.keptcontents import KeptContents
from tests.dsec_store.tarreading import content, entries
from tests.dsec_store.test_tar import EVERYTHING
from tests.flows.ocicases import CASES
from tests.ocimaker import Layer

LARGE = noise(3 * SMALL.solo + 5, "large")
FILE = tar.file(b"f", b"text")
SPARSE_RUNS = [(512, 512), (2048, 100), (90_000, 512)]
SPARSE = tar.gnu_sparse(b"s", 100_000, SPARSE_RUNS, b"a" * 512 + b"b" * 100 + b"c" * 512)

ODD = {
    "nothing": b"",
    "two zero blocks": tar.END,
    "no end": FILE,
    "one end block": FILE + bytes(512),
    "part of a block behind the end": FILE + bytes(1024) + bytes(100),
    "zeros behind the end": tar.archive(FILE, end=bytes(10_240)),
    "junk behind the end": tar.archive(FILE, end=tar.END + b"junk" * 999),
    "another archive behind the end": tar.archive(FILE) + tar.archive(tar.file(b"second", LARGE)),
    "a lone zero block": tar.archive(FILE, bytes(512), tar.file(b"g", b"1")),
    "no padding at the end": FILE[: 512 + 4],
    "half of the padding at the end": FILE[: 512 + 100],
    "padding that is not zero": tar.archive(FILE[:516] + b"p" * 508, tar.file(b"g", LARGE)[:-1] + b"p"),
    "contents of whole blocks": tar.archive(tar.file(b"f", b"x" * 512), tar.file(b"g", bytes(SMALL.solo))),
    "zeros behind zeros": tar.archive(tar.file(b"f", bytes(5)), tar.file(b"g", bytes(1024)), end=bytes(5000)),
    "duplicates": tar.archive(*(tar.file(b"%d" % number, (b"x", LARGE)[number % 2]) for number in range(7))),
    "a large file between small ones": tar.archive(FILE, tar.file(b"l", LARGE), tar.file(b"g", b"1")),
    "markers with content": tar.archive(tar.file(b"d/.wh.f", b"why"), tar.file(b".wh..wh.plnk/1", LARGE), FILE),
    "a hardlink with a size": tar.archive(FILE, tar.hardlink(b"h", b"f", size=4)),
    "a dumpdir": tar.archive(tar.header(b"d/", b"D", size=5, magic=tar.GNU) + tar.padded(b"Yabc\0"), FILE),
    "a label with content": tar.archive(tar.header(b"v", b"V", size=700, magic=tar.GNU) + tar.padded(b"v" * 700), FILE),
    "sparse": tar.archive(SPARSE, FILE, SPARSE),
    "sparse without padding": SPARSE[:-412],
    "sparse, all hole": tar.archive(tar.gnu_sparse(b"s", 100_000, [], b""), FILE),
    "sparse, no byte": tar.archive(tar.gnu_sparse(b"s", 0, [], b""), FILE),
    "sparse, many runs": tar.archive(tar.gnu_sparse(b"s", 90_000, [(n * 1000, 7) for n in range(60)], b"z" * 420)),
    "sparse, ends with zeros": tar.archive(tar.gnu_sparse(b"s", 600, [(0, 7)], bytes(7)), bytes(512), FILE),
    "everything": EVERYTHING,
}


def tars() -> Iterator[tuple[str, bytes]]:
    yield from ODD.items()
    for name, case in CASES.items():
        for number, layer in enumerate(case.layers[:5]):
            yield f"{name} {number}", layer.tar if isinstance(layer, Layer) else layer


TARS = dict(tars())


class Pieces:
    """A stream of a tar that arrives in pieces which end at these places."""

    def __init__(self, data: bytes, places: list[int]) -> None:
        ends = [0, *sorted({place for place in places if 0 < place < len(data)}), len(data)]
        self._pieces = [data[start:end] for start, end in pairwise(ends)]
        self._pieces.reverse()

    def read(self, size: int, /) -> bytes:
        return self._pieces.pop() if self._pieces else b""


def opened(objects: Objects, chunk_map: ChunkMap, upload: Upload) -> LazyBlob:
    locations = upload.locate(chunk_map)
    return LazyBlob(chunk_map, lambda _: locations, ChunkSource(objects.blobs, NoCache()))


class Unpacked:
    """A tar that was unpacked into a store."""

    def __init__(self, data: bytes, places: list[int] | None = None) -> None:
        objects = Objects(MemoryBlobs())
        with Upload(objects, ChunkIndex(objects), workers=1) as upload:
            contents = StoredContents(upload.blob(SMALL), SMALL)
            recipe = RecipeWriter(upload.blob(SMALL))
            self.placed: list[Placed] = unpack(Pieces(data, places or []), contents, recipe)
            maps = contents.finish(), recipe.finish()
            upload.finish()
            self.contents, recipe_blob = (opened(objects, chunk_map, upload) for chunk_map in maps)
        self.recipe = recipe_blob.read(0, maps[1].blob_size)
        self.map = maps[0].encode()

    def tar(self) -> bytes:
        return b"".join(read_recipe([self.recipe], self.contents.read, "recipe"))

    def content(self, placed: Placed) -> bytes:
        return self.contents.read(placed.address.offset, placed.entry.size) if placed.address else b""


@pytest.mark.parametrize("name", TARS)
def test_a_tar_comes_back(name: str) -> None:
    check(TARS[name])


def check(data: bytes) -> None:
    unpacked = Unpacked(data)
    assert unpacked.tar() == data
    assert [placed.entry for placed in unpacked.placed] == entries(data)
    for placed in unpacked.placed:
        wanted = b"" if is_marker(placed.entry.path) else content(data, placed.entry)
        assert unpacked.content(placed) == wanted


@settings(deadline=None)
@given(
    st.sampled_from([*ODD]), st.lists(st.one_of(st.integers(1, 30_000), st.integers(1, 60).map(lambda n: n * 512 - 1)))
)
def test_how_it_arrives_does_not_matter(name: str, places: list[int]) -> None:
    one, other = Unpacked(ODD[name]), Unpacked(ODD[name], places)
    assert (one.placed, one.map, one.recipe) == (other.placed, other.map, other.recipe)


def test_a_large_tar_that_arrives_byte_by_byte() -> None:
    data = ODD["everything"]
    one, other = Unpacked(data), Unpacked(data, list(range(len(data))))
    assert (one.placed, one.map, one.recipe) == (other.placed, other.map, other.recipe)


def test_the_archive_that_python_tests_itself_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsec_store.layer.tar.ID_MAX", 2**32 - 1)  # one file has this uid, which we refuse
    package = find_spec("test")
    for folder in package.submodule_search_locations or [] if package else []:
        for place in ("testtar.tar", "archivetestdata/testtar.tar"):
            if (Path(folder) / place).exists():
                check((Path(folder) / place).read_bytes())
                return
    pytest.skip("needs testtar.tar of Python's own tests, which this installation lacks")


@pytest.mark.parametrize("form", ["gnu", "posix --sparse-version=0.0", "posix --sparse-version=0.1", "posix"])
def test_sparse_files_of_gnu_tar(form: str, tmp_path: Path) -> None:
    program = shutil.which("tar")
    if not program or b"GNU tar" not in subprocess.check_output([program, "--version"]):
        pytest.skip("needs GNU tar")
    for name, runs in {"hole": [], "head": [(0, b"x")], "many": [(n * 8192, b"run %d" % n) for n in range(50)]}.items():
        with (tmp_path / name).open("wb") as out:
            for offset, text in runs:
                out.seek(offset)
                out.write(text)
            out.truncate(500_000)
    command = [program, "-C", os.fspath(tmp_path), "--sparse", "--hole-detection=raw", *f"--format={form}".split()]
    data = subprocess.check_output([*command, "-cf", "-", "hole", "head", "many"])
    assert all(entry.runs is not None for entry in entries(data))
    check(data)


# -- what the reader hands out -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TARS)
def test_content_that_nobody_asks_for_is_kept(name: str) -> None:
    kept: list[bytes] = []
    reader = TarReader(io.BytesIO(TARS[name]), kept.append)
    assert list(reader) == entries(TARS[name])
    reader.finish()
    assert b"".join(kept) == TARS[name]


def test_what_is_left_of_a_content_is_kept_too() -> None:
    data = tar.archive(tar.file(b"f", LARGE), FILE)
    kept: list[bytes] = []
    reader = TarReader(Pieces(data, [600]), kept.append)
    taken, paths = [], []
    for entry in reader:
        paths.append(entry.path)
        taken.append(next(reader.content()))
    reader.finish()
    assert (taken, paths) == ([LARGE[:88], b"text"], [b"f", b"f"])
    assert b"".join(kept) == data.replace(LARGE[:88], b"", 1).replace(b"text", b"", 1)


def test_pieces_of_content_are_bounded() -> None:
    data = tar.archive(tar.file(b"f", bytes(3 * PIECE + 5)))
    reader = TarReader(io.BytesIO(data))
    (sizes,) = [[len(piece) for piece in reader.content()] for _ in reader]
    assert (max(sizes), sum(sizes)) == (PIECE, 3 * PIECE + 5)


@pytest.mark.parametrize("take", ["content", "whole_content", "nothing"])
def test_a_content_that_is_cut_is_corrupt_and_names_its_entry(take: str) -> None:
    reader = TarReader(io.BytesIO(FILE + tar.file(b"g", bytes(3000))[:2000]))

    def read_all() -> None:
        for _ in reader:
            if take == "content":
                assert sum(map(len, reader.content())) == 4
            elif take == "whole_content":
                reader.whole_content()

    message = "tar archive, entry at byte 1024: 3000 bytes of content, but the archive has 1488 more"
    with pytest.raises(Corrupt, match=f"^{message}$"):
        read_all()


@pytest.mark.parametrize("size", range(0, len(EVERYTHING), 100))
def test_a_cut_archive_is_refused_or_comes_back(size: int) -> None:
    with suppress(Corrupt, Invalid):
        assert Unpacked(EVERYTHING[:size]).tar() == EVERYTHING[:size]


# -- what is stored ----------------------------------------------------------------------------------------------------


def test_a_sparse_file_has_its_zeros() -> None:
    contents = KeptContents()
    (placed,) = unpack(io.BytesIO(tar.archive(SPARSE)), contents)
    expected = bytearray(100_000)
    expected[512:1024], expected[2048:2148], expected[90_000:90_512] = b"a" * 512, b"b" * 100, b"c" * 512
    assert contents.kept == [expected]
    assert (placed.entry.size, placed.address) == (100_000, contents.add_small(bytes(expected)))


def test_no_content_is_stored_of_what_is_no_file_of_the_layer() -> None:
    contents = KeptContents()
    data = ODD["markers with content"] + tar.file(b"never reached", b"x")
    assert [placed.address is None for placed in unpack(io.BytesIO(data), contents)] == [True, True, False]
    assert contents.kept == [b"text"]


@pytest.mark.parametrize(
    ("path", "marker"),
    [(b".wh.f", True), (b"a/.wh..wh..opq", True), (b"a/.wh.d/f", True), (b"a.wh.f", False), (b"a/b.wh.", False)],
)
def test_markers(path: bytes, marker: bool) -> None:
    assert is_marker(path) == marker


def test_the_stream_is_read_to_its_end() -> None:
    stream = io.BytesIO(ODD["another archive behind the end"])
    assert len(unpack(stream, KeptContents())) == 1
    assert stream.read() == b""


def test_an_archive_with_endless_holes_is_refused_before_they_are_read() -> None:
    with pytest.raises(Invalid, match=r"'endless': sparse files with 7696581394432 bytes of holes so far"):
        unpack(io.BytesIO(tar.archive(tar.gnu_sparse(b"endless", 7 << 40, [], b""))), KeptContents())


def test_the_limit_of_holes_is_for_their_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpack_module, "HOLES_MAX", 4096)
    first = tar.gnu_sparse(b"first", 2560, [(0, 512)], b"a" * 512)
    second, plain = tar.gnu_sparse(b"second", 2048, [], b""), tar.file(b"plain", bytes(4096))
    unpack(io.BytesIO(tar.archive(first, second, plain)), KeptContents())
    with pytest.raises(Invalid, match=r"'second': .* 4097 bytes of holes"):
        unpack(io.BytesIO(tar.archive(first, tar.gnu_sparse(b"second", 2049, [], b""))), KeptContents())
