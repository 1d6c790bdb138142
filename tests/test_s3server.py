"""The test's own S3 server: what rides on its being down, and that it ends with whoever started it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from dsec_store.errors import Unavailable
from dsec_store.locate import open_store
from dsec_store.retry import RetryBlobs
from tests.s3server import S3Server, lacking

pytestmark = [pytest.mark.component, pytest.mark.skipif(lacking() is not None, reason=str(lacking()))]

ROOT = Path(__file__).parents[1]
GONE_WITHIN = 10.0
"""Seconds."""


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[S3Server]:
    """A server that a test may stop."""
    with S3Server(tmp_path) as server:
        yield server


def processes_naming(text: str) -> list[str]:
    """Command lines of running processes that contain `text`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.append(path.read_bytes().replace(b"\0", b" ").decode())
    return [line for line in found if text in line]


def await_end_of(text: str) -> None:
    deadline = time.monotonic() + GONE_WITHIN
    while (left := processes_naming(text)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


def test_blobs_outlive_an_outage_and_retries_ride_over_it(own_server: S3Server) -> None:
    store = open_store(own_server.url, environment=own_server.environment)
    store.put("refs/demo", b"1")
    own_server.stop()
    with pytest.raises(Unavailable):
        store.get("refs/demo")

    def restart(_: float) -> None:
        own_server.start()

    assert RetryBlobs(store, sleep=restart).get("refs/demo") == b"1"


@pytest.mark.parametrize("end", ["stdin closes", "SIGTERM", "SIGKILL"])
def test_the_module_serves_until_it_is_ended_and_leaves_no_process(tmp_path: Path, end: str) -> None:
    command = [sys.executable, "-m", "tests.s3server", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        exported = dict(process.stdout.readline().removeprefix("export ").strip().split("=", 1) for _ in range(5))
        store = open_store(exported["DSEC_TEST_STORE"], environment=exported)
        store.put("a", b"1")
        assert store.get("a") == b"1"
        if end == "stdin closes":
            process.stdin.close()
        else:
            process.send_signal(signal.Signals[end])
    await_end_of(str(tmp_path))


def test_a_server_that_cannot_start_says_why_and_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "disks").write_text("in the way")
    with pytest.raises(RuntimeError, match=r"(?s)did not start:\n.*NotADirectoryError"):
        S3Server(tmp_path).start()
    await_end_of(str(tmp_path))
