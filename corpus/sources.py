"""Where the collections of tars come from: packages of Debian and their sources, fetched and unpacked, never installed.

Lists of packages are our own, below `.demo/corpus/`, made from the archive that this machine uses: so sources can be
had where only binary packages are configured, nothing of the machine changes, and no root is needed.
"""

from __future__ import annotations

import binascii
import bz2
import lzma
import shutil
import subprocess
import sysconfig
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from scripts.inputs import DEMO

PLACE: Final = DEMO / "corpus"

_GO: Final = "golang-1.19-src"
_PYTHON: Final = "libpython3.11-testsuite"
_ARCHIVE: Final = "libarchive"
_KEYS: Final = "/usr/share/keyrings/debian-archive-keyring.gpg"
_FORMAT: Final = "$(ORIGIN) $(COMPONENT) $(REPO_URI) $(CODENAME)"

_UU: Final = ".uu"
_UNPACKERS: Final = {"bz2": bz2.decompress, "tbz": bz2.decompress, "xz": lzma.decompress}
_GZIP_UNPACKS: Final = ("Z",)
_KEPT: Final = ("tar", "ustar", "gz", "tgz", "zst")
"""Forms that our own reader unpacks."""


class Failed(Exception):
    """A collection cannot be had."""


def collections() -> dict[str, list[Path]]:
    """Every collection's archives, by name; made once and kept."""
    found = {"CPython": _python(), "Go archive/tar": _go(), "libarchive": _libarchive()}
    for name, archives in found.items():
        if not archives:
            raise Failed(f"{name}: no archives were found; rm -rf {PLACE} and run again")
    return found


def _python() -> list[Path]:
    folder = Path(sysconfig.get_path("stdlib")) / "test"
    if not list(folder.rglob("testtar.tar")):  # Debian's Python has its tests in another package
        folder = _package(_PYTHON)
    return sorted(folder.rglob("*.tar"))


def _go() -> list[Path]:
    archives = sorted(_package(_GO).glob("usr/share/go-*/src/archive/tar/testdata/*.tar*"))
    return _plain_forms(archives, PLACE / "go")


def _libarchive() -> list[Path]:
    folder = _source(_ARCHIVE)
    encoded = [path for path in sorted(folder.rglob(f"*{_UU}")) if _is_tar(path.name.removesuffix(_UU))]
    decoded = PLACE / "libarchive"
    decoded.mkdir(parents=True, exist_ok=True)
    for path in encoded:
        place = decoded / path.name.removesuffix(_UU)
        if not place.exists():
            place.write_bytes(_uudecoded(path.read_bytes()))
    return _plain_forms(sorted(decoded.iterdir()), PLACE / "libarchive plain")


def _is_tar(name: str) -> bool:
    known = (*_KEPT, *_UNPACKERS, *_GZIP_UNPACKS)
    return name.rpartition(".")[2] in known and any(part in name for part in (".tar", ".tgz", ".tbz", "ustar"))


def _uudecoded(text: bytes) -> bytes:
    lines = text.split(b"\n")
    start = next(number for number, line in enumerate(lines) if line.startswith(b"begin "))
    out = bytearray()
    for line in lines[start + 1 :]:
        if line == b"end":
            break
        # The last line may carry more digits than its length asks for.
        out += binascii.a2b_uu(line[: 1 + (line[0] - 32 & 63) * 4 // 3 + 3] if line else b" ")
    return bytes(out)


def _plain_forms(archives: list[Path], place: Path) -> list[Path]:
    """The same, with those unpacked whose compression no layer has."""
    place.mkdir(parents=True, exist_ok=True)
    return [_plain_form(path, place) for path in archives]


def _plain_form(path: Path, place: Path) -> Path:
    form = path.name.rpartition(".")[2]
    if form not in _UNPACKERS and form not in _GZIP_UNPACKS:
        return path
    plain = place / f"{path.name} unpacked.tar"
    if not plain.exists():
        if form in _UNPACKERS:
            data = _UNPACKERS[form](path.read_bytes())
        else:
            data = subprocess.run(["gzip", "-dc"], input=path.read_bytes(), check=True, capture_output=True).stdout
        plain.write_bytes(data)
    return plain


# -- packages ----------------------------------------------------------------------------------------------------------


def _package(name: str) -> Path:
    """The files of a binary package."""
    place = PLACE / name
    if not place.exists():
        with _fetched(name, "download") as folder:
            (package,) = folder.glob("*.deb")
            subprocess.run(["dpkg-deb", "-x", str(package), str(folder / "files")], check=True)
            (folder / "files").rename(place)
    return place


def _source(name: str) -> Path:
    """The files of a source package, as its authors released them."""
    place = PLACE / f"{name} source"
    if not place.exists():
        with _fetched(name, "source", "--download-only") as folder:
            (release,) = folder.glob("*.orig.tar.*[!c]")
            with tarfile.open(release) as archive:
                archive.extractall(folder / "files", filter="data")
            (folder / "files").rename(place)
    return place


class _fetched:  # noqa: N801  # a context manager, used like a function
    """A folder with what `apt-get COMMAND ... NAME` fetches; gone afterwards."""

    def __init__(self, name: str, *command: str) -> None:
        self._folder = PLACE / f"{name}.part"
        self._name = name
        self._command = command

    def __enter__(self) -> Path:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        options = _lists()
        _run(["apt-get", *options, *self._command, self._name], self._folder)
        return self._folder

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _lists() -> list[str]:
    """apt's options for our own lists of packages; the lists are fetched once."""
    lists, parts = (PLACE / "lists").absolute(), (PLACE / "sources").absolute()
    options = [f"Dir::Etc::SourceList={parts}/none", f"Dir::Etc::SourceParts={parts}", f"Dir::State::Lists={lists}"]
    arguments = [word for option in options for word in ("-o", option)]
    if not (parts / "corpus.list").exists():
        (lists / "partial").mkdir(parents=True, exist_ok=True)
        parts.mkdir(parents=True, exist_ok=True)
        (parts / "none").touch()
        (parts / "part.list").write_text("".join(_lines()), encoding="utf-8")
        _run(["apt-get", *arguments, "update", "--quiet"], PLACE)
        (parts / "part.list").rename(parts / "corpus.list")
    return arguments


def _lines() -> Iterator[str]:
    """The main archive of this machine, packages and sources."""
    command = ["apt-get", "indextargets", "--format", _FORMAT, "Created-By: Packages"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True)
    for line in dict.fromkeys(listed.stdout.splitlines()):
        words = line.split()
        if words[:2] == ["Debian", "main"] and "-" not in words[3]:
            for kind in ("deb", "deb-src"):
                yield f"{kind} [signed-by={_KEYS}] {words[2]} {words[3]} main\n"
            return
    raise Failed("apt knows no archive of Debian here; the collections of tars are Debian's packages")


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason was given"])[-1]
        raise Failed(f"{' '.join(command[-2:])}: {last}")
