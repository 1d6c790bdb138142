"""How contents are best cut: what a store holds, how it grows with each version, and what the first command fetches."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Final

from bench import backups
from bench.cuts import NEVER, Cpu, Laid, Model, Rule, read_layer
from bench.families import Family, families
from bench.measure import GIB, Failed
from bench.nodes import scratch
from bench.opened import COMMAND, Fetched, fetch, opened
from bench.report import Section, Table
from dsec_store.chunker import FASTCDC, ChunkerParameters

SAMPLES: Final = 1

YARDSTICK: Final = "yardstick"
KIB: Final = 1024
MB: Final = 1_000_000


SOLO: Final = 64
"""KiB from which a content is cut alone, where nothing else is said."""


def _rule(average: int, *, ratio: int = 4, solo: int = SOLO) -> ChunkerParameters:
    """`average` and `solo` in KiB; minimum and maximum are the average divided and multiplied by `ratio`."""
    sizes = (average * KIB // ratio, average * KIB, average * KIB * ratio)
    return ChunkerParameters(FASTCDC, *sizes, solo * KIB)


SIZES: Final = {f"{average // 4}/{average}/{average * 4}": Rule(_rule(average)) for average in (32, 64, 128, 256, 512)}
"""Minimum, average and maximum in KiB."""

CHOSEN: Final = "32/128/512"

OTHERS: Final = {
    "64/128/256": Rule(_rule(128, ratio=2)),
    "alone from 32 KiB": Rule(_rule(128, solo=32)),
    "alone from 128 KiB": Rule(_rule(128, solo=128)),
    "never alone": Rule(_rule(128, solo=NEVER)),
    "each alone": Rule(_rule(128, solo=0)),
    "not aligned": Rule(_rule(128), alignment=1),
    "in order of suffixes": Rule(_rule(128), by_suffix=True),
    "zstd level 1": Rule(_rule(128), level=1),
    "zstd level 5": Rule(_rule(128), level=5),
    "zstd level 9": Rule(_rule(128), level=9),
}
"""One thing changed in the chosen rule; measured on the yardstick alone."""

_CONDITIONS: Final = (
    "Contents of real packages, in path order and cut as docs/format/chunk-map.md says, by the builder's cutter; "
    "chunks are digested and compressed, but nothing is stored. Rows name minimum, average and maximum of chunks in "
    "KiB, contents of {solo} KiB and more alone, zstd level 3; or what differs from {chosen}. MB are 10^6 bytes. "
    "Families: {families}. The yardstick's `.pyc` files carry the digest of their source; those of the family *python* "
    "carry its time, as pip makes them, and so all differ in each version. Measured once; CPU is of one thread, while "
    "{workers} work side by side."
)
_ONE: Final = (
    "The yardstick, {size:.0f} MB of contents. *Map and index* are 49 bytes per chunk and 45 more per new one, "
    "not counted in the MB before them; metadata images are not counted at all:"
)
_ALL: Final = (
    "MB that the first version takes, and those that each later one adds on average. In brackets the share of the "
    "later versions' bytes that are there already: in layers that no earlier version has, and in the whole image:"
)
_READS: Final = (
    "`python3 -c '{command}'` in the yardstick: {files} files of {needed:.1f} MB, each read whole. Requests if each "
    "file is fetched when it is wanted, and if all is known beforehand; one request brings what lies side by side:"
)
_CONTROLS: Final = "Controls on the yardstick, with their own metadata; gzip ships whole layers{missing}:"


@dataclass(frozen=True, slots=True)
class Grown:
    """What one version brought, without layers that were there; bytes, and numbers of chunks."""

    shared: int
    """Plain bytes of the layers that were there."""
    size: int
    new_size: int
    stored: int
    chunks: int
    new_chunks: int
    metadata: int


@dataclass(frozen=True, slots=True)
class Result:
    """One family under one rule."""

    versions: list[Grown]
    cpu: Cpu
    """Of the first version."""
    fetched: Fetched | None
    """From the first version of the yardstick."""

    @property
    def later(self) -> list[Grown]:
        return self.versions[1:]

    @property
    def growth(self) -> float:
        """Stored bytes of a later version, on average."""
        return sum(grown.stored for grown in self.later) / len(self.later)

    @property
    def share(self) -> float:
        """Of the bytes in the later versions' new layers, those that were there already."""
        return 1 - sum(grown.new_size for grown in self.later) / sum(grown.size for grown in self.later)

    @property
    def image_share(self) -> float:
        """Of all bytes of the later versions, those that were there already."""
        return 1 - sum(grown.new_size for grown in self.later) / sum(grown.size + grown.shared for grown in self.later)


def measure(_: int) -> Section:
    """Everything once, however many samples are asked for: sizes do not vary. `Failed` if a family cannot be made."""
    found = families()
    opened(found[YARDSTICK].versions[0])
    results = _results(found)
    ours = {**SIZES, **OTHERS}
    yardstick = {name: results[name, YARDSTICK] for name in ours}
    first = yardstick[CHOSEN]
    if first.fetched is None:
        raise Failed("the yardstick's first version was not read")
    lacking = backups.missing()
    named = "; ".join(f"*{family.name}*, {family.title}" for family in found.values())
    tables = {
        _ONE.format(size=first.versions[0].size / MB): _one(yardstick),
        _ALL: _all(found, results),
        _READS.format(command=COMMAND, files=first.fetched.files, needed=first.fetched.needed / MB): _reads(yardstick),
        _CONTROLS.format(missing=f"; not installed: {', '.join(lacking)}" if lacking else ""): _controls(
            found[YARDSTICK]
        ),
    }
    samples_taken = {f"{name}, {family}": asdict(result) for (name, family), result in results.items()}
    return Section(
        "Cuts",
        _CONDITIONS.format(solo=SOLO, chosen=CHOSEN, families=named, workers=os.cpu_count()),
        tables,
        samples_taken,
    )


def _results(found: Mapping[str, Family]) -> dict[tuple[str, str], Result]:
    """Every size with every family, every other rule with the yardstick."""
    tasks = [(name, rule, family) for family in found.values() for name, rule in SIZES.items()]
    tasks += [(name, rule, found[YARDSTICK]) for name, rule in OTHERS.items()]
    results = {}
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(study, rule, family): (name, family.name) for name, rule, family in tasks}
        for number, future in enumerate(as_completed(futures), 1):
            results[futures[future]] = future.result()
            print(f"dedup: {number} of {len(tasks)}: {', '.join(futures[future])}", file=sys.stderr, flush=True)
    return results


def study(rule: Rule, family: Family) -> Result:
    """What `family` takes under `rule`."""
    model = Model(rule)
    laid: dict[Path, Laid] = {}
    versions = []
    cpu, fetched = Cpu(), None
    for number, version in enumerate(family.versions):
        new = [tar for tar in version if tar not in laid]
        laid |= {tar: model.add(read_layer(tar)) for tar in new}
        shared = sum(laid[tar].size for tar in version if tar not in new)
        versions.append(_grown(shared, [laid[tar] for tar in new]))
        if number == 0:
            cpu = Cpu(**asdict(model.cpu))
            if family.name == YARDSTICK:
                fetched = fetch(opened(version), [(read_layer(tar), laid[tar]) for tar in version])
    return Result(versions, cpu, fetched)


def _grown(shared: int, new: Sequence[Laid]) -> Grown:
    return Grown(
        shared=shared,
        size=sum(one.size for one in new),
        new_size=sum(one.new_size for one in new),
        stored=sum(one.new_stored for one in new),
        chunks=sum(len(one.pieces) for one in new),
        new_chunks=sum(one.new_chunks for one in new),
        metadata=sum(one.metadata for one in new),
    )


def _one(results: Mapping[str, Result]) -> Table:
    columns = (
        "",
        "first, MB",
        "second adds, MB",
        "chunks",
        "map and index, MB",
        "cut",
        "digest",
        "compress, CPU s/GiB",
    )
    rows = []
    for name, result in results.items():
        first, second = result.versions
        cpu = (result.cpu.cut, result.cpu.digest, result.cpu.compress)
        rows.append(
            (
                name,
                f"{first.stored / MB:.1f}",
                f"{second.stored / MB:.1f}",
                f"{first.chunks:,}",
                f"{first.metadata / MB:.2f} + {second.metadata / MB:.2f}",
                *(f"{seconds / (first.size / GIB):.2f}" for seconds in cpu),
            )
        )
    return Table(columns, tuple(rows))


def _all(found: Mapping[str, Family], results: Mapping[tuple[str, str], Result]) -> Table:
    rows = [(name, *(_show(results[name, family]) for family in found)) for name in SIZES]
    whole = ("equal files", *(_shares(*whole_files(family)) for family in found.values()))
    return Table(("", *found), (*rows, whole))


def _show(result: Result) -> str:
    return (
        f"{result.versions[0].stored / MB:.1f} + {result.growth / MB:.1f} {_shares(result.share, result.image_share)}"
    )


def _shares(layers: float, image: float) -> str:
    return f"({100 * layers:.0f} %, {100 * image:.0f} %)"


def whole_files(family: Family) -> tuple[float, float]:
    """The shares of the later versions' bytes that equal files would save, in new layers and in whole images."""
    known: set[bytes] = set()
    seen: set[Path] = set()
    shared = new = saved = 0
    for number, version in enumerate(family.versions):
        for tar in version:
            contents = read_layer(tar).sizes
            if number and tar in seen:
                shared += sum(contents.values())
            elif number:
                new += sum(contents.values())
                saved += sum(size for digest, size in contents.items() if digest in known)
            known |= contents.keys()
            seen.add(tar)
    return saved / new, (saved + shared) / (new + shared)


def _reads(results: Mapping[str, Result]) -> Table:
    columns = ("", "chunks", "requests", "known beforehand", "MB fetched", "plain bytes of the chunks / needed")
    fetched = {name: result.fetched for name, result in results.items() if result.fetched}
    return Table(columns, tuple(_read(name, one) for name, one in fetched.items()))


def _read(name: str, one: Fetched) -> tuple[str, ...]:
    figures = (f"{one.chunks:,}", str(one.requests), str(one.runs), f"{one.wire / MB:.1f}")
    return (name, *figures, f"{one.size / one.needed:.2f}")


def _controls(yardstick: Family) -> Table:
    print("dedup: the controls", file=sys.stderr, flush=True)
    with scratch() as folder:
        taken: Mapping[str, Iterable[int]] = {
            f"gzip -{backups.GZIP_LEVEL}": backups.shipped(yardstick.versions),
            **backups.grown(yardstick.versions, folder),
        }
    rows = tuple((name, *(f"{size / MB:.1f}" for size in sizes)) for name, sizes in taken.items())
    return Table(("", "first, MB", "second adds, MB"), rows)
