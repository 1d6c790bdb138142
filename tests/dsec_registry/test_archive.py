"""The members of a tar: names and links that lie lead nowhere."""

from __future__ import annotations

import contextlib
import gzip
import subprocess
from pathlib import Path

import pytest

from dsec_registry import archive as module
from dsec_registry.archive import LINKS_MAX, Archive
from dsec_store.errors import Corrupt, Invalid, NotFound
from tests import tarmaker as tar


def opened(tmp_path: Path, *entries: bytes) -> contextlib.closing[Archive]:
    path = tmp_path / "a.tar"
    path.write_bytes(tar.archive(*entries))
    return contextlib.closing(Archive(path))


def data_of(archive: Archive, name: str) -> bytes | None:
    stream = archive.open(name)
    if stream is None:
        return None
    with contextlib.closing(stream):
        return stream.read(1 << 20)


FILES = (tar.directory(b"d/"), tar.file(b"d/f", b"in d"), tar.file(b"f", b"at the top"))


@pytest.mark.parametrize(
    ("entries", "name", "data"),
    [
        ((), "f", b"at the top"),
        ((), "d/f", b"in d"),
        ((), "./d//f", b"in d"),
        ((), "d/../f", b"at the top"),
        ((), "d", None),
        ((), "", None),
        ((), "d/f/g", None),
        ((), "absent", None),
        ((tar.file(b"./d/f", b"later"),), "d/f", b"later"),
        ((tar.file(b"/d/f", b"absolute"),), "d/f", b"absolute"),
        ((tar.file(b"d/../f", b"elsewhere"),), "f", b"at the top"),
        ((tar.file(b"../f", b"outside"),), "f", b"at the top"),
        ((tar.directory(b"f"),), "f", None),
        ((tar.fifo(b"f"),), "f", None),
        ((tar.symlink(b"d/l", b"f"),), "d/l", b"in d"),
        ((tar.symlink(b"d/l", b"../f"),), "d/l", b"at the top"),
        ((tar.symlink(b"e", b"d"),), "e/f", b"in d"),
        ((tar.symlink(b"e", b"d"), tar.symlink(b"d/l", b"../e/f")), "e/l", b"in d"),
        ((tar.symlink(b"e", b"."), tar.symlink(b"g", b"e/e/e/d")), "g/f", b"in d"),
        ((tar.symlink(b"l", b"absent"),), "l", None),
        ((tar.symlink(b"f", b"d/f"),), "f", b"in d"),
        ((tar.symlink(b"l", b"d/f"), tar.file(b"l", b"a file after all")), "l", b"a file after all"),
        ((tar.hardlink(b"d/h", b"f"), tar.file(b"f", b"later")), "d/h", b"at the top"),
        ((tar.hardlink(b"d/h", b"./f"), tar.hardlink(b"i", b"d/h")), "i", b"at the top"),
        ((tar.hardlink(b"h", b"absent"),), "h", None),
        ((tar.hardlink(b"h", b"../f"),), "h", None),
        ((tar.file(b"../g", b"outside"), tar.hardlink(b"h", b"../g")), "h", None),
    ],
)
def test_names_lead_where_tar_would_extract(
    tmp_path: Path, entries: tuple[bytes, ...], name: str, data: bytes | None
) -> None:
    with opened(tmp_path, *FILES, *entries) as archive:
        assert data_of(archive, name) == data


@pytest.mark.parametrize(
    ("entries", "name", "text"),
    [
        ((), "../f", "leads out of the archive"),
        ((), "d/../../f", "leads out of the archive"),
        ((), "/f", "by an absolute path"),
        ((tar.symlink(b"d/l", b"../../f"),), "d/l", "leads out of the archive"),
        ((tar.symlink(b"l", b"/etc/passwd"),), "l", "by an absolute path"),
        ((tar.symlink(b"e", b"/"),), "e/f", "by an absolute path"),
        ((tar.symlink(b"l", b"l"),), "l", "in a circle"),
        ((tar.symlink(b"l", b"d/l"), tar.symlink(b"d/l", b"../l")), "d/l", "in a circle"),
        ((tar.symlink(b"e", b"e/e"),), "e/f", "in a circle"),
    ],
)
def test_no_name_leads_out_of_the_archive(tmp_path: Path, entries: tuple[bytes, ...], name: str, text: str) -> None:
    with opened(tmp_path, *FILES, *entries) as archive, pytest.raises(Invalid, match=f"a.tar: '{name}'.*{text}"):
        archive.open(name)


@pytest.mark.parametrize("links", [LINKS_MAX, LINKS_MAX + 1])
def test_a_chain_of_links_has_an_end(tmp_path: Path, links: int) -> None:
    chain = [tar.symlink(b"%d" % number, b"%d" % (number + 1)) for number in range(links)]
    with opened(tmp_path, *chain, tar.file(b"%d" % links, b"end")) as archive:
        if links == LINKS_MAX:
            assert data_of(archive, "0") == b"end"
        else:
            with pytest.raises(Invalid, match=f"more than {LINKS_MAX} links"):
                archive.open("0")


def test_links_may_be_long(tmp_path: Path) -> None:
    """Each leads down 700 folders and up again; folders need not be members."""
    way = b"d/" * 700 + b"../" * 700
    chain = [tar.long_link(way + b"%d" % (n + 1)) + tar.symlink(b"%d" % n, b"x") for n in range(LINKS_MAX)]
    with opened(tmp_path, *chain, tar.file(b"%d" % LINKS_MAX, b"end")) as archive:
        assert data_of(archive, "0") == b"end"


def test_a_path_that_no_member_can_have_is_missing(tmp_path: Path) -> None:
    with opened(tmp_path, tar.symlink(b"l", b"d/" * 40), tar.file(b"f")) as archive:
        assert archive.open("d/" * 100_000 + "f") is None
        assert archive.open("l/" * LINKS_MAX + "f") is None


def test_a_sparse_member_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with (
        opened(tmp_path, tar.gnu_sparse(b"s", 4096, [(0, 512)], bytes(512))) as archive,
        pytest.raises(Invalid, match=r"'s' is a sparse file .*--sparse"),
    ):
        archive.open("s")


@pytest.mark.parametrize(("limit", "value"), [("MEMBERS_MAX", 1), ("NAMES_MAX", 5)])
def test_an_index_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int) -> None:
    monkeypatch.setattr(module, limit, value)
    with pytest.raises(Invalid, match=r"a\.tar: more than"):
        opened(tmp_path, *FILES)


@pytest.mark.parametrize("cut", [600, 1100])
def test_a_cut_tar_is_corrupt(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(tar.archive(tar.file(b"f", bytes(700)), tar.file(b"g"))[:cut])
    with pytest.raises(Corrupt, match=r"a\.tar"):
        Archive(path)


def test_what_is_no_tar(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="absent"):
        Archive(tmp_path / "absent")
    with pytest.raises(Invalid, match="directory"):
        Archive(tmp_path)
    (tmp_path / "noise").write_bytes(gzip.compress(b"no tar at all" * 100))
    with pytest.raises(Corrupt, match="noise"):
        Archive(tmp_path / "noise")


def test_many_read_side_by_side(tmp_path: Path) -> None:
    with opened(tmp_path, *FILES) as archive:
        one, two = archive.open("f"), archive.open("d/f")
        assert one
        assert two
        assert (one.read(3), two.read(3), one.read(100), two.read(100)) == (b"at ", b"in ", b"the top", b"d")


@pytest.mark.component
def test_an_archive_by_gnu_tar_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / "a").mkdir(parents=True)
    (folder / "a" / "layer.tar").write_bytes(b"layer")
    (folder / "b").mkdir()
    (folder / "b" / "layer.tar").symlink_to("../a/layer.tar")
    (folder / "c").hardlink_to(folder / "a" / "layer.tar")
    path = tmp_path / "a.tar"
    subprocess.run(["tar", "-C", folder, "-cf", path, "."], check=True, capture_output=True)
    with contextlib.closing(Archive(path)) as archive:
        assert [data_of(archive, name) for name in ("a/layer.tar", "b/layer.tar", "c")] == [b"layer"] * 3
