"""What demo and benchmarks work on: everything real, made here from packages, and kept in `.demo/`.

Only the image and the toolkit take time to make; they are made once. `rm -rf .demo` forgets them.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent.parent
DEMO: Final = HERE / ".demo"
IMAGE: Final = DEMO / "image"
WORKSPACE: Final = DEMO / "workspace"
TOOLKIT: Final = DEMO / "toolkit"
TAG: Final = "v1"

_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PIP: Final = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", "--no-deps")


def make_image() -> None:
    """Debian's smallest system with Python and git, packed as an OCI layout."""
    if (IMAGE / "index.json").exists():
        return
    title("An OCI image: Debian with python3 and git, from packages (once; about half a minute)")
    DEMO.mkdir(exist_ok=True)
    tar, layout = DEMO / "base.tar", DEMO / "image.part"
    image = f"{layout}:{TAG}"
    shutil.rmtree(layout, ignore_errors=True)
    shell("mmdebstrap", "--quiet", "--variant=minbase", "--include=python3,git", "bookworm", str(tar))
    shell("umoci", "init", "--layout", str(layout))
    shell("umoci", "new", "--image", image)
    shell("umoci", "raw", "add-layer", "--image", image, str(tar))
    shell("umoci", "config", "--image", image, "--config.cmd", "python3", "--config.env", f"PATH={_PATH}")
    shell("umoci", "gc", "--layout", str(layout))
    tar.unlink()
    layout.rename(IMAGE)


def make_workspace() -> None:
    """This repository, as it was committed last."""
    shutil.rmtree(WORKSPACE, ignore_errors=True)
    WORKSPACE.mkdir(parents=True)
    archive = subprocess.run(["git", "-C", str(HERE), "archive", "HEAD"], check=True, stdout=subprocess.PIPE)
    subprocess.run(["tar", "-x", "-C", str(WORKSPACE)], input=archive.stdout, check=True)


def make_toolkit() -> None:
    """pytest in a folder of its own; its scripts find the sandbox's Python, and its bytecode is not compiled yet."""
    if (TOOLKIT / "bin/pytest").exists():
        return
    title("A toolkit: pytest, from the package index")
    DEMO.mkdir(exist_ok=True)
    part = DEMO / "toolkit.part"
    shutil.rmtree(part, ignore_errors=True)
    requirements = str(HERE / "requirements/toolkit.txt")
    shell(sys.executable, *_PIP, "--require-hashes", "--target", str(part), "-r", requirements)
    for script in (part / "bin").iterdir():
        first, _, rest = script.read_text().partition("\n")
        script.write_text(f"#!/usr/bin/env python3\n{rest}" if "python" in first else f"{first}\n{rest}")
    part.rename(TOOLKIT)


def title(text: str) -> None:
    print(f"\n== {text}", flush=True)


def shell(*command: str) -> None:
    print(f"$ {shlex.join(command)}", flush=True)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
