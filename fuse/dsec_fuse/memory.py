"""What the C library does with memory that the daemon frees.

Problem: an answer of 1 MiB is put together from buffers that live for a millisecond. By default glibc gives such memory
back to the kernel at once, and gets it again a page at a time: 300 faults per MiB, a third of what a read from the node
cache costs. Choice: it keeps what is freed, and all threads share it. Cost: up to KEPT bytes that are not in use; yet
the daemon is smaller than by default (62 instead of 87 MiB resident), where each thread keeps memory of its own.

Source: mallopt(3).
"""

from __future__ import annotations

import ctypes
from typing import Final

KEPT: Final = 64 << 20
"""Freed bytes that are kept for the next answers: more than 16 threads have in use at once."""

LARGEST: Final = 32 << 20
"""Buffers of up to this many bytes come out of what was kept; the most that glibc accepts."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8


def keep_freed() -> None:
    """For this process, from now on; before it starts threads. Does nothing with a C library that cannot."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for setting, value in ((_TRIM_THRESHOLD, KEPT), (_MMAP_THRESHOLD, LARGEST), (_ARENA_MAX, 1)):
            mallopt(setting, value)
