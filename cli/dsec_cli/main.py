"""`dsec`: the node, and commands in sandboxes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from dsec_cli import nodes
from dsec_cli.command import ENV, NAME, root_option, run_group, say, store_option
from dsec_cli.node import node_group
from dsec_cli.wiring import PROMPT, Settings, open_objects
from dsec_sandbox import outcome
from dsec_sandbox.environment import Environment, resolve
from dsec_sandbox.outcome import Outcome
from dsec_sandbox.run import run as run_container
from dsec_sandbox.spec import RunConfig, command_of, merge_env
from dsec_store.descriptor import Pairs
from dsec_store.errors import StoreError

PROGRAM = "dsec"


def main() -> None:
    run_group(group, PROGRAM)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dsec-platform")
def group() -> None:
    """Sandboxes from composed, lazily loaded images."""


group.add_command(node_group)


@group.command(context_settings={"ignore_unknown_options": False})
@click.argument("name", type=NAME)
@click.argument("command", nargs=-1, metavar="[-- CMD ...]")
@click.option("--workspace", "workspaces", type=NAME, multiple=True, help="A workspace above the base. Repeatable.")
@click.option("--toolkit", "toolkits", type=NAME, multiple=True, help="A toolkit on top. Repeatable.")
@click.option("--env", type=ENV, multiple=True, metavar="K=V", help="A variable; ours is the last word. Repeatable.")
@click.option("--workdir", help="Where the command starts [the image's].")
@click.option("--user", help="uid, name, uid:gid or name:group [the image's].")
@click.option(
    "--status-file",
    type=click.Path(path_type=Path),
    help="Write to it how the command ended, as JSON.",
)
@store_option
@root_option
def run(
    name: str,
    command: tuple[str, ...],
    workspaces: tuple[str, ...],
    toolkits: tuple[str, ...],
    env: Pairs,
    workdir: str | None,
    user: str | None,
    status_file: Path | None,
    store: str | None,
    root: str | None,
) -> None:
    """Run CMD in a sandbox of the image NAME, with the workspaces and toolkits on top.

    CMD replaces the image's Cmd and keeps its Entrypoint. Exit code: the command's own, 128+n for signal n, 127 not
    found, 126 not executable, 125 when the platform failed.
    """
    try:
        settings = Settings.of(store, root)
        objects = open_objects(settings.store, policy=PROMPT)
        environment = resolve(objects, name, workspaces, toolkits)
        config = _config(environment, command, env, workdir, user)
        ended = _run(settings, environment, config)
    except StoreError as error:
        ended = outcome.platform(str(error))
    except Exception as error:  # a fault of ours must not look like the command's exit code
        ended = outcome.platform(f"{type(error).__name__}: {error}")
    if ended.text:
        say(PROGRAM, ended.text)
    if status_file is not None:
        _report(status_file, ended)
    sys.exit(ended.exit_code)


def _config(
    environment: Environment, command: tuple[str, ...], env: Pairs, workdir: str | None, user: str | None
) -> RunConfig:
    image = environment.run
    return RunConfig(
        env=merge_env(image.env, environment.additions, env),
        args=command_of(image.entrypoint, image.cmd, command),
        workdir=workdir or image.working_dir or "/",
        user=image.user if user is None else user,
        terminal=os.isatty(0) and os.isatty(1),
    )


def _run(settings: Settings, environment: Environment, config: RunConfig) -> Outcome:
    with nodes.composed(settings, environment.layers) as composition:
        return run_container(composition.path, config, state=settings.root / nodes.RUNS, container_id=composition.id)


def _report(status_file: Path, ended: Outcome) -> None:
    try:
        outcome.write_status_file(status_file, ended)
    except OSError as error:
        say(PROGRAM, f"--status-file {status_file}: {error.strerror}")
        sys.exit(outcome.PLATFORM)


if __name__ == "__main__":
    main()
