"""Checking: is everything there, does it match its digest, can every byte be had?

    report = check_image(objects, objects.references.read("demo"), deep=True)
    whole = check_store(objects, deep=False)              # all names, and what no name leads to but builders rely on

*Shallow*: each object that a name leads to is read and verified; the parts agree with each other: descriptor, metadata
image and chunk maps, locators and the sections of packs, recipes and the blobs that they speak of, runs and the layers
for which they stand, configuration and layers, lookups and the layers to which they lead. *Deep*: every chunk is
fetched and verified too, and the tar of each layer that came as one is made again and has its diff_id. Nothing is
repaired and nothing is written.

What several images share is read once. One exception: the tar of a layer is made from that layer's chunks, so a deep
check reads a chunk again for each further layer with a recipe that has it, unless it was read just before.

Up to `READERS` objects are read at once. Memory: about 130 bytes for each place of a chunk that a locator names, when
deep some 200 more, the trees of one image that has runs, and the largest objects under way.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, TypeVar

from dsec_store import keys
from dsec_store.checkparts import (
    Chunk,
    ChunkProblem,
    Record,
    blob_records,
    check_lookup,
    check_metadata,
    check_origin,
    check_recipe,
    disagreements,
    lookup_keys,
    read_chunks,
    run_problems,
)
from dsec_store.chunks import ChunkSource
from dsec_store.descriptor import Blob, Image, LayerDescriptor
from dsec_store.digest import Digest
from dsec_store.errors import Corrupt, Invalid, NotFound
from dsec_store.layer.export import RecentChunks, layer_tar
from dsec_store.objects import Objects
from dsec_store.reachable import READERS, Each
from dsec_store.references import Origin, Reference

A = TypeVar("A")
B = TypeVar("B")

PACKS_AT_ONCE: Final = 16
"""Packs that are asked for at once."""

TARS_AT_ONCE: Final = 2
"""Tars that are made at once; each reads ahead by itself."""

RECENT: Final = 64 << 20
"""Bytes of chunks that are kept while tars are made."""

Progress = Callable[[str, int, int], None]
"""Told what is being checked, and how many of how many are done."""


@dataclass(slots=True)
class Report:
    """What was looked at, and what is wrong: one line each, naming the object. `bytes` are plain ones of `chunks`."""

    layers: int = 0
    chunks: int = 0
    bytes: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass(slots=True)
class StoreReport:
    """What is wrong with a whole store.

    total   everything that was looked at once, with every problem once    names   the problems of each name
    """

    total: Report = field(default_factory=Report)
    names: dict[str, list[str]] = field(default_factory=dict)


def silent(what: str, done: int, total: int) -> None:
    """A progress that nobody watches."""


def check_image(objects: Objects, reference: Reference, *, deep: bool, progress: Progress = silent) -> Report:
    """Check what a name leads to, and all that this leads to. Raises `StoreError` only when the image object itself
    cannot be read, or when the store cannot be reached."""
    image = objects.image(reference.image)
    checking = _Checking(objects, deep, progress)
    checking.run({reference.image: image}, [reference])
    return Report(len(checking.layers), *checking.read, checking.problems_of(reference))


def check_store(objects: Objects, *, deep: bool, progress: Progress = silent) -> StoreReport:
    """Check all names, indexes and lookups. Raises `StoreError` only when the store cannot be reached."""
    checking = _Checking(objects, deep, progress)
    names = list(objects.references.names())
    references = dict(checking.each("names", objects.references.read, {name: name for name in names}))
    images = dict(
        checking.each("images", objects.image, {each.image: keys.image(each.image) for each in references.values()})
    )
    checking.run(images, list(dict.fromkeys(references.values())))
    report = StoreReport(Report(len(checking.layers), *checking.read))
    for name in names:
        own = checking.problems.get(name, [])
        report.names[name] = [*own, *(checking.problems_of(references[name]) if name in references else ())]
    problems = [*(each for found in report.names.values() for each in found), *checking.beside()]
    report.total.problems = list(dict.fromkeys(problems))
    return report


def layer_problems(objects: Objects, digest: Digest) -> list[str]:
    """What is wrong with one layer, all of its chunks included."""
    checking = _Checking(objects, deep=True, progress=silent)
    checking.check_layers([digest])
    return checking.problems_of(keys.layer(digest))


class Presence:
    """Whether the parts of layers are there; for builders, who ask about many layers. Packs are asked for once."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._packs: dict[Digest, int] = {}

    def missing(self, digest: Digest) -> list[str]:
        """What this layer lacks: objects that are lost, packs that are too short. Chunks are not looked at."""
        try:
            self._check(digest)
        except (Corrupt, Invalid, NotFound) as error:
            return [str(error)]
        return []

    def _check(self, digest: Digest) -> None:
        layer = self._objects.layer(digest)
        if self._objects.blobs.stat(keys.metadata(layer.metadata.digest)) is None:
            raise NotFound(f"metadata image {layer.metadata.digest} is missing in {self._objects.blobs.location}")
        needed: dict[Digest, int] = defaultdict(int)
        for blob in layer.stored_blobs:
            for at in self._objects.locator(blob.name, len(self._objects.chunk_map(blob.chunk_map))):
                needed[at.pack] = max(needed[at.pack], at.offset + at.stored)
        self._ask([pack for pack, size in needed.items() if self._packs.get(pack, 0) < size])
        for pack, size in needed.items():
            if self._packs[pack] < size:
                raise NotFound(f"pack {pack} has {self._packs[pack]} bytes where at least {size} are needed")

    def _ask(self, packs: list[Digest]) -> None:
        with ThreadPoolExecutor(PACKS_AT_ONCE, thread_name_prefix="stat") as pool:
            stats = pool.map(lambda pack: self._objects.blobs.stat(keys.pack(pack)), packs)
            self._packs.update({pack: stat.size if stat else 0 for pack, stat in zip(packs, stats, strict=True)})


class _Checking:
    """One check: each kind of object in turn, from the names down, several at once.

    A *subject* is whatever a problem is of: a key, a blob, a reference, a name. `_below` says what it leads to.
    """

    def __init__(self, objects: Objects, deep: bool, progress: Progress) -> None:
        self._objects = objects
        self._deep = deep
        self._progress = progress
        self._many = Each(READERS)
        self._below: dict[Hashable, list[Hashable]] = defaultdict(list)
        self._records: dict[Digest, set[Record]] = defaultdict(set)
        self._damaged: dict[str, list[ChunkProblem]] = defaultdict(list)
        self._broken: set[Blob] = set()
        self.problems: dict[Hashable, list[str]] = defaultdict(list)
        self.layers: dict[Digest, LayerDescriptor | None] = {}
        self.read = (0, 0)

    def run(self, images: Mapping[Digest, Image], references: Iterable[Reference]) -> None:
        """Check these images and all that they lead to; `references` are names of them."""
        documents = {oci: keys.oci(oci) for reference in references for oci in reference.origin.oci}
        for reference in references:
            self._below[reference] = [*map(keys.oci, reference.origin.oci), keys.image(reference.image)]
        for _ in self.each("documents", self._objects.oci, documents):
            pass
        for digest, image in images.items():
            self._below[keys.image(digest)] += map(keys.layer, dict.fromkeys((*image.layers, *image.lowers)))
        self.check_layers(dict.fromkeys(layer for one in images.values() for layer in (*one.layers, *one.lowers)))
        self._check_names(images, references)

    def check_layers(self, digests: Iterable[Digest]) -> None:
        wanted = {digest: keys.layer(digest) for digest in digests}
        self.layers = dict.fromkeys(wanted)
        self.layers.update(self.each("layers", self._objects.layer, wanted))
        layers = {digest: layer for digest, layer in self.layers.items() if layer}
        for digest, layer in layers.items():
            self._below[keys.layer(digest)] += [keys.metadata(layer.metadata.digest), *layer.stored_blobs]
        self._check_metadata(layers)
        self._check_blobs(list(dict.fromkeys(blob for layer in layers.values() for blob in layer.stored_blobs)))
        self._check_packs()
        self._check_recipes(layers)

    # -- what layers consist of ------------------------------------------------------------------------------------

    def _check_metadata(self, layers: Mapping[Digest, LayerDescriptor]) -> None:
        def check(digest: Digest) -> None:
            check_metadata(self._objects, digest, layers[digest])

        subjects = {digest: ("metadata of", digest) for digest in layers}
        for digest in layers:
            self._below[keys.layer(digest)].insert(0, subjects[digest])
        for _ in self.each("metadata images", check, subjects):
            pass

    def _check_blobs(self, blobs: list[Blob]) -> None:
        def read(blob: Blob) -> tuple[dict[Digest, set[Record]], list[str]]:
            return blob_records(self._objects, blob)

        for blob, (records, wrong) in self.each("blobs", read, {blob: blob for blob in blobs}):
            self.problems[blob] += wrong
            for pack, found in records.items():
                self._records[pack] |= found
                self._below[blob].append(keys.pack(pack))
        self._broken = {blob for blob in blobs if self.problems.get(blob)}

    def _check_packs(self) -> None:
        def check(pack: Digest) -> list[ChunkProblem]:
            return disagreements(self._objects, pack, self._records[pack])

        for pack, wrong in self.each("packs", check, {pack: keys.pack(pack) for pack in self._records}):
            self._damaged[keys.pack(pack)] += wrong

    def _check_recipes(self, layers: Mapping[Digest, LayerDescriptor]) -> None:
        """Recipes, and when deep all chunks: those from which no tar was made are read pack by pack.

        Tars come first, for what was read for them need not be read again. A tar that cannot be made because a chunk
        is damaged is no problem of its own.
        """
        recent = _VerifiedChunks(RECENT)
        source = ChunkSource(self._objects.blobs, recent)
        with_recipe = {digest: ("recipe of", digest) for digest, layer in layers.items() if self._may_read(layer)}

        def check(digest: Digest) -> None:
            if self._deep and layers[digest].diff_id:
                for _ in layer_tar(self._objects, layers[digest], source):
                    pass
            else:
                check_recipe(self._objects, layers[digest], source)

        for _ in self.each("recipes", check, with_recipe, Each(TARS_AT_ONCE) if self._deep else None):
            pass
        if self._deep:
            self._read_chunks(recent)
        for digest, subject in with_recipe.items():
            if self._is_readable(layers[digest]):
                self._below[keys.layer(digest)].append(subject)

    def _may_read(self, layer: LayerDescriptor) -> bool:
        """Whether there is a recipe, and what is known to be missing or damaged does not stop it from being read."""
        return layer.recipe is not None and self._is_readable(layer)

    def _is_readable(self, layer: LayerDescriptor) -> bool:
        return not any(
            blob in self._broken or any(self._names_damage(blob, pack) for pack in self._below[blob])
            for blob in layer.stored_blobs
        )

    def _names_damage(self, blob: Blob, pack: Hashable) -> bool:
        return bool(self.problems.get(pack) or (isinstance(pack, str) and self._chunk_problems(blob, pack)))

    def _read_chunks(self, verified: _VerifiedChunks) -> None:
        """Fetch and verify every chunk that was not."""
        elsewhere = self._in_several_places()

        def is_due(record: Record, pack: Digest) -> bool:
            ref = Chunk.of(record, pack).ref
            return ref.digest in elsewhere or not verified.saw(ref.digest)

        def read(pack: Digest) -> tuple[int, int, list[ChunkProblem]]:
            due = [record for record in self._records[pack] if is_due(record, pack)]
            try:
                found = list(read_chunks(self._objects, pack, due))
            except NotFound:
                return 0, 0, []  # told already
            sizes = [each for each in found if isinstance(each, int)]
            kept = sum(Chunk.of(record, pack).ref.size for record in self._records[pack].difference(due))
            wrong = [each for each in found if isinstance(each, ChunkProblem)]
            return len(self._records[pack]) - len(wrong), sum(sizes) + kept, wrong

        chunks = size = 0
        packs = {pack: keys.pack(pack) for pack in self._records}
        for pack, (count, plain, wrong) in self.each("packs read", read, packs):
            chunks, size = chunks + count, size + plain
            known = {each.digest for each in self._damaged[keys.pack(pack)]}
            self._damaged[keys.pack(pack)] += [each for each in wrong if each.digest not in known]
        self.read = (chunks, size)

    def _in_several_places(self) -> set[bytes]:
        """Digests of chunks that locators find in more places than one: reading one place says nothing of the other."""
        seen: set[bytes] = set()
        several: set[bytes] = set()
        for pack, records in self._records.items():
            for record in records:
                digest = Chunk.of(record, pack).ref.digest
                (several if digest in seen else seen).add(digest)
        return several

    # -- what leads to layers --------------------------------------------------------------------------------------

    def _check_names(self, images: Mapping[Digest, Image], references: Iterable[Reference]) -> None:
        """What needs every layer of an image. Where one is missing or damaged, that was told."""
        complete = {
            digest: [layer for each in image.layers if (layer := self.layers[each])]
            for digest, image in images.items()
            if all(self.layers[layer] for layer in (*image.layers, *image.lowers))
        }

        def origin(reference: Reference) -> None:
            check_origin(self._objects, reference.origin, complete[reference.image])

        told = {each for each in references if any(self.problems.get(keys.oci(oci)) for oci in each.origin.oci)}
        asked = {each: each for each in references if each.image in complete and each not in told}
        for _ in self.each("configurations", origin, asked):
            pass
        for digest in complete:
            self._check_runs(digest, images[digest])
        self._check_lookups({digest: (images[digest], layers) for digest, layers in complete.items()})

    def _check_runs(self, digest: Digest, image: Image) -> None:
        layers = {each: layer for each, layer in self.layers.items() if layer}
        runs = [layers[lower] for lower in image.lowers]
        plain = {part for run in runs for part in run.run}
        whole = plain <= layers.keys() and not any(
            self.problems.get(("metadata of", each)) for each in (*image.layers, *image.lowers)
        )
        if whole:
            self.problems[keys.image(digest)] += run_problems(self._objects, digest, image, layers)

    def _check_lookups(self, images: Mapping[Digest, tuple[Image, list[LayerDescriptor]]]) -> None:
        wanted: dict[str, Digest] = {}
        for digest, (_, layers) in images.items():
            for key, number in lookup_keys(layers):
                diff_id = layers[number].diff_id
                assert diff_id, "only such layers have these lookups"
                wanted[key] = diff_id
                self._below[keys.image(digest)].append(key)

        def check(key: str) -> None:
            check_lookup(self._objects, key, wanted[key])

        for _ in self.each("lookups", check, {key: key for key in wanted}):
            pass

    # -- what names do not lead to ---------------------------------------------------------------------------------

    def beside(self) -> list[str]:
        """What is wrong with indexes and lookups of the whole store."""
        before = {subject: len(found) for subject, found in self.problems.items()}
        indexes = {digest: keys.index(digest) for digest in self._objects.index_digests()}
        named: dict[Digest, Digest] = {}
        for index, packs in self.each("indexes", self._objects.index, indexes):
            named.update((pack, index) for pack, _ in packs)
        stored = self._objects.packs()
        for pack in sorted(named.keys() - stored.keys()):
            self._lost_pack(named[pack], pack)
        lookups = {each.key: each.key for each in self._objects.blobs.list("lookup/")}

        def check(key: str) -> None:
            check_lookup(self._objects, key)

        for _ in self.each("lookups", check, lookups):
            pass
        return [each for subject, found in self.problems.items() for each in found[before.get(subject, 0) :]]

    def _lost_pack(self, index: Digest, pack: Digest) -> None:
        """An index that gc has replaced meanwhile says nothing any more."""
        if self._objects.blobs.stat(keys.index(index)) is not None:
            self.problems[keys.index(index)].append(f"index {index}: it names pack {pack}, which is missing")

    # -- below -----------------------------------------------------------------------------------------------------

    def each(
        self, what: str, check: Callable[[A], B], subjects: Mapping[A, Hashable], many: Each | None = None
    ) -> Iterator[tuple[A, B]]:
        """The answers of `check` for each thing; what it finds wrong becomes a problem of the thing's subject."""

        def tolerant(thing: A) -> tuple[A, B] | str:
            try:
                return thing, check(thing)
            except (Corrupt, Invalid, NotFound) as error:
                return str(error)

        things = list(subjects)
        for done, (thing, answer) in enumerate(zip(things, (many or self._many)(tolerant, things), strict=True)):
            self._progress(what, done, len(things))
            if isinstance(answer, str):
                self.problems[subjects[thing]].append(answer)
            else:
                yield answer
        if things:
            self._progress(what, len(things), len(things))

    def problems_of(self, top: Hashable) -> list[str]:
        """The problems of a subject and of all that it leads to, each once, in the order of a walk."""
        found: dict[str, None] = {}
        seen: set[Hashable] = set()
        stack = [top]
        while stack:
            subject = stack.pop()
            if subject not in seen:
                seen.add(subject)
                found.update(dict.fromkeys(self.problems.get(subject, ())))
                below = self._below.get(subject, [])
                stack += reversed(below)
                if isinstance(subject, Blob):
                    for pack in below:
                        found.update(dict.fromkeys(self._chunk_problems(subject, pack)))
        return list(found)

    def _chunk_problems(self, blob: Blob, pack: Hashable) -> list[str]:
        """What is wrong with those chunks of a pack that this blob has."""
        damaged = self._damaged.get(pack, []) if isinstance(pack, str) else []
        own = set(self._objects.chunk_map(blob.chunk_map).digests) if damaged else set()
        return [each.text for each in damaged if each.digest in own]


class _VerifiedChunks(RecentChunks):
    """Keeps what came last, and remembers which chunks came."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self._seen: set[bytes] = set()
        self._seen_lock = threading.Lock()

    def put(self, digest: bytes, chunk: bytes) -> None:
        super().put(digest, chunk)
        with self._seen_lock:
            self._seen.add(digest)

    def saw(self, digest: bytes) -> bool:
        return digest in self._seen


def describe(image: Image, origin: Origin) -> dict[str, object]:
    """The own fields of an image and its origin, for `inspect`."""
    return {
        "kind": image.kind,
        "platform": image.platform,
        "config": str(origin.config) if origin.config else None,
        "manifest": str(origin.manifest) if origin.manifest else None,
        "env": dict(image.env),
        "path": list(image.path),
        "source_bytes": origin.source_bytes,
    }
