"""Many commands at once, none of which knows of the others."""

from pathlib import Path
from typing import Final

import pytest

from tests.flows.world import Ended, World, ended

pytestmark = pytest.mark.flow

RUNS: Final = 16
CONVERSIONS: Final = 8


def all_at_once(world: World, count: int, *command: str) -> list[Ended]:
    started = [world.start(*command) for _ in range(count)]
    return [ended(process) for process in started]


def test_many_first_runs_start_one_node(shared: World) -> None:
    command = ("dsec", "run", "--toolkit", "tools", "configured", "--", "sh", "-c", "greet; cat /etc/motd")
    results = all_at_once(shared, RUNS, *command)
    assert [done.errors for done in results if done.code or done.errors] == []
    assert [done.lines for done in results] == [["tools tools", "welcome"]] * RUNS
    assert (shared.root / "node.log").read_text().count(" serves ") == 1
    assert (shared.compositions(), shared.overlays()) == ([], [])
    assert len(shared.status()["layers"]) == len(shared.json("dsec-image", "inspect", "configured")["layers"]) + 1


def test_many_conversions_of_one_image_agree(world: World, layout: Path) -> None:
    convert = ("dsec-image", "convert", f"oci:{layout}:plain", "app", "--json")
    results = all_at_once(world, CONVERSIONS, *convert)
    assert [done.errors for done in results if done.code] == []
    assert len({done.json["image"] for done in results}) == 1
    assert world.json("dsec-image", "check", "app", "--deep")["problems"] == []
    assert world.json("dsec-image", "convert", f"oci:{layout}:plain", "app")["new_packs"] == 0


def test_many_mounts_at_one_place_and_one_wins(shared: World) -> None:
    target = shared.make("target")
    done = all_at_once(shared, CONVERSIONS, "dsec-image", "mount", "plain", str(target))
    assert sorted(each.code for each in done) == [0] + [1] * (CONVERSIONS - 1)
    assert len(shared.compositions()) == 1
    assert shared.overlays() == [str(target)]


def test_many_stops_are_one(shared: World) -> None:
    shared.ok("dsec", "node", "start")
    assert {done.code for done in all_at_once(shared, 4, "dsec", "node", "stop")} == {0}
    assert shared.mounts() == []
