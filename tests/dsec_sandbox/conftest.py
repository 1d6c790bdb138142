"""A box to run commands in, which must be empty again after each test."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dsec_sandbox.box import Box, lacking


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    if reason := lacking():
        pytest.skip(reason)
    box = Box(tmp_path)
    yield box
    left = box.left()
    box.clear()
    assert left == []


@pytest.fixture(autouse=True)
def usual_signals() -> Iterator[None]:
    """A test run in the background ignores what its tests send."""
    former = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGHUP, signal.SIGQUIT)}
    former[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in former.items():
        signal.signal(number, handler)
