"""A program that reads one file again and again, never from the page cache, and checks what it gets.

python reader.py FILE SHA256        prints `ok` for each time; ends well when its standard input closes
"""

import hashlib
import os
import select
import sys

_BLOCK = 1 << 17


def digest_of(path: str) -> str:
    """The file's SHA-256; its pages are dropped afterwards."""
    digest = hashlib.sha256()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        while block := os.read(descriptor, _BLOCK):
            digest.update(block)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    return digest.hexdigest()


def main(path: str, expected: str) -> None:
    while not select.select([sys.stdin], [], [], 0)[0]:
        if digest_of(path) != expected:
            sys.exit(f"{path}: wrong bytes")
        print("ok", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
