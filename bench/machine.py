"""What a result depends on: kernel, processor, memory, and the versions of what took part."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path


def facts() -> dict[str, str]:
    return {
        "kernel": platform.release(),
        "processors": f"{len(os.sched_getaffinity(0))} x {_processor()}",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / (1 << 30):.0f} GiB",
        "load before": f"{os.getloadavg()[0]:.1f}",
        "dsec": version("dsec-platform"),
        "Python": platform.python_version(),
        "crun": _program("crun"),
        "umoci": _program("umoci"),
    }


def _processor() -> str:
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return " ".join(found[1].split()) if found else platform.machine()


def _program(name: str) -> str:
    """The version that a program tells of itself."""
    if shutil.which(name) is None:
        return "none"
    said = subprocess.run([name, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"\d+\.\d+[\w.~+-]*", said)
    return found[0] if found else "unknown"
