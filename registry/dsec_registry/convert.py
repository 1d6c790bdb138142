"""Conversion: an OCI image becomes an image of the store, layer by layer.

    blob -> verify digest and size -> decompress (the diff_id is computed on the way) -> tar entries
         -> contents to chunks as they arrive, headers and padding to the recipe
         -> tree on top of the layers below -> metadata image -> descriptor -> lookups

A layer that the store has already, by its build key, is neither read nor built, if all that it consists of is there: so
converting again repairs what was lost. Damage inside of objects takes `verify` to be seen and repaired.

The layers' contents are stored side by side; their trees are made one after the other, since each may need what lies
below. Nothing becomes visible before the whole image is stored: the name is written last. A crash or an error before
leaves objects that nobody refers to, which the next conversion of the same layers finds and uses.

Lookups: `build` and `chain` lead to every layer; `digest` and `diff`, which say nothing of what lies below, only to
layers that look the same on anything.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from dsec_registry.images import ImageSource, ResolvedImage, VerifiedReader
from dsec_registry.manifest import Descriptor, Platform
from dsec_store.check import Presence, layer_problems
from dsec_store.chunker import DEFAULT
from dsec_store.descriptor import Image
from dsec_store.digest import Digest, hasher_for
from dsec_store.errors import Corrupt, StoreError, Unavailable
from dsec_store.layer.ahead import ReadAhead
from dsec_store.layer.assemble import assemble
from dsec_store.layer.build import LayerBuild, StoredLayer, StoredStack, build_key
from dsec_store.layer.collapse import lowers_of
from dsec_store.layer.decompress import decompressed
from dsec_store.layer.unpack import Placed, unpack
from dsec_store.objects import Objects
from dsec_store.references import Origin, check_name
from dsec_store.upload import ChunkIndex

LAYERS_AT_ONCE: Final = max(1, min(4, len(os.sched_getaffinity(0)) // 2))
"""Layers whose contents are stored side by side: one keeps two processors busy, and each takes some 60 MiB."""

LOOKUPS_AT_ONCE: Final = 16
"""Layers that are looked up at once."""

_log: Final = logging.getLogger(__name__)

_BOTTOM: Final = Digest.of(b"", "sha256")
"""What a build key has for the parent of a bottom layer that looked below: nothing is a parent too."""

Progress = Callable[[str, int, int], None]
"""Told of what is being done, and how many of how many bytes are. Called from several threads."""


@dataclass(frozen=True, slots=True)
class Converted:
    """What a conversion did: the image, and of its layers how many were built and what that added to the store."""

    image: Digest
    layers: int
    built: int
    new_packs: int
    new_bytes: int


def silent(what: str, done: int, total: int) -> None:
    """A progress that nobody watches."""


def convert(
    objects: Objects,
    source: ImageSource,
    tag: str | None,
    platform: Platform,
    name: str,
    *,
    progress: Progress = silent,
    workers: int = 0,
    verify: bool = False,
) -> Converted:
    """Store the image that `tag` names in `source` under `name`. Raises `StoreError`; then `name` is as it was.

    `verify`: whatever the store has already is read and verified before it is relied on, and stored anew if damaged.
    `workers` threads digest and compress, 0: one per processor. The result does not depend on them.
    """
    check_name(name)
    resolved = source.resolve(tag, platform)
    conversion = _Conversion(objects, source, progress, workers, verify)
    layers = conversion.run(_steps(resolved))
    image = Image(
        kind="base",
        layers=layers,
        lowers=lowers_of(objects, layers, verify=verify),
        platform=str(resolved.config.platform or platform),
        config=resolved.config.run,
    )
    digest = objects.put_image(image)
    objects.references.set(name, digest, _store_origin(objects, resolved))
    built = conversion.built
    return Converted(
        image=digest,
        layers=len(layers),
        built=len(built),
        new_packs=sum(layer.new_packs for layer in built),
        new_bytes=sum(layer.new_bytes for layer in built),
    )


def chain_id(parent: Digest | None, diff_id: Digest) -> Digest:
    """The chain_id of a layer on `parent` (image-spec, config.md "Layer ChainID")."""
    return diff_id if parent is None else Digest.of(f"{parent} {diff_id}".encode(), "sha256")


def _store_origin(objects: Objects, resolved: ResolvedImage) -> Origin:
    """Keep the documents of the image as they came."""
    return Origin(
        manifest=objects.put_oci(resolved.manifest_bytes),
        config=objects.put_oci(resolved.config_bytes),
        source_bytes=sum(layer.size for layer in resolved.manifest.layers),
    )


@dataclass(frozen=True, slots=True)
class _Step:
    """One layer of the image: its place, its blob, and the keys by which the store may know it."""

    title: str
    blob: Descriptor
    diff_id: Digest
    chain: Digest
    alone: Digest
    on_top: Digest


def _steps(resolved: ResolvedImage) -> list[_Step]:
    """The layers of an image, bottom first."""
    steps: list[_Step] = []
    count = len(resolved.manifest.layers)
    parent = None
    for number, (blob, diff_id) in enumerate(zip(resolved.manifest.layers, resolved.config.diff_ids, strict=True), 1):
        chain = chain_id(parent, diff_id)
        alone, on_top = build_key(diff_id, DEFAULT, None), build_key(diff_id, DEFAULT, parent or _BOTTOM)
        steps.append(_Step(f"layer {number} of {count} ({diff_id.hex[:12]})", blob, diff_id, chain, alone, on_top))
        parent = chain
    return steps


@dataclass(frozen=True, slots=True)
class _Found:
    """A layer of the store, and the build key that leads to it."""

    key: Digest
    layer: Digest


@dataclass(frozen=True, slots=True)
class _Unpacked:
    """A layer whose contents are stored, and whose tree is still to be made."""

    build: LayerBuild
    placed: list[Placed]


class _Conversion:
    """The layers of one image on their way."""

    def __init__(self, objects: Objects, source: ImageSource, progress: Progress, workers: int, verify: bool) -> None:
        self._objects = objects
        self._source = source
        self._progress = progress
        self._workers = workers
        self._verify = verify
        self._presence = Presence(objects)
        self._index: ChunkIndex | None = None
        self._index_lock = threading.Lock()
        self._given_up = threading.Event()
        self._stack = StoredStack(objects)
        self.built: list[StoredLayer] = []

    def run(self, steps: list[_Step]) -> tuple[Digest, ...]:
        """All layers, stored; bottom first."""
        with ThreadPoolExecutor(LOOKUPS_AT_ONCE, thread_name_prefix="lookup") as pool:
            known = list(pool.map(self._known, steps))
        missing = _first_of_each(step for step, found in zip(steps, known, strict=True) if found is None)
        with _Window(self._unpack, missing, self._given_up) as unpacked:
            for step, found in zip(steps, known, strict=True):
                again = found is None and step not in unpacked
                self._add(step, self._known(step) if again else found, unpacked)
        return self._stack.layers

    def _add(self, step: _Step, found: _Found | None, unpacked: _Window) -> None:
        """Put one more layer on top: one that is known, or built now."""
        if found is None:
            with unpacked.take(step) as layer:
                found = self._build(step, layer)
        else:
            self._stack.push(found.layer)
        self._objects.set_lookup("chain", step.chain, found.layer)
        if found.key == step.alone:
            self._objects.set_lookup("digest", step.blob.digest, found.layer)
            self._objects.set_lookup("diff", step.diff_id, found.layer)

    def _known(self, step: _Step) -> _Found | None:
        """By the first of its keys that leads to a layer of which nothing is missing."""
        for key in (step.alone, step.on_top):
            if (layer := self._objects.lookup("build", key)) and self._is_whole(layer):
                return _Found(key, layer)
        return None

    def _is_whole(self, layer: Digest) -> bool:
        problems = layer_problems(self._objects, layer) if self._verify else self._presence.missing(layer)
        for problem in problems:
            _log.warning("layer %s is built again: %s", layer, problem)
        return not problems

    def _build(self, step: _Step, unpacked: _Unpacked) -> _Found:
        with _naming(step):
            assembly = assemble(unpacked.placed, unpacked.build.contents, self._stack.stack(), self._stack.open)
            stored = unpacked.build.commit(assembly, step.diff_id)
        self.built.append(stored)
        self._stack.push(stored.digest, assembly.root)
        key = step.on_top if assembly.needs_lower else step.alone
        self._objects.set_lookup("build", key, stored.digest)
        return _Found(key, stored.digest)

    # -- contents, on other threads --------------------------------------------------------------------------------

    def _unpack(self, step: _Step) -> _Unpacked:
        """Store the contents of a layer. Nothing is stored of a blob that is not what the manifest says."""
        with self._source.open_blob(step.blob) as reader:
            reader.finish()
        index = self._shared_index()
        with contextlib.ExitStack() as undo:
            build = undo.enter_context(LayerBuild(self._objects, index, workers=self._workers, with_recipe=True))
            with _naming(step), ReadAhead(self._plain(step)) as tar:
                placed = unpack(tar, build.contents, build.recipe)
            undo.pop_all()
        return _Unpacked(build, placed)

    def _plain(self, step: _Step) -> Iterator[bytes]:
        """The uncompressed bytes of a layer's blob. Raises `Corrupt` when they are not what the config says."""
        hasher = hasher_for("sha256")
        with self._source.open_blob(step.blob, hashed=False) as reader:  # the diff_id verifies these bytes
            counted = _Counted(reader)
            for piece in decompressed(counted):
                if self._given_up.is_set():
                    raise Unavailable("given up, since another layer failed")
                hasher.update(piece)
                self._progress(step.title, counted.position, step.blob.size)
                yield piece
            reader.finish()
        if (found := Digest("sha256", hasher.digest())) != step.diff_id:
            raise Corrupt(f"its uncompressed bytes are {found}, its config says diff_id {step.diff_id}")
        self._progress(step.title, step.blob.size, step.blob.size)

    def _shared_index(self) -> ChunkIndex:
        """What chunks the store has: read when the first layer needs it."""
        with self._index_lock:
            if self._index is None:
                self._index = ChunkIndex(self._objects, verify=self._verify)
            return self._index


@contextlib.contextmanager
def _naming(step: _Step) -> Iterator[None]:
    """What is wrong with a layer is told with its digest."""
    try:
        yield
    except StoreError as error:
        raise type(error)(f"layer {step.blob.digest}: {error}") from None


class _Counted:
    """A reader that says how far it is."""

    def __init__(self, reader: VerifiedReader) -> None:
        self._reader = reader
        self.position = 0

    def read(self, size: int, /) -> bytes:
        data = self._reader.read(size)
        self.position += len(data)
        return data


class _Window:
    """Layers that are unpacked ahead, a few at a time, and taken in their order.

    A layer that is taken without having been foreseen is unpacked then. At the end, and after an error, what is under
    way is given up.
    """

    def __init__(self, unpack: Callable[[_Step], _Unpacked], steps: Iterable[_Step], given_up: threading.Event) -> None:
        self._unpack = unpack
        self._waiting = deque(steps)
        self._running: dict[_Step, Future[_Unpacked]] = {}
        self._given_up = given_up
        self._pool = ThreadPoolExecutor(LAYERS_AT_ONCE, thread_name_prefix="layer")

    def __enter__(self) -> _Window:
        for _ in range(LAYERS_AT_ONCE):
            self._start_next()
        return self

    def __exit__(self, *_: object) -> None:
        self._given_up.set()
        self._pool.shutdown(cancel_futures=True)
        for future in self._running.values():
            if not future.cancelled() and future.exception() is None:
                future.result().build.close()

    def __contains__(self, step: _Step) -> bool:
        return step in self._running

    @contextlib.contextmanager
    def take(self, step: _Step) -> Iterator[_Unpacked]:
        """The unpacked layer, to be committed inside the `with` statement."""
        future = self._running.pop(step, None)
        unpacked = future.result() if future else self._unpack(step)
        with unpacked.build:
            yield unpacked
        self._start_next()

    def _start_next(self) -> None:
        if self._waiting:
            step = self._waiting.popleft()
            self._running[step] = self._pool.submit(self._unpack, step)


def _first_of_each(steps: Iterable[_Step]) -> Iterator[_Step]:
    """Steps without those whose tar came before: it is probably known when their turn comes."""
    seen: set[Digest] = set()
    for step in steps:
        if step.diff_id not in seen:
            seen.add(step.diff_id)
            yield step
