"""Memory that is freed is used again, without asking the kernel."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

PROGRAM = """
import resource, threading
from dsec_store.allocator import keep_freed
keep_freed()

def answer(rounds):
    chunks = [bytes(1 << 16)] * 17
    for _ in range(rounds):
        at_once = [b"".join(chunks)[100 : 100 + (1 << 20)] for _ in range(8)]

def work():
    answer(10)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    answer(100)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this C library has no mallopt")
def test_answers_reuse_the_memory_of_earlier_ones() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True)
    assert int(done.stdout) < 100, "page faults of 800 answers; thousands where freed memory goes back to the kernel"
