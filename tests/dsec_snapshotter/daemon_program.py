"""The data daemon of the tests: chunks of a folder store, without a cache.

python daemon_program.py ROOT STORE
"""

import os
import sys
from pathlib import Path

from dsec_fuse.daemon import serve
from dsec_snapshotter import root as names
from dsec_store.backends.folder import FolderBlobs
from dsec_store.chunks import ChunkSource, NoCache
from dsec_store.layerfiles import LayerFiles, NodeBlobs
from dsec_store.objects import Objects


def main(root: Path, store: Path) -> None:
    objects = Objects(FolderBlobs(store))
    blobs = NodeBlobs(LayerFiles(root), objects, ChunkSource(objects.blobs, NoCache()))
    serve(blobs, holder=root / names.HOLDER_SOCKET, slot=names.HOLDER_SLOT, control=root / names.DAEMON_SOCKET)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
