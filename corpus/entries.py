"""A layer of a million entries: memory grows by a kilobyte or two for each, and no more."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from corpus.report import Result
from tests import tarmaker as tar

COUNT: Final = 1_000_000
MEMORY: Final = COUNT * 2048 + (512 << 20)
"""Bytes of resident memory."""

_ENVIRONMENT: Final = {**os.environ, "PYTHONHASHSEED": "0"}


def check() -> list[Result]:
    result = Result("large", f"a layer of {COUNT:,} files, in at most {MEMORY >> 20} MiB")
    again = "python -m corpus entries"
    with tempfile.TemporaryDirectory(prefix="dsec-corpus-") as name:
        folder = Path(name)
        with (folder / "layer.tar").open("wb") as file:
            file.writelines(_archive())
        command = [sys.executable, "-m", "dsec_cli.image", "build", str(folder / "layer.tar"), "large"]
        command += ["--kind", "base", "--store", f"file://{folder}/store"]
        with (folder / "errors").open("wb") as errors:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, env=_ENVIRONMENT)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        wrong = (folder / "errors").read_text() if process.returncode else ""
        memory = usage.ru_maxrss << 10
        result.check("a million files", wrong or (f"{memory} bytes of memory" if memory > MEMORY else ""), again)
        print(f"corpus: {memory >> 20} MiB for {COUNT:,} files", file=sys.stderr)
    return [result]


def _archive() -> Iterator[bytes]:
    for number in range(COUNT):
        yield tar.file(b"%d/%d/%d" % (number % 100, number % 10_000, number), b"%d" % number)
    yield tar.END
