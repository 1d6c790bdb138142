"""OpenStack Swift's four servers under one process; run by the system's Python, which has the package `python3-swift`.

    /usr/bin/python3 swift_servers.py FOLDER PROXY_PORT ACCOUNT_PORT CONTAINER_PORT OBJECT_PORT < pipe

Swift expects rings (which disk holds what), one configuration a server, and /etc/swift/swift.conf. All of it is written
into FOLDER instead, for one disk and one copy; and the memcached that its proxies share is replaced by a dictionary.
Swift is imported once, then forked: starting takes a second, not four.

Everything ends when standard input closes, on SIGTERM, or when one of the servers ends.
"""

from __future__ import annotations

import ctypes
import math
import os
import select
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from time import monotonic
from typing import Any, Final

from swift.common import utils  # type: ignore[import-not-found]
from swift.common.ring import RingBuilder  # type: ignore[import-not-found]
from swift.common.wsgi import run_wsgi  # type: ignore[import-not-found]

ADDRESS: Final = "127.0.0.1"
ACCOUNT: Final = "test"
USER: Final = "tester"
KEY: Final = "testing"
Application = Callable[[dict[str, Any], Callable[..., object]], Iterable[bytes]]
"""A WSGI application."""

ROLES: Final = ("proxy", "account", "container", "object")

_READ_TRIES: Final = 3
_PR_SET_PDEATHSIG: Final = 1

_SWIFT_CONF: Final = """
[swift-hash]
swift_hash_path_suffix = any
"""

_COMMON: Final = """
[DEFAULT]
bind_ip = {address}
bind_port = {port}
bind_timeout = 3
user = root
workers = 0
swift_dir = {folder}
devices = {folder}/disks
mount_check = false
fallocate_reserve = 0
disable_fallocate = true
log_level = WARNING
"""

_STORAGE_SERVER: Final = """
[pipeline:main]
pipeline = retry {role}-server
[filter:retry]
paste.filter_factory = swift_servers:retry_filter
[app:{role}-server]
use = egg:swift#{role}
"""

# Larger pieces than the 64 KiB of the defaults save switches between proxy and object server. Listings come in pages of
# 100 instead of 1,000, so that a test of paging needs fewer objects.
_PROXY: Final = """
[pipeline:main]
pipeline = catch_errors gatekeeper healthcheck cache listing_formats s3api tempauth copy slo dlo proxy-server
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:gatekeeper]
use = egg:swift#gatekeeper
[filter:healthcheck]
use = egg:swift#healthcheck
[filter:cache]
paste.filter_factory = swift_servers:cache_filter
[filter:listing_formats]
use = egg:swift#listing_formats
[filter:s3api]
use = egg:swift#s3api
max_bucket_listing = 100
[filter:tempauth]
use = egg:swift#tempauth
user_{account}_{user} = {key} .admin
[filter:copy]
use = egg:swift#copy
[filter:slo]
use = egg:swift#slo
[filter:dlo]
use = egg:swift#dlo
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
client_chunk_size = 1048576
object_chunk_size = 1048576
"""


class Cache:
    """As much of a memcached client as Swift uses. There is one proxy process, so a dictionary in it will do."""

    def __init__(self) -> None:
        self._values: dict[str, tuple[Any, float]] = {}

    def get(self, key: str, **_: object) -> Any:
        value, end = self._values.get(key, (None, math.inf))
        return value if monotonic() < end else None

    def set(self, key: str, value: Any, time: float = 0, **_: object) -> None:
        self._values[key] = value, (monotonic() + time if time else math.inf)

    def delete(self, key: str, **_: object) -> None:
        self._values.pop(key, None)


def cache_filter(_global_conf: object, **_: object) -> Callable[[Application], Application]:
    """Middleware that hands the cache to the others; made by paste.deploy from the configuration."""
    cache = Cache()

    def around(application: Application) -> Application:
        def serve(environ: dict[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
            environ["swift.cache"] = cache
            return application(environ, start_response)

        return serve

    return around


def retry_filter(_global_conf: object, **_: object) -> Callable[[Application], Application]:
    """Middleware of the storage servers that looks again for what it does not find.

    Swift lists an object's folder, then opens the newest file in it. An overwrite in between removes that file: 404 for
    an object that was there all the time. With three copies the proxy asks another one; with one, the same again.
    """

    def around(application: Application) -> Application:
        def serve(environ: dict[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
            tries = _READ_TRIES if environ["REQUEST_METHOD"] in ("GET", "HEAD") else 1
            while True:
                tries -= 1
                begun: list[tuple[Any, ...]] = []
                body = application(dict(environ), lambda *answer, begun=begun: begun.append(answer))
                if tries == 0 or not begun[0][0].startswith("404"):
                    start_response(*begun[0])
                    return body

        return serve

    return around


def write_configuration(folder: Path, ports: dict[str, int]) -> None:
    """Everything that the servers read, in `folder`."""
    (folder / "disks" / "d1").mkdir(parents=True, exist_ok=True)
    (folder / "swift.conf").write_text(_SWIFT_CONF)
    for role, port in ports.items():
        names = {"address": ADDRESS, "folder": folder, "port": port, "role": role}
        names |= {"account": ACCOUNT, "user": USER, "key": KEY}
        text = _COMMON + (_PROXY if role == "proxy" else _STORAGE_SERVER)
        (folder / f"{role}.conf").write_text(text.format(**names))
        if role != "proxy":
            _write_ring(folder / f"{role}.ring.gz", port)


def _write_ring(path: Path, port: int) -> None:
    """A ring of one partition, one replica, one device."""
    builder = RingBuilder(part_power=0, replicas=1, min_part_hours=0)
    device = {"id": 0, "region": 1, "zone": 1, "weight": 1.0, "device": "d1", "meta": ""}
    device |= {"ip": ADDRESS, "port": port, "replication_ip": ADDRESS, "replication_port": port}
    builder.add_dev(device)
    builder.rebalance()
    builder.get_ring().save(str(path))


def _serve(role: str, folder: Path) -> Any:
    """Run one server until it is killed."""
    options: dict[str, Any] = {"verbose": True}  # the log goes to standard error
    if role == "object":
        from swift.obj import server  # type: ignore[import-not-found]

        options["global_conf_callback"] = server.global_conf_callback
    return run_wsgi(str(folder / f"{role}.conf"), f"{role}-server", **options)


def _fork(task: Callable[[], Any]) -> int:
    """The id of a child that runs `task` and dies with this process."""
    parent = os.getpid()
    if pid := os.fork():
        return pid
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        if os.getppid() == parent:
            task()
    finally:
        os._exit(1)


def _wait(pids: list[int]) -> None:
    """Until standard input closes or one of `pids` has ended."""
    watched = [os.pidfd_open(pid) for pid in pids]
    while True:
        ready, _, _ = select.select([sys.stdin, *watched], [], [])
        if ready != [sys.stdin] or not os.read(sys.stdin.fileno(), 1):
            return


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    ports = dict(zip(ROLES, map(int, sys.argv[2:]), strict=True))
    write_configuration(folder, ports)
    utils.set_swift_dir(str(folder))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    pids = [_fork(lambda role=role: _serve(role, folder)) for role in ROLES]  # type: ignore[misc]
    try:
        _wait(pids)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
