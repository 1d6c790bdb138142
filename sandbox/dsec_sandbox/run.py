"""Run one command in a container of its own, from a root file system to a typed outcome.

    outcome = run(Path("/mnt/root"), RunConfig(env=(), args=("make", "test")), state=root / "runs", container_id="r1")
    sys.exit(outcome.exit_code)

The order, and who undoes each step: signals are caught (and given back) around everything; user, working directory and
program are looked up in the root file system; the container is created, started, waited for and removed. The root file
system is the caller's: already mounted, and not touched except for the working directory and the mount points
that are missing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
from pathlib import Path
from typing import Final

from dsec_sandbox import bundle, executable, outcome, spec, users
from dsec_sandbox.crun import Container, Ending, kill_leftover
from dsec_sandbox.forwarding import Forwarding
from dsec_sandbox.outcome import NotStartedError, Outcome
from dsec_sandbox.rootpath import RootPath
from dsec_sandbox.spec import RunConfig
from dsec_sandbox.terminal import CONSOLE_SOCKET, Console
from dsec_sandbox.users import Identity
from dsec_store.errors import Invalid

__all__ = ["kill_leftover", "run"]

MAX_ACCOUNTS: Final = 16 << 20
"""Bytes of /etc/passwd and of /etc/group that are read."""

_HOSTNAME: Final = 12
"""Characters of the container's id that are its host name when none is given."""


def run(root: Path, config: RunConfig, *, state: Path, container_id: str) -> Outcome:
    """Run `config` on the mounted file system at `root`, with this process's standard streams, and say how it ended.

    `state` is a folder for runs, any number of them at once; `container_id` is new in it. Nothing is left there
    afterwards. Raises `Invalid` when `config` does not fit this file system (its user, its working directory) or the id
    is in use; every other end is an outcome, faults of the platform included.
    """
    try:
        with Forwarding() as signals, RootPath(root) as inside:
            config, identity = _settle(inside, config, container_id)
            _make_places(inside)
            program = executable.find_executable(inside, config.args[0], dict(config.env)["PATH"], config.workdir)
            document = bundle.document(root, config, identity, os.uname().machine)
            with Container(state, container_id) as container:
                ending = _supervise(container, document, signals)
            return _outcome(ending, inside, program)
    except NotStartedError as reason:
        return reason.outcome
    except (OSError, UnicodeError) as error:  # a path of ours that is not UTF-8 cannot be told to the runtime
        return outcome.platform(str(error))


def _settle(inside: RootPath, config: RunConfig, container_id: str) -> tuple[RunConfig, Identity]:
    """`config` with nothing left open, its user looked up and its working directory made."""
    identity = users.resolve(config.user, _accounts(inside, "/etc/passwd"), _accounts(inside, "/etc/group"))
    settled = dataclasses.replace(
        config,
        env=spec.with_defaults(config.env, identity.home, config.terminal),
        workdir=spec.absolute(config.workdir),
        hostname=config.hostname or container_id[:_HOSTNAME],
    )
    try:
        inside.make_directories(settled.workdir)
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG):
            raise
        raise Invalid(f"working directory {settled.workdir}: {error.strerror}") from None
    return settled, identity


def _make_places(inside: RootPath) -> None:
    """The directories that something is mounted on. crun makes them too, but fails when two runs on one root do."""
    for place in bundle.PLACES:
        try:
            inside.make_directories(place)
        except OSError as error:
            text = f"nothing can be mounted at {place} of the image: {error.strerror}"
            raise NotStartedError(outcome.platform(text)) from None


def _accounts(inside: RootPath, path: str) -> bytes:
    """The file at `path`; nothing where the image has no such file, or something else in its place."""
    try:
        return inside.read(path, MAX_ACCOUNTS)
    except OSError:
        return b""


def _supervise(container: Container, document: bundle.Document, signals: Forwarding) -> Ending:
    """Create, start and await the container, with a console between it and us if it has a terminal."""
    with contextlib.ExitStack() as stack:
        console = None
        if document["process"]["terminal"]:
            console = stack.enter_context(Console(container.bundle / CONSOLE_SOCKET))
        pid = container.create(document, CONSOLE_SOCKET if console else None)
        if console:
            console.connect()
        signals.check()
        container.start()
        with signals.aimed_at(pid):
            if console:
                console.pump(signals)
            signals.wait(pid)
        return container.reap()


def _outcome(ending: Ending, inside: RootPath, program: str) -> Outcome:
    """What the kernel says of the init; where that never became the command, why not."""
    ended = outcome.of_wait_status(ending.status)
    if ending.executed or ended.kind == "signaled":
        return ended
    return executable.refusal(inside, program)
