"""Same input, same digests: whatever the machine, the order of things, the environment and the load are like.

`make corpus` does this twenty times with a real image; here it is a small one, a few times.
"""

import os
import random
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from dsec_registry.convert import convert
from dsec_registry.manifest import host_platform
from dsec_registry.sources import open_source, parse_source
from dsec_store.backends.folder import FolderBlobs
from dsec_store.objects import Objects
from tests import tarmaker as tar
from tests.busy import busy
from tests.flows.images import make_folder
from tests.flows.world import World
from tests.ocimaker import Layer, write_layout

pytestmark = pytest.mark.flow

TMPFS: Final = Path("/dev/shm")


@dataclass(frozen=True)
class Surroundings:
    """What a result must not depend on."""

    title: str
    environment: dict[str, str] = field(default_factory=dict)
    umask: int = 0o022
    processors: int = 0
    load: int = 0


SURROUNDINGS: Final = (
    Surroundings("the usual", {}),
    Surroundings("another place on earth", {"TZ": "Pacific/Chatham", "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "1"}),
    Surroundings("no locale, a strict umask", {"TZ": "UTC+11", "LC_ALL": "C", "PYTHONHASHSEED": "2"}, umask=0o077),
    Surroundings("one processor", {"PYTHONHASHSEED": "3", "LC_ALL": "POSIX"}, umask=0, processors=1),
    Surroundings("load", {"PYTHONHASHSEED": "4", "PYTHONUTF8": "0", "LANGUAGE": "tr"}, load=4),
)


def digest_in(world: World, surroundings: Surroundings, arguments: Sequence[str], name: str) -> tuple[str, list[str]]:
    """The image's digest, and the keys of all objects of the new store."""
    where = world.with_store(f"store {name}").with_(**surroundings.environment)
    available = sorted(os.sched_getaffinity(0))

    def prepare() -> None:
        os.umask(surroundings.umask)
        if surroundings.processors:
            os.sched_setaffinity(0, available[: surroundings.processors])

    with busy(surroundings.load):
        done = where.run("dsec-image", *arguments, "--json", preexec_fn=prepare)
    assert (done.code, done.errors) == (0, [])
    return str(done.json["image"]), keys_of(Objects(FolderBlobs(where.store)))


def keys_of(objects: Objects) -> list[str]:
    return sorted(blob.key for blob in objects.blobs.list("") if not blob.key.startswith("leases/"))


def layers() -> list[Layer]:
    """Enough chunks for several batches and packs on every thread, names of any bytes, and all that times can be."""
    noise = random.Random(1)
    big = [tar.file(b"data/%d" % number, noise.randbytes(3 << 20), mtime=number) for number in range(8)]
    odd = [
        tar.file(b"odd/" + bytes([255, 254, number]), b"%d" % number, mtime=-number, mode=0o4755, uid=number)
        for number in range(1, 40)
    ]
    pax = tar.pax({b"mtime": b"-1.000000001", b"SCHILY.xattr.user.b": b"2", b"SCHILY.xattr.user.a": b"1"})
    upper = [tar.file(b"odd/.wh.\xff\xfe\x05"), tar.file(b"data/.wh.3"), pax + tar.file("ıİ/ß".encode(), b"x")]
    return [Layer(tar.archive(*big)), Layer(tar.archive(*odd), "zstd"), Layer(tar.archive(*upper))]


def test_a_conversion_depends_on_its_image_alone(world: World, tmp_path: Path) -> None:
    layout = write_layout(tmp_path / "layout", layers()).path
    arguments = ("convert", f"oci:{layout}", "image")
    found = [digest_in(world, surroundings, arguments, str(number)) for number, surroundings in enumerate(SURROUNDINGS)]
    assert all(each == found[0] for each in found), [each[0] for each in found]


def test_a_conversion_does_not_depend_on_the_number_of_threads(tmp_path: Path) -> None:
    layout = write_layout(tmp_path / "layout", layers()).path
    found = set()
    for workers in (1, 2, 3, 16):
        objects = Objects(FolderBlobs(tmp_path / f"store {workers}", create=True))
        with open_source(parse_source(f"oci:{layout}")) as source:
            image = convert(objects, source, None, host_platform(), "image", workers=workers).image
        found.add((image, tuple(keys_of(objects))))
    assert len(found) == 1


def test_a_folder_gives_the_same_image_in_whatever_order_it_was_filled(world: World, tmp_path: Path) -> None:
    """A directory's order is the file system's: another one on tmpfs, and after other files came and went."""
    files = {f"{place}/{name}": f"{name}\n".encode() * 50 for place in "abc" for name in map(str, range(60))}
    names = list(files)
    folders = [make_folder(tmp_path / "first", files)]
    random.Random(7).shuffle(names)
    (tmp_path / "second/a").mkdir(parents=True)
    passing = [tmp_path / f"second/a/passing{number}" for number in range(200)]
    for path in passing:
        path.touch()
    folders.append(make_folder(tmp_path / "second", {name: files[name] for name in names}))
    for path in passing:
        path.unlink()
    os.utime(tmp_path / "second/a", (10**9, 10**9))
    with on_tmpfs(world) as other:
        if other:
            folders.append(make_folder(other / "third", {name: files[name] for name in reversed(names)}))
        found = set()
        for number, (folder, surroundings) in enumerate(zip(folders, SURROUNDINGS[1:], strict=False)):
            arguments = ("build", str(folder), "work", "--kind", "workspace")
            image, keys = digest_in(world, surroundings, arguments, str(number))
            found.add((image, tuple(keys)))
    assert len(found) == 1


@contextmanager
def on_tmpfs(world: World) -> Iterator[Path | None]:
    """A folder on a file system that keeps its directories in another order; None where there is none."""
    if not os.access(TMPFS, os.W_OK):
        yield None
        return
    folder = TMPFS / world.folder.name
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
