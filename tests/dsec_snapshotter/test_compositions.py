"""Equal layers in one composition: the lower occurrence changes nothing, by a model of what overlayfs does. And what is
left of a composition that cannot be made."""

import errno
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec_snapshotter.compositions import RUN, Compositions, topmost_occurrences
from dsec_snapshotter.features import Features
from dsec_snapshotter.layers import Layers
from dsec_snapshotter.processes import Ended, ExitWatch, Process
from dsec_store.backends.folder import FolderBlobs
from dsec_store.digest import Digest
from dsec_store.errors import Unavailable
from dsec_store.objects import Objects

Layer = Mapping[str, str]
"""Path -> "file", "directory", "opaque" (a directory that hides what is below) or "whiteout". Parents are included."""

NAMES = st.sampled_from("abc")


@st.composite
def layers(draw: st.DrawFn, depth: int = 3, prefix: str = "") -> Layer:
    """A layer, made from its root down: only directories have entries."""
    found: dict[str, str] = {}
    for name in draw(st.sets(NAMES)):
        kinds = ["file", "whiteout"] + ["directory", "opaque"] * (depth > 1)
        found[prefix + name] = kind = draw(st.sampled_from(kinds))
        if kind in {"directory", "opaque"}:
            found |= draw(layers(depth - 1, f"{prefix}{name}/"))
    return found


def shown(stack: Sequence[tuple[int, Layer]]) -> dict[str, tuple[str, int]]:
    """What an overlay of `stack`, bottom first, shows: path -> kind, and whose entry it is (a layer's number)."""
    found: dict[str, tuple[str, int]] = {}
    paths = sorted({path for _, layer in stack for path in layer})
    for path in paths:
        for number, layer in reversed(_reaching(stack, path)):
            if path in layer:
                found[path] = ("directory" if layer[path] == "opaque" else layer[path], number)
                break
    return {path: entry for path, entry in found.items() if entry[0] != "whiteout"}


def _reaching(stack: Sequence[tuple[int, Layer]], path: str) -> Sequence[tuple[int, Layer]]:
    """The layers that lookup gets to for `path`: a parent ends it at the first that is no plain directory."""
    parts = path.split("/")
    for end in range(1, len(parts)):
        parent = "/".join(parts[:end])
        for index in reversed(range(len(stack))):
            kind = stack[index][1].get(parent, "directory")
            if kind != "directory":
                stack = stack[index + (kind != "opaque") :]
                break
    return stack


@given(st.lists(layers(), min_size=1, max_size=4), st.data())
def test_the_lower_of_two_equal_layers_changes_nothing(distinct: list[Layer], data: st.DataObject) -> None:
    order = data.draw(st.lists(st.integers(0, len(distinct) - 1), min_size=1, max_size=7))
    digests = [Digest.of(b"%d" % number) for number in order]
    numbers = dict(zip(digests, order, strict=True))
    kept = [numbers[digest] for digest in topmost_occurrences(digests)]
    assert shown([(n, distinct[n]) for n in kept]) == shown([(n, distinct[n]) for n in order])


class BlindWatch(ExitWatch):
    """Has no descriptor left."""

    def watch(self, process: Process, ended: Ended) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_an_owner_that_cannot_be_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("store", "s", "records"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path)
    layers = Layers(Objects(FolderBlobs(tmp_path / "store")), Features(direct_io=False, read_ahead=False), lambda: None)
    compositions = Compositions(layers, BlindWatch(), lambda id: None)
    with pytest.raises(Unavailable, match="process 1 cannot be watched"):
        compositions.create([Digest.of(b"a")], kind=RUN, writable=True, owner=Process(1, 0))
    assert compositions.all() == []
    assert (os.listdir("s"), os.listdir("records")) == ([], [])
