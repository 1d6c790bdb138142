"""Digests: two algorithms, one way of writing each."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec_store.digest import Digest, hasher_for
from dsec_store.errors import Corrupt, Invalid

ALGORITHMS = st.sampled_from(["blake3", "sha256"])
HEX = "00" * 31 + "ab"


def test_the_digests_of_abc() -> None:
    """Test vectors of the two standards."""
    assert Digest.of(b"abc").hex == "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85"
    assert Digest.of(b"abc", "sha256").hex == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@given(ALGORITHMS, st.binary(min_size=32, max_size=32))
def test_written_and_parsed(algorithm: str, raw: bytes) -> None:
    digest = Digest(algorithm, raw)
    assert Digest.parse(str(digest)) == digest


@given(ALGORITHMS, st.lists(st.binary()))
def test_in_pieces(algorithm: str, pieces: list[bytes]) -> None:
    hasher = hasher_for(algorithm)
    for piece in pieces:
        hasher.update(piece)
    assert Digest(algorithm, hasher.digest()) == Digest.of(b"".join(pieces), algorithm)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "blake3",
        "blake3:",
        f"blake3:{HEX[:-1]}",
        f"blake3:{HEX}0",
        f"blake3:{HEX.upper()}",
        f"blake3:{HEX[:-1]} ",
        f"blake3:{HEX[:-1]}٣",
        f"BLAKE3:{HEX}",
        f"md5:{HEX}",
        f"sha512:{HEX}",
        f" sha256:{HEX}",
        f"sha256:{HEX}\n",
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(Invalid, match="not a digest"):
        Digest.parse(text)


@given(st.text())
def test_parsing_never_fails_in_another_way(text: str) -> None:
    with pytest.raises(Invalid):
        Digest.parse(text)


def test_unknown_algorithms_and_sizes() -> None:
    with pytest.raises(Invalid):
        Digest("md5", bytes(32))
    with pytest.raises(Invalid):
        Digest("sha256", bytes(31))
    with pytest.raises(Invalid, match="known: blake3, sha256"):
        hasher_for("md5")


@pytest.mark.parametrize("form", [bytes, bytearray, memoryview])
def test_what_is_verified_may_have_any_form(form: type) -> None:
    Digest.of(b"abc").verify(form(b"abc"), "three letters")


def test_a_mismatch_names_the_thing_and_the_digest() -> None:
    digest = Digest("sha256", hashlib.sha256(b"abc").digest())
    with pytest.raises(Corrupt, match=rf"^three letters: 3 bytes do not match {digest}$"):
        digest.verify(b"abd", "three letters")
