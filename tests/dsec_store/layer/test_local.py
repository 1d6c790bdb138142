"""Images of one layer from folders and tars: the same input gives the same digests, whoever builds them where."""

import gzip
import locale
import os
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec_store.backends.memory import MemoryBlobs
from dsec_store.chunks import ChunkSource, NoCache
from dsec_store.descriptor import RunConfig
from dsec_store.errors import Corrupt, Denied, Invalid, NotFound, StoreError
from dsec_store.layer import folder
from dsec_store.layer.erofs import read_image
from dsec_store.layer.local import Built, LocalBuild, build_local
from dsec_store.layer.tree import Directory, Inode, inode_of
from dsec_store.objects import Objects
from dsec_store.references import Origin, Reference
from dsec_store.storedblob import open_blob
from tests import tarmaker as tar

WORKSPACE = LocalBuild("workspace", prefix="/testbed")


@pytest.fixture
def objects() -> Objects:
    return Objects(MemoryBlobs())


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with a bit of everything."""
    top = tmp_path / "source"
    (top / "pkg" / "sub").mkdir(parents=True)
    (top / "pkg" / "mod.py").write_text("print()\n")
    (top / "pkg" / "sub" / "big").write_bytes(bytes(range(256)) * 2000)
    os.link(top / "pkg" / "mod.py", top / "zz")
    (top / "link").symlink_to("pkg")
    (top / "ÄÖ").touch()
    for path in (*top.rglob("*"), top):
        os.utime(path, ns=(0, 10**18 + 1), follow_symlinks=False)
    return top


def built(objects: Objects, source: Path, build: LocalBuild = WORKSPACE) -> Built:
    return build_local(objects, source, "demo", build)


def tree(objects: Objects, result: Built) -> Directory:
    return read_image(objects.metadata(result.layer.descriptor.metadata)).root


def at(root: Directory, path: bytes) -> Inode:
    node = root.find(path)
    assert node is not None
    return inode_of(node)


def tar_file(tmp_path: Path, *entries: bytes) -> Path:
    path = tmp_path / "source.tar"
    path.write_bytes(tar.archive(*entries))
    return path


# -- what is made ------------------------------------------------------------------------------------------------------


def test_a_folder_becomes_an_image_of_one_layer(objects: Objects, source: Path) -> None:
    settings = LocalBuild("toolkit", "/opt/tool", env=(("A", "1"),), path=("/opt/tool/bin",))
    result = built(objects, source, settings)
    reference = objects.references.read("demo")
    image = objects.image(reference.image)
    assert reference == Reference(result.image, Origin(source_bytes=len("print()\n") + 512000))
    assert (image.kind, image.layers, image.env, image.path) == (
        "toolkit",
        (result.layer.digest,),
        settings.env,
        settings.path,
    )
    assert (image.lowers, image.config) == ((), RunConfig())
    assert result.layer.descriptor.diff_id is None
    root = tree(objects, result)
    mod = at(root, b"opt/tool/pkg/mod.py")
    assert mod is at(root, b"opt/tool/zz")
    (stored,) = result.layer.descriptor.blobs
    blob = open_blob(objects, stored, ChunkSource(objects.blobs, NoCache()))
    assert mod.address is not None
    assert blob.read(mod.address.offset, mod.size) == b"print()\n"
    assert result.layer.descriptor.inodes == 1 + sum(1 for _ in root.walk()) - 1, "two names are one inode"


def test_parents_of_the_prefix_are_the_same_everywhere(objects: Objects, source: Path) -> None:
    source.chmod(0o700)
    root = tree(objects, built(objects, source, LocalBuild("workspace", "/a/b")))
    for path in (b"", b"a"):
        inode = at(root, path)
        assert (inode.mode, inode.uid, inode.gid, inode.mtime_ns) == (stat.S_IFDIR | 0o755, 0, 0, 0)
    assert at(root, b"a/b").mode == stat.S_IFDIR | 0o700


@pytest.mark.parametrize(("kind", "keeps"), [("base", True), ("workspace", False), ("toolkit", False)])
def test_only_a_base_has_a_root_of_its_own(kind: str, keeps: bool, objects: Objects, source: Path) -> None:
    source.chmod(0o700)
    result = built(objects, source, LocalBuild(kind))
    assert result.layer.descriptor.has_root == keeps
    assert at(tree(objects, result), b"").mode == stat.S_IFDIR | (0o700 if keeps else 0o755)


def test_times_are_kept_or_clamped(objects: Objects, source: Path) -> None:
    os.utime(source / "zz", ns=(0, 5))
    assert at(tree(objects, built(objects, source)), b"testbed/link").mtime_ns == 10**18 + 1
    clamped = tree(objects, built(objects, source, LocalBuild("workspace", "/testbed", clamp_mtime=10**6)))
    assert {inode_of(node).mtime_ns for _, node in clamped.walk()} == {5, 10**15}


@pytest.mark.skipif(os.geteuid() != 0, reason="owners need root")
def test_owners_are_root_or_kept(objects: Objects, source: Path) -> None:
    os.chown(source / "zz", 1000, 1001)
    assert at(tree(objects, built(objects, source)), b"testbed/zz").uid == 0
    kept = tree(objects, built(objects, source, LocalBuild("workspace", "/testbed", keep_owner=True)))
    assert (at(kept, b"testbed/zz").uid, at(kept, b"testbed/zz").gid) == (1000, 1001)


def test_an_empty_folder_becomes_a_layer_too(objects: Objects, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    result = built(objects, tmp_path / "empty")
    assert (result.layer.descriptor.blobs, result.layer.descriptor.inodes) == ((), 2)
    assert not list(objects.blobs.list("maps/")) + list(objects.blobs.list("locators/"))


# -- the same everywhere -----------------------------------------------------------------------------------------------


def test_a_copy_gives_the_same_image(objects: Objects, source: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / "copy"
    copy.parent.mkdir()
    subprocess.run(["cp", "-a", source, copy], check=True)
    elsewhere = Objects(MemoryBlobs())
    assert built(objects, source).image == built(elsewhere, copy).image
    again = built(objects, copy)
    assert (again.layer.new_packs, again.layer.new_bytes) == (0, 0)


@pytest.fixture
def foreign_surroundings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Another umask, time zone and, where there is one, locale."""
    umask, collation = os.umask(0o077), locale.setlocale(locale.LC_ALL)
    monkeypatch.setenv("TZ", "Asia/Kathmandu")
    time.tzset()
    for name in ("de_DE.UTF-8", "en_US.UTF-8", "C.UTF-8"):
        try:
            locale.setlocale(locale.LC_ALL, name)
            break
        except locale.Error:
            continue
    yield
    os.umask(umask)
    locale.setlocale(locale.LC_ALL, collation)
    monkeypatch.undo()
    time.tzset()


def test_surroundings_do_not_matter(objects: Objects, source: Path, request: pytest.FixtureRequest) -> None:
    before = built(objects, source)
    request.getfixturevalue("foreign_surroundings")
    assert built(Objects(MemoryBlobs()), source).image == before.image


# -- tars --------------------------------------------------------------------------------------------------------------


def test_a_tar_gives_what_its_folder_gives(objects: Objects, source: Path, tmp_path: Path) -> None:
    archive = tmp_path / "source.tar.gz"
    subprocess.run(["tar", "--format=posix", "-C", source, "-czf", archive, "."], check=True)
    assert built(objects, archive).layer.digest == built(objects, source).layer.digest


def test_a_tar_keeps_its_order_of_owners_and_markers(objects: Objects, tmp_path: Path) -> None:
    path = tar_file(tmp_path, tar.file(b"f", b"1", uid=7, gid=8), tar.file(b"d/.wh.old"))
    plain, kept = (
        tree(objects, built(objects, path, LocalBuild("base", keep_owner=keep_owner))) for keep_owner in (False, True)
    )
    assert [(at(root, b"f").uid, at(root, b"f").gid) for root in (plain, kept)] == [(0, 0), (7, 8)]
    assert at(plain, b"d/old").is_whiteout


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"no tar at all" * 100, (Corrupt, "checksum|no number")),
        (gzip.compress(tar.archive(tar.file(b"f", b"1")))[:-9], (Corrupt, "damaged or cut")),
        (tar.archive(tar.file(b"../f")), (Invalid, "climbs")),
        (tar.archive(tar.hardlink(b"h", b"elsewhere")), (Invalid, "which is no file")),
    ],
)
def test_a_bad_tar_is_refused_and_the_name_is_as_it_was(
    data: bytes, error: tuple[type[StoreError], str], objects: Objects, source: Path, tmp_path: Path
) -> None:
    before = built(objects, source).image
    path = tmp_path / "bad.tar"
    path.write_bytes(data)
    with pytest.raises(error[0], match=error[1]):
        built(objects, path)
    assert objects.references.get("demo") == before


def test_a_missing_source_is_not_found(objects: Objects, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no folder or tar"):
        built(objects, tmp_path / "gone")
    assert not list(objects.blobs.list(""))


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_a_file_that_changes_before_it_is_stored_is_noticed(
    objects: Objects, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meanwhile(path: bytes) -> dict[bytes, bytes]:
        """Asked for when the file was looked at, before it is read."""
        (source / "pkg" / "mod.py").write_text("PRINT()\n")
        return {}

    monkeypatch.setattr(folder, "_xattrs", meanwhile)
    with pytest.raises(Invalid, match=r"/(zz|pkg/mod\.py)': changed while it was read"):
        built(objects, source)
    assert not list(objects.references.names())
    assert not list(objects.blobs.list("layers/"))


def test_what_cannot_be_read_is_denied(objects: Objects) -> None:
    with pytest.raises(Denied, match="'/proc/self/mem' cannot be read"):
        built(objects, Path("/proc/self/mem"))
    assert not list(objects.references.names())


def test_no_temporary_file_is_needed(objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    assert at(tree(objects, built(objects, tar_file(tmp_path, tar.file(b"f", b"1")))), b"testbed/f").size == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "image"},
        {"kind": "base", "prefix": "relative"},
        {"kind": "base", "prefix": "/a/../b"},
        {"kind": "toolkit", "path": ("bin",)},
        {"kind": "toolkit", "path": ("/a:/b",)},
        {"kind": "toolkit", "path": ("/\udcff",)},
    ],
)
def test_bad_settings_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(Invalid):
        LocalBuild(**settings)  # type: ignore[arg-type]


def test_a_prefix_may_be_of_any_bytes(objects: Objects, source: Path) -> None:
    root = tree(objects, built(objects, source, LocalBuild("workspace", "/a\udcff")))
    assert isinstance(root.find(b"a\xff"), Directory)


def test_a_bad_name_is_refused_before_anything_is_read(objects: Objects, source: Path) -> None:
    with pytest.raises(Invalid, match="not a name"):
        build_local(objects, source, "Not A Name", WORKSPACE)
    assert not list(objects.blobs.list(""))
