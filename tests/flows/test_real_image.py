"""A real Debian, from packages to commands in it: the lazy mount is what umoci unpacks, and little of it is fetched."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.flows import images
from tests.flows.world import World, private_world
from tests.views import Seen, view_of

pytestmark = [pytest.mark.flow, pytest.mark.timeout(600)]  # the first time the image has to be made

SHARE: Final = 0.2
"""Of the compressed image: the most that the first command may fetch."""

PYTHON: Final = ("dsec", "run", "debian", "--", "python3", "-c")
IMPORTS: Final = (
    "import json, ssl, sqlite3; print(ssl.OPENSSL_VERSION.split()[0], sqlite3.connect(':memory:') is not None)"
)


@pytest.fixture(scope="module")
def converted(debian: str) -> Iterator[World]:
    """A world with the image in its store, and nothing on its node."""
    with private_world() as world:
        world.ok("dsec-image", "convert", f"oci:{debian}", "debian")
        yield world


def test_little_is_fetched_for_the_first_command_and_nothing_for_the_second(converted: World) -> None:
    world = converted.with_root("fresh")
    assert world.ok(*PYTHON, IMPORTS).lines == ["OpenSSL True"]
    fetched = world.wire_bytes()
    assert 0 < fetched < SHARE * world.json("dsec-image", "inspect", "debian")["source_bytes"]
    assert world.ok(*PYTHON, IMPORTS).lines == ["OpenSSL True"]
    assert world.wire_bytes() == fetched
    assert (world.ok("dsec", "node", "stop").code, world.mounts()) == (0, [])
    assert world.ok(*PYTHON, IMPORTS).lines == ["OpenSSL True"]
    assert world.stats()["total"]["wire_bytes"] == 0, "the cache outlives the node"


def test_the_mount_is_what_umoci_unpacks(converted: World, debian: str, tmp_path: Path) -> None:
    """Type, mode, owner, size, content, link target, device number, xattrs, time in seconds, and who is whose twin."""
    target = converted.make("target")
    converted.ok("dsec-image", "mount", "debian", str(target))
    lazy, unpacked = seen(target), seen(images.unpack(debian, tmp_path / "bundle"))
    assert sorted(lazy.keys() ^ unpacked.keys()) == []
    assert [(path, differing(lazy[path], unpacked[path])) for path in lazy if lazy[path] != unpacked[path]] == []
    assert converted.json("dsec-image", "check", "debian", "--deep")["problems"] == []


def seen(path: Path) -> dict[bytes, Seen]:
    """Times in seconds: tars have no more."""
    return {name: entry._replace(mtime_ns=entry.mtime_ns // 10**9) for name, entry in view_of(path).items()}


def differing(one: Seen, other: Seen) -> list[str]:
    """The fields that differ, by name: contents would be unreadable."""
    return [name for name in Seen._fields if getattr(one, name) != getattr(other, name)]


def test_tools_of_the_image_work(converted: World) -> None:
    """A real program that forks, writes and reads back, and the package database."""
    script = "cd /tmp && git init -q a && cd a && git -c user.name=n -c user.email=e commit -q --allow-empty -m x"
    done = converted.ok("dsec", "run", "debian", "--", "sh", "-c", f"{script} && git log --format=%s && dpkg --verify")
    assert done.lines == ["x"]
    paths = converted.ok("dsec", "run", "debian", "--", "find", "/usr/bin", "-name", "git", "-perm", "/111").lines
    assert paths == ["/usr/bin/git"]
