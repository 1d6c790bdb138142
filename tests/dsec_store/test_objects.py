"""Typed objects: what is put is got back, what is damaged or absent is named, and nothing unverified comes out."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from dsec_store import keys
from dsec_store import objects as objects_module
from dsec_store.backends.memory import MemoryBlobs
from dsec_store.chunkmap import ChunkLocation, ChunkMap
from dsec_store.descriptor import Sized
from dsec_store.digest import Digest
from dsec_store.errors import Corrupt, Invalid, NotFound
from dsec_store.objects import MAX_METADATA, MAX_OCI_OBJECT, Objects
from dsec_store.pack import PackBuilder, PackedChunk
from tests.dsec_store.blobmaker import flipped, noise, unless_refused
from tests.dsec_store.test_descriptor import IMAGE, LAYER

METADATA = b"a metadata image " * 100
MAP = ChunkMap([bytes(32), bytes(31) + b"a"], [10, 20])
LOCATIONS = [ChunkLocation(Digest.of(b"pack"), 0, 10, 0), ChunkLocation(Digest.of(b"pack"), 10, 15, 1)]


def pack(*stored: bytes) -> tuple[bytes, list[PackedChunk]]:
    builder = PackBuilder()
    for data in stored:
        builder.add(Digest.of(data).raw, len(data), 0, data)
    return builder.seal(), builder.chunks


PACK, CHUNKS = pack(b"one", b"another")


@pytest.fixture
def objects() -> Objects:
    return Objects(MemoryBlobs())


Read = Callable[[], object]

STORED: dict[str, Callable[[Objects], tuple[str, Read, object]]] = {}
"""For each kind: puts an object, and gives its key, how to read it, and what must come."""


def kind(store: Callable[[Objects], tuple[str, Read, object]]) -> None:
    STORED[store.__name__] = store


@kind
def layer(objects: Objects) -> tuple[str, Read, object]:
    digest = objects.put_layer(LAYER)
    return keys.layer(digest), lambda: objects.layer(digest), LAYER


@kind
def image(objects: Objects) -> tuple[str, Read, object]:
    digest = objects.put_image(IMAGE)
    return keys.image(digest), lambda: objects.image(digest), IMAGE


@kind
def oci(objects: Objects) -> tuple[str, Read, object]:
    digest = objects.put_oci(b'{ "verbatim": 1 }')
    assert digest == Digest.of(b'{ "verbatim": 1 }', "sha256")
    return keys.oci(digest), lambda: objects.oci(digest), b'{ "verbatim": 1 }'


@kind
def metadata(objects: Objects) -> tuple[str, Read, object]:
    sized = objects.put_metadata(METADATA)
    assert sized == Sized(Digest.of(METADATA), len(METADATA))
    return keys.metadata(sized.digest), lambda: objects.metadata(sized), METADATA


@kind
def plain_metadata(objects: Objects) -> tuple[str, Read, object]:
    sized = objects.put_metadata(noise(500))
    return keys.metadata(sized.digest), lambda: objects.metadata(sized), noise(500)


@kind
def chunk_map(objects: Objects) -> tuple[str, Read, object]:
    sized = objects.put_chunk_map(MAP)
    return keys.chunk_map(sized.digest), lambda: objects.chunk_map(sized).encode(), MAP.encode()


@kind
def index(objects: Objects) -> tuple[str, Read, object]:
    digest = objects.put_index([(Digest.of(PACK), CHUNKS)])
    return keys.index(digest), lambda: objects.index(digest), [(Digest.of(PACK), CHUNKS)]


@pytest.mark.parametrize("name", STORED)
def test_what_is_put_is_got(objects: Objects, name: str) -> None:
    _, read, expected = STORED[name](objects)
    assert read() == expected


@pytest.mark.parametrize("name", STORED)
def test_what_is_absent_is_named(objects: Objects, name: str) -> None:
    key, read, _ = STORED[name](objects)
    objects.blobs.delete(key)
    with pytest.raises(NotFound, match=rf"{key[-64:]} is missing in {objects.blobs.location}$"):
        read()


@pytest.mark.parametrize("name", STORED)
def test_no_damage_goes_unnoticed(objects: Objects, name: str) -> None:
    key, read, expected = STORED[name](objects)
    data = objects.blobs.get(key)
    changes = [flipped(data, at) for at in range(0, len(data), 7)]
    for change in [*changes, data[:-1], data + b"\0", b""]:
        objects.blobs.put(key, change)
        with pytest.raises(Corrupt, match=key[-64:]):
            assert read() == expected


def test_a_locator_is_replaceable(objects: Objects) -> None:
    sized = objects.put_chunk_map(MAP)
    with pytest.raises(NotFound, match=f"locator of chunk map {sized.digest} is missing"):
        objects.locator(sized.digest)
    for locations in (LOCATIONS, LOCATIONS[::-1]):
        objects.put_locator(sized, locations)
        assert objects.locator(sized.digest, 2) == locations
    with pytest.raises(Corrupt, match="2 entries for 3"):
        objects.locator(sized.digest, 3)


def test_sizes_are_checked_before_digests(objects: Objects) -> None:
    sized = objects.put_metadata(METADATA)
    for size in (0, len(METADATA) - 1, len(METADATA) + 1, MAX_METADATA + 1, 10**15):
        with pytest.raises(Corrupt):
            objects.metadata(replace(sized, size=size))
    chunk_map = objects.put_chunk_map(MAP)
    for size in (0, chunk_map.size - 1, chunk_map.size + 1):
        with pytest.raises(Corrupt, match="bytes"):
            objects.chunk_map(replace(chunk_map, size=size))


def test_what_a_reader_accepts_is_bounded_before_it_is_read(objects: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    sized, pack_digest = objects.put_chunk_map(MAP), objects.put_pack(PACK)
    objects.put_locator(sized, LOCATIONS)
    reads: dict[str, Read] = {
        "MAX_CHUNK_MAP": lambda: objects.chunk_map(sized),
        "MAX_LOCATOR": lambda: objects.locator(sized.digest),
        "MAX_SECTION": lambda: objects.pack_chunks(pack_digest),
        "MAX_PACK": lambda: objects.verify_pack(pack_digest),
    }
    for limit, read in reads.items():
        read()
        with monkeypatch.context() as patch:
            patch.setattr(f"dsec_store.objects.{limit}", 20)
            with pytest.raises(Corrupt, match="expected at most 20"):
                read()


def test_a_whole_pack_is_verified(objects: Objects) -> None:
    digest = objects.put_pack(PACK)
    objects.verify_pack(digest)
    objects.blobs.put(keys.pack(digest), flipped(PACK, 3))
    with pytest.raises(Corrupt, match=f"pack {digest}"):
        objects.verify_pack(digest)


def test_an_oci_object_is_bounded(objects: Objects) -> None:
    data = bytes(MAX_OCI_OBJECT + 1)
    digest = Digest.of(data, "sha256")
    objects.blobs.put(keys.oci(digest), data)
    with pytest.raises(Corrupt, match="expected at most"):
        objects.oci(digest)


def test_what_readers_would_refuse_is_not_written(objects: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Invalid, match=r"an OCI object of \d+ bytes cannot be stored"):
        objects.put_oci(bytes(MAX_OCI_OBJECT + 1))
    monkeypatch.setattr(objects_module, "MAX_METADATA", 4095)
    with pytest.raises(Invalid, match="a metadata image of 4096 bytes cannot be stored"):
        objects.put_metadata(bytes(4096))
    assert not list(objects.blobs.list(""))


def test_lookups(objects: Objects) -> None:
    diff_id, digest = Digest.of(b"tar", "sha256"), objects.put_layer(LAYER)
    assert objects.lookup("diff", diff_id) is None
    objects.set_lookup("diff", diff_id, digest)
    assert objects.lookup("diff", diff_id) == digest
    assert objects.lookup("chain", diff_id) is None
    objects.blobs.delete(keys.layer(digest))
    assert objects.lookup("diff", diff_id) is None


@pytest.mark.parametrize("data", [b"", b"?", b"\xff" * 71, b"x" * 1000, str(Digest.of(b"absent")).encode()])
def test_a_lookup_to_nonsense_leads_nowhere_until_it_is_set_anew(objects: Objects, data: bytes) -> None:
    diff_id, digest = Digest.of(b"tar", "sha256"), objects.put_layer(LAYER)
    objects.blobs.put(keys.lookup("diff", diff_id), data)
    assert objects.lookup("diff", diff_id) is None
    objects.set_lookup("diff", diff_id, digest)
    assert objects.lookup("diff", diff_id) == digest


def test_a_pack_tells_its_chunks(objects: Objects) -> None:
    digest = objects.put_pack(PACK)
    assert digest == Digest.of(PACK)
    assert objects.pack_chunks(digest) == CHUNKS
    with pytest.raises(NotFound, match=f"pack {Digest.of(b'other')} is missing"):
        objects.pack_chunks(Digest.of(b"other"))


@pytest.mark.parametrize("data", [b"", b"short", PACK[:-1], PACK[10:], PACK + b"\0", bytes(100)])
def test_a_pack_that_was_cut_is_corrupt(objects: Objects, data: bytes) -> None:
    objects.blobs.put(keys.pack(Digest.of(PACK)), data)
    with pytest.raises(Corrupt, match=Digest.of(PACK).hex):
        objects.pack_chunks(Digest.of(PACK))


def test_a_pack_with_a_flipped_section_is_refused_or_tells_other_chunks(objects: Objects) -> None:
    """Its own bytes are not verified here: that takes the whole pack."""
    for at in range(len(b"oneanother"), len(PACK)):
        objects.blobs.put(keys.pack(Digest.of(PACK)), flipped(PACK, at))
        assert unless_refused(lambda: objects.pack_chunks(Digest.of(PACK))) != CHUNKS


def test_listings_leave_out_what_is_not_ours(objects: Objects) -> None:
    pack_digest, index_digest = objects.put_pack(PACK), objects.put_index([(Digest.of(PACK), CHUNKS)])
    for family in ("packs", "indexes"):
        objects.blobs.put(f"{family}/README", b"?")
        objects.blobs.put(f"{family}/zz/{Digest.of(b'misplaced').hex}", b"?")
    assert objects.packs() == {pack_digest: len(PACK)}
    assert list(objects.index_digests()) == [index_digest]
    assert list(objects.indexes()) == [(pack_digest, CHUNKS)]


def test_a_layer_of_another_release_says_what_to_do(objects: Objects) -> None:
    data = LAYER.encode().replace(b'"format":2', b'"format":7')
    digest = Digest.of(data)
    objects.blobs.put(keys.layer(digest), data)
    with pytest.raises(Invalid, match=rf"layer {re.escape(str(digest))}: format 7 .*upgrade dsec"):
        objects.layer(digest)
