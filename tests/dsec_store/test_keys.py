"""Key names: where each kind of object lies, and what a key promises of its bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dsec_store import keys
from dsec_store.blobs import check_key
from dsec_store.digest import Digest
from dsec_store.errors import Invalid

BLAKE3 = Digest.of(b"abc")
SHA256 = Digest.of(b"abc", "sha256")

FAMILIES: dict[str, tuple[Callable[[Digest], str], Digest]] = {
    "packs": (keys.pack, BLAKE3),
    "indexes": (keys.index, BLAKE3),
    "metadata": (keys.metadata, BLAKE3),
    "maps": (keys.chunk_map, BLAKE3),
    "layers": (keys.layer, BLAKE3),
    "images": (keys.image, BLAKE3),
    "oci": (keys.oci, SHA256),
    "locators": (keys.locator, BLAKE3),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_fan_out_by_two_digits(family: str) -> None:
    key_of, digest = FAMILIES[family]
    assert check_key(key_of(digest)) == f"{family}/{digest.hex[:2]}/{digest.hex}"


@pytest.mark.parametrize("family", FAMILIES)
def test_only_keys_that_name_their_bytes_promise_a_digest(family: str) -> None:
    key_of, digest = FAMILIES[family]
    assert keys.verbatim_digest(key_of(digest)) == (digest if family in keys.VERBATIM else None)


def test_what_is_replaceable_promises_none() -> None:
    replaceable = {"metadata", "locators"}  # metadata images are named by their plain bytes, and stored compressed
    assert set(keys.VERBATIM) == set(FAMILIES) - replaceable
    assert keys.verbatim_digest(keys.reference("demo")) is None
    assert keys.verbatim_digest(keys.lookup("diff", SHA256)) is None


@pytest.mark.parametrize("kind", keys.LOOKUP_KINDS)
def test_lookups_by_kind_and_algorithm(kind: str) -> None:
    found = {check_key(keys.lookup(kind, digest)) for digest in (BLAKE3, SHA256)}
    assert found == {f"lookup/{kind}/{d.algorithm}/{d.hex[:2]}/{d.hex}" for d in (BLAKE3, SHA256)}


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(Invalid, match="unknown lookup kind 'name'"):
        keys.lookup("name", BLAKE3)


def test_the_digest_in_a_key() -> None:
    assert keys.digest_in(keys.index(BLAKE3)) == BLAKE3
    for key in ("indexes/ab/README", "indexes", f"{keys.index(BLAKE3)}/"):
        with pytest.raises(Invalid):
            keys.digest_in(key)
