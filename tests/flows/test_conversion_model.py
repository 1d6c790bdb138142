"""Any sequence of layers becomes the tree that a replay of their tars gives."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings

from dsec_store.backends.memory import MemoryBlobs
from dsec_store.errors import Invalid
from dsec_store.objects import Objects
from tests.flows.layersequences import LAYERS, OPERATIONS, converted, quick, replayed
from tests.flows.replay import Operation, seen
from tests.kernel import unmountable
from tests.views import merged_view, mounted, view_of

pytestmark = pytest.mark.flow


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
