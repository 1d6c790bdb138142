"""The holder: a tiny process that keeps file descriptors for others, which may die and start anew.

Problem: when the last descriptor of /dev/fuse closes, the kernel aborts the connection for good, and every mount above
it is lost. So somebody must own one who never crashes. Choice: a process that does nothing else, imports a few modules
of the standard library and nothing of ours, holds no lock and no thread, and asks nobody anything. Cost: 5 MiB of
private memory, and no change of this file reaches a node before all its mounts are gone.

`dsec_store.fdholder` starts it and talks to it. It is run as a program, `python -I -S fdholder_main.py FD`, where FD is
an inherited listening unix socket, so that the length of its path does not matter.

A conversation is one frame there and one frame back, on a connection of its own. A frame is a verb, a name and a state,
and may carry one descriptor (SCM_RIGHTS, unix(7)) with its first byte:

    PUT  name state fd -> OK               keep both under the name, in place of what was there
    GET  name          -> OK state fd      NONE when nothing is kept under the name
    DROP name          -> OK               close it; also OK when there is none
    LIST               -> OK state         the names, one a line
    PING               -> OK state         the holder's process id
    QUIT               -> OK               close everything and end

It ends on QUIT and SIGTERM. Other signals that a terminal or a broken peer causes are ignored.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
from contextlib import suppress
from typing import NamedTuple

_HEADER = struct.Struct("=4sII")
"""Verb, bytes of the name, bytes of the state. Both ends are processes of one machine."""

_FD = struct.Struct("=i")

MAX_NAME = 255
MAX_STATE = 1 << 16
"""Bytes. A state is a few hundred; more is a peer that speaks something else."""

PEER_TIMEOUT = 5.0
"""Seconds that a peer may take over its one frame: the next one waits for it."""

OOM_SCORE = "-900"
"""The kernel's out-of-memory killer should take nearly everybody else first: nothing can replace this process."""


class Frame(NamedTuple):
    """One message. `fd` is -1 when none came with it; who receives a frame owns its descriptor."""

    verb: str
    name: str = ""
    state: bytes = b""
    fd: int = -1


def send(connection: socket.socket, frame: Frame) -> None:
    name = frame.name.encode()
    message = _HEADER.pack(frame.verb.encode(), len(name), len(frame.state)) + name + frame.state
    sent = socket.send_fds(connection, [message], [] if frame.fd < 0 else [frame.fd])
    if sent < len(message):  # sending nothing would fail, once the peer has answered and closed
        connection.sendall(message[sent:])


def receive(connection: socket.socket) -> Frame:
    """The next frame. Raises OSError when the peer goes away, falls silent or sends something else."""
    space = socket.CMSG_SPACE(_FD.size)  # for one: the kernel closes what does not fit
    header, ancillary, _, _ = connection.recvmsg(_HEADER.size, space, socket.MSG_CMSG_CLOEXEC)
    (fd,) = _FD.unpack(ancillary[0][2]) if ancillary else (-1,)
    try:
        header += _exactly(connection, _HEADER.size - len(header))
        verb, name_size, state_size = _HEADER.unpack(header)
        if name_size > MAX_NAME or state_size > MAX_STATE:
            raise ConnectionError("not a frame: its parts are too long")
        body = _exactly(connection, name_size + state_size)
        return Frame(verb.rstrip(b"\0").decode(), body[:name_size].decode(), body[name_size:], fd)
    except (OSError, ValueError) as error:
        if fd >= 0:
            os.close(fd)
        raise ConnectionError(f"no frame: {error}") from error


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionError("the peer closed in the middle of a frame")
        data += more
    return data


def answer(request: Frame, kept: dict[str, tuple[int, bytes]]) -> Frame:
    """Do what `request` asks. Takes over its descriptor; the one in the answer stays ours."""
    if request.verb == "PUT" and request.fd >= 0:
        old, _ = kept.get(request.name, (-1, b""))
        kept[request.name] = (request.fd, request.state)
        _close(old)
        return Frame("OK")
    _close(request.fd)
    if request.verb == "GET":
        fd, state = kept.get(request.name, (-1, b""))
        return Frame("OK", request.name, state, fd) if fd >= 0 else Frame("NONE")
    if request.verb == "DROP":
        _close(kept.pop(request.name, (-1, b""))[0])
        return Frame("OK")
    if request.verb == "LIST":
        return Frame("OK", state="\n".join(sorted(kept)).encode())
    if request.verb in ("PING", "QUIT"):
        return Frame("OK", state=str(os.getpid()).encode())
    return Frame("BAD")


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)


def hold(listener: socket.socket) -> None:
    """Serve one peer after another until one says QUIT."""
    kept: dict[str, tuple[int, bytes]] = {}
    verb = ""
    while verb != "QUIT":
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            connection.settimeout(PEER_TIMEOUT)
            request = receive(connection)
            verb = request.verb
            send(connection, answer(request, kept))


def _detach() -> None:
    """Become nobody's child in a session of its own, so that no parent has to wait for it and no terminal ends it."""
    if os.fork():
        os._exit(0)
    os.setsid()
    os.chdir("/")
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGPIPE, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # lowering it may need CAP_SYS_RESOURCE
        file.write(OOM_SCORE)


if __name__ == "__main__":
    _detach()
    hold(socket.socket(fileno=int(sys.argv[1])))
