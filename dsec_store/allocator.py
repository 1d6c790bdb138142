"""What the C library does with memory that a process frees. Call before threads start; without glibc, nothing happens.

By default glibc learns from what is freed: buffers of some MiB come out of arenas, of which each thread has one, and
what is free in one arena is no use to another. Two kinds of process fare badly with that.

* The data daemon puts answers of 1 MiB together from buffers that live for a millisecond; its memory goes back to the
  kernel, and comes again a page at a time: 300 faults per MiB, a third of what a read from the node cache costs.
  `keep_freed`: it keeps what is freed, and all threads share it. Cost: up to KEPT bytes that are not in use; yet it is
  smaller than by default (62 instead of 87 MiB resident).
* A build hands windows, chunks and packs from thread to thread, and its arenas fill with holes: 350 MiB for an image of
  1.2 GiB. `return_large`: large buffers are mapped by themselves, and go when they are freed: 205 MiB. Cost: some 5 %
  of the CPU.

Source: mallopt(3).
"""

from __future__ import annotations

import ctypes
from typing import Final

KEPT: Final = 64 << 20
"""Freed bytes that the daemon keeps for the next answers: more than 16 threads have in use at once."""

LARGEST: Final = 32 << 20
"""Buffers of up to this many bytes come out of what was kept; the most that glibc accepts."""

LARGE: Final = 128 << 10
"""Buffers of so many bytes are mapped by themselves in a build: windows, packs, what comes out of a decompressor."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8


def keep_freed() -> None:
    """For processes with many short-lived buffers of like size."""
    _set((_TRIM_THRESHOLD, KEPT), (_MMAP_THRESHOLD, LARGEST), (_ARENA_MAX, 1))


def return_large() -> None:
    """For processes whose large buffers wander between threads."""
    _set((_MMAP_THRESHOLD, LARGE))


def _set(*settings: tuple[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for setting, value in settings:
            mallopt(setting, value)
