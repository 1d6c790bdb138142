"""The main job on this machine: an OCI image, a workspace and a toolkit become a sandbox in which commands run.

Everything is real and made here: a Debian image with Python and git from packages, this repository as the workspace,
pytest as the toolkit. It is done twice: with a folder as the store, and with an S3 server on loopback. What is made
stays in `.demo/` (`scripts/inputs.py`), so a second run starts with the conversion. As root, by `make demo`.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.inputs import DEMO, IMAGE, TAG, TOOLKIT, WORKSPACE, make_image, make_toolkit, make_workspace, title
from tests.s3server import S3Server

BIN = Path(sys.executable).parent

COMMANDS = (
    ("python3", "-c", 'import json, sqlite3, ssl, sys; print("python", sys.version.split()[0], "from the base")'),
    ("head", "-n", "1", "README.md"),
    ("sh", "-c", 'pytest --version && find /opt/toolkit -name "*.pyc" | wc -l'),
)
"""The base's interpreter, a file of the workspace, the toolkit on PATH: and its bytecode, written into its own tree."""


def main() -> None:
    if os.geteuid() != 0:
        sys.exit("demo: mounting needs root; run it as root (sudo make demo)")
    make_image()
    make_workspace()
    make_toolkit()
    rows = [demonstrate("folder", f"file://{DEMO}/folder/store", {})]
    with s3_server() as (url, environment):
        rows.append(demonstrate("s3", url, environment))
    print_results(rows)


# -- the job ---------------------------------------------------------------------------------------------------------


@dataclass
class Node:
    """A store and a node state of their own, and the commands run with them."""

    name: str
    environment: dict[str, str]
    first_command: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)

    def run(self, *arguments: str, show: bool = True) -> str:
        """Run one of our commands as a user would; it is printed, and so is what it says."""
        if show:
            print(f"$ {shlex.join(arguments)}", flush=True)
        command = [str(BIN / arguments[0]), *arguments[1:]]
        done = subprocess.run(command, env=self.environment, stdout=subprocess.PIPE, text=True, check=False)
        if show:
            print(done.stdout, end="", flush=True)
        if done.returncode:
            sys.exit(f"demo: {shlex.join(arguments)} ended with {done.returncode}")
        return done.stdout

    def json(self, *arguments: str) -> Any:
        return json.loads(self.run(*arguments, "--json", show=False))


def demonstrate(name: str, store: str, extra: dict[str, str]) -> Node:
    """Convert, mount, compose and run on one kind of store, with a new node."""
    title(f"Store: {store}")
    base = DEMO / name
    shutil.rmtree(base, ignore_errors=True)
    base.mkdir()
    node = Node(name, {**os.environ, **extra, "DSEC_STORE": store, "DSEC_ROOT": str(base / "root")})
    node.run("dsec-image", "convert", f"oci:{IMAGE}:{TAG}", "demo")
    toolkit = ("--prefix", "/opt/toolkit", "--path", "/opt/toolkit/bin", "--env", "PYTHONPATH=/opt/toolkit")
    node.run("dsec-image", "build", str(WORKSPACE), "demo-workspace", "--kind", "workspace", "--prefix", "/testbed")
    node.run("dsec-image", "build", str(TOOLKIT), "demo-toolkit", "--kind", "toolkit", *toolkit)
    node.run("dsec-image", "ls")
    try:
        run_commands(node)
    finally:
        node.run("dsec", "node", "stop")
    return node


def run_commands(node: Node) -> None:
    """The first command with nothing local, then the others, then the same once more."""
    sandbox = (
        "dsec",
        "run",
        "--workspace",
        "demo-workspace",
        "--toolkit",
        "demo-toolkit",
        "--workdir",
        "/testbed",
        "demo",
        "--",
    )
    node.run("dsec", "node", "start")
    start = time.monotonic()
    node.run(*sandbox, *COMMANDS[0])
    node.first_command = time.monotonic() - start
    for command in COMMANDS[1:]:
        node.run(*sandbox, *command)
    node.figures = node.json("dsec", "node", "stats")
    print("# once more: nothing is fetched again")
    for command in COMMANDS:
        node.run(*sandbox, *command, show=False)
    again = node.json("dsec", "node", "stats")
    fetched = again["total"]["wire_bytes"] - node.figures["total"]["wire_bytes"]
    print(f"# bytes fetched by it: {fetched}")
    if fetched:
        sys.exit("demo: a second run of the same commands fetched bytes again")
    node.figures["images"] = [
        node.json("dsec-image", "inspect", image) for image in ("demo", "demo-workspace", "demo-toolkit")
    ]


# -- the S3 server, and the table ------------------------------------------------------------------------------------


@contextmanager
def s3_server() -> Iterator[tuple[str, dict[str, str]]]:
    """A real S3 server on loopback, as the tests run it: the URL of a new bucket, and the AWS variables."""
    with S3Server() as server:
        yield f"{server.url}/demo", dict(server.environment)


def print_results(nodes: list[Node]) -> None:
    title("What was fetched")
    rows = [("", *(node.name for node in nodes))]
    figures = [Figures(node) for node in nodes]
    rows.append(("base image, compressed", *(mib(one.compressed) for one in figures)))
    rows.append(("fetched over the wire (base, workspace, toolkit)", *(mib(one.wire) for one in figures)))
    rows.append(("    share of the compressed base image", *(percent(one.wire, one.compressed) for one in figures)))
    rows.append(("base, workspace and toolkit, plain", *(mib(one.plain) for one in figures)))
    rows.append(("fetched, plain", *(mib(one.fetched) for one in figures)))
    rows.append(("    share of the plain bytes", *(percent(one.fetched, one.plain) for one in figures)))
    rows.append(("requests", *(str(one.requests) for one in figures)))
    rows.append(("first command, nothing local", *(f"{node.first_command:.2f} s" for node in nodes)))
    for label, *cells in rows:
        print(f"{label:<48}" + "".join(f"{cell:>14}" for cell in cells))


class Figures:
    """The figures of one node: of the images that its sandboxes were made of, and of what it fetched."""

    def __init__(self, node: Node) -> None:
        images, stats = node.figures["images"], node.figures
        self.compressed = images[0]["source_bytes"]
        self.plain = sum(blob["size"] for image in images for layer in image["layers"] for blob in layer["blobs"])
        self.wire = stats["total"]["wire_bytes"] + stats["metadata"]["wire_bytes"]
        self.fetched = stats["total"]["fetched_bytes"]
        self.requests = stats["total"]["requests"] + stats["metadata"]["requests"]


def mib(count: int) -> str:
    return f"{count / (1 << 20):.1f} MiB"


def percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %"


if __name__ == "__main__":
    main()
