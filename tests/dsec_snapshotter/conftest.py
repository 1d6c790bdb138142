"""Nodes over the real kernel: they need root, EROFS on files, overlayfs and FUSE."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dsec_snapshotter.nodes import NodeUnderTest, node_under_test
from tests.kernel import unmountable


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeUnderTest]:
    """A node that has not been started; when the test ends it is stopped, and must have left nothing."""
    for lacking in map(unmountable, ("erofs", "overlay", "fuse")):
        if lacking:
            pytest.skip(lacking)
    with node_under_test(tmp_path / "root", tmp_path / "store") as node:
        yield node
