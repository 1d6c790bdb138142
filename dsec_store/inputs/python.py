"""Python packages as a toolkit: what a requirements file asks for, as a folder that is to be mounted at a prefix.

    with open_python(parse_python("pip:requirements.txt")) as tools:
        ...  # build tools.folder for a prefix, with tools.env(prefix) and tools.path(prefix)

pip resolves and downloads, as a process, so its configuration, credentials and hash checking are the user's own;
`wheels.py` unpacks. Wheels only: building a package would run its code here, and give other bytes each time.

The same wheels give the same folder. Which wheels it are, pip decides: pin and hash them in the requirements file for
the same layer tomorrow.

pip decides conditions on requirements (`; python_version < "3.12"`) by the interpreter that runs it, whatever it is
asked to download for. So it is run by an interpreter of the version that is wanted, on a machine of that kind.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from dsec_store.errors import Denied, Invalid, NotFound
from dsec_store.inputs.wheels import Prefix

SCHEME: Final = "pip:"

GLIBC_DEFAULT: Final = 28
"""Minor version of glibc 2 that packages may need by default: Debian 10, Ubuntu 20.04 and RHEL 8 have it."""

MESSAGE_LINES: Final = 8
"""Lines of pip's that an error shows."""

_GLIBC_FIRST: Final = {"x86_64": 5, "i686": 5}
"""Minor version of the oldest manylinux of a machine type; of all others, `_GLIBC_OTHERS`."""
_GLIBC_OTHERS: Final = 17
_MUSL_FIRST: Final = 1
_OLD_NAMES: Final = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
_PLATFORM: Final = re.compile(
    r"(manylinux_2_|musllinux_1_)([0-9]{1,3})_(\w+)|(manylinux2014|manylinux2010|linux)_(\w+)"
)
_VERSION: Final = re.compile(r"3\.[0-9]{1,2}")
_IMPLEMENTATION: Final = "cp"
_BETWEEN: Final = re.compile(r",(?=\s*[A-Za-z0-9])(?![^\[]*\])")
"""A comma before the next requirement: not one before an operator (`a>1,<2`), nor one between extras (`a[x,y]`)."""
_OWN_VERSION: Final = f"{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True, slots=True)
class PythonSource:
    """Packages: requirements as pip's command line takes them, or a file of them; for which Python and platform.

    `platforms` are wheel tags, the most wanted first.
    """

    requirements: tuple[str, ...]
    file: Path | None
    python: str
    platforms: tuple[str, ...]

    def for_python(self, python: str | None, platform: str | None) -> PythonSource:
        """The same packages for another Python and platform, where these are given. Raises `Invalid`.

        `python` is as in "3.11" [that of this program], `platform` as in "manylinux_2_28_x86_64" [that for this
        machine].
        """
        wanted = python or self.python
        if not _VERSION.fullmatch(wanted):
            raise Invalid(f"not a version of Python: {wanted!r}; write it as in 3.11")
        return replace(self, python=wanted, platforms=platform_tags(platform) if platform else self.platforms)


def parse_python(text: str, *, python: str | None = None, platform: str | None = None) -> PythonSource:
    """`pip:FILE`, or `pip:NAME==1.2,OTHER>=3,<4`: what exists as a file or has a slash is a file.

    Raises `Invalid` for a malformed one, `NotFound` when there is no such file. The others: `PythonSource.for_python`.
    """
    return _parse(text).for_python(python, platform)


def _parse(text: str) -> PythonSource:
    rest = text.removeprefix(SCHEME)
    if rest == text or not rest.strip():
        raise Invalid(f"not a list of Python packages: {text!r}; write pip:FILE or pip:NAME==VERSION,...")
    tags = platform_tags(f"manylinux_2_{GLIBC_DEFAULT}_{os.uname().machine}")
    file = Path(rest)
    if file.is_file():
        return PythonSource((), file, _OWN_VERSION, tags)
    if "/" in rest and "://" not in rest:
        raise NotFound(f"no requirements file {rest!r}")
    requirements = tuple(part.strip() for part in _BETWEEN.split(rest))
    for requirement in requirements:
        if not requirement[:1].isalnum() or requirement.endswith(","):
            raise Invalid(f"not a requirement: {requirement!r}; options belong into a requirements file")
    return PythonSource(requirements, None, _OWN_VERSION, tags)


def platform_tags(platform: str) -> tuple[str, ...]:
    """The wheel tags that fit a platform: its own and those of older libraries. `Invalid` for an unknown one."""
    match = _PLATFORM.fullmatch(platform)
    if not match:
        raise Invalid(f"unknown platform {platform!r}; write it as in manylinux_2_28_x86_64 or musllinux_1_2_x86_64")
    family, minor, machine = match[1] or match[4], match[2], match[3] or match[5]
    here = os.uname().machine
    if machine != here:
        raise Invalid(f"platform {platform!r}: pip decides conditions for the machine it runs on; build on {machine}")
    if family == "musllinux_1_":
        return tuple(f"{family}{number}_{machine}" for number in range(int(minor), _MUSL_FIRST - 1, -1))
    if family == "linux":  # wheels that were built on this machine, and those for everybody
        return (platform, *_manylinux(GLIBC_DEFAULT, machine))
    newest = int(minor) if minor else next(number for number, name in _OLD_NAMES.items() if name == family)
    return _manylinux(newest, machine)


def _manylinux(newest: int, machine: str) -> tuple[str, ...]:
    tags = []
    for number in range(newest, _GLIBC_FIRST.get(machine, _GLIBC_OTHERS) - 1, -1):
        tags.append(f"manylinux_2_{number}_{machine}")
        if number in _OLD_NAMES:
            tags.append(f"{_OLD_NAMES[number]}_{machine}")
    return tuple(tags)


@dataclass(frozen=True, slots=True)
class PythonTools:
    """Packages in a folder, which is gone after the `with` statement, and is the prefix to be.

    It has `bin` and `lib/pythonX.Y/site-packages`. `packages` are "name version", `notices` are for people.
    """

    folder: Path
    python: str
    packages: tuple[str, ...]
    notices: tuple[str, ...]

    def env(self, prefix: str) -> tuple[tuple[str, str], ...]:
        """The variables that make Python find the packages at `prefix`."""
        return (("PYTHONPATH", f"{prefix.rstrip('/')}/lib/python{self.python}/site-packages"),)

    def path(self, prefix: str) -> tuple[str, ...]:
        """The folders that belong in front of PATH."""
        return (f"{prefix.rstrip('/')}/bin",) if (self.folder / "bin").is_dir() else ()


@contextmanager
def open_python(source: PythonSource) -> Iterator[PythonTools]:
    """Download and unpack, into a temporary folder (TMPDIR).

    Raises `Invalid` when pip finds no fitting wheels or does not reach its index, with what it says; `Corrupt` for a
    damaged wheel; `Denied` without pip or room.
    """
    try:
        folder = tempfile.TemporaryDirectory(prefix="dsec-pip-")
    except OSError as error:
        raise Denied(f"no temporary folder can be made: {error.strerror or error}; set TMPDIR") from None
    with folder as name:
        wheels, top = Path(name, "wheels"), Path(name, "prefix")
        wheels.mkdir()
        top.mkdir()
        _download(source, wheels)
        prefix = Prefix(top, source.python)
        packages = []
        for wheel in sorted(wheels.iterdir()):
            prefix.add(wheel)
            packages.append(" ".join(wheel.name.split("-")[:2]))
            wheel.unlink()
        prefix.finish()
        yield PythonTools(top, source.python, tuple(packages), tuple(prefix.notices))


def _download(source: PythonSource, into: Path) -> None:
    """Fill a folder with the wheels of `source` and all that they require."""
    command = [
        *(_interpreter(source.python), "-I", "-m", "pip", "download", "--no-input", "--disable-pip-version-check"),
        *("--progress-bar", "off", "--only-binary", ":all:", "--dest", str(into)),
        *("--implementation", _IMPLEMENTATION, "--python-version", source.python),
    ]
    for tag in source.platforms:
        command += ["--platform", tag]
    command += ["--requirement", str(source.file)] if source.file else ["--", *source.requirements]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if result.returncode:
        raise Invalid(f"pip does not get the packages: {_message(result.stderr)}")
    others = sorted(file.name for file in into.iterdir() if file.suffix != ".whl")
    if others:
        raise Invalid(f"no wheels: {', '.join(others)}; build them with pip wheel, and add --find-links to the file")


def _interpreter(python: str) -> str:
    """An interpreter of this version, with pip."""
    found = sys.executable if python == _OWN_VERSION else shutil.which(f"python{python}")
    if not found:
        problem = f"pip must be run by Python {python}, and there is no python{python} in PATH"
        raise Invalid(f"{problem}; install it, or build for {_OWN_VERSION}")
    command = [found, "-I", "-c", "import pip, sys; print(*sys.version_info[:2], sep='.')"]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if result.returncode or result.stdout.strip().decode() != python:
        raise Denied(f"{found} is not Python {python} with pip; run {found} -m ensurepip, or install its pip")
    return found


def _message(text: bytes) -> str:
    """What pip says is wrong, on one line."""
    lines = [line.strip() for line in text.decode(errors="replace").splitlines() if line.strip()]
    told = [line for line in lines if line.startswith(("ERROR:", "WARNING:"))] or lines
    return "; ".join(told[-MESSAGE_LINES:]) or "it ended without a message"
