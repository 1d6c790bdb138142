"""What the C library does with memory that a process frees.

Problem: buffers of a MiB or so, which live for a moment and wander between threads. By default glibc gives such memory
back to the kernel at once, and gets it again a page at a time: 300 faults per MiB, a third of what a read from the node
cache costs. And each thread has an arena of its own, whose holes are no use to another: a build of 1.2 GiB came to
350 MiB. Choice: what is freed is kept, and all threads share it. Cost: up to KEPT bytes that are not in use; yet
processes are smaller so than by default: the data daemon 62 instead of 87 MiB resident, that build 285 MiB.

Source: mallopt(3).
"""

from __future__ import annotations

import ctypes
from typing import Final

KEPT: Final = 64 << 20
"""Freed bytes that are kept: more than the daemon's 16 threads have in use at once."""

LARGEST: Final = 32 << 20
"""Buffers of up to this many bytes come out of what was kept; the most that glibc accepts."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8


def keep_freed() -> None:
    """For this process, from now on; before it starts threads. Does nothing with a C library that cannot."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for setting, value in ((_TRIM_THRESHOLD, KEPT), (_MMAP_THRESHOLD, LARGEST), (_ARENA_MAX, 1)):
            mallopt(setting, value)
