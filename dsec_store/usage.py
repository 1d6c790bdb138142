"""What takes how much room in a store, and who shares it.

    survey = survey_store(objects)
    survey.images["demo"].unique              # stored bytes that go when this image goes, and no other

Two sorts of bytes: *stored* ones, as chunks lie compressed in packs, and *plain* ones. A chunk is counted by the place
where it lies: one that was stored twice is two, and two images share it only if both read the same place. Recipes are
told apart from contents; a chunk that is both is content.

Problem: who else uses a chunk is known only when the locators of all images were read.
Choice:  read each blob's chunk map and locator once, some at a time, into one table; images are bits of a mask.
Memory:  about 170 bytes a place, whatever the number of images, and a few hundred for each object of the store.

What cannot be read is told as a problem and counted as nothing; then it is not told either what no name uses.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

from dsec_store import keys
from dsec_store.chunkmap import ChunkLocation, ChunkMap
from dsec_store.descriptor import Blob, Image, LayerDescriptor
from dsec_store.digest import Digest
from dsec_store.errors import Corrupt, Invalid, NotFound
from dsec_store.objects import Objects
from dsec_store.reachable import Each
from dsec_store.references import Reference

A = TypeVar("A")
B = TypeVar("B")

Progress = Callable[[str, int, int], None]
"""Told what is being read, and how many of how many are done."""

COUNTED: Final = ("images", "oci", "layers", "metadata", "maps", "locators", "packs")
"""Families of objects that a name leads to; the other families are for builders and gc."""

_PACK_ENTRY: Final = 45
_PACK_END: Final = 16
"""Bytes of a pack beside its chunks: an entry for each, count and footer (docs/format/pack.md)."""


@dataclass(slots=True)
class Amount:
    """Some chunks: how many, and their plain and stored bytes."""

    chunks: int = 0
    plain: int = 0
    stored: int = 0

    def add(self, other: Amount) -> None:
        self.chunks += other.chunks
        self.plain += other.plain
        self.stored += other.stored

    @property
    def average(self) -> int:
        """Plain bytes of a chunk."""
        return self.plain // self.chunks if self.chunks else 0


@dataclass(slots=True)
class ImageUse:
    """The room that an image takes.

    contents, recipes   its chunks; each place is counted once    layers       how many it has
    unique, shared      stored bytes of all of these: of no       documents    stored bytes of metadata images, chunk
                        other image, of others too                             maps, locators and the small objects
    shared_with         images with which it shares any chunk
    """

    layers: int = 0
    contents: Amount = field(default_factory=Amount)
    recipes: Amount = field(default_factory=Amount)
    unique: int = 0
    documents: int = 0
    shared_with: int = 0

    @property
    def stored(self) -> int:
        return self.contents.stored + self.recipes.stored

    @property
    def shared(self) -> int:
        return self.stored - self.unique


@dataclass(slots=True)
class LayerUse:
    """Stored bytes of a layer's chunks, recipe included, and of those that others use too."""

    stored: int = 0
    shared_with_images: int = 0
    shared_with_layers: int = 0


@dataclass(slots=True)
class StoreUse:
    """All that is stored: (objects, bytes) by family, and what of it no name leads to.

    unused   bytes of whole objects that no name leads to       dead   bytes in packs that are used: of chunks that are
                                                                       not, and of what lists them
    Both None when they cannot be told. gc frees at most so much: what is young or held by builds and mounts stays.
    """

    families: dict[str, tuple[int, int]] = field(default_factory=dict)
    unused: int | None = None
    dead: int | None = None

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self.families.values())


@dataclass(slots=True)
class Survey:
    """`images` by name; `layers` those of the watched image, bottom first; `problems` name what could not be read."""

    images: dict[str, ImageUse] = field(default_factory=dict)
    layers: list[LayerUse] = field(default_factory=list)
    store: StoreUse = field(default_factory=StoreUse)
    problems: list[str] = field(default_factory=list)


def silent(what: str, done: int, total: int) -> None:
    """A progress that nobody watches."""


def survey_store(objects: Objects, *, watch: str | None = None, progress: Progress = silent) -> Survey:
    """Who uses what. Names of one image count as one image. `watch`: a name whose layers are told apart.

    Raises `NotFound` when there is no name `watch`, and `Unavailable` when the store cannot be reached.
    """
    if watch is not None:
        objects.references.read(watch)
    return _Surveying(objects, progress).survey(watch)


def amount_of(objects: Objects, blobs: Iterable[Blob]) -> Amount:
    """The chunks of some blobs, each place counted once."""
    table = _Table()
    for blob in blobs:
        table.add(*_read_blob(objects, blob), bit=1, recipe=False)
    total = Amount()
    for group in table.groups().values():
        total.add(group)
    return total


class _Table:
    """Every place in a pack where a chunk lies that is in use, and by which images: one bit of a mask each."""

    def __init__(self) -> None:
        self._packs: dict[Digest, int] = {}
        self._rows: dict[int, int] = {}
        self._size = array("I")
        self._stored = array("I")
        self._recipe = bytearray()
        self._mask = array("I")
        self._masks: list[int] = []
        self._numbers: dict[int, int] = {}

    def add(self, chunk_map: ChunkMap, locations: list[ChunkLocation], *, bit: int, recipe: bool) -> array[int]:
        """Note that the images of `bit` use this blob. Contents come before recipes. Returns the rows of its chunks."""
        rows = array("I")
        joined: dict[int, int] = {}
        for size, at in zip(chunk_map.sizes, locations, strict=True):
            place = self._packs.setdefault(at.pack, len(self._packs)) << 32 | at.offset
            row = self._rows.setdefault(place, len(self._size))
            if row == len(self._size):
                self._size.append(size)
                self._stored.append(at.stored)
                self._recipe.append(recipe)
                self._mask.append(self._number(0))
            before = self._mask[row]
            if before not in joined:
                joined[before] = self._number(self._masks[before] | bit)
            self._mask[row] = joined[before]
            rows.append(row)
        return rows

    def _number(self, mask: int) -> int:
        number = self._numbers.setdefault(mask, len(self._masks))
        if number == len(self._masks):
            self._masks.append(mask)
        return number

    def groups(self) -> dict[tuple[int, bool], Amount]:
        """The chunks by the mask of their images and by whether they are of recipes."""
        found: dict[tuple[int, bool], Amount] = {}
        for size, stored, recipe, mask in zip(self._size, self._stored, self._recipe, self._mask, strict=True):
            amount = found.setdefault((self._masks[mask], bool(recipe)), Amount())
            amount.chunks += 1
            amount.plain += size
            amount.stored += stored
        return found

    def stored(self, row: int) -> int:
        return self._stored[row]

    def mask(self, row: int) -> int:
        return self._masks[self._mask[row]]

    def packs(self) -> dict[Digest, Amount]:
        """What is in use of each pack."""
        digests = list(self._packs)
        found = {pack: Amount() for pack in digests}
        for place, row in self._rows.items():
            found[digests[place >> 32]].add(Amount(1, self._size[row], self._stored[row]))
        return found


@dataclass(slots=True)
class _User:
    """An image: its bit and what it leads to."""

    bit: int
    digest: Digest
    image: Image
    keys: set[str]


class _Surveying:
    """One survey: from the names down, each kind of object in turn, several at once."""

    def __init__(self, objects: Objects, progress: Progress) -> None:
        self._objects = objects
        self._progress = progress
        self._each = Each()
        self._survey = Survey()
        self._table = _Table()
        self._users: dict[Digest, _User] = {}
        self._layers: dict[Digest, LayerDescriptor] = {}
        self._rows: dict[Digest, array[int]] = {}

    def survey(self, watch: str | None) -> Survey:
        names = self._read_names()
        self._read_images(names)
        self._read_layers()
        watched = self._users.get(names[watch].image) if watch is not None and watch in names else None
        self._read_blobs(set(watched.image.layers) if watched else set())
        sizes = self._list()
        self._count_images(names, sizes)
        self._count_store(sizes)
        if watched:
            self._survey.layers = self._count_layers(watched)
        return self._survey

    # -- reading ---------------------------------------------------------------------------------------------------

    def _read_names(self) -> dict[str, Reference]:
        names = list(self._objects.references.names())
        return dict(self._tolerant("names", self._objects.references.read, names))

    def _read_images(self, names: Mapping[str, Reference]) -> None:
        oci: dict[Digest, set[str]] = defaultdict(set)
        for reference in names.values():
            oci[reference.image] |= {keys.oci(document) for document in reference.origin.oci}
        for digest, image in self._tolerant("images", self._objects.image, oci):
            self._users[digest] = _User(1 << len(self._users), digest, image, {keys.image(digest), *oci[digest]})

    def _read_layers(self) -> None:
        wanted = dict.fromkeys(
            layer for user in self._users.values() for layer in (*user.image.layers, *user.image.lowers)
        )
        self._layers = dict(self._tolerant("layers", self._objects.layer, wanted))

    def _read_blobs(self, watched: set[Digest]) -> None:
        """Contents first: a chunk that is both is content."""
        bits: dict[tuple[bool, Blob], int] = defaultdict(int)
        for user in self._users.values():
            for digest in {*user.image.layers, *user.image.lowers} & self._layers.keys():
                layer = self._layers[digest]
                user.keys |= {keys.layer(digest), keys.metadata(layer.metadata.digest)}
                for blob in layer.stored_blobs:
                    user.keys |= {keys.chunk_map(blob.name), keys.locator(blob.name)}
                    bits[blob == layer.recipe, blob] |= user.bit
        kept = {blob.name for digest in watched & self._layers.keys() for blob in self._layers[digest].stored_blobs}
        order = sorted(bits, key=lambda key: (key[0], key[1].name))

        def read(key: tuple[bool, Blob]) -> tuple[ChunkMap, list[ChunkLocation]]:
            return _read_blob(self._objects, key[1])

        for key, (chunk_map, locations) in self._tolerant("blobs", read, order):
            rows = self._table.add(chunk_map, locations, bit=bits[key], recipe=key[0])
            if key[1].name in kept:
                self._rows[key[1].name] = rows

    def _tolerant(self, what: str, read: Callable[[A], B], things: Iterable[A]) -> Iterator[tuple[A, B]]:
        """What can be read of `things`, with the answers."""

        def one(thing: A) -> tuple[A, B] | str:
            try:
                return thing, read(thing)
            except (NotFound, Corrupt, Invalid) as error:
                return str(error)

        waiting = list(things)
        for done, answer in enumerate(self._each(one, waiting)):
            self._progress(what, done, len(waiting))
            if isinstance(answer, str):
                self._survey.problems.append(answer)
            else:
                yield answer

    def _list(self) -> dict[str, int]:
        """The size of every object that is counted, by key."""

        def one(family: str) -> list[tuple[str, int]]:
            return [(each.key, each.size) for each in self._objects.blobs.list(f"{family}/")]

        sizes: dict[str, int] = {}
        for family, listed in zip(keys.COLLECTED, self._each(one, keys.COLLECTED), strict=True):
            self._survey.store.families[family] = (len(listed), sum(size for _, size in listed))
            if family in COUNTED:
                sizes.update(listed)
        return sizes

    # -- counting --------------------------------------------------------------------------------------------------

    def _count_images(self, names: Mapping[str, Reference], sizes: Mapping[str, int]) -> None:
        groups = self._table.groups()
        uses = {user.digest: _image_use(user, groups, sizes) for user in self._users.values()}
        for name, reference in names.items():
            if reference.image in uses:
                self._survey.images[name] = uses[reference.image]

    def _count_store(self, sizes: Mapping[str, int]) -> None:
        if self._survey.problems:
            return
        used = {key for user in self._users.values() for key in user.keys}
        dead = 0
        for pack, amount in self._table.packs().items():
            used.add(keys.pack(pack))
            needed = amount.stored + amount.chunks * _PACK_ENTRY + _PACK_END
            dead += max(0, sizes.get(keys.pack(pack), 0) - needed)
        self._survey.store.unused = sum(size for key, size in sizes.items() if key not in used)
        self._survey.store.dead = dead

    def _count_layers(self, watched: _User) -> list[LayerUse]:
        rows = [self._rows_of(layer) for layer in watched.image.layers]
        users = Counter(row for layer in dict(zip(watched.image.layers, rows, strict=True)).values() for row in layer)
        found = []
        for own in rows:
            use = LayerUse()
            for row in own:
                stored = self._table.stored(row)
                use.stored += stored
                use.shared_with_images += stored * (self._table.mask(row) != watched.bit)
                use.shared_with_layers += stored * (users[row] > 1)
            found.append(use)
        return found

    def _rows_of(self, layer: Digest) -> set[int]:
        descriptor = self._layers.get(layer)
        blobs = descriptor.stored_blobs if descriptor else ()
        return {row for blob in blobs for row in self._rows.get(blob.name, ())}


def _image_use(user: _User, groups: Mapping[tuple[int, bool], Amount], sizes: Mapping[str, int]) -> ImageUse:
    use = ImageUse(layers=len(user.image.layers), documents=sum(sizes.get(key, 0) for key in user.keys))
    others = 0
    for (mask, recipe), amount in groups.items():
        if mask & user.bit:
            (use.recipes if recipe else use.contents).add(amount)
            use.unique += amount.stored if mask == user.bit else 0
            others |= mask & ~user.bit
    use.shared_with = others.bit_count()
    return use


def _read_blob(objects: Objects, blob: Blob) -> tuple[ChunkMap, list[ChunkLocation]]:
    chunk_map = objects.chunk_map(blob.chunk_map)
    return chunk_map, objects.locator(blob.name, len(chunk_map))
