"""Small OCI images from layout to file system: the store's layers, merged, are the tree that the specification wants.

Three witnesses: a plain merge of the stored trees, the kernel (EROFS and overlayfs), and umoci, which unpacks the same
layouts in its own way. Then the images that must be refused, and what a refusal leaves.
"""

import os
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from dsec_registry.convert import Converted, convert
from dsec_registry.layouts import OciLayout
from dsec_registry.manifest import Platform, host_platform
from dsec_store.backends.memory import MemoryBlobs
from dsec_store.errors import Corrupt, Invalid, NotFound, StoreError
from dsec_store.objects import Objects
from tests import tarmaker as tar
from tests.flows.ocicases import CASES, NOW, Case
from tests.kernel import unmountable
from tests.ocimaker import LayoutMaker, damage, digest_of, read_json, write_layout
from tests.views import View, merged_view, mounted, regular, view, view_of

pytestmark = pytest.mark.flow

AMD64: Final = Platform("linux", "amd64")
ARM64: Final = Platform("linux", "arm64", "v8")

UMOCI_CASES: Final = {name: case for name, case in CASES.items() if case.umoci in ("", NOW)}
"""The others say how umoci differs."""

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def converted(objects: Objects, layout: Path, *, workers: int = 0, platform: Platform | None = None) -> Converted:
    with OciLayout(layout) as source:
        return convert(objects, source, "t", platform or host_platform(), "demo", workers=workers)


def fresh() -> Objects:
    return Objects(MemoryBlobs())


def laid_out(case: Case, tmp_path: Path) -> Path:
    return write_layout(tmp_path / "layout", case.layers).path


@every_case
def test_the_merged_layers_are_the_right_tree(case: Case, tmp_path: Path) -> None:
    objects = fresh()
    image = converted(objects, laid_out(case, tmp_path)).image
    assert merged_view(objects, objects.image(image)) == case.view


@every_case
def test_digests_are_the_same_again_and_elsewhere(case: Case, tmp_path: Path) -> None:
    layout = laid_out(case, tmp_path)
    objects, elsewhere = fresh(), fresh()
    first, again = converted(objects, layout), converted(objects, layout)
    other = converted(elsewhere, shutil.copytree(layout, tmp_path / "copy"), workers=1)
    assert first.image == again.image == other.image
    assert (again.built, again.new_packs, again.new_bytes) == (0, 0, 0)
    assert {blob.key for blob in objects.blobs.list("")} == {blob.key for blob in elsewhere.blobs.list("")}
    assert objects.references.get("demo") == first.image


@pytest.mark.component
@pytest.mark.skipif(bool(unmountable("erofs")), reason=unmountable("erofs"))
@pytest.mark.skipif(bool(unmountable("overlay")), reason=unmountable("overlay"))
@every_case
def test_the_kernel_shows_the_right_tree(case: Case, tmp_path: Path) -> None:
    objects = fresh()
    image = converted(objects, laid_out(case, tmp_path)).image
    scratch = tmp_path / ("long" * 50)
    scratch.mkdir()
    with mounted(objects, objects.image(image), scratch) as path:
        assert view_of(path) == case.view


@pytest.mark.component
@pytest.mark.skipif(os.geteuid() != 0, reason="unpacking owners and devices needs root")
@pytest.mark.skipif(shutil.which("umoci") is None, reason="umoci is not installed")
@pytest.mark.parametrize("case", UMOCI_CASES.values(), ids=UMOCI_CASES)
def test_umoci_unpacks_the_same_tree(case: Case, tmp_path: Path) -> None:
    layout = laid_out(case, tmp_path)
    subprocess.run(["umoci", "unpack", "--image", f"{layout}:t", tmp_path / "bundle"], check=True, capture_output=True)
    unpacked = view_of(tmp_path / "bundle" / "rootfs")
    if case.umoci == NOW:
        assert without_folder_times(unpacked) == without_folder_times(case.view)
    else:
        assert unpacked == case.view


def without_folder_times(paths: View) -> View:
    return {path: seen._replace(mtime_ns=0) if stat.S_ISDIR(seen.mode) else seen for path, seen in paths.items()}


def test_whiteouts_hold_at_any_number_of_workers(tmp_path: Path) -> None:
    layout = laid_out(CASES["whiteouts far above what they hide"], tmp_path)
    assert len({converted(fresh(), layout, workers=workers).image for workers in (1, 2, 8)}) == 1


def test_equal_layers_are_stored_once_and_counted_each(tmp_path: Path) -> None:
    objects = fresh()
    done = converted(objects, laid_out(CASES["empty layers"], tmp_path))
    layers = objects.image(done.image).layers
    assert (len(layers), layers[0], done.layers, done.built) == (3, layers[2], 3, 2)


# -- images that are described in an unusual way -----------------------------------------------------------------------


@pytest.mark.parametrize("extra", [{}, {"history": []}, {"history": [{"empty_layer": True}] * 3}])
def test_history_does_not_matter(extra: dict[str, object], tmp_path: Path) -> None:
    layout = write_layout(tmp_path / "layout", [tar.archive(tar.file(b"f", b"f"))], extra=extra).path
    objects = fresh()
    assert merged_view(objects, objects.image(converted(objects, layout).image)) == view({b"f": regular(b"f")})


@pytest.mark.parametrize("nested", [False, True], ids=["index", "index in an index"])
@pytest.mark.parametrize("backwards", [False, True], ids=["attestation last", "attestation first"])
def test_the_wanted_platform_is_converted(nested: bool, backwards: bool, tmp_path: Path) -> None:
    maker = LayoutMaker(tmp_path / "layout")
    images = {
        platform: maker.image([tar.archive(tar.file(b"f", str(platform).encode()))], platform=str(platform))
        for platform in (AMD64, ARM64)
    }
    entries = [*images.values(), maker.attestation(images[AMD64])]
    index = maker.index(entries[::-1] if backwards else entries)
    maker.add(maker.index([index]) if nested else index, tag="t")
    objects = fresh()
    for platform in images:
        image = objects.image(converted(objects, maker.path, platform=platform).image)
        assert merged_view(objects, image)[b"f"].data == str(platform).encode()
        assert image.platform == str(platform)
    with pytest.raises(NotFound, match=r"s390x.*amd64.*arm64"):
        converted(objects, maker.path, platform=Platform("linux", "s390x"))


# -- images that are refused -------------------------------------------------------------------------------------------


def refused(layout: Path, kind: type[StoreError], text: str) -> None:
    """The conversion fails so, in one line, and leaves no name and no layer."""
    objects = fresh()
    with pytest.raises(kind, match=text) as caught:
        converted(objects, layout)
    assert "\n" not in str(caught.value)
    assert not list(objects.references.names())
    assert not list(objects.blobs.list("layers/"))
    assert not list(objects.blobs.list("lookup/"))


def shortened(data: bytes) -> bytes:
    return data[:-1]


def lengthened(data: bytes) -> bytes:
    return data + b"x"


def flipped_early(data: bytes) -> bytes:
    return data[:3] + bytes([data[3] ^ 4]) + data[4:]


def flipped_late(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("change", [shortened, lengthened, flipped_early, flipped_late])
def test_a_damaged_blob_is_refused_by_its_digest(change: Callable[[bytes], bytes], tmp_path: Path) -> None:
    maker = LayoutMaker(tmp_path / "layout")
    image = maker.image([tar.archive(tar.file(b"f", b"f" * 9999))])
    maker.add(image, tag="t")
    digest = read_json(maker.path, image["digest"])["layers"][0]["digest"]
    damage(maker.path, digest, change)
    refused(maker.path, Corrupt, f"blob {digest}")


def test_a_wrong_diff_id_is_refused(tmp_path: Path) -> None:
    other = {"rootfs": {"type": "layers", "diff_ids": [digest_of(b"other")]}}
    layout = write_layout(tmp_path / "layout", [tar.archive(tar.file(b"f"))], extra=other).path
    refused(layout, Corrupt, "layer sha256:.*diff_id sha256:")


def test_a_tar_that_is_cut_but_has_the_right_digests_is_refused(tmp_path: Path) -> None:
    cut = tar.archive(tar.file(b"f", b"f" * 9999))[:4096]
    refused(write_layout(tmp_path / "layout", [cut]).path, Corrupt, "layer sha256:.*9999 bytes of content")


REFUSED: Final = {
    "a path that climbs": (tar.file(b"../../esc1"), "'../../esc1'.*climbs"),
    "a path that climbs inside": (tar.file(b"a/../b"), "'a/../b'.*climbs"),
    "a whiteout of a path that climbs": (tar.file(b"../.wh.x"), "climbs"),
    "a hardlink to a path that climbs": (tar.hardlink(b"h", b"../etc/passwd"), "climbs"),
    "a hardlink to nothing": (tar.hardlink(b"h", b"gone"), "'h': a hardlink to 'gone'"),
    "a device that would be a whiteout": (tar.character_device(b"c", 0, 0), "'c'.*0:0"),
    "an xattr that overlayfs would obey": (
        tar.pax({b"SCHILY.xattr.user.overlay.opaque": b"y"}) + tar.directory(b"d/"),
        "'d/'.*user.overlay",
    ),
    "a file below a file": (tar.file(b"f") + tar.file(b"f/g"), "'f/g'.*no directory"),
    "a file below a loop": (tar.symlink(b"a", b"b") + tar.symlink(b"b", b"a") + tar.file(b"a/f"), "'a/f'"),
    "a root that is a file": (tar.file(b"./"), "root"),
    "a whiteout without a name": (tar.file(b".wh."), "whiteout"),
    "a line break in a message": (tar.file(b"a\nb/../c"), "climbs"),
}


@pytest.mark.parametrize(("entries", "text"), REFUSED.values(), ids=REFUSED)
def test_a_tar_that_no_layer_can_hold_is_refused(entries: bytes, text: str, tmp_path: Path) -> None:
    refused(write_layout(tmp_path / "layout", [tar.archive(entries)]).path, Invalid, f"layer sha256:.*{text}")
