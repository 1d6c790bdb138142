"""What the first command in an image reads, and what it takes to fetch that from a store.

The command is run once in a folder that holds the image, under chroot. An audit hook notes each file that the
interpreter opens; what is mapped at the end (programs, libraries) is read from /proc. Each file counts as read whole.
"""

from __future__ import annotations

import json
import subprocess
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from bench.cuts import Laid, Layer
from bench.measure import Failed, run

COMMAND: Final = "import numpy, pandas"

_SCRIPT: Final = f"""
import sys
opened = []
sys.addaudithook(lambda event, values: opened.append(values[0]) if event == "open" else None)
started = [module.__spec__.cached for module in list(sys.modules.values()) if getattr(module, "__spec__", None)]
{COMMAND}
import json
print(json.dumps([name for name in (*started, *opened) if isinstance(name, str)]), flush=True)
sys.stdin.read()
"""


@contextmanager
def unpacked(version: Iterable[Path], beside: Path) -> Iterator[Path]:
    """The files of an image in a folder, which is removed afterwards."""
    with TemporaryDirectory(prefix="unpacked-", dir=beside) as folder:
        for tar in version:
            run(["tar", "-x", "-C", folder, "-f", str(tar)])
        yield Path(folder).resolve()


def opened(version: Sequence[Path]) -> list[str]:
    """Paths of files in the image that COMMAND reads, in the order of first use; noted once and kept. Needs root."""
    noted = version[-1].with_suffix(".opened.json")
    if not noted.exists():
        with unpacked(version, noted.parent) as root:
            names = _run(root)
            paths = [str(real.relative_to(root)) for name in names if (real := _real(root, name))]
        noted.write_text(json.dumps(list(dict.fromkeys(paths))), encoding="utf-8")
    return list(json.loads(noted.read_text(encoding="utf-8")))


def _run(root: Path) -> list[str]:
    command = ["chroot", str(root), "/usr/bin/python3", "-c", _SCRIPT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        line = process.stdout.readline()
        maps = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8") if line else ""
        process.stdin.close()
    if process.returncode:
        raise Failed(f"python3 -c {COMMAND!r} in the image of the yardstick ended with {process.returncode}")
    mapped = [words[5] for words in (entry.split(maxsplit=5) for entry in maps.splitlines()) if len(words) == 6]
    inside = [name.removeprefix(str(root)) for name in mapped if name.startswith(f"{root}/")]
    return [*inside, *json.loads(line)]


def _real(root: Path, name: str) -> Path | None:
    """The regular file that `name` leads to, if there is one in the image: attempts count as opened too."""
    real = (root / name.lstrip("/")).resolve()
    return real if real.is_relative_to(root) and real.is_file() else None


@dataclass(frozen=True, slots=True)
class Fetched:
    """What reading some files whole takes when nothing is local; bytes."""

    files: int
    needed: int
    """Plain bytes of the files."""
    chunks: int
    size: int
    """Plain bytes of the chunks that hold them."""
    wire: int
    """Stored bytes of these chunks."""
    requests: int
    """If each file is fetched when it is wanted: runs of neighbouring chunks of it that are not there yet."""
    runs: int
    """If all is known beforehand: runs of neighbouring chunks."""


def fetch(paths: Iterable[str], layers: Sequence[tuple[Layer, Laid]]) -> Fetched:
    """`paths` in the order in which they are read; of the layers the last one that has a path counts."""
    ends = [laid.ends for _, laid in layers]
    sizes = [layer.sizes for layer, _ in layers]
    local: list[set[int]] = [set() for _ in layers]
    seen: set[bytes] = set()
    needed = requests = 0
    for path in paths:
        number = max((number for number, (layer, _) in enumerate(layers) if path in layer.digests), default=None)
        if number is None:
            continue  # an empty file
        layer, laid = layers[number]
        digest = layer.digests[path]
        if digest in seen:
            continue
        seen.add(digest)
        start, size = laid.starts[digest], sizes[number][digest]
        needed += size
        wanted = set(range(bisect_right(ends[number], start), bisect_right(ends[number], start + size - 1) + 1))
        requests += _runs(wanted - local[number])
        local[number] |= wanted
    pieces = [laid.pieces[chunk] for (_, laid), chunks in zip(layers, local, strict=True) for chunk in chunks]
    return Fetched(
        files=len(seen),
        needed=needed,
        chunks=len(pieces),
        size=sum(piece.size for piece in pieces),
        wire=sum(piece.stored for piece in pieces),
        requests=requests,
        runs=sum(map(_runs, local)),
    )


def _runs(chunks: set[int]) -> int:
    return sum(chunk - 1 not in chunks for chunk in chunks)
