"""The test vectors of docs/format: what the pages show is what this release writes and reads."""

from __future__ import annotations

import re
from pathlib import Path

import lmdb
import pytest

from dsec_store import keys
from dsec_store.backends.memory import MemoryBlobs
from dsec_store.cache import NodeCache
from dsec_store.chunker import DEFAULT, Cutter
from dsec_store.chunkmap import ChunkLocation, ChunkMap, decode_locator, encode_locator
from dsec_store.chunks import ChunkSource, LazyBlob, NoCache
from dsec_store.descriptor import Blob, Image, LayerDescriptor, Sized
from dsec_store.digest import Digest
from dsec_store.layer.recipe import read_recipe
from dsec_store.objects import Objects
from dsec_store.pack import PackBuilder, decode_index, encode_index
from dsec_store.references import Origin
from tests.dsec_store.blobmaker import noise
from tests.dsec_store.layer.test_recipe import Part, written
from tests.dsec_store.test_chunker import ends

DOCS = Path(__file__).parents[2] / "docs" / "format"

ZEROS, HELLO = bytes(4096), b"hello".ljust(4096, b"\0")
FRAMES = [
    bytes.fromhex("28b52ffd60000f4d00001000000100fbf70116"),
    bytes.fromhex("28b52ffd60000f6d00003068656c6c6f000100f7f74111"),
]
"""The frames that the page shows: other releases of zstd may write others, all must read these."""

METADATA_IMAGE = Sized(Digest.parse("blake3:22499ce2928680ca5a1c68efab09cd7379299d853a36474e1ad32713938d6f3e"), 4096)


def blocks(page: str) -> list[str]:
    """The indented blocks of a page's section of test vectors."""
    section = re.split(r"^## Test vectors?$", (DOCS / page).read_text(encoding="utf-8"), flags=re.MULTILINE)[1]
    return [
        "\n".join(re.findall(r"^    (.*)$", block, re.MULTILINE))
        for block in section.split("\n\n")
        if block[:4] == " " * 4
    ]


def dump(page: str, number: int) -> bytes:
    """The bytes of a hex dump; its addresses must be right."""
    data = b""
    for line in blocks(page)[number].splitlines():
        address, digits = re.match(r"([0-9a-f]{4}): ((?:[0-9a-f]{2,4} ?)+)(?:  .*)?$", line).groups()  # type: ignore[union-attr]
        assert int(address, 16) == len(data)
        data += bytes.fromhex(digits)
    return data


def text(page: str, number: int) -> bytes:
    return blocks(page)[number].replace("\n", "").encode()


def shown(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


@pytest.fixture
def builder() -> PackBuilder:
    builder = PackBuilder()
    for plain, frame in zip((ZEROS, HELLO), FRAMES, strict=True):
        builder.add(Digest.of(plain).raw, len(plain), 1, frame)
    return builder


PACK = dump("pack.md", 0)
LOCATIONS = [ChunkLocation(Digest.of(PACK), 0, 19, 1), ChunkLocation(Digest.of(PACK), 19, 23, 1)]
MAP = ChunkMap([Digest.of(ZEROS).raw, Digest.of(HELLO).raw], [4096, 4096])
BLOB = Blob(Sized(Digest.of(MAP.encode()), 92), 8192)
LAYER = LayerDescriptor(METADATA_IMAGE, (BLOB,), 3, True, DEFAULT)
IMAGE = Image("toolkit", (Digest.of(LAYER.encode()),), env=(("LANG", "C.UTF-8"),), path=("/opt/bin",))


def test_pack(builder: PackBuilder) -> None:
    assert builder.seal() == PACK
    assert f"`{Digest.of(PACK)}`" in shown("pack.md")


def test_index(builder: PackBuilder) -> None:
    data = dump("pack.md", 1)
    assert encode_index([(Digest.of(PACK), builder.chunks)]) == data
    assert decode_index(data, "index") == [(Digest.of(PACK), builder.chunks)]
    assert f"`{Digest.of(data)}`" in shown("pack.md")


def test_chunk_map() -> None:
    data = dump("chunk-map.md", 0)
    assert MAP.encode() == ChunkMap.decode(data, "map").encode() == data
    assert f"`{Digest.of(data)}`" in shown("chunk-map.md")


def test_locator() -> None:
    data = dump("chunk-map.md", 1)
    assert encode_locator(LOCATIONS) == data
    assert decode_locator(data, "locator", 2) == LOCATIONS


def test_cuts() -> None:
    assert ends(DEFAULT, noise(1 << 20, "vector")) == [int(end) for end in blocks("chunk-map.md")[2].split()]
    assert Cutter(DEFAULT).end() is None


@pytest.mark.parametrize(("number", "value"), [(0, LAYER), (1, IMAGE)])
def test_descriptors(number: int, value: LayerDescriptor | Image) -> None:
    data = text("descriptor.md", number)
    assert value.encode() == data
    assert type(value).decode(data, "it") == value
    assert f"`{Digest.of(data)}`" in shown("descriptor.md")


def test_the_vectors_make_a_store() -> None:
    """All pages together: the reference leads to the bytes of the blob."""
    objects = Objects(MemoryBlobs())
    for key, data in {
        keys.pack(Digest.of(PACK)): PACK,
        keys.chunk_map(BLOB.name): dump("chunk-map.md", 0),
        keys.locator(BLOB.name): dump("chunk-map.md", 1),
        keys.layer(Digest.of(LAYER.encode())): text("descriptor.md", 0),
        keys.image(Digest.of(IMAGE.encode())): text("descriptor.md", 1),
        "refs/demo%3Av1": text("store.md", 0),
    }.items():
        objects.blobs.put(key, data)
    layer = objects.layer(objects.image(objects.references.get("demo:v1")).layers[0])
    (stored,) = layer.blobs
    locations = objects.locator(stored.name)
    blob = LazyBlob(objects.chunk_map(stored.chunk_map), lambda _: locations, ChunkSource(objects.blobs, NoCache()))
    assert blob.read(0, 10_000) == ZEROS + HELLO
    assert list(objects.references.names()) == ["demo:v1"]


def test_a_reference_is_written_as_shown() -> None:
    objects = Objects(MemoryBlobs())
    objects.references.set("demo:v1", Digest.of(IMAGE.encode()), Origin(source_bytes=5))
    assert objects.blobs.get("refs/demo%3Av1") == text("store.md", 0)


def test_cache(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path, 0)
    cache.put(Digest.of(ZEROS).raw, ZEROS)
    cache.close()
    assert (tmp_path / "data" / "0000000001").read_bytes() == ZEROS
    digest = Digest.of((tmp_path / "index" / "data.mdb").read_bytes())
    assert (tmp_path / "state").read_text() == f"closed {digest.hex}"
    with lmdb.open(str(tmp_path / "index"), max_dbs=2, lock=False) as env:
        tables = {name: env.open_db(name.encode(), create=False) for name in ("digest", "segment")}
        with env.begin() as transaction:
            found = {name: list(transaction.cursor(table)) for name, table in tables.items()}
    entry = dump("cache.md", 0)
    assert found == {"digest": [(entry[:32], entry[32:])], "segment": [(dump("cache.md", 1), b"")]}


def test_recipe() -> None:
    parts: list[Part] = [b"one", (0, 5), bytes(507), b"two", (8192, 3), b"three", (0, 5)]
    data = dump("recipe.md", 0)
    assert written(parts) == data
    blob = b"hello".ljust(8192, b"\0") + b"end"
    made = b"".join(read_recipe([data], lambda address, size: blob[address : address + size], "recipe"))
    assert made == b"onehello" + bytes(507) + b"twoendthreehello"


PAGES = ["store.md", "pack.md", "chunk-map.md", "descriptor.md", "cache.md", "recipe.md", "layers.md", "tar.md"]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", shown(page)):
        assert (DOCS / target).is_file(), target
