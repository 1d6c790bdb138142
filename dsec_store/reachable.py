"""Marking: which objects of a store something leads to.

    names ─> images, OCI objects ─> layers ─> metadata, chunk maps, locators ─> packs          (docs/format/store.md)

Read once each, a few at a time. Of packs it is also told which of their chunks are in use.

Memory: about 130 bytes for each reachable object, and, with `chunks`, about 90 for each chunk in use: its offset in a
set, pack by pack.

    reached = mark(objects, each, holds=[])
    "packs/ab/ab12…" in reached.keys
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, TypeVar

from dsec_store import keys
from dsec_store.chunkmap import ChunkLocation
from dsec_store.digest import Digest
from dsec_store.errors import Corrupt, Invalid, NotFound, StoreError, Unavailable
from dsec_store.objects import Objects

A = TypeVar("A")
B = TypeVar("B")

READERS: Final = 16
"""Objects that are read at once."""

_TRIES: Final = 5
"""How often marking begins anew because a name went away meanwhile."""

_BATCH: Final = 64
"""Objects whose contents may be in memory together."""


class Each:
    """Applies a function to many things, `workers` at once, results in order; with one worker in the calling thread."""

    def __init__(self, workers: int = READERS) -> None:
        self._workers = workers

    def __call__(self, function: Callable[[A], B], things: Iterable[A]) -> Iterator[B]:
        if self._workers == 1:
            yield from map(function, things)
            return
        waiting = list(things)
        with ThreadPoolExecutor(self._workers, thread_name_prefix="gc") as pool:
            for at in range(0, len(waiting), _BATCH):
                yield from pool.map(function, waiting[at : at + _BATCH])


@dataclass(slots=True)
class PackUse:
    """What is in use of one pack: offsets of chunks, their stored bytes in all, and the chunk maps that name them."""

    offsets: set[int] = field(default_factory=set)
    stored: int = 0
    chunk_maps: set[Digest] = field(default_factory=set)


@dataclass(slots=True)
class Reached:
    """Keys of all that is reachable; with `chunks`, the use of each pack."""

    keys: set[str] = field(default_factory=set)
    packs: dict[Digest, PackUse] = field(default_factory=dict)


def mark(objects: Objects, each: Each, holds: Iterable[str], *, chunks: bool = False) -> Reached:
    """All that the names of the store and the layers of the keys `holds` lead to.

    Raises `Corrupt` when a reference, or an image, layer or locator that a name leads to, is lost or damaged: what it
    leads to cannot be told. What is held and cannot be read leads nowhere.
    """
    holds = set(holds)
    named = _named(objects, each)
    for _ in range(_TRIES):
        walk = _Walk(objects, each, chunks)
        walk.strict = True
        try:
            walk.run(named)
        except Corrupt:
            before, named = named, _named(objects, each)
            if before == named:
                raise
            continue  # a name was removed meanwhile, and another gc has freed what it led to
        walk.strict = False
        walk.run(holds - walk.reached.keys)
        return walk.reached
    raise Unavailable("names of the store change faster than gc can read them: run it again")


def closure(objects: Objects, each: Each, roots: Iterable[str]) -> set[str]:
    """The keys `roots` and those of all that they lead to. What cannot be read leads nowhere."""
    walk = _Walk(objects, each, chunks=False)
    walk.run(set(roots))
    return walk.reached.keys


def _named(objects: Objects, each: Each) -> set[str]:
    """Keys of the images and OCI objects that the names of the store lead to."""

    def read(name: str) -> list[str]:
        try:
            reference = objects.references.read(name)
        except NotFound:  # removed just now
            return []
        except (Corrupt, Invalid) as error:
            raise _unknown(error) from error
        return [keys.image(reference.image), *map(keys.oci, reference.origin.oci)]

    return {key for found in each(read, objects.references.names()) for key in found}


class _Walk:
    """One walk, or several after one another: what the first has reached, the next adds to."""

    def __init__(self, objects: Objects, each: Each, chunks: bool) -> None:
        self._objects = objects
        self._each = each
        self._chunks = chunks
        self.strict = False
        self.reached = Reached()

    def run(self, roots: set[str]) -> None:
        reached = self.reached
        reached.keys |= roots
        layers = {key for key in roots if keys.family(key) == "layers"}
        for found in self._read(self._image, _of(roots, "images")):
            layers.update(found)
        reached.keys |= layers
        blobs = _of(roots, "locators")
        for metadata, found_blobs in self._read(self._layer, sorted(map(keys.digest_in, layers), key=_order)):
            reached.keys.add(metadata)
            blobs.extend(found_blobs)
            reached.keys.update(keys.chunk_map(blob) for blob in found_blobs)
        blobs = sorted(set(blobs), key=_order)
        reached.keys.update(map(keys.locator, blobs))
        for blob, locations in self._read(self._locator, blobs):
            reached.keys.update({keys.pack(at.pack) for at in locations})
            if self._chunks:
                self._use(blob, locations)

    def _read(self, read: Callable[[Digest], B], digests: Iterable[Digest]) -> Iterator[B]:
        """The answers of `read`, without those of objects that cannot be read."""

        def tolerant(digest: Digest) -> list[B]:
            try:
                return [read(digest)]
            except (NotFound, Corrupt, Invalid) as error:
                if self.strict:
                    raise _unknown(error) from error
                return []

        for answers in self._each(tolerant, digests):
            yield from answers

    def _image(self, digest: Digest) -> set[str]:
        image = self._objects.image(digest)
        return {keys.layer(layer) for layer in (*image.layers, *image.lowers)}

    def _layer(self, digest: Digest) -> tuple[str, list[Digest]]:
        layer = self._objects.layer(digest)
        return keys.metadata(layer.metadata.digest), [blob.name for blob in layer.stored_blobs]

    def _locator(self, blob: Digest) -> tuple[Digest, list[ChunkLocation]]:
        return blob, self._objects.locator(blob)

    def _use(self, blob: Digest, locations: list[ChunkLocation]) -> None:
        """Note which chunks of which packs this blob needs."""
        for at in locations:
            use = self.reached.packs.setdefault(at.pack, PackUse())
            use.chunk_maps.add(blob)
            if at.offset not in use.offsets:
                use.offsets.add(at.offset)
                use.stored += at.stored


def _unknown(error: StoreError) -> Corrupt:
    return Corrupt(
        f"gc frees nothing while it cannot tell what is in use: {error} ('dsec-image ls' and 'check' tell which image "
        "that is: convert or build it again, or remove its name)"
    )


def _of(roots: Iterable[str], family: str) -> list[Digest]:
    """The digests of the keys of one family, in order."""
    return sorted((keys.digest_in(key) for key in roots if keys.family(key) == family), key=_order)


def _order(digest: Digest) -> bytes:
    return digest.raw
