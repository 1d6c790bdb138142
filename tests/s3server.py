"""A real S3 server for tests, the demo and the benchmarks: OpenStack Swift behind its s3api, on loopback.

A mock answers what its author thought of. Swift is a server that people run, with signatures checked, listings in pages
and its own opinions (`docs/format/store-backends.md`), and it comes as one Debian package, `python3-swift`.

    with S3Server() as server:                        # about two seconds
        store = open_store(server.url, environment=server.environment)

    python -m tests.s3server [FOLDER]                 # prints `export NAME=VALUE` lines and serves

until standard input closes or SIGTERM comes. Blobs lie in a private folder that is removed at the end, unless one is
given.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from datetime import timedelta
from http import HTTPStatus
from pathlib import Path
from typing import Final, Self

import obstore
from obstore.store import S3Store

ADDRESS: Final = "127.0.0.1"
REGION: Final = "us-east-1"
ACCESS_KEY: Final = "test:tester"
SECRET_KEY: Final = "testing"
BUCKET: Final = "dsec"

PYTHON: Final = Path("/usr/bin/python3")
"""The system's interpreter: Debian's packages belong to it."""

START_SECONDS: Final = 30.0
"""How long a start may take on a loaded machine."""

_POLL_SECONDS: Final = 0.05
_STOP_SECONDS: Final = 10.0
_SERVERS: Final = Path(__file__).with_name("swift_servers.py")


def lacking() -> str | None:
    """What this machine lacks to run the server, or None."""
    found = PYTHON.exists() and any(Path("/usr/lib/python3/dist-packages").glob("swift/common/wsgi.py"))
    return (
        None if found else "no S3 server: the package python3-swift is not installed (scripts/setup test installs it)"
    )


class S3Server:
    """The running server; a context manager. `stop` and a second `start` keep the blobs and the address."""

    def __init__(self, folder: Path | None = None) -> None:
        self._private = None if folder else tempfile.TemporaryDirectory(prefix="dsec-s3-")
        self.folder = folder or Path(self._private.name if self._private else "")
        self._ports = _free_ports(4)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://{ADDRESS}:{self._ports[0]}"

    @property
    def url(self) -> str:
        """Of a bucket that exists."""
        return f"s3://{BUCKET}"

    @property
    def environment(self) -> Mapping[str, str]:
        """The usual variables with which any S3 client finds this server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": REGION,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        }

    def start(self) -> Self:
        """Return when the server answers and the bucket exists."""
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [str(PYTHON), "-W", "ignore", str(_SERVERS), str(self.folder), *map(str, self._ports)]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env={})
        try:
            self._wait_ready()
            self.create_bucket(BUCKET)
        except BaseException:
            self.close()
            raise
        return self

    def stop(self) -> None:
        """End the server's processes; they are gone on return."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its children die with it
            self._process.wait()
        self._process = None

    def close(self) -> None:
        """`stop`, and remove the blobs if the folder is our own."""
        self.stop()
        if self._private is not None:
            self._private.cleanup()

    def create_bucket(self, name: str) -> None:
        """Make a bucket; one that exists is no error. obstore makes none, so it only signs the request."""
        store = S3Store(
            name,
            endpoint=self.endpoint,
            region=REGION,
            access_key_id=ACCESS_KEY,
            secret_access_key=SECRET_KEY,
            client_options={"allow_http": True},
        )
        url = obstore.sign(store, "PUT", "", timedelta(minutes=1))
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=START_SECONDS).close()
        except urllib.error.HTTPError as error:
            with error:
                if error.code != HTTPStatus.CONFLICT:  # it exists
                    raise

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not all(_answers(port) for port in self._ports):
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the S3 server did not start:\n{(self.folder / 'log').read_text()[-4000:]}")
            time.sleep(_POLL_SECONDS)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on; all are held until all are known, so they differ."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((ADDRESS, 0))
        return [each.getsockname()[1] for each in sockets]


def _answers(port: int) -> bool:
    """Whether an HTTP server at `port` answers anything."""
    connection = http.client.HTTPConnection(ADDRESS, port, timeout=_POLL_SECONDS * 20)
    try:
        connection.request("GET", "/healthcheck")
        connection.getresponse().read()
    except OSError:
        return False
    finally:
        connection.close()
    return True


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    with S3Server(Path(sys.argv[1]) if len(sys.argv) > 1 else None) as server:
        for name, value in server.environment.items():
            print(f"export {name}={value}")
        print(f"export DSEC_TEST_STORE={server.url}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            while os.read(sys.stdin.fileno(), 4096):
                pass


if __name__ == "__main__":
    main()
