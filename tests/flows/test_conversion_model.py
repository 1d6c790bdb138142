"""Any sequence of layers becomes the tree that a replay of their tars gives."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsec_registry.convert import convert
from dsec_registry.layouts import OciLayout
from dsec_registry.manifest import host_platform
from dsec_store.backends.memory import MemoryBlobs
from dsec_store.descriptor import Image
from dsec_store.errors import Invalid
from dsec_store.objects import Objects
from tests import tarmaker as tar
from tests.flows.replay import (
    AddName,
    MakeFifo,
    MakeFile,
    MakeFolder,
    MakeLink,
    Opaque,
    Operation,
    Tree,
    Whiteout,
    entry,
    replay,
    seen,
)
from tests.kernel import unmountable
from tests.ocimaker import Layer, write_layout
from tests.views import merged_view, mounted, view_of

pytestmark = pytest.mark.flow

NAMES = st.sampled_from([b"a", b"b", b"c"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map(b"/".join)
TARGETS = st.one_of(PATHS, PATHS.map(lambda path: b"/" + path), NAMES.map(lambda name: b"../" + name), st.just(b".."))
MODES = st.sampled_from([0o644, 0o755, 0o4711])

OPERATIONS: st.SearchStrategy[Operation] = st.one_of(
    st.builds(MakeFile, PATHS, st.sampled_from([b"", b"1", b"two", b"3" * 5000]), MODES, st.integers(0, 2)),
    st.builds(MakeFolder, PATHS, MODES, st.integers(0, 2)),
    st.builds(MakeLink, PATHS, TARGETS),
    st.builds(AddName, PATHS, PATHS),
    st.builds(MakeFifo, PATHS),
    st.builds(Whiteout, PATHS),
    st.builds(Opaque, st.one_of(PATHS, st.just(b""))),
)
LAYERS = st.lists(st.lists(OPERATIONS, max_size=8), min_size=1, max_size=4)

quick = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def converted(objects: Objects, layers: list[list[Operation]], folder: Path) -> Image:
    tars = [Layer(tar.archive(*map(entry, operations)), "plain") for operations in layers]
    with OciLayout(write_layout(folder / "layout", tars).path) as source:
        return objects.image(convert(objects, source, None, host_platform(), "demo").image)


def replayed(layers: list[list[Operation]]) -> tuple[Tree, list[list[Operation]]]:
    """The tree, and the layers without what cannot be applied."""
    tree: Tree = {}
    possible = []
    for layer in layers:
        operations = layer
        after, applied = replay(tree, operations)
        while len(applied) < len(operations):  # without these others may be impossible too
            operations = applied
            after, applied = replay(tree, operations)
        tree = after
        possible.append(applied)
    return tree, possible


@settings(quick, max_examples=400)
@given(LAYERS)
def test_the_merged_layers_are_the_replayed_tree(layers: list[list[Operation]]) -> None:
    tree, possible = replayed(layers)
    objects = Objects(MemoryBlobs())
    with tempfile.TemporaryDirectory() as folder:
        image = converted(objects, possible, Path(folder))
    assert merged_view(objects, image) == seen(tree)


@settings(quick, max_examples=100)
@given(LAYERS, OPERATIONS)
def test_what_cannot_be_replayed_is_refused(layers: list[list[Operation]], last: Operation) -> None:
    _, possible = replayed(layers)
    possible[-1].append(last)
    _, again = replayed(possible)
    objects = Objects(MemoryBlobs())
    with tempfile.TemporaryDirectory() as folder:
        if again == possible:
            converted(objects, possible, Path(folder))
        else:
            with pytest.raises(Invalid, match="layer sha256:"):
                converted(objects, possible, Path(folder))


@pytest.mark.component
@pytest.mark.skipif(bool(unmountable("erofs")), reason=unmountable("erofs"))
@pytest.mark.skipif(bool(unmountable("overlay")), reason=unmountable("overlay"))
@settings(quick, max_examples=60)
@given(LAYERS)
def test_the_kernel_shows_the_replayed_tree(layers: list[list[Operation]]) -> None:
    tree, possible = replayed(layers)
    objects = Objects(MemoryBlobs())
    with tempfile.TemporaryDirectory() as folder:
        image = converted(objects, possible, Path(folder))
        with mounted(objects, image, Path(folder)) as path:
            assert view_of(path) == seen(tree)
