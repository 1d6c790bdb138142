"""Messages against vectors that were laid out by hand from include/uapi/linux/fuse.h."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec_fuse import protocol
from dsec_fuse.protocol import Attributes, Entry, Feature, Init, Negotiated, Opcode, Range
from dsec_store.errors import Invalid

READ = bytes.fromhex(
    "50000000 0f000000 0900000000000080 2a00000000000040"  # length 80, READ, number 9 resent, node
    "00000000 00000000 d2040000 0000 0000"  # uid, gid, pid 1234, no extensions
    "0000000000000000 0010000000000000 00001000 00000000 0000000000000000 00800000 00000000"  # handle, 4096, 1 MiB
)
LINUX_6_18 = Init(7, 45, 128 << 10, 0x3FF_FFFF_FFFF)


def test_a_read_is_parsed() -> None:
    request = protocol.parse_request(READ)
    assert (request.opcode, request.node, request.pid) == (Opcode.READ, 1 << 62 | 42, 1234)
    assert request.unique == 1 << 63 | 9
    assert request.resent
    assert request.name == "READ"
    assert protocol.parse_read(request.body) == Range(4096, 1 << 20)


def test_an_extension_is_no_part_of_the_body() -> None:
    message = READ[:36] + b"\1\0" + READ[38:]
    assert len(protocol.parse_request(message).body) == len(READ) - 40 - 8


@pytest.mark.parametrize("message", [b"", READ[:39], READ[:-1], READ + b"\0"])
def test_a_message_of_the_wrong_length_is_refused(message: bytes) -> None:
    with pytest.raises(Invalid):
        protocol.parse_request(message)


@given(st.binary(max_size=200))
def test_any_bytes_are_parsed_or_refused(message: bytes) -> None:
    with contextlib.suppress(Invalid):
        protocol.parse_request(message)


def test_an_unknown_operation_has_a_name_for_the_figures() -> None:
    assert protocol.parse_request(READ[:4] + b"\x63\0\0\0" + READ[8:]).name == "OPCODE_99"


def test_a_name_ends_at_its_zero_byte() -> None:
    assert protocol.parse_name(b"a.blob\0") == b"a.blob"


def test_an_init_has_features_in_two_halves() -> None:
    body = bytes.fromhex("07000000 2d000000 00000200 01000040 80000000") + bytes(44)
    assert protocol.parse_init(body) == Init(7, 45, 128 << 10, 1 | Feature.INIT_EXT | Feature.HAS_RESEND)
    before_5_17 = bytes.fromhex("07000000 20000000 00000200 01000000")
    assert protocol.parse_init(before_5_17) == Init(7, 32, 128 << 10, 1)


def test_no_more_is_negotiated_than_either_side_knows() -> None:
    both = Negotiated.from_offer(LINUX_6_18)
    assert both == Negotiated(40, 128 << 10, protocol.WANTED)
    assert both.can_resend
    old = Negotiated.from_offer(Init(7, 34, 64 << 20, Feature.ASYNC_READ | Feature.MAX_PAGES | 1 << 1))
    assert old == Negotiated(34, 8 << 20, Feature.ASYNC_READ | Feature.MAX_PAGES)
    assert not old.can_resend
    with pytest.raises(Invalid, match=r"7\.26"):
        Negotiated.from_offer(Init(7, 26, 1 << 17, 0))


def test_what_was_negotiated_survives_the_process() -> None:
    negotiated = Negotiated.from_offer(LINUX_6_18)
    assert Negotiated.from_bytes(negotiated.to_bytes()) == negotiated


def test_the_answer_to_init() -> None:
    assert protocol.init_reply(Negotiated(40, 128 << 10, protocol.WANTED)) == bytes.fromhex(
        "07000000 28000000 00000200 01806640 0004 0003 00100000 01000000 0001 0000 80000000 00000000 0000"
    ) + bytes(22)


def test_headers_and_notification() -> None:
    assert protocol.header(9, 4) == bytes.fromhex("14000000 00000000 0900000000000000")
    assert protocol.header(9, 0, 5) == bytes.fromhex("10000000 fbffffff 0900000000000000")
    assert protocol.resend_notification() == bytes.fromhex("10000000 07000000 0000000000000000")


def test_attributes() -> None:
    attributes = Attributes(node=7, mode=0o100400, size=513)
    packed = bytes.fromhex("0700000000000000 0102000000000000 0200000000000000") + bytes(36)
    packed += bytes.fromhex("00810000 01000000 00000000 00000000 00000000 00100000 00000000")
    valid = bytes.fromhex("0000004000000000")
    assert protocol.attributes_reply(attributes) == valid + bytes(8) + packed
    assert protocol.entry_reply(attributes) == packed[:8] + bytes(8) + valid + valid + bytes(8) + packed
    assert len(protocol.entry_reply(attributes)) == 128


def test_fixed_answers_have_the_size_that_the_kernel_checks() -> None:
    assert protocol.open_reply(keep_cache=True) == bytes(8) + b"\2" + bytes(7)
    assert protocol.open_reply(keep_cache=False) == bytes(16)
    assert len(protocol.statfs_reply(3)) == 80


def test_a_directory_is_cut_at_whole_entries() -> None:
    entries = [Entry(2, 2, 0o100400, b"a" * 5), Entry(3, 3, 0o100400, b"b" * 8)]
    first = bytes.fromhex("0200000000000000 0200000000000000 05000000 08000000") + b"aaaaa\0\0\0"
    second = bytes.fromhex("0300000000000000 0300000000000000 08000000 08000000") + b"bbbbbbbb"
    assert protocol.directory_reply(entries, 64) == first + second
    assert protocol.directory_reply(entries, 63) == first
    assert protocol.directory_reply(entries, 31) == b""
