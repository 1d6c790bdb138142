"""`dsec run`: how it ends, what the command sees, and that nothing of it is left."""

import json
import os
import shlex
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsec_snapshotter.processes import wait_ended
from tests.dsec_snapshotter.nodes import until
from tests.flows.world import WITHIN, Ended, World, assert_lost, private_world

pytestmark = pytest.mark.flow

NOWHERE = {
    "DSEC_STORE": "s3://bucket/store",
    "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
}
"""A store that nobody serves."""

ENVIRONMENT = ("--workspace", "work", "--toolkit", "tools", "--toolkit", "more")


@pytest.fixture(scope="module")
def running(store: str) -> Iterator[World]:
    """A world whose node all tests of this module share."""
    with private_world(store) as world:
        world.ok("dsec", "node", "start")
        yield world


@pytest.fixture
def node(running: World) -> Iterator[World]:
    """The same; after each test the node must be as it was."""
    yield running
    assert_idle(running)


def assert_idle(world: World) -> None:
    """No composition, no container, no mount but those of layers and blobs."""
    status = world.status()
    assert (status["compositions"], status["problems"], world.overlays()) == ([], [], [])
    for folder in ("s", "runs/bundles", "runs/crun"):
        assert not any((world.root / folder).glob("*")), folder


def run(world: World, *arguments: str, **options: Any) -> Ended:
    return world.run("dsec", "run", *arguments, **options)


def lines(world: World, *arguments: str) -> list[str]:
    """What a run prints that succeeds."""
    return world.ok("dsec", "run", *arguments).lines


# -- the end ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "outcome"),
    [
        ("true", (0, "exited", "")),
        ("sh -c exit\\ 7", (7, "exited", "")),
        ("sh -c exit\\ 125", (125, "exited", "")),
        ("sh -c exit\\ 127", (127, "exited", "")),
        ("sh -c exit\\ 137", (137, "exited", "")),
        ("nope", (127, "not-found", "nope: not found in PATH")),
        ("/bin/nope", (127, "not-found", "/bin/nope: not found")),
        ("/etc/passwd", (126, "not-executable", "/etc/passwd is not an executable file")),
    ],
)
def test_exit_code_and_status_file_tell_how_it_ended(
    node: World, tmp_path: Path, command: str, outcome: tuple[int, str, str]
) -> None:
    code, kind, text = outcome
    file = tmp_path / "status"
    done = run(node, "--status-file", str(file), "plain", "--", *shlex.split(command))
    assert (done.code, done.errors) == (code, [f"dsec: {text}"] if text else [])
    assert json.loads(file.read_text()) == {"kind": kind, "exit_code": code, "signal": None, "text": text}


def test_a_command_that_is_killed(node: World, tmp_path: Path) -> None:
    file = tmp_path / "status"
    sandbox = node.sandbox("--status-file", str(file), "plain", "--", "sh", "-c", "echo ready; exec sleep 1000")
    os.kill(sandbox.init().pid, signal.SIGKILL)
    done = sandbox.finish()
    assert (done.code, done.errors) == (137, ["dsec: killed by SIGKILL"])
    assert json.loads(file.read_text()) == {
        "kind": "signaled",
        "exit_code": 137,
        "signal": 9,
        "text": "killed by SIGKILL",
    }


@pytest.mark.parametrize(
    ("variables", "arguments", "text"),
    [
        ({}, ("gone", "--", "true"), "no image named 'gone'"),
        (NOWHERE, ("plain", "--", "true"), "no answer from http://127.0.0.1:1"),
        ({"DSEC_CACHE_BYTES": "many"}, ("plain", "--", "true"), "DSEC_CACHE_BYTES='many' is not a number of bytes"),
        ({}, ("--workspace", "tools", "plain", "--", "true"), "'tools' is a toolkit, not a workspace"),
        ({}, ("--toolkit", "plain", "plain", "--", "true"), "'plain' is a base, not a toolkit"),
        ({}, ("--user", "nobody", "plain", "--", "true"), "the image has no user 'nobody'"),
        ({}, ("--workdir", "/etc/passwd", "plain", "--", "true"), "working directory /etc/passwd: Not a directory"),
    ],
)
def test_a_platform_failure_is_125(
    node: World, tmp_path: Path, variables: dict[str, str], arguments: tuple[str, ...], text: str
) -> None:
    file = tmp_path / "status"
    done = run(node.with_(**variables), "--status-file", str(file), *arguments)
    assert (done.code, len(done.errors), done.stdout) == (125, 1, b"")
    assert text in done.errors[0]
    outcome = json.loads(file.read_text())
    assert (outcome["kind"], outcome["exit_code"], outcome["signal"]) == ("platform", 125, None)
    assert done.errors == [f"dsec: {outcome['text']}"]


@pytest.mark.parametrize("arguments", [(), ("plain", "--nope"), ("Upper", "--", "true"), ("plain", "--env", "novalue")])
def test_wrong_usage_is_2_and_writes_no_status(node: World, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = run(node, "--status-file", str(tmp_path / "status"), *arguments)
    assert (done.code, len(done.errors)) == (2, 1)
    assert done.errors[0].endswith("(see 'dsec run --help')")
    assert not (tmp_path / "status").exists()


def test_a_status_file_that_cannot_be_written_is_told(node: World, tmp_path: Path) -> None:
    done = run(node, "--status-file", str(tmp_path / "none/status"), "plain", "--", "true")
    assert done.code == 125
    assert done.errors == [f"dsec: --status-file {tmp_path}/none/status: No such file or directory"]


def test_an_interrupt_reaches_the_command(node: World) -> None:
    script = "trap 'exit 42' INT; echo ready; while :; do sleep 0.05; done"
    sandbox = node.sandbox("plain", "--", "sh", "-c", script)
    sandbox.process.send_signal(signal.SIGINT)
    assert sandbox.finish().code == 42


def test_a_command_that_ignores_interrupts_ends_all_the_same(node: World) -> None:
    script = "trap 'echo caught' INT; echo ready; while :; do sleep 0.05; done"
    sandbox = node.sandbox("plain", "--", "sh", "-c", script)
    sandbox.process.send_signal(signal.SIGINT)
    assert sandbox.line() == "caught\n"
    sandbox.process.send_signal(signal.SIGINT)
    assert sandbox.finish().code == 137


def test_the_node_cleans_up_after_a_run_that_was_killed(node: World) -> None:
    sandbox = node.sandbox("plain", "--", "sh", "-c", "echo ready; exec sleep 1000")
    command = sandbox.init()
    sandbox.process.kill()
    sandbox.finish()
    assert wait_ended(command, WITHIN)
    until(lambda: not node.compositions())


def test_a_run_survives_the_death_of_the_node(node: World) -> None:
    """Its outcome is its own, and the next node releases what it had."""
    sandbox = node.sandbox("plain", "--", "sh", "-c", "echo ready; read line; exit 5")
    node.kill("node")
    done = sandbox.finish(b"go\n")
    assert (done.code, done.errors) == (5, [])
    node.ok("dsec", "node", "start")


def test_a_node_that_is_stopped_by_force_fails_its_runs(shared: World) -> None:
    sandbox = shared.sandbox("plain", "--", "sh", "-c", "echo ready; exec sleep 1000")
    shared.ok("dsec", "node", "stop", "--force")
    assert_lost(sandbox)
    assert shared.mounts() == []


# -- what the command sees -------------------------------------------------------------------------------------------


def test_the_images_configuration_is_honoured(node: World) -> None:
    assert lines(node, "configured") == ["image image /home/worker", "/srv/app", "1000", "1001"]
    assert lines(node, "plain") == ["the image's own"]


def test_a_command_replaces_cmd_and_keeps_entrypoint(node: World) -> None:
    assert lines(node, "entry") == ["entry cmd"]
    assert lines(node, "entry", "--", "mine", "--too") == ["entry mine --too"]


def test_options_are_the_last_word(node: World) -> None:
    options = ("--env", "FROM=caller", "--env", "MORE=a=b c", "--workdir", "/var/new", "--user", "0:2000")
    script = "echo $FROM $ONLY $MORE; pwd; id -u; id -g"
    assert lines(node, *options, "configured", "--", "sh", "-c", script) == [
        "caller image a=b c",
        "/var/new",
        "0",
        "2000",
    ]


def test_streams_pass_exactly_and_apart(node: World) -> None:
    sent = os.urandom(1 << 20)
    assert run(node, "plain", "--", "cat", stdin=sent).stdout == sent
    done = run(node, "plain", "--", "sh", "-c", "echo out; echo err >&2")
    assert (done.stdout, done.stderr) == (b"out\n", b"err\n")


def test_a_closed_input_is_empty(node: World) -> None:
    done = run(node, "plain", "--", "sh", "-c", "cat; exit 3", stdin=b"", preexec_fn=lambda: os.close(0))
    assert (done.code, done.stdout, done.stderr) == (3, b"", b"")


def test_workspace_and_toolkits_come_together(node: World) -> None:
    script = "cat README; greet; echo $PATH; cat /opt/tools/lib/module"
    path = "/opt/more/bin:/opt/tools/bin:/bin"
    shown = lines(node, *ENVIRONMENT, "--workdir", "/testbed", "configured", "--", "sh", "-c", script)
    assert shown == ["the workspace", "more more", path, "module"]


def test_the_environment_is_merged_in_the_order_of_the_layers(node: World) -> None:
    def said(*options: str) -> list[str]:
        return lines(node, *options, "configured", "--", "sh", "-c", "echo $FROM")

    assert said("--workspace", "work") == ["work"]
    assert said("--toolkit", "more", "--toolkit", "tools", "--workspace", "work") == ["tools"]
    assert said("--toolkit", "more", "--env", "FROM=caller") == ["caller"]


def test_what_is_written_is_gone_in_the_next_run(node: World) -> None:
    cached = "/opt/tools/lib/__pycache__/module.pyc"
    write = f"mkdir ${{0%/*}}; echo x > $0; echo changed > /testbed/README; rm /opt/tools/bin/greet; cat {cached}"
    assert lines(node, *ENVIRONMENT, "plain", "--", "sh", "-c", write, cached) == ["x"]
    look = f"ls /opt/tools/lib; cat /testbed/README; ls {os.path.dirname(cached)} 2>/dev/null; ls /opt/tools/bin"
    assert lines(node, *ENVIRONMENT, "plain", "--", "sh", "-c", look) == ["module", "the workspace", "greet"]


def test_the_same_run_again_fetches_nothing(shared: World) -> None:
    command = (*ENVIRONMENT, "plain", "--", "sh", "-c", "cat /testbed/README /opt/tools/lib/module; greet")
    lines(shared, *command)
    fetched = shared.wire_bytes()
    assert fetched > 0
    lines(shared, *command)
    assert shared.wire_bytes() == fetched


def test_what_lies_in_the_working_directory_is_never_imported(shared: World) -> None:
    """A command is typed in a workspace that nobody trusts, as root; installed commands do not look there either."""
    folder = shared.make("workspace of a stranger")
    for module in ("click", "lmdb", "dsec_store", "logging"):
        (folder / f"{module}.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
    dsec = Path(sys.executable).with_name("dsec")
    for arguments in (["node", "start"], ["node", "stats"]):
        subprocess.run([dsec, *arguments], cwd=folder, env=shared.environment, check=True, capture_output=True)
    assert not (folder / "ran").exists()


def test_nothing_of_the_platform_is_inside(node: World) -> None:
    """No path of the node in the mount table, no socket, and a root directory with the image's attributes."""
    mounts = "\n".join(lines(node, *ENVIRONMENT, "plain", "--", "cat", "/proc/self/mountinfo"))
    assert str(node.folder) not in mounts
    assert lines(node, "plain", "--", "find", "/", "-xdev", "-type", "s") == []
    assert stat.S_IMODE(int(lines(node, "plain", "--", "stat", "-c", "%a", "/")[0], 8)) == 0o755
