"""Worlds to run real commands in, and images that are made once for the whole run."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.flows.world")

from tests.flows import images  # noqa: E402  # after the line above
from tests.flows.world import World, lacking, private_world  # noqa: E402


@pytest.fixture(scope="session")
def capable() -> None:
    """Skips where flows cannot run, and says why."""
    if reason := lacking():
        pytest.skip(reason)


@pytest.fixture(scope="session")
def layout(capable: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An OCI layout with the images of `images.CONFIGS`, by tag."""
    return images.make_layout(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="session")
def store(layout: Path) -> Iterator[str]:
    """The URL of a store that no test changes: `plain`, `entry` and `configured` to run in, the workspace `work`, the
    toolkits `tools` and `more`."""
    with private_world() as world:
        for tag in images.CONFIGS:
            world.ok("dsec-image", "convert", f"oci:{layout}:{tag}", tag)
        images.build_parts(world)
        yield f"file://{world.store}"


@pytest.fixture(scope="session")
def big_store(capable: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a store that no test changes, with the image `big`: `images.BIG_FILES`, and busybox to read them."""
    layout = images.make_big_layout(tmp_path_factory.mktemp("big"))
    with private_world() as world:
        world.ok("dsec-image", "convert", f"oci:{layout}", "big")
        shutil.rmtree(layout)
        yield f"file://{world.store}"


@pytest.fixture
def big(big_store: str) -> Iterator[World]:
    """A world with a node of its own, on the store with the image `big`."""
    with private_world(big_store) as world:
        yield world


@pytest.fixture
def world(capable: None) -> Iterator[World]:
    """A world with an empty store of its own."""
    with private_world() as world:
        yield world


@pytest.fixture
def shared(store: str) -> Iterator[World]:
    """A world with a node of its own, on the store that no test changes."""
    with private_world(store) as world:
        yield world


@pytest.fixture(scope="session")
def debian(capable: None, pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A real image, "layout:tag". It is kept in pytest's cache, for making it takes longer than all its tests."""
    if reason := images.debian_lacks():
        pytest.skip(reason)
    cache = getattr(pytestconfig, "cache", None)
    return images.make_debian(cache.mkdir("flow-debian") if cache else tmp_path_factory.mktemp("debian"))
