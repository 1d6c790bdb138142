"""A wheel, unpacked into a prefix: the same bytes, modes and times whoever does it.

`installer` reads and verifies wheels; what is written is ours, because a layer must not tell when, where and with which
release of a tool it was made:

* modes are 0644, or 0755 for scripts and what the wheel marks executable; directories are 0755; all times `MTIME_NS`;
* scripts begin with `#!/usr/bin/env python3`: which Python that is, the base image says;
* RECORD is sorted by path; there is no INSTALLER, REQUESTED or direct_url.json;
* nothing is compiled. Bytecode differs between releases of one Python version and even between runs, and the digest of
  the layer with it. The cost: a first import compiles, in each sandbox anew.
"""

from __future__ import annotations

import base64
import configparser
import csv
import hashlib
import io
import os
import warnings
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from installer import install
from installer.destinations import WheelDestination
from installer.exceptions import InstallerError
from installer.records import Hash, RecordEntry
from installer.sources import WheelFile
from installer.utils import fix_shebang

from dsec_store.errors import Corrupt, Denied, Invalid

if TYPE_CHECKING:
    from installer.scripts import ScriptSection
    from installer.utils import Scheme

MTIME_NS: Final = 315_532_800 * 10**9
"""Of all files, in nanoseconds since 1970: the start of 1980, before which zip files (and so wheels) have no time."""

INTERPRETER: Final = "/usr/bin/env python3"

_PIECE: Final = 1 << 20
_DIRECTORY_MODE: Final = 0o755
_BAD_WHEEL: Final = (
    InstallerError,
    zipfile.BadZipFile,
    zlib.error,
    configparser.Error,
    ValueError,
    KeyError,
    AssertionError,
    EOFError,
    NotImplementedError,
)
"""What `installer` and the modules below it raise for a malformed or damaged wheel."""
_SCRIPT: Final = """\
#!{interpreter}
import sys
from {module} import {first}
if __name__ == "__main__":
    sys.exit({attribute}())
"""


class Prefix(WheelDestination):
    """The folder `top`, which becomes a prefix for Python `python` (as in "3.11"). Wheels are added one by one.

    A file that two wheels have is the later one's, as with pip; `notices` tells when their bytes differ.
    """

    def __init__(self, top: Path, python: str) -> None:
        self._top = top
        self.site_packages = f"lib/python{python}/site-packages"
        self._folders = {
            "purelib": self.site_packages,
            "platlib": self.site_packages,
            "scripts": "bin",
            "headers": f"include/python{python}",
            "data": "",
        }
        self._owners: dict[str, tuple[str, bytes]] = {}
        self._wheel = ""
        self.notices: list[str] = []

    def add(self, wheel: Path) -> None:
        """Unpack a wheel. Raises `Corrupt` for one that contradicts itself, `Invalid` for what has no place here."""
        self._wheel = wheel.name
        try:
            with WheelFile.open(wheel) as source, warnings.catch_warnings(record=True) as left_out:
                warnings.simplefilter("always")
                source.validate_record()
                install(source, self, {})
        except _BAD_WHEEL as error:
            raise Corrupt(f"{wheel.name} is damaged or no wheel: {error}") from error
        except OSError as error:
            raise Denied(f"{wheel.name} cannot be unpacked to {self._top}: {error.strerror or error}") from error
        if left_out:
            self.notices.append(f"{wheel.name}: compiled files in __pycache__ are left out")

    def finish(self) -> None:
        """Set all modes of directories and all times, when the last wheel is in."""
        for folder, _, files in os.walk(self._top, topdown=False):
            for name in files:
                os.utime(os.path.join(folder, name), ns=(MTIME_NS, MTIME_NS))
            os.chmod(folder, _DIRECTORY_MODE)
            os.utime(folder, ns=(MTIME_NS, MTIME_NS))

    # -- What `installer` calls ------------------------------------------------------------------------------------

    def write_script(self, name: str, module: str, attr: str, section: ScriptSection) -> RecordEntry:
        """A program for an entry point."""
        if not all(part.isidentifier() for part in f"{module}.{attr}".split(".")):
            raise Invalid(
                f"{self._wheel}: the entry point {name!r} names {module!r} and {attr!r}, which is no function"
            )
        text = _SCRIPT.format(
            interpreter=INTERPRETER, module=module, first=attr.split(".", maxsplit=1)[0], attribute=attr
        )
        return self._write("scripts", name, io.BytesIO(text.encode()), executable=True)

    def write_file(
        self, scheme: Scheme, path: str | os.PathLike[str], stream: BinaryIO, is_executable: bool
    ) -> RecordEntry:
        """A file of the wheel."""
        if scheme != "scripts":
            return self._write(scheme, os.fspath(path), stream, executable=is_executable)
        with fix_shebang(stream, INTERPRETER) as fixed:
            return self._write(scheme, os.fspath(path), fixed, executable=True)

    def finalize_installation(
        self, scheme: Scheme, record_file_path: str, records: Iterable[tuple[Scheme, RecordEntry]]
    ) -> None:
        """RECORD, with paths relative to site-packages."""
        rows = sorted(entry.to_row(self._from_site_packages(place)) for place, entry in records)
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        self._write(scheme, record_file_path, io.BytesIO(text.getvalue().encode()), executable=False)

    def _from_site_packages(self, scheme: str) -> str | None:
        folder = self._folders[scheme]
        return None if folder == self.site_packages else os.path.relpath(folder or ".", self.site_packages) + "/"

    def _write(self, scheme: str, path: str, stream: BinaryIO, *, executable: bool) -> RecordEntry:
        parts = path.split("/")
        if any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise Invalid(f"{self._wheel}: the path {path!r} leaves its place")
        place = os.path.join(self._folders[scheme], path)
        target = self._top / place
        target.parent.mkdir(parents=True, exist_ok=True)
        hasher, size = hashlib.sha256(), 0
        target.unlink(missing_ok=True)
        with target.open("xb") as out:
            while piece := stream.read(_PIECE):
                hasher.update(piece)
                size += len(piece)
                out.write(piece)
        target.chmod(0o755 if executable else 0o644)
        self._own(place, hasher.digest())
        digest = base64.urlsafe_b64encode(hasher.digest()).rstrip(b"=").decode()
        return RecordEntry(path, Hash("sha256", digest), size)

    def _own(self, place: str, digest: bytes) -> None:
        former = self._owners.get(place)
        if former and former[1] != digest:
            self.notices.append(f"{place} is in {former[0]} and {self._wheel}, and differs; the latter's is taken")
        self._owners[place] = self._wheel, digest
        if place.startswith(self.site_packages) and place.endswith(".pth"):
            self.notices.append(f"{place} has no effect: Python reads .pth files only in its own site-packages")
