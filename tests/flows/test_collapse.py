"""Collapsed images: whatever runs are made of their layers, the tree is that of the plain layers.

Witnesses: a replay of the tars, a plain merge of what is stored, the kernel, and a real node with sandboxes.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsec_cli.collapse import RULES
from dsec_cli.wiring import open_objects
from dsec_registry.convert import convert
from dsec_registry.layouts import OciLayout
from dsec_registry.manifest import host_platform
from dsec_store.backends.memory import MemoryBlobs
from dsec_store.descriptor import Image
from dsec_store.layer.collapse import RUN_LENGTH, collapse, lowers_of
from dsec_store.objects import Objects
from tests import tarmaker as tar
from tests.dsec_sandbox.box import make_root
from tests.flows.images import build_parts, tar_of_folder
from tests.flows.layersequences import LAYERS, converted, replayed
from tests.flows.ocicases import CASES, Case
from tests.flows.replay import Operation, seen
from tests.flows.world import World, private_world
from tests.kernel import unmountable
from tests.ocimaker import Layer, tar_of, write_layout
from tests.views import merged_view, mounted, view_of

pytestmark = pytest.mark.flow

with_kernel = [
    pytest.mark.component,
    pytest.mark.skipif(bool(unmountable("erofs")), reason=unmountable("erofs")),
    pytest.mark.skipif(bool(unmountable("overlay")), reason=unmountable("overlay")),
]

quick = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def collapsed(objects: Objects, image: Image, *cuts: int) -> Image:
    """The image with a run between each two cuts, and at both ends."""
    bounds = [0, *cuts, len(image.layers)]
    runs = [range(start, stop) for start, stop in pairwise(bounds)]
    return replace(image, lowers=collapse(objects, image.layers, runs))


# -- any layers --------------------------------------------------------------------------------------------------------


@settings(quick, max_examples=100)
@given(LAYERS, st.data())
def test_collapsed_layers_are_the_replayed_tree(layers: list[list[Operation]], data: st.DataObject) -> None:
    tree, possible = replayed(layers)
    objects = Objects(MemoryBlobs())
    with tempfile.TemporaryDirectory() as folder:
        image = converted(objects, possible, Path(folder))
    cut = data.draw(st.integers(1, len(layers)))
    assert merged_view(objects, collapsed(objects, image)) == seen(tree)
    assert merged_view(objects, collapsed(objects, image, cut)) == seen(tree)
    upper = replace(image, lowers=collapse(objects, image.layers, [range(cut, len(layers))]))
    assert merged_view(objects, upper) == seen(tree)


class TestKernel:
    pytestmark = with_kernel

    @settings(quick, max_examples=30)
    @given(LAYERS, st.data())
    def test_it_shows_the_replayed_tree(self, layers: list[list[Operation]], data: st.DataObject) -> None:
        tree, possible = replayed(layers)
        objects = Objects(MemoryBlobs())
        cut = data.draw(st.integers(0, len(layers) - 1))
        with tempfile.TemporaryDirectory() as folder:
            image = converted(objects, possible, Path(folder))
            upper = replace(image, lowers=collapse(objects, image.layers, [range(cut, len(layers))]))
            with mounted(objects, upper, Path(folder)) as path:
                assert view_of(path) == seen(tree)

    @pytest.mark.parametrize("case", CASES.values(), ids=CASES)
    def test_it_shows_the_right_tree(self, case: Case, tmp_path: Path) -> None:
        objects, image = stored(case, tmp_path)
        image = collapsed(objects, image)
        assert len(image.mounted) == 1
        with mounted(objects, image, tmp_path) as path:
            assert view_of(path) == case.view

    def test_a_conversion_collapses_a_hundred_and_forty_layers(self, tmp_path: Path) -> None:
        objects, image = stored(CASES["140 layers"], tmp_path)
        assert image.lowers == lowers_of(objects, image.layers)
        assert len(image.mounted) == 140 // RUN_LENGTH + 140 % RUN_LENGTH
        with mounted(objects, image, tmp_path) as path:
            assert view_of(path) == CASES["140 layers"].view


@pytest.mark.parametrize("case", [case for case in CASES.values() if 1 < len(case.layers) < 10])
def test_a_run_from_anywhere_to_anywhere(case: Case, tmp_path: Path) -> None:
    objects, image = stored(case, tmp_path)
    count = len(case.layers)
    for start in range(count - 1):
        for stop in range(start + 2, count + 1):
            lowers = collapse(objects, image.layers, [range(start, stop)])
            assert merged_view(objects, replace(image, lowers=lowers)) == case.view, (start, stop)


def stored(case: Case, tmp_path: Path) -> tuple[Objects, Image]:
    objects = Objects(MemoryBlobs())
    with OciLayout(write_layout(tmp_path / "layout", case.layers).path) as source:
        return objects, objects.image(convert(objects, source, "t", host_platform(), "demo").image)


# -- on a node ---------------------------------------------------------------------------------------------------------

TALL: Final = 102
"""Layers: three complete runs, some more, and altogether more than a hundred blobs."""

MIDDLE: Final = TALL - 3
"""Layers that each add two files and take one away."""

IMAGES: Final = {"tall": "none", "auto": "auto", "one": "all", "any": "none"}
"""Images, and how they are collapsed."""

SECOND: Final = 10**9


@pytest.fixture(scope="module")
def tall_store(capable: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A store with images that are equal but for their runs, a workspace and toolkits. Tests may change `any`."""
    folder = tmp_path_factory.mktemp("tall")
    make_root(folder / "root")
    root = tar_of_folder(folder / "root")
    with private_world() as world:
        tall = write_layout(folder / "tall", [root, *tall_layers()]).path
        world.ok("dsec-image", "convert", f"oci:{tall}", "tall")
        objects = open_objects(f"file://{world.store}")
        reference = objects.references.read("tall")
        image = objects.image(reference.image)
        for name, rule in IMAGES.items():
            other = replace(image, lowers=RULES[rule](objects, image.layers))
            objects.references.set(name, objects.put_image(other), reference.origin)
        build_parts(world)
        yield f"file://{world.store}"


COMPLETE: Final = TALL // RUN_LENGTH
LOWERS: Final = COMPLETE + TALL % RUN_LENGTH


def tall_layers() -> list[Layer]:
    """On busybox: files with all that a file can have, then many layers that add and take away, and one that deletes
    names of lower layers' files and takes the place of directories."""
    xattr = tar.pax({b"SCHILY.xattr.user.note": b"kept", b"mtime": b"1000000000.123456789"})
    lowest = (
        *(tar.directory(b"d/", mode=0o750, uid=7, mtime=SECOND), tar.directory(b"gone/"), tar.file(b"gone/f", b"f")),
        *(xattr, tar.file(b"d/a", b"linked", mode=0o4755, uid=3)),
        *(tar.hardlink(b"d/b", b"d/a"), tar.hardlink(b"d/c", b"d/a"), tar.symlink(b"d/s", b"a")),
        *(tar.directory(b"n/"), tar.directory(b"was/"), tar.file(b"was/old", b"old")),
    )
    middle = [
        (
            *(tar.directory(b"n/", mtime=n), tar.file(b"n/f%d" % n, b"%d" % n), tar.file(b"n/.wh.f%d" % (n - 2))),
            tar.file(b"k%d" % n, b"keep %d" % n),
        )
        for n in range(MIDDLE)
    ]
    highest = (
        *(tar.file(b".wh.gone"), tar.file(b"d/.wh.c"), tar.file(b".wh.was"), tar.directory(b"was/")),
        tar.file(b"was/new", b"new"),
    )
    return [Layer(tar.archive(*entries), "plain") for entries in (lowest, *middle, highest)]


@pytest.fixture
def tall(tall_store: str) -> Iterator[World]:
    with private_world(tall_store) as world:
        yield world


def mounted_layers(world: World) -> int:
    return len(world.status()["layers"])


def test_a_node_shows_the_same_tree_of_fewer_layers(tall: World) -> None:
    plain, auto = tall.make("plain"), tall.make("auto")
    tall.ok("dsec-image", "mount", "auto", str(auto))
    assert mounted_layers(tall) == LOWERS
    tall.ok("dsec-image", "mount", "tall", str(plain))
    assert mounted_layers(tall) == TALL + COMPLETE
    view = view_of(plain)
    assert view_of(auto) == view
    assert sorted(path for path in view if path.startswith((b"n/", b"was/", b"gone"))) == [
        *(b"n/f%d" % number for number in (MIDDLE - 2, MIDDLE - 1)),
        b"was/new",
    ]
    file = view[b"d/a"]
    assert (file.mode, file.uid, file.data, file.xattrs) == (0o104755, 3, b"linked", {b"user.note": b"kept"})
    assert file.mtime_ns == SECOND * SECOND + 123456789
    assert view[b"d/b"].twin == b"d/a"
    assert b"d/c" not in view


def test_an_environment_on_a_collapsed_base(tall: World) -> None:
    script = (
        "cat /n/f98 /k7 /testbed/README; greet; ls /was /opt/more/bin; ls -i /d/a /d/b | sed 's/ .*//' | uniq | wc -l"
    )
    parts = ("--workspace", "work", "--toolkit", "tools", "--toolkit", "more")
    runs = [tall.ok("dsec", "run", name, *parts, "--", "sh", "-c", script) for name in ("auto", "tall")]
    assert runs[0].lines == runs[1].lines
    assert runs[0].lines[-1].strip() == "1"
    touched = "echo x >>/d/a; cat /d/b; echo; rm -r /was; mkdir /was; ls /was; mv /n /m; ls /m"
    assert tall.ok("dsec", "run", "auto", "--", "sh", "-c", touched).lines == ["linked", "f97", "f98"]


def test_more_than_a_hundred_blobs_on_a_node_with_a_long_path(tall: World) -> None:
    far = tall.with_(DSEC_ROOT=str(tall.folder / ("d" * 90) / ("e" * 90)))
    (lower,) = far.json("dsec-image", "collapse", "one")["mounted"]
    assert lower["blobs"] == TALL
    target = far.make("target")
    far.ok("dsec-image", "mount", "one", str(target))
    assert mounted_layers(far) == 1
    assert [(target / f"k{n}").read_text() for n in range(MIDDLE)] == [f"keep {n}" for n in range(MIDDLE)]
    far.kill("node", "daemon")
    far.ok("dsec", "node", "start")
    assert (target / "k1").read_text() == "keep 1"
    assert far.ok("dsec", "run", "one", "--", "cat", "/k2").lines == ["keep 2"]
    far.ok("dsec-image", "umount", str(target))
    far.ok("dsec", "node", "stop")
    assert far.mounts() == []


def test_the_command_and_its_undoing(tall: World) -> None:
    before = tall.json("dsec-image", "inspect", "any")
    one = tall.json("dsec-image", "collapse", "any")
    assert [len(lower["run"]) for lower in one["mounted"]] == [TALL]
    assert tall.json("dsec-image", "collapse", "any") == one
    auto = tall.json("dsec-image", "collapse", "any", "--auto")
    assert [len(lower["run"]) for lower in auto["mounted"]] == [RUN_LENGTH] * COMPLETE + [0] * (LOWERS - COMPLETE)
    said = tall.ok("dsec-image", "collapse", "any", "--undo").lines
    assert said == [f"any: {before['image']}", f"{TALL} layers, mounted as {TALL}, 0 of them runs of several"]
    assert tall.json("dsec-image", "inspect", "any") == before
    assert tall.run("dsec-image", "collapse", "no-such-name").code == 1


def test_a_collapsed_image_on_another_hides_what_its_layers_hide(world: World, tmp_path: Path) -> None:
    """A run knows only what lies below it in its own image."""
    upper = [tar_of({"f": b"1", "g": b"1"}), tar.archive(tar.file(b".wh.f"))]
    for name, layers in (("lower", [tar_of({"f": b"0", "h": b"0"})]), ("upper", upper)):
        world.ok("dsec-image", "convert", f"oci:{write_layout(tmp_path / name, layers).path}", name)
    targets = [world.make("before"), world.make("after")]
    world.ok("dsec-image", "mount", "lower", "upper", str(targets[0]))
    world.ok("dsec-image", "collapse", "upper")
    world.ok("dsec-image", "mount", "lower", "upper", str(targets[1]))
    assert sorted(path.name for path in targets[0].iterdir()) == ["g", "h"]
    assert view_of(targets[0]) == view_of(targets[1])
