"""References: which names are names, how they lie in the store, and what two writers leave."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec_store.backends.folder import FolderBlobs
from dsec_store.backends.memory import MemoryBlobs
from dsec_store.blobs import BlobStore
from dsec_store.digest import Digest
from dsec_store.document import MAX_NUMBER, encode
from dsec_store.errors import Corrupt, Invalid, NotFound, Unavailable
from dsec_store.fault import Fault, FaultBlobs, scripted
from dsec_store.references import MAX_NAME, Origin, Reference, References, check_name
from tests.dsec_store.blobmaker import in_threads, unless_refused

IMAGE, OTHER = Digest.of(b"image"), Digest.of(b"other")
ORIGIN = Origin(Digest.of(b"manifest", "sha256"), Digest.of(b"config", "sha256"), 12)
NO_ORIGINS: list[object] = [
    *("", [], True, {}, {"source_bytes": -1}, {"source_bytes": True}),
    *({"source_bytes": 1, "manifest": "x"}, {"source_bytes": 1, "config": 1}),
]
DIGESTS = st.none() | st.builds(Digest, st.sampled_from(["blake3", "sha256"]), st.binary(min_size=32, max_size=32))

COMPONENTS = st.from_regex(r"[a-z0-9]+((\.|_|__|-{1,3})[a-z0-9]+){0,2}", fullmatch=True).filter(str.isascii)
TAGS = st.none() | st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,20}", fullmatch=True).filter(str.isascii)
NAMES = st.builds(
    lambda components, tag: "/".join(components) + (f":{tag}" if tag else ""),
    st.lists(COMPONENTS, min_size=1, max_size=4),
    TAGS,
).filter(lambda name: len(name) < MAX_NAME // 3)


@pytest.fixture(params=["memory", "folder"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    return MemoryBlobs() if request.param == "memory" else FolderBlobs(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "a",
        "demo:v1",
        "library/python:3.11-slim",
        "repo/main",
        "a__b.c-d---e",
        "a:" + "t" * 128,
        "a" * MAX_NAME,
        "0/1/2:LATEST",
        "a:_x.-",
    ],
)
def test_names(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "A",
        "a/",
        "/a",
        "a//b",
        "..",
        "../a",
        "a/../b",
        ".a",
        "a.",
        "a..b",
        "a___b",
        "a_-b",
        "a b",
        "a\n",
        "ä",
        "a٣",
        "a:",
        "a:.b",
        "a:-b",
        "a:b:c",
        "a:b/c",
        "a:" + "t" * 129,
        "a%2Fb",
        "a@sha256:" + "0" * 64,
        "host.example:5000/a",
        "a\0",
    ],
)
def test_what_is_no_name(name: str) -> None:
    with pytest.raises(Invalid, match="not a name"):
        check_name(name)


def test_a_name_fits_into_a_file_name(tmp_path: Path) -> None:
    longest = "/".join("a" * 61 for _ in range(4)) + "bc"
    assert len(longest) + 2 * 3 == MAX_NAME
    references = References(FolderBlobs(tmp_path))
    references.set(longest, IMAGE)
    assert references.get(longest) == IMAGE
    with pytest.raises(Invalid, match="too long"):
        references.set(longest + "d", IMAGE)


@given(st.text())
def test_no_other_error(name: str) -> None:
    assert unless_refused(lambda: check_name(name)) in (name, None)


def test_hostile_names_take_no_time() -> None:
    with pytest.raises(Invalid):
        check_name("a-" * 50_000 + "!")


@given(st.dictionaries(NAMES, st.sampled_from([IMAGE, OTHER]), max_size=8))
def test_names_are_kept_apart(names: dict[str, Digest]) -> None:
    references = References(MemoryBlobs())
    for name, image in names.items():
        references.set(name, image)
    assert {name: references.get(name) for name in names} == names
    assert list(references.names()) == sorted(names)


def test_a_name_may_begin_like_another(blobs: BlobStore) -> None:
    references = References(blobs)
    for name in ("a", "a/b", "a/b/c", "a:b", "a/b:c"):
        references.set(name, IMAGE)
    assert list(references.names()) == ["a", "a/b", "a/b/c", "a/b:c", "a:b"]


def test_set_get_replace_remove(blobs: BlobStore) -> None:
    references = References(blobs)
    missing = re.escape(f"no image named 'demo' in {blobs.location} (see 'dsec-image ls')")
    for ask in (references.get, references.read):
        with pytest.raises(NotFound, match=missing):
            ask("demo")
    references.set("demo", IMAGE)
    references.set("demo", OTHER)
    assert references.get("demo") == OTHER
    references.remove("demo")
    assert not list(references.names())
    with pytest.raises(NotFound, match=missing):
        references.remove("demo")


@given(st.builds(Origin, DIGESTS, DIGESTS, st.integers(0, MAX_NUMBER)))
def test_the_origin_is_read_back(origin: Origin) -> None:
    references = References(MemoryBlobs())
    references.set("demo", IMAGE, origin)
    assert references.read("demo") == Reference(IMAGE, origin)


def test_a_new_image_has_a_new_origin(blobs: BlobStore) -> None:
    references = References(blobs)
    references.set("demo", IMAGE, ORIGIN)
    references.set("demo", OTHER)
    assert references.read("demo") == Reference(OTHER, Origin())


@pytest.mark.parametrize("fields", [{}, {"origin": None}])
def test_a_reference_without_an_origin_is_read(fields: dict[str, None]) -> None:
    blobs = MemoryBlobs()
    blobs.put("refs/demo", encode({"format": 1, "image": str(IMAGE), **fields}))
    assert References(blobs).read("demo") == Reference(IMAGE, Origin())


def test_the_objects_of_an_origin() -> None:
    assert ORIGIN.config is not None
    assert ORIGIN.oci == (ORIGIN.config, ORIGIN.manifest)
    assert Origin(config=ORIGIN.config).oci == (ORIGIN.config,)
    assert Origin(source_bytes=5).oci == ()


def test_two_writers_leave_one_of_both(blobs: BlobStore) -> None:
    references = References(blobs)
    references.set("demo", IMAGE)

    def write(image: Digest) -> set[Digest]:
        seen = set()
        for _ in range(20):
            references.set("demo", image)
            seen.add(references.get("demo"))
        return seen

    results = in_threads([lambda: write(IMAGE), lambda: write(OTHER)])
    assert all(isinstance(seen, set) and seen <= {IMAGE, OTHER} for seen in results)
    assert references.get("demo") in (IMAGE, OTHER)


def test_what_is_no_reference_is_not_listed() -> None:
    blobs = MemoryBlobs()
    for key in ("refs/README", "refs/%7E", "refs/x%2", "refs/a/b"):
        blobs.put(key, b"?")
    References(blobs).set("demo", IMAGE)
    assert list(References(blobs).names()) == ["demo"]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"?",
        encode({"format": 1}),
        encode({"format": 1, "image": "demo"}),
        encode({"image": str(IMAGE)}),
        *(encode({"format": 1, "image": str(IMAGE), "origin": origin}) for origin in NO_ORIGINS),
    ],
)
def test_a_damaged_reference_is_corrupt_and_can_be_set_anew(data: bytes) -> None:
    blobs = MemoryBlobs()
    references = References(blobs)
    blobs.put("refs/demo", data)
    with pytest.raises(Corrupt, match="reference 'demo'"):
        references.get("demo")
    references.set("demo", IMAGE)
    assert references.get("demo") == IMAGE


def test_an_outage_is_no_absence() -> None:
    references = References(FaultBlobs(MemoryBlobs(), scripted(*[Fault.UNAVAILABLE] * 3)))
    for ask in (lambda: references.get("demo"), lambda: references.remove("demo"), lambda: list(references.names())):
        with pytest.raises(Unavailable):
            ask()
