"""Long paths and tall stacks: where kernel interfaces end at 107, 255 and 4096 bytes, and overlays at 128 layers."""

import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from tests.dsec_sandbox.box import make_root
from tests.flows.images import tar_of_folder
from tests.flows.world import World
from tests.ocimaker import Layer, tar_of, write_layout

pytestmark = pytest.mark.flow

LAYERS: Final = 140
LENGTH: Final = 200
"""Characters of DSEC_ROOT."""

PEAK: Final = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[2:]).returncode
open(sys.argv[1], "w").write(str(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))
sys.exit(code)
"""
"""Runs a command and writes the KiB that it had at its peak into a file. What a parent has when it forks counts for the
child: so this is a small process of its own."""

LARGE_FILE: Final = 200 << 20
MEMORY: Final = 230 << 20
"""Bytes that a conversion of few files may have at once; names and attributes of many come on top."""


def test_a_tall_image_on_a_node_with_a_long_path(world: World, tmp_path: Path) -> None:
    make_root(tmp_path / "root")
    tall = [Layer(tar_of({"top": b"%d" % number, f"f{number}": b"x"}), "plain") for number in range(1, LAYERS)]
    layout = write_layout(tmp_path / "layout", [tar_of_folder(tmp_path / "root"), *tall]).path
    world.ok("dsec-image", "convert", f"oci:{layout}", "tall")
    world.ok("dsec-image", "collapse", "tall", "--undo")
    assert len(world.json("dsec-image", "inspect", "tall")["layers"]) == LAYERS
    far = at_length(world)
    target = world.make("target")
    far.ok("dsec-image", "mount", "tall", str(target))
    assert (target / "top").read_text() == str(LAYERS - 1)
    assert all((target / f"f{number}").read_text() == "x" for number in range(1, LAYERS))
    assert far.ok("dsec", "run", "tall", "--", "sh", "-c", "cat /top; ls / | grep -c '^f'").lines == [
        str(LAYERS - 1) + str(LAYERS - 1)
    ]
    assert len(far.status()["layers"]) == LAYERS
    far.kill("node", "daemon")
    far.ok("dsec", "node", "start")
    assert (target / "top").read_text() == str(LAYERS - 1)
    far.ok("dsec-image", "umount", str(target))
    far.ok("dsec", "node", "stop")
    assert far.mounts() == []


def test_a_conversion_takes_little_memory_however_large_the_image(world: World, tmp_path: Path) -> None:
    """Two layers that do not compress, each nearly as large as what it may take at its peak."""
    layers = [tar_of({f"f{n}": random.Random(n).randbytes(LARGE_FILE)}) for n in range(2)]
    layout = write_layout(tmp_path / "layout", [Layer(layer, "plain") for layer in layers]).path
    measured = replace(world, before=(sys.executable, "-c", PEAK, str(tmp_path / "peak")))
    measured.ok("dsec-image", "convert", f"oci:{layout}", "large")
    assert int((tmp_path / "peak").read_text()) << 10 < MEMORY


def at_length(world: World) -> World:
    """The same store, and a node whose path has LENGTH characters."""
    path = world.folder / ("d" * 60) / ("e" * 60)
    return world.with_(DSEC_ROOT=str(path / ("f" * (LENGTH - len(str(path)) - 1))))


def test_names_that_repeat_take_no_place_in_the_overlay(shared: World) -> None:
    """Six hundred, more than an overlay takes."""
    names = ["plain", *["work", "tools", "more"] * 200]
    target = shared.make("target")
    shared.ok("dsec-image", "mount", *names, str(target))
    shared.ok("dsec-image", "umount", str(target))
    assert shared.compositions() == []
