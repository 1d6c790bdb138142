"""The images that the flow tests run in: a small one of busybox with some configurations, and a real Debian."""

import io
import os
import random
import shutil
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.dsec_sandbox.box import make_root
from tests.flows.world import World
from tests.ocimaker import Json, Layer, LayoutMaker, tar_of, write_layout

CONFIGS: Final[Mapping[str, Json]] = {
    "plain": {"Cmd": ["echo", "the image's own"]},
    "entry": {"Entrypoint": ["echo", "entry"], "Cmd": ["cmd"]},
    "configured": {
        "Env": ["PATH=/bin", "FROM=image", "ONLY=image"],
        "WorkingDir": "/srv/app",
        "User": "worker",
        "Cmd": ["sh", "-c", "echo $FROM $ONLY $HOME; pwd; id -u; id -g"],
    },
}
"""By tag."""

WORKSPACE: Final = {"README": b"the workspace\n", "src/main": b"echo main\n"}
TOOLS: Final = {"bin/greet": b"#!/bin/sh\necho tools $FROM\n", "lib/module": b"module\n"}
MORE: Final = {"bin/greet": b"#!/bin/sh\necho more $FROM\n"}
PARTS: Final = {"work": WORKSPACE, "tools": TOOLS, "more": MORE}

BIG_FILES: Final = 4
BIG_SIZE: Final = 20 << 20
"""Bytes of each big file: dozens of chunks, several packs."""

_DEBIAN_TOOLS: Final = ("mmdebstrap", "umoci")
_DEBIAN_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def make_layout(folder: Path) -> Path:
    """An OCI layout whose tags are those of CONFIGS; every image has busybox and one file more."""
    make_root(folder / "root")
    maker = LayoutMaker(folder / "layout")
    layers = [tar_of_folder(folder / "root"), tar_of({"etc/motd": b"welcome\n"})]
    for tag, config in CONFIGS.items():
        maker.add(maker.image(layers, config=config), tag=tag)
    shutil.rmtree(folder / "root")
    return maker.path


def make_folder(path: Path, files: Mapping[str, bytes]) -> Path:
    """A new folder with these files; what begins like a script is executable. All times are 2001."""
    for name, data in files.items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        file.chmod(0o755 if data.startswith(b"#!") else 0o644)
    for each in (path, *path.rglob("*")):
        os.utime(each, (10**9, 10**9))
    return path


def make_big_layout(folder: Path) -> Path:
    """An OCI layout with one image: busybox and the big files."""
    make_root(folder / "root")
    layers = [Layer(tar_of_folder(folder / "root")), Layer(tar_of(big_files()), "plain")]
    shutil.rmtree(folder / "root")
    return write_layout(folder / "layout", layers).path


def big_files() -> dict[str, bytes]:
    """Files that do not compress, the same at each call."""
    return {f"big{number}": random.Random(number).randbytes(BIG_SIZE) for number in range(BIG_FILES)}


def build_parts(world: World) -> None:
    """A workspace and two toolkits."""
    folders = {name: make_folder(world.folder / name, files) for name, files in PARTS.items()}
    build = ("dsec-image", "build")
    world.ok(*build, str(folders["work"]), "work", "--kind", "workspace", "--prefix", "/testbed", "--env", "FROM=work")
    for name in ("tools", "more"):
        place = f"/opt/{name}"
        options = ("--kind", "toolkit", "--prefix", place, "--path", f"{place}/bin", "--env", f"FROM={name}")
        world.ok(*build, str(folders[name]), name, *options)


def tar_of_folder(folder: Path) -> bytes:
    """The folder's content as a layer, owned by root."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(folder.rglob("*")):
            tar.add(path, str(path.relative_to(folder)), recursive=False, filter=_root_owned)
    return buffer.getvalue()


def _root_owned(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime = int(member.mtime)
    return member


def debian_lacks() -> str:
    """What this machine lacks to make the Debian image; empty if nothing."""
    missing = [tool for tool in _DEBIAN_TOOLS if shutil.which(tool) is None]
    return f"{missing[0]} is not installed (scripts/setup installs it)" if missing else ""


def make_debian(folder: Path) -> str:
    """A Debian with Python and git, as packages give it, unless it is there; returns "layout:tag"."""
    tar, layout, done = folder / "base.tar", folder / "layout.part", folder / "layout"
    image = f"{layout}:v1"
    if done.exists():
        return f"{done}:v1"
    shutil.rmtree(layout, ignore_errors=True)
    commands = [
        ["mmdebstrap", "--quiet", "--variant=minbase", "--include=python3,git", "bookworm", str(tar)],
        ["umoci", "init", "--layout", str(layout)],
        ["umoci", "new", "--image", image],
        ["umoci", "raw", "add-layer", "--image", image, str(tar)],
        ["umoci", "config", "--image", image, "--config.cmd", "python3", "--config.env", f"PATH={_DEBIAN_PATH}"],
        ["umoci", "gc", "--layout", str(layout)],
    ]
    for command in commands:
        subprocess.run(command, check=True, capture_output=True)
    tar.unlink()
    layout.rename(done)
    return f"{done}:v1"


def unpack(image: str, folder: Path) -> Path:
    """What umoci makes of the image: an independent opinion."""
    subprocess.run(["umoci", "unpack", "--image", image, str(folder)], check=True, capture_output=True)
    return folder / "rootfs"
