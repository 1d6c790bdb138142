"""A data daemon whose blobs are the files of a folder: what the tests kill and start anew.

python -m tests.dsec_fuse.folder_daemon FOLDER HOLDER SLOT CONTROL SECONDS-PER-READ
"""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from dsec_fuse.daemon import serve
from dsec_store.errors import NotFound


@dataclass(frozen=True)
class FileBlob:
    path: Path
    delay: float

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    def read(self, offset: int, length: int) -> bytes:
        time.sleep(self.delay)
        with self.path.open("rb") as file:
            return os.pread(file.fileno(), length, offset)

    def cached(self, offset: int, length: int) -> bytes | None:
        return None


@dataclass(frozen=True)
class FolderBlobs:
    """`<folder>/<hex>.blob`."""

    folder: Path
    delay: float = 0.0

    def open(self, hex: str) -> FileBlob:
        path = self.folder / f"{hex}.blob"
        if not path.exists():
            raise NotFound(f"no blob {hex}")
        return FileBlob(path, self.delay)

    def at_hand(self, hex: str) -> FileBlob:
        return self.open(hex)

    def names(self) -> list[str]:
        return sorted(path.stem for path in self.folder.glob("*.blob"))


def main(folder: str, holder: str, slot: str, control: str, delay: str) -> None:
    blobs = FolderBlobs(Path(folder), float(delay))
    ending = serve(blobs, holder=Path(holder), slot=slot, control=Path(control), stats=lambda: {"blobs": blobs.names()})
    print(ending.value, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
