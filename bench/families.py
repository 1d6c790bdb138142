"""Families of images: versions that follow each other, made of real packages, as a user's builds would make them.

A version is a list of layers, a layer is a tar. Layers are made once and kept in `.demo/families`, or in the folder
that DSEC_BENCH_FAMILIES names (about 6 GB). What a version holds is pinned by release, or by day where a package
manager resolves; only the Debian base is whatever the mirror has on the day when it is made.

Times are set, not taken from the clock: every file of one installation has that installation's time, as pip leaves
it. pip compiles each module, and the `.pyc` carries the time of its source in the header: so an image that is built
anew has other bytes in *every* `.pyc`, whatever changed. The Python family is like that. Builders who want equal images
from equal input have the `.pyc` carry the digest of its source instead (PEP 552); the yardstick is like that.
"""

from __future__ import annotations

import compileall
import os
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from py_compile import PycInvalidationMode
from tempfile import TemporaryDirectory
from typing import Final

from bench.measure import Failed, run
from scripts.inputs import DEMO

ENVIRONMENT: Final = "DSEC_BENCH_FAMILIES"
NEEDED: Final = ("mmdebstrap", "npm")

PYTHON: Final = (3, 11)
"""The Python of the Debian base, which the installing one must be as well: it compiles for it."""

SITE: Final = "usr/local/lib/python3.11/dist-packages"

DAY: Final = 86_400
EPOCH: Final = 1_735_689_600
"""2025-01-01: seconds of Unix time from which an installation's day counts."""


@dataclass(frozen=True, slots=True)
class Family:
    """Versions from the oldest to the newest; each is the layers of one image, from the bottom."""

    name: str
    title: str
    versions: tuple[tuple[Path, ...], ...]


Pins = tuple[str, ...]
Installations = tuple[tuple[int, Pins], ...]
"""Day and packages of each pip run that made a layer; a later one replaces what it brings again."""

_SMALL: Final = ("python-dateutil==2.9.0.post0", "pytz==2025.1", "tzdata==2025.1", "six==1.17.0")

_YARDSTICK: Final = (
    "numpy==2.2.4",
    "scipy==1.15.2",
    "scikit-learn==1.6.1",
    "matplotlib==3.10.1",
    "pyarrow==19.0.0",
    "pillow==11.1.0",
    "statsmodels==0.14.4",
    *_SMALL,
)
YARDSTICK: Final[dict[str, Installations]] = {
    "yardstick-1": ((0, _YARDSTICK), (0, ("pandas==2.2.2",))),
    "yardstick-2": ((0, _YARDSTICK), (30, ("pandas==2.2.3",))),
}

_SERVICE: Final = ("numpy", "scipy", "pandas", "requests", "sqlalchemy", "django", "pillow", "cryptography", "urllib3")
_RELEASES: Final = (
    ("2.2.2", "1.15.0", "2.2.2", "2.32.2", "2.0.36", "5.1.4", "11.0.0", "44.0.0", "2.2.3"),
    ("2.2.3", "1.15.1", "2.2.3", "2.32.3", "2.0.37", "5.1.5", "11.1.0", "44.0.1", "2.3.0"),
    ("2.2.4", "1.15.2", "2.2.3", "2.32.3", "2.0.38", "5.1.7", "11.1.0", "44.0.2", "2.3.0"),
    ("2.2.5", "1.15.2", "2.2.3", "2.32.3", "2.0.40", "5.2", "11.2.1", "44.0.3", "2.4.0"),
    ("2.2.6", "1.15.3", "2.3.0", "2.32.4", "2.0.41", "5.2.2", "11.2.1", "45.0.3", "2.4.0"),
)

_NODE_PACKAGES: Final = (
    *("next@15", "typescript@5", "webpack@5", "express@5", "react@19", "react-dom@19"),
    *("eslint@9", "jest@29", "vite@6", "date-fns@4"),
)
NODE: Final[dict[str, tuple[str, Pins]]] = {
    f"node-{number + 1}": (day, _NODE_PACKAGES) for number, day in enumerate(("2025-02-01", "2025-03-10", "2025-04-15"))
}
"""The day on which npm resolves, and the packages."""

WORKSPACES: Final = (
    *("4.0", "4.0.4", "4.0.8", "4.1", "4.1.4", "4.1.8", "4.1.12", "4.2", "4.2.4", "4.2.8"),
    *("4.2.12", "4.2.16", "5.0", "5.0.4", "5.0.8", "5.1", "5.1.4", "5.1.8", "5.2", "5.2.4"),
)
"""Releases of Django, as in its wheels: twenty states of one source tree within three and a half years."""


def folder() -> Path:
    """Where layers are kept."""
    return Path(os.environ.get(ENVIRONMENT) or DEMO / "families")


def families() -> dict[str, Family]:
    """All families; makes what is lacking, which takes about ten minutes and needs the package mirrors.

    Raises `Failed` where a program or the right Python lacks.
    """
    home = folder()
    home.mkdir(parents=True, exist_ok=True)
    plain = _layer(home, "debian-python", lambda tar: _debian(tar, ("python3",), updates=True))
    old = _layer(home, "debian-release", lambda tar: _debian(tar, ("python3", "git"), updates=False))
    new = _layer(home, "debian-updated", lambda tar: _debian(tar, ("python3", "git"), updates=True))
    node = _layer(home, "debian-node", lambda tar: _debian(tar, ("nodejs",), updates=True))
    made = (
        Family(
            "yardstick",
            "Debian with Python and scientific packages, 0.77 GiB, and the same with another release of pandas",
            tuple((plain, _layer(home, name, _pip(runs, by_digest=True))) for name, runs in YARDSTICK.items()),
        ),
        Family(
            "python",
            "five builds of a service on Debian with Python; each installs its packages anew, "
            "the last two on a base with Debian's updates",
            tuple(
                (old if number < 3 else new, _layer(home, f"python-{number + 1}", _pip(runs)))
                for number, runs in enumerate(_services())
            ),
        ),
        Family(
            "node",
            "three builds of a web project on Debian with Node.js, two and a half months apart",
            tuple((node, _layer(home, name, _npm(day, pins))) for name, (day, pins) in NODE.items()),
        ),
        Family(
            "workspaces",
            "twenty states of Django's source tree",
            tuple((_layer(home, f"django-{release}", _wheel(f"django=={release}")),) for release in WORKSPACES),
        ),
    )
    return {family.name: family for family in made}


def _services() -> Iterator[Installations]:
    for number, releases in enumerate(_RELEASES):
        pins = tuple(f"{name}=={release}" for name, release in zip(_SERVICE, releases, strict=True))
        yield ((30 * number, (*pins, *_SMALL)),)


def _layer(home: Path, name: str, make: Callable[[Path], None]) -> Path:
    tar = home / f"{name}.tar"
    if not tar.exists():
        _need()
        print(f"families: making {name}", file=sys.stderr, flush=True)
        part = tar.with_suffix(".part")
        make(part)
        part.rename(tar)
    return tar


def _need() -> None:
    if missing := [program for program in NEEDED if shutil.which(program) is None]:
        raise Failed(
            f"families of images are made with {' and '.join(missing)}, which are not installed (apt has them)"
        )
    if sys.version_info[:2] != PYTHON:
        raise Failed("families of images need Python 3.11, that of Debian 12: run the benchmark with it")


def _debian(tar: Path, packages: Iterable[str], *, updates: bool) -> None:
    """Debian's smallest system; without `updates`, only what the last point release has."""
    hooks = [] if updates else ["--setup-hook=sed -i '/-security\\|-updates/d' \"$1\"/etc/apt/sources.list"]
    command = ["mmdebstrap", "--quiet", "--format=tar", "--variant=minbase", f"--include={','.join(packages)}", *hooks]
    run([*command, "bookworm", str(tar)], {**os.environ, "SOURCE_DATE_EPOCH": str(EPOCH)})


def _pip(runs: Installations, *, by_digest: bool = False) -> Callable[[Path], None]:
    def make(tar: Path) -> None:
        with _tree() as tree:
            for number, (day, pins) in enumerate(runs):
                fresh = tree.parent / f"run-{number}"
                _install(fresh, pins)
                _touch(fresh, day)
                _compile(fresh, by_digest=by_digest)
                _touch(fresh, day)
                shutil.copytree(fresh, tree / SITE, dirs_exist_ok=True)
            for above in (tree / SITE).relative_to(tree).parents:
                os.utime(tree / above, (EPOCH, EPOCH))
            _pack(tree, tar)

    return make


def _install(target: Path, pins: Sequence[str]) -> None:
    options = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-compile", "--only-binary=:all:")
    run([sys.executable, "-m", "pip", "install", *options, "--target", str(target), *pins])
    shutil.rmtree(target / "bin", ignore_errors=True)  # scripts that name this Python, not the image's


def _touch(tree: Path, day: int) -> None:
    seconds = EPOCH + day * DAY
    for path in (tree, *tree.rglob("*")):
        os.utime(path, (seconds, seconds), follow_symlinks=False)


def _compile(tree: Path, *, by_digest: bool) -> None:
    """The code has its path in the image, the header the time of the source or its digest."""
    mode = PycInvalidationMode.CHECKED_HASH if by_digest else PycInvalidationMode.TIMESTAMP
    compileall.compile_dir(tree, quiet=2, workers=0, stripdir=str(tree), prependdir=f"/{SITE}", invalidation_mode=mode)


def _npm(day: str, pins: Sequence[str]) -> Callable[[Path], None]:
    def make(tar: Path) -> None:
        with _tree() as tree:
            project = tree / "srv/app"
            project.mkdir(parents=True)
            options = ("--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error", f"--before={day}")
            run(["npm", "install", "--prefix", str(project), *options, *pins])
            _pack(tree, tar)

    return make


def _wheel(pin: str) -> Callable[[Path], None]:
    def make(tar: Path) -> None:
        with _tree() as tree:
            wheels = tree.parent / "wheels"
            run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels), pin])
            for wheel in wheels.glob("*.whl"):
                with zipfile.ZipFile(wheel) as archive:
                    archive.extractall(tree / "workspace")
            _pack(tree, tar)

    return make


@contextmanager
def _tree() -> Iterator[Path]:
    """An empty folder, beside which there is room for more."""
    with TemporaryDirectory(prefix="family-") as home:
        tree = Path(home) / "tree"
        tree.mkdir()
        yield tree


def _pack(tree: Path, tar: Path) -> None:
    """In path order, as root's."""
    with tarfile.open(tar, "w", format=tarfile.GNU_FORMAT) as archive:
        for path in sorted(tree.rglob("*")):
            archive.add(path, str(path.relative_to(tree)), recursive=False, filter=_as_root)


def _as_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    return entry
