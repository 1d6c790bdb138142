"""Real images: converted, unpacked by umoci, compared as trees, and taken out again."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from corpus.report import Result
from corpus.sources import PLACE
from dsec_store.backends.folder import FolderBlobs
from dsec_store.objects import Objects
from scripts.inputs import IMAGE, TAG, make_image
from tests.dsec_sandbox.box import make_root
from tests.flows.images import tar_of_folder
from tests.ocimaker import Layer, write_layout
from tests.views import View, merged_view, view_of

_PIP: Final = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", "--require-hashes")
_REQUIREMENTS: Final = Path(__file__).parent.parent / "requirements/runtime.txt"


def images() -> dict[str, str]:
    """Every image as "layout:tag", by name. They are made once and kept."""
    make_image()
    made = {"Debian with python3 and git": f"{IMAGE}:{TAG}"}
    for name, make in (("busybox", _busybox), ("Python packages", _packages)):
        layout = PLACE / name.replace(" ", "-").lower()
        if not layout.exists():
            with _part(layout) as part:
                write_layout(part / "layout", make(part))
                (part / "layout").rename(layout)
        made[name] = f"{layout}:t"
    return made


@contextmanager
def _part(layout: Path) -> Iterator[Path]:
    PLACE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=PLACE, prefix=f"{layout.name}-") as folder:
        yield Path(folder)


def _busybox(folder: Path) -> list[Layer]:
    make_root(folder / "root")
    return [Layer(tar_of_folder(folder / "root"))]


def _packages(folder: Path) -> list[Layer]:
    """What this project itself needs, on busybox."""
    command = [sys.executable, *_PIP, "--target", str(folder / "top/opt/packages"), "--requirement", str(_REQUIREMENTS)]
    subprocess.run(command, check=True, capture_output=True)
    return [*_busybox(folder), Layer(tar_of_folder(folder / "top"))]


def check() -> list[Result]:
    return [_image(name, image) for name, image in images().items()]


def _image(name: str, image: str) -> Result:
    result = Result(name, "real image")
    checks: dict[str, Callable[[str, Path], str]] = {
        "converted twice, equal digests": _twice,
        "the tree that umoci unpacks": _tree,
        "exported, equal diff_ids": _export,
    }
    for case, run in checks.items():
        with tempfile.TemporaryDirectory(prefix="dsec-corpus-") as folder:
            try:
                wrong = run(image, Path(folder))
            except subprocess.CalledProcessError as error:
                wrong = error.stderr.decode(errors="replace").strip().splitlines()[-1]
        result.check(case, wrong, f"dsec-image convert oci:{image} NAME")
    return result


def convert(image: str, store: Path) -> str:
    """The digest of the image in a new store."""
    return str(_command("convert", f"oci:{image}", "image", "--store", f"file://{store}", "--json")["image"])


def _command(*arguments: str) -> Any:
    command = [sys.executable, "-m", "dsec_cli.image", *arguments]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)


def _twice(image: str, folder: Path) -> str:
    found = {convert(image, folder / store) for store in ("a", "b")}
    keys = {tuple(keys_of(folder / store)) for store in ("a", "b")}
    return "" if len(found) == 1 and len(keys) == 1 else f"different digests or objects: {found}"


def keys_of(store: Path) -> list[str]:
    """The keys of all objects of a store but leases."""
    return sorted(blob.key for blob in FolderBlobs(store).list("") if not blob.key.startswith("leases/"))


def _tree(image: str, folder: Path) -> str:
    convert(image, folder / "store")
    objects = Objects(FolderBlobs(folder / "store"))
    ours = merged_view(objects, objects.image(objects.references.get("image")))
    subprocess.run(["umoci", "unpack", "--image", image, str(folder / "b")], check=True, capture_output=True)
    return _difference(ours, view_of(folder / "b/rootfs"))


def _difference(ours: View, theirs: View) -> str:
    """The time of the root is left out: where no layer lists it, umoci gives it that of the unpacking."""
    mine, other = ({**each, b"": each[b""]._replace(mtime_ns=0)} for each in (ours, theirs))
    paths = sorted(path for path in mine.keys() | other.keys() if mine.get(path) != other.get(path))
    return f"{len(paths)} paths are another here and there, the first {paths[0]!r}" if paths else ""


def _export(image: str, folder: Path) -> str:
    convert(image, folder / "store")
    _command("export", "image", f"oci:{folder}/out:v", "--store", f"file://{folder}/store", "--json")
    before, after = (_diff_ids(each) for each in (image, f"{folder}/out:v"))
    return "" if before == after else f"diff_ids {before} became {after}"


def _diff_ids(image: str) -> Any:
    layout, _, tag = image.rpartition(":")
    path = Path(layout)
    index = json.loads((path / "index.json").read_bytes())["manifests"]
    (entry,) = [each for each in index if each.get("annotations", {}).get("org.opencontainers.image.ref.name") == tag]
    manifest = json.loads(_blob(path, entry["digest"]))
    return json.loads(_blob(path, manifest["config"]["digest"]))["rootfs"]["diff_ids"]


def _blob(layout: Path, digest: str) -> bytes:
    return (layout / "blobs" / digest.replace(":", "/")).read_bytes()
