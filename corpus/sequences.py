"""Random sequences of layers against a plain model of the image specification, and against overlayfs itself."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Final

from hypothesis import Phase, given, seed, settings

from corpus.report import Result
from dsec_store.backends.memory import MemoryBlobs
from dsec_store.layer.collapse import collapse
from dsec_store.objects import Objects
from tests.flows.layersequences import LAYERS, converted, quick, replayed
from tests.flows.replay import Operation, seen
from tests.kernel import unmountable
from tests.views import merged_view, mounted, view_of

MOUNTED_EVERY: Final = 10
"""Of so many sequences, one is mounted too."""

Layers = list[list[Operation]]


def check(count: int, number: int) -> list[Result]:
    """`count` sequences, chosen by the seed `number`."""
    model = Result("random layers", f"merged view = replay (seed {number})")
    run = Result("random layers", "collapsed = replay")
    kernel = Result("random layers", "overlayfs on EROFS = replay")
    can_mount = os.geteuid() == 0 and not unmountable("erofs") and not unmountable("overlay")
    again = f"python -m corpus sequences --sequences {count} --seed {number}"
    done = 0

    @seed(number)
    @settings(quick, max_examples=count, database=None, phases=[Phase.generate])
    @given(LAYERS)
    def each(layers: Layers) -> None:
        nonlocal done
        if done == count:
            return
        done += 1
        tree, possible = replayed(layers)
        objects = Objects(MemoryBlobs())
        title, wanted = f"number {done}: {possible}", seen(tree)
        with tempfile.TemporaryDirectory(prefix="dsec-corpus-") as folder:
            try:
                image = converted(objects, possible, Path(folder))
                model.check(title, _unless(merged_view(objects, image) == wanted), again)
                collapsed = replace(image, lowers=collapse(objects, image.layers, [range(len(image.layers))]))
                run.check(title, _unless(merged_view(objects, collapsed) == wanted), again)
                if can_mount and done % MOUNTED_EVERY == 0:
                    shown = collapsed if done % (2 * MOUNTED_EVERY) == 0 else image
                    with mounted(objects, shown, Path(folder)) as path:
                        kernel.check(title, _unless(view_of(path) == wanted), again)
            except Exception as error:  # whatever it is, it is a case that failed
                model.fail(title, f"{type(error).__name__}: {error}", again)

    each()
    return [model, run, kernel] if can_mount else [model, run]


def _unless(equal: bool) -> str:
    return "" if equal else "another tree"
