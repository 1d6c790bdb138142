"""Random sequences of layers, and what becomes of them: for tests, and in greater number for `make corpus`."""

from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from dsec_registry.convert import convert
from dsec_registry.layouts import OciLayout
from dsec_registry.manifest import host_platform
from dsec_store.descriptor import Image
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
)
from tests.ocimaker import Layer, write_layout

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
