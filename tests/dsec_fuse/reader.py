"""Reads random ranges of FILE until its standard input ends, and compares each with ORIGINAL. Tells how many it read.

python reader.py FILE ORIGINAL cached|direct
"""

import mmap
import os
import random
import select
import sys

BLOCK = 4096
LARGEST = 2 << 20


def main(path: str, original_path: str, how: str) -> None:
    flags = os.O_RDONLY | (os.O_DIRECT if how == "direct" else 0)
    fd = os.open(path, flags)
    with open(original_path, "rb") as file:
        original = file.read()
    buffer = memoryview(mmap.mmap(-1, LARGEST))
    reads = 0
    while not select.select([0], [], [], 0)[0]:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        offset = random.randrange(0, len(original), BLOCK)
        length = random.randrange(BLOCK, LARGEST + 1, BLOCK)
        size = os.preadv(fd, [buffer[:length]], offset)
        if buffer[:size] != original[offset : offset + length]:
            sys.exit(f"wrong bytes at {offset}, {size} of {length}")
        reads += 1
    print(reads)


if __name__ == "__main__":
    main(*sys.argv[1:])
