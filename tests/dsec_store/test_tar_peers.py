"""What the tar reader makes of other programs' archives: those of GNU tar, and of Python's tarfile."""

import io
import os
import shutil
import subprocess
import tarfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec_store.layer.tar import TarEntry, TarKind
from dsec_store.layer.tree import ID_MAX
from tests.dsec_store.tarreading import content, entries

# -- Sparse files of GNU tar -------------------------------------------------------------------------------------------

SPARSE_FORMATS = {
    "gnu": ["--format=gnu"],
    "pax 0.0": ["--format=posix", "--sparse-version=0.0"],
    "pax 0.1": ["--format=posix", "--sparse-version=0.1"],
    "pax 1.0": ["--format=posix", "--sparse-version=1.0"],
}
SPARSE_FILES = {
    "one": [(0, b"head")],
    "hole first": [(300_000, b"x" * 5000)],
    "many": [(number * 8192, b"run %d" % number) for number in range(300)],
    "all hole": [],
}


@pytest.mark.parametrize("form", SPARSE_FORMATS)
def test_sparse_files_of_gnu_tar(form: str, tmp_path: Path) -> None:
    tar = shutil.which("tar")
    if not tar or b"GNU tar" not in subprocess.check_output([tar, "--version"]):
        pytest.skip("needs GNU tar")
    for name, pieces in SPARSE_FILES.items():
        write_sparse(tmp_path / name, 3_000_000, pieces)
    command = [tar, "-C", str(tmp_path), "--sparse", "--hole-detection=raw", *SPARSE_FORMATS[form], "-cf", "-"]
    data = subprocess.check_output([*command, *SPARSE_FILES])
    found = {os.fsdecode(entry.path): entry for entry in entries(data)}
    assert set(found) == set(SPARSE_FILES)
    for name, entry in found.items():
        assert entry.runs is not None
        assert content(data, entry) == (tmp_path / name).read_bytes()


def write_sparse(path: Path, size: int, pieces: list[tuple[int, bytes]]) -> None:
    with path.open("wb") as out:
        for offset, data in pieces:
            out.seek(offset)
            out.write(data)
        out.truncate(size)


# -- Against Python's tarfile ------------------------------------------------------------------------------------------

TYPES = {
    tarfile.REGTYPE: TarKind.FILE,
    tarfile.DIRTYPE: TarKind.DIRECTORY,
    tarfile.SYMTYPE: TarKind.SYMLINK,
    tarfile.LNKTYPE: TarKind.HARDLINK,
    tarfile.CHRTYPE: TarKind.CHAR,
    tarfile.BLKTYPE: TarKind.BLOCK,
    tarfile.FIFOTYPE: TarKind.FIFO,
}


def names(longest: int) -> st.SearchStrategy[str]:
    """Any bytes but NUL, as tarfile wants them."""
    text = st.binary(min_size=1, max_size=longest).map(lambda raw: raw.replace(b"\0", b"0"))
    return text.map(lambda raw: raw.decode("utf-8", "surrogateescape"))


@st.composite
def members(draw: st.DrawFn, form: int) -> tuple[tarfile.TarInfo, bytes]:
    """What `form` can hold of everything: ustar has short names, small ids and no time before 1970."""
    ustar = form == tarfile.USTAR_FORMAT
    info = tarfile.TarInfo(draw(names(99 if ustar else 400)).rstrip("/") or "x")
    info.type = draw(st.sampled_from(list(TYPES)))
    info.mode = draw(st.integers(0, 0o7777))
    info.uid, info.gid = (draw(st.integers(0, 8**7 - 1 if ustar else ID_MAX)) for _ in range(2))
    info.mtime = draw(st.integers(0 if ustar else -(2**40), 8**11 - 1))
    if form == tarfile.PAX_FORMAT:
        info.mtime = info.mtime + draw(st.sampled_from([0, 0.25, 0.5]))
    data = draw(st.binary(max_size=1500)) if info.isreg() else b""
    info.size = len(data)
    if info.issym() or info.islnk():
        info.linkname = draw(names(100 if ustar else 400))
    if info.isdev() and not info.isfifo():
        info.devmajor, info.devminor = draw(st.integers(0, 4095)), draw(st.integers(0, 2**20 - 1))
    return info, data


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@given(st.data())
def test_what_tarfile_writes(form: int, data: st.DataObject) -> None:
    wanted = data.draw(st.lists(members(form), max_size=5))
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form, encoding="utf-8", errors="surrogateescape") as tar:
        for info, text in wanted:
            tar.addfile(info, io.BytesIO(text))
    found = entries(out.getvalue())
    assert [facts(entry) for entry in found] == [facts_of_tarfile(info) for info, _ in wanted]
    assert [content(out.getvalue(), entry) for entry in found] == [text for _, text in wanted]


def facts(entry: TarEntry) -> tuple[object, ...]:
    attributes = (entry.kind, entry.mode, entry.uid, entry.gid, entry.mtime_ns, entry.size)
    return (entry.path.rstrip(b"/"), *attributes, entry.link, entry.rdev)


def facts_of_tarfile(info: tarfile.TarInfo) -> tuple[object, ...]:
    attributes = (TYPES.get(info.type, TarKind.FILE), info.mode & 0o7777, info.uid, info.gid)
    device = info.isdev() and not info.isfifo()
    return (
        info.name.encode("utf-8", "surrogateescape"),
        *attributes,
        int(info.mtime) * 10**9 + int((info.mtime - int(info.mtime)) * 10**9),
        info.size if info.isfile() else 0,
        info.linkname.encode("utf-8", "surrogateescape") if info.issym() or info.islnk() else b"",
        (info.devmajor, info.devminor) if device else (0, 0),
    )


def test_the_archive_that_python_tests_itself_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Old forms, Latin-1 names and sparse files, made by programs of their time."""
    monkeypatch.setattr("dsec_store.layer.tar.ID_MAX", 2**32 - 1)  # one file has this uid, which we refuse
    path = python_test_archive()
    data = path.read_bytes()
    with tarfile.open(path, encoding="utf-8", errors="surrogateescape") as tar:
        infos = tar.getmembers()
        texts = [tar.extractfile(info).read() if info.isfile() else b"" for info in infos]  # type: ignore[union-attr]
    found = entries(data)
    assert [facts(entry) for entry in found] == [facts_of_tarfile(info) for info in infos]
    assert [content(data, entry) for entry in found] == texts


def python_test_archive() -> Path:
    package = find_spec("test")
    for folder in package.submodule_search_locations or [] if package else []:
        for place in ("testtar.tar", "archivetestdata/testtar.tar"):
            if (Path(folder) / place).exists():
                return Path(folder) / place
    pytest.skip("needs testtar.tar of Python's own tests, which this installation lacks")
