"""Starts the holder, and hands it file descriptors to keep across the death of their owner.

    holder = Holder.spawn(root / "holder.sock")     # once; it outlives us
    holder.put("blobs/0", fd, b"")                  # from now on our death does not close what fd stands for
    fd, state = Holder(root / "holder.sock").get("blobs/0")         # any later process: the same open file

The program itself, and what it promises, is `dsec_store.fdholder_main`.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec_store import ipc
from dsec_store.errors import Invalid, NotFound, Unavailable
from dsec_store.fdholder_main import MAX_NAME, MAX_STATE, PEER_TIMEOUT, Frame, receive, send

_PROGRAM: Final = Path(__file__).with_name("fdholder_main.py")
_TIMEOUT: Final = 2 * PEER_TIMEOUT
"""Seconds: a peer before us may use up its whole time, and then it is our turn."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder that listens at `path`. Every method raises `Unavailable` when none does."""

    path: Path

    @classmethod
    def spawn(cls, path: Path) -> Holder:
        """Start a holder at `path`, detached from this process. On return it can be asked.

        The caller makes sure that none is there (`running`): a second one would take over the path, and the first,
        unreachable, would keep its descriptors open for ever.
        """
        with ipc.listen(path) as listener:
            fd = listener.fileno()
            program = [sys.executable, "-I", "-S", str(_PROGRAM), str(fd)]
            null = subprocess.DEVNULL
            subprocess.run(program, pass_fds=[fd], stdin=null, stdout=null, stderr=null, check=True)
        return cls(path)

    def running(self) -> bool:
        try:
            return self.pid() > 0
        except Unavailable:
            return False

    def pid(self) -> int:
        return int(self._ask(Frame("PING")).state)

    def put(self, name: str, fd: int, state: bytes) -> None:
        """Keep a duplicate of `fd` and `state` under `name`, in place of what was there. `fd` stays the caller's."""
        if not name or "\n" in name or len(name.encode()) > MAX_NAME or len(state) > MAX_STATE:
            raise Invalid(f"the holder cannot keep {len(state)} bytes under the name {name!r}")
        self._ask(Frame("PUT", name, state, fd))

    def get(self, name: str) -> tuple[int, bytes]:
        """A descriptor of the same open file, which the caller owns, and the state. `NotFound` when there is none."""
        found = self._ask(Frame("GET", name))
        if found.verb != "OK":
            raise NotFound(f"the holder keeps nothing under the name {name!r}")
        return found.fd, found.state

    def drop(self, name: str) -> None:
        """Close what is kept under `name`, if anything is."""
        self._ask(Frame("DROP", name))

    def names(self) -> list[str]:
        return self._ask(Frame("LIST")).state.decode().splitlines()

    def quit(self) -> None:
        """Close everything that is kept, and end the holder. Its socket file goes too."""
        self._ask(Frame("QUIT"))
        self.path.unlink(missing_ok=True)

    def _ask(self, request: Frame) -> Frame:
        try:
            with ipc.connect(self.path, _TIMEOUT) as connection:
                send(connection, request)
                reply = receive(connection)
        except OSError as error:
            raise Unavailable(f"no holder answers at {self.path.name}: {error}") from error
        if reply.verb == "BAD":
            raise Invalid(f"the holder does not know {request.verb}: it is of another release")
        return reply
