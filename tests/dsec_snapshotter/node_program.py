"""The node of the tests, over a folder store, which does not answer while a file `stalled` is next to it.

python node_program.py ROOT STORE [ORPHANS [DAEMON ...]]

An orphan's id is appended to the file ORPHANS, `-` for none. DAEMON is a command line in place of the tests' own data
daemon.
"""

import logging
import os
import sys
import time
from pathlib import Path

from dsec_snapshotter.node import serve
from dsec_store.backends.folder import FolderBlobs
from dsec_store.errors import StoreError
from dsec_store.objects import Objects

DAEMON = Path(__file__).with_name("daemon_program.py")
_LOOK_EVERY = 0.02


class StallingBlobs(FolderBlobs):
    def get(self, key: str, limit: int | None = None) -> bytes:
        while Path(self.location.removeprefix("file://")).with_name("stalled").exists():
            time.sleep(_LOOK_EVERY)
        return super().get(key, limit)


def main(root: str, store: str, orphans: str = "-", *daemon: str) -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    argv = list(daemon) or [sys.executable, str(DAEMON), root, store]

    def on_orphan(id: str) -> None:
        if orphans != "-":
            with open(orphans, "a", encoding="utf-8") as out:
                out.write(f"{id}\n")

    objects = Objects(StallingBlobs(Path(store)))
    try:
        serve(Path(root), objects, objects.blobs.location, argv, on_orphan=on_orphan)
    except StoreError as error:
        print(error, flush=True)
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
