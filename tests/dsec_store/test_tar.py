"""What the tar reader makes of every form, and of hostile bytes."""

import io
import tracemalloc
from contextlib import suppress
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec_store.errors import Corrupt, Invalid, StoreError
from dsec_store.layer.tar import PIECE, TarEntry, TarKind, read_entries
from dsec_store.layer.tarheader import (
    EXTENSION_SIZE_MAX,
    GLOBAL_RECORDS_MAX,
    SPARSE_RUNS_MAX,
    parse_pax,
    parse_time,
)
from dsec_store.layer.tree import ID_MAX, PATH_LENGTH_MAX, shown
from tests.dsec_store.tarreading import content, entries
from tests.tarmaker import (
    BLOCK,
    GNU,
    V7,
    archive,
    block_device,
    character_device,
    directory,
    extension,
    fifo,
    file,
    gnu_sparse,
    hardlink,
    header,
    long_link,
    long_path,
    padded,
    pax,
    pax_record,
    signed,
    symlink,
)

CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")
LONG = b"d/" * 150 + b"f"


def only(*parts: bytes) -> TarEntry:
    """The one entry of an archive of these parts."""
    (entry,) = entries(archive(*parts))
    return entry


def paths(data: bytes) -> list[bytes]:
    return [entry.path for entry in entries(data)]


# -- Kinds and fields --------------------------------------------------------------------------------------------------


def test_a_file_with_all_its_fields() -> None:
    data = archive(file(b"a/f", b"text", mode=0o4755, uid=7, gid=8, mtime=9))
    assert entries(data) == [
        TarEntry(b"a/f", TarKind.FILE, 0o4755, 7, 8, 9 * 10**9, 4, b"", (0, 0), {}, BLOCK, None),
    ]
    assert content(data, entries(data)[0]) == b"text"


def test_the_vector_of_the_format_page() -> None:
    data = archive(file(b"f"))
    assert sha256(data).hexdigest() == "236b97dcd8626bfaaa1a07ede3efb6cf740e93a5c8442b90f850db2fb3a75fa6"
    assert entries(data) == [TarEntry(b"f", TarKind.FILE, 0o644, 0, 0, 0, 0, b"", (0, 0), {}, BLOCK, None)]


def test_every_kind() -> None:
    found = entries(
        archive(
            file(b"f"),
            directory(b"d/", mode=0o1777),
            symlink(b"s", b"f"),
            hardlink(b"h", b"f"),
            character_device(b"c", 1, 3),
            block_device(b"b", 4095, 2**20 - 1),
            fifo(b"p"),
        )
    )
    assert [(entry.path, entry.kind) for entry in found] == [
        (b"f", TarKind.FILE),
        (b"d/", TarKind.DIRECTORY),
        (b"s", TarKind.SYMLINK),
        (b"h", TarKind.HARDLINK),
        (b"c", TarKind.CHAR),
        (b"b", TarKind.BLOCK),
        (b"p", TarKind.FIFO),
    ]
    assert [entry.link for entry in found] == [b"", b"", b"f", b"f", b"", b"", b""]
    assert [entry.rdev for entry in found[4:6]] == [(1, 3), (4095, 2**20 - 1)]
    assert found[1].mode == 0o1777


def test_type_bits_of_a_mode_are_dropped() -> None:
    assert only(file(b"f", mode=0o104755)).mode == 0o4755


@pytest.mark.parametrize("size", [0, 4, 700])
@pytest.mark.parametrize("typeflag", [b"1", b"2", b"3", b"4", b"5", b"6"])
def test_kinds_without_content_skip_nothing_whatever_their_size_says(typeflag: bytes, size: int) -> None:
    found = entries(archive(header(b"x", typeflag, size=size, link=b"to"), file(b"next")))
    assert [(entry.path, entry.size) for entry in found] == [(b"x", 0), (b"next", 0)]


@pytest.mark.parametrize("typeflag", [b"\0", b"7", b"Q"])
def test_old_contiguous_and_unknown_types_are_files(typeflag: bytes) -> None:
    found = entries(archive(header(b"f", typeflag, size=3) + padded(b"abc"), file(b"next")))
    assert [(entry.path, entry.kind, entry.size) for entry in found] == [
        (b"f", TarKind.FILE, 3),
        (b"next", TarKind.FILE, 0),
    ]


def test_v7_marks_a_directory_by_a_slash_and_has_no_prefix() -> None:
    entry = only(header(b"d/", b"\0", magic=V7, prefix=b"junk"))
    assert (entry.path, entry.kind) == (b"d/", TarKind.DIRECTORY)


def test_gnu_specials() -> None:
    dumpdir = header(b"d/", b"D", size=5, magic=GNU) + padded(b"Yabc\0")
    found = entries(archive(header(b"label", b"V", magic=GNU), dumpdir, file(b"next")))
    assert [(entry.path, entry.kind) for entry in found] == [(b"d/", TarKind.DIRECTORY), (b"next", TarKind.FILE)]
    for typeflag in (b"M", b"N"):
        with pytest.raises(Invalid, match=r"'part': .* \(typeflag [MN]\)"):
            only(header(b"part", typeflag))


@pytest.mark.parametrize(
    "name", [b"caf\xe9", b"nl\nname", b"quote\"'\\", b"trail ", b".hidden", b"/abs", b"../up", b"./"]
)
def test_names_are_bytes_as_they_are(name: bytes) -> None:
    assert only(file(name)).path == name


# -- Long names --------------------------------------------------------------------------------------------------------


def test_ustar_prefix() -> None:
    assert only(file(b"n" * 100, prefix=b"p" * 155)).path == b"p" * 155 + b"/" + b"n" * 100


def test_gnu_keeps_times_where_ustar_has_its_prefix() -> None:
    assert only(file(b"f", magic=GNU, prefix=b"00000000017")).path == b"f"


def test_star_ends_its_prefix_earlier() -> None:
    block = bytearray(header(b"f", b"0", prefix=b"p" * 131))
    block[476:500] = b"00000000017\0" * 2
    block[508:512] = b"tar\0"
    assert only(signed(bytes(block))).path == b"p" * 131 + b"/f"


def test_long_names_by_gnu_and_by_pax() -> None:
    found = entries(
        archive(
            long_path(LONG) + file(b"cut", b"1"),
            long_link(LONG) + long_path(b"s" + LONG) + symlink(b"cut", b"cut"),
            pax({b"path": LONG, b"linkpath": b"l" + LONG}) + hardlink(b"cut", b"cut"),
            file(b"short"),
        )
    )
    assert [entry.path for entry in found] == [LONG, b"s" + LONG, LONG, b"short"]
    assert [entry.link for entry in found] == [b"", LONG, b"l" + LONG, b""]


# -- Numbers -----------------------------------------------------------------------------------------------------------


def test_base_256_numbers() -> None:
    entry = only(file(b"f", uid=ID_MAX, gid=2**31, mtime=-5))
    assert (entry.uid, entry.gid, entry.mtime_ns) == (ID_MAX, 2**31, -5 * 10**9)


@pytest.mark.parametrize(
    ("field", "uid"),
    [
        (b"   17 \0 ", 15),
        (b"0000017 ", 15),
        (b"00000017", 15),
        (b"\0\0000017\0", 15),
        (b"17\0junk\0", 15),
        (bytes(8), 0),
        (b" " * 8, 0),
        (b"\x80\0\0\0\xff\0\0\1", 0xFF000001),
    ],
)
def test_ways_to_write_a_number(field: bytes, uid: int) -> None:
    assert only(with_field(108, field)).uid == uid


@pytest.mark.parametrize("field", [b"0000018\0", b"-000001\0", b"0x00001\0", b"0_00001\0", b"1 2\0    "])
def test_what_is_no_number(field: bytes) -> None:
    with pytest.raises(Corrupt, match="entry at byte 0: the header's uid is no number"):
        only(with_field(108, field))


@pytest.mark.parametrize(("name", "offset"), [("uid", 108), ("gid", 116)])
@pytest.mark.parametrize(
    ("field", "value"), [(b"\x80\0\0\0" + b"\xff" * 4, 2**32 - 1), (b"\x81" + bytes(7), 2**56), (b"\xff" * 8, -1)]
)
def test_ids_that_chown_cannot_set(name: str, offset: int, field: bytes, value: int) -> None:
    with pytest.raises(Invalid, match=rf"'f': .*{name} {value}\b"):
        only(with_field(offset, field))


def with_field(offset: int, field: bytes) -> bytes:
    """An empty file `f` whose header holds `field` at `offset`."""
    block = bytearray(header(b"f", b"0"))
    block[offset : offset + len(field)] = field
    return signed(bytes(block))


def test_a_signed_checksum_is_accepted_and_a_wrong_one_is_not() -> None:
    block = header(b"caf\xe9", b"0")
    total = sum(block[:148]) + 8 * 32 + sum(block[156:])
    assert only(block[:148] + b"%06o\0 " % (total - 256) + block[156:]).path == b"caf\xe9"
    with pytest.raises(Corrupt, match="checksum"):
        only(block[:148] + b"%06o\0 " % (total - 1) + block[156:])


# -- PAX records -------------------------------------------------------------------------------------------------------


def test_pax_replaces_every_field() -> None:
    records = {
        b"path": b"p\xff",
        b"uid": b"%d" % ID_MAX,
        b"gid": b"9",
        b"size": b"3",
        b"mtime": b"-1.5",
        b"hdrcharset": b"BINARY",
        b"comment": b"a=b\n",
    }
    data = archive(pax(records) + header(b"f", b"0") + padded(b"abc"), file(b"next"))
    first, second = entries(data)
    assert (first.path, first.uid, first.gid, first.mtime_ns) == (b"p\xff", ID_MAX, 9, -1_500_000_000)
    assert content(data, first) == b"abc"
    assert (second.path, second.uid, second.mtime_ns) == (b"next", 0, 0)


@pytest.mark.parametrize(
    ("text", "nanoseconds"),
    [
        (b"0", 0),
        (b"1600000000.123456789", 1_600_000_000_123_456_789),
        (b"1.0000000019", 1_000_000_001),
        (b"1.", 1_000_000_000),
        (b"-0.000000001", -1),
        (b"-12.25", -12_250_000_000),
    ],
)
def test_pax_times(text: bytes, nanoseconds: int) -> None:
    assert parse_time(text) == nanoseconds


@pytest.mark.parametrize("text", [b"1e9", b"+1", b"", b"--1", b".5", b"1.x", b" 1", b"1.-5", b"9" * 21])
def test_what_is_no_pax_time(text: bytes) -> None:
    with pytest.raises(Corrupt):
        parse_time(text)


def test_xattrs_in_both_writings() -> None:
    records = {
        b"SCHILY.xattr.security.capability": CAPABILITY,
        b"SCHILY.xattr.user.k": b"v=1\n2",
        b"SCHILY.xattr.user.a%3Db%25": b"gnu",
        b"SCHILY.xattr.user.empty": b"",
        b"LIBARCHIVE.xattr.user.caf%C3%A9": b"AAEC/w",
        b"LIBARCHIVE.xattr.user.k": b"b3RoZXI=",
    }
    assert only(pax(records), file(b"f")).xattrs == {
        b"security.capability": CAPABILITY,
        b"user.k": b"v=1\n2",
        b"user.a=b%": b"gnu",
        b"user.empty": b"",
        "user.café".encode(): b"\0\1\2\xff",
    }


def test_global_records_hold_until_they_are_ended() -> None:
    found = entries(
        archive(
            pax({b"uid": b"5", b"mtime": b"1", b"SCHILY.xattr.user.a": b"1"}, b"g"),
            file(b"global"),
            pax({b"uid": b"6", b"mtime": b"", b"SCHILY.xattr.user.a": b""}),
            file(b"own", mtime=3),
            pax({b"mtime": b""}, b"g"),
            file(b"later", mtime=4),
        )
    )
    assert [(entry.uid, entry.mtime_ns // 10**9) for entry in found] == [(5, 1), (6, 3), (5, 4)]
    assert [entry.xattrs for entry in found] == [{b"user.a": b"1"}, {}, {b"user.a": b"1"}]


@pytest.mark.parametrize(
    "data",
    [
        b"x",
        b"5 a\n",
        b"7 a=\n",
        b"6 a=b\nrest",
        b"99 a=b\n",
        b"3 a\n",
        b"4 =\n\n",
        b"5 =b\n",
        b"5 ab\n",
        b" 6 a=b\n",
        b"-6 a=b\n",
        b"0 a=b\n",
        b"00000000000000000006 a=b\n",
        b"7 a=b\n\0",
    ],
)
def test_malformed_pax_records(data: bytes) -> None:
    with pytest.raises(Corrupt):
        parse_pax(data)


KEYWORDS = st.binary(min_size=1, max_size=150).filter(lambda key: b"=" not in key and not key.startswith(b"GNU."))


@given(st.dictionaries(KEYWORDS, st.binary(max_size=1200)))
def test_pax_records_come_back_whatever_their_bytes(records: dict[bytes, bytes]) -> None:
    assert parse_pax(b"".join(pax_record(*item) for item in records.items())) == records


@pytest.mark.parametrize(
    ("records", "error"),
    [
        ({b"uid": b"4294967295"}, Invalid),
        ({b"gid": b"-1"}, Invalid),
        ({b"uid": b"1.5"}, Corrupt),
        ({b"size": b"-1"}, Corrupt),
        ({b"size": b"99999999"}, Corrupt),
        ({b"mtime": b"1" * 20}, Invalid),
        ({b"path": b"a\0b"}, Invalid),
        ({b"path": b"p" * (PATH_LENGTH_MAX + 1)}, Invalid),
        ({b"LIBARCHIVE.xattr.user.a": b"?"}, Corrupt),
        ({b"GNU.sparse.major": b"2", b"GNU.sparse.minor": b"0"}, Invalid),
        ({b"GNU.sparse.major": b"1", b"GNU.sparse.minor": b"0"}, Corrupt),
        ({b"GNU.sparse.map": b"0,1,2", b"GNU.sparse.size": b"9"}, Corrupt),
        ({b"GNU.sparse.map": b"0,1", b"GNU.sparse.size": b"9"}, Corrupt),
    ],
)
def test_records_that_are_refused(records: dict[bytes, bytes], error: type[StoreError]) -> None:
    with pytest.raises(error, match=r"^tar archive, entry at byte 0: "):
        only(pax(records), file(b"f"))


# -- Where an archive ends ---------------------------------------------------------------------------------------------


def test_the_end_of_an_archive() -> None:
    one, two = file(b"1", b"x"), file(b"2")
    assert paths(b"") == []
    assert paths(archive()) == []
    assert paths(archive(one, two, end=b"")) == [b"1", b"2"]
    assert paths(archive(one, bytes(BLOCK), two, end=bytes(BLOCK))) == [b"1", b"2"]
    assert paths(archive(one) + b"not looked at" + two) == [b"1"]


def test_padding_may_lack_at_the_end_but_no_content() -> None:
    data = archive(file(b"f", b"text"), end=b"")
    assert paths(data[: BLOCK + 4]) == [b"f"]
    with pytest.raises(Corrupt, match="4 bytes of content, but the archive has 3 more"):
        paths(data[: BLOCK + 3])


@pytest.mark.parametrize("data", [pax({b"uid": b"1"}), long_path(LONG)])
def test_an_extension_header_needs_its_entry(data: bytes) -> None:
    for end in (b"", bytes(2 * BLOCK)):
        with pytest.raises(Corrupt, match="without the entry"):
            paths(data + end)


def test_errors_name_the_place_in_one_line() -> None:
    name = b"caf\xe9\n" + b"x" * 90
    with pytest.raises(Invalid) as caught:
        paths(archive(file(b"first"), file(name, uid=2**32)))
    assert str(caught.value).startswith(f"tar archive, entry at byte {BLOCK}: {shown(name)}: uid {2**32}, gid 0: ")
    assert shown(name) == r"'caf\xe9\n" + "x" * 90 + "'"
    assert shown(b"y" * 5000) == "'" + "y" * 200 + "'…"


# -- Limits ------------------------------------------------------------------------------------------------------------


def test_the_longest_path_and_the_largest_extension_header() -> None:
    assert only(long_path(b"p" * PATH_LENGTH_MAX), file(b"f")).path == b"p" * PATH_LENGTH_MAX
    assert only(extension(b"L", b"f".ljust(EXTENSION_SIZE_MAX, b"\0")), file(b"x")).path == b"f"
    for typeflag in (b"x", b"g", b"L", b"K"):
        with pytest.raises(Invalid, match="extension header of 1048577 bytes"):
            only(extension(typeflag, bytes(EXTENSION_SIZE_MAX + 1)), file(b"x"))


def test_a_decimal_may_have_any_number_of_leading_zeros() -> None:
    data = archive(pax({b"size": b"0" * 600 + b"3", b"uid": b"0" * 30}), file(b"f", b"abc"))
    (entry,) = entries(data)
    assert (content(data, entry), entry.uid) == (b"abc", 0)


def test_global_records_are_limited_in_number_and_size() -> None:
    with pytest.raises(Invalid, match="1001 global PAX records"):
        only(pax({b"k%d" % number: b"v" for number in range(GLOBAL_RECORDS_MAX + 1)}, b"g"), file(b"f"))
    half = bytes(EXTENSION_SIZE_MAX // 2)
    with pytest.raises(Invalid, match="2 global PAX records of"):
        only(pax({b"a": half}, b"g"), pax({b"b": half}, b"g"), file(b"f"))


def test_device_numbers_are_those_of_linux() -> None:
    with pytest.raises(Invalid, match="'c': device 4096:0"):
        only(character_device(b"c", 4096, 0))


@pytest.mark.parametrize("entry", [symlink(b"s", b""), hardlink(b"h", b"")])
def test_a_link_needs_a_target(entry: bytes) -> None:
    with pytest.raises(Invalid, match="without a target"):
        only(entry)


def test_a_sparse_map_that_never_ends_is_not_read_into_memory() -> None:
    records = {b"GNU.sparse.major": b"1", b"GNU.sparse.minor": b"0", b"GNU.sparse.realsize": b"1"}
    data = archive(pax(records), file(b"f", b"2\n" + b"1" * 40_000_000))
    tracemalloc.start()
    with pytest.raises(Corrupt, match="too few lines"):
        entries(data)
    assert tracemalloc.get_traced_memory()[1] < 4 * PIECE
    tracemalloc.stop()


def test_sparse_runs_are_limited() -> None:
    records = {b"GNU.sparse.major": b"1", b"GNU.sparse.minor": b"0", b"GNU.sparse.realsize": b"1"}
    with pytest.raises(Invalid, match="runs"):
        only(pax(records), file(b"f", b"%d\n" % (SPARSE_RUNS_MAX + 1)))


# -- Sparse files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 4, 5, 25, 26, 60])
def test_gnu_sparse_headers_and_their_extension_blocks(count: int) -> None:
    runs = [(number * 1024, 10 + number) for number in range(count)]
    stored = b"".join(bytes([65 + number % 26]) * length for number, (_, length) in enumerate(runs))
    data = archive(gnu_sparse(b"f", 100_000, runs, stored), file(b"next"))
    first, second = entries(data)
    assert (first.size, first.runs, second.path) == (100_000, tuple(runs), b"next")
    for number, (offset, length) in enumerate(runs):
        assert content(data, first)[offset : offset + length] == bytes([65 + number % 26]) * length


def test_an_empty_run_marks_the_end_only() -> None:
    assert only(gnu_sparse(b"f", 500, [(0, 3), (500, 0)], b"abc")).runs == ((0, 3),)


@pytest.mark.parametrize(
    ("size", "runs", "stored"),
    [
        (10, [(0, 4), (3, 4)], 8),
        (10, [(5, 2), (0, 2)], 4),
        (10, [(8, 4)], 4),
        (10, [(0, 4)], 5),
        (10, [(0, 4)], 3),
        (2**63, [(0, 4)], 4),
        (10, [(-1, 4)], 4),
        (10, [(4, -4), (0, 8)], 4),
    ],
)
def test_sparse_runs_that_contradict_themselves(size: int, runs: list[tuple[int, int]], stored: int) -> None:
    with pytest.raises(Corrupt, match="sparse runs"):
        only(gnu_sparse(b"f", size, runs, bytes(stored)))


def test_typeflag_s_of_another_program_is_refused() -> None:
    with pytest.raises(Invalid, match="not GNU's"):
        only(header(b"f", b"S"))


def test_pax_sparse_0_0_repeats_its_keywords() -> None:
    pairs = [(b"GNU.sparse.size", b"20"), (b"GNU.sparse.numblocks", b"2")]
    for offset, length in ((3, 2), (10, 1)):
        pairs += [(b"GNU.sparse.offset", b"%d" % offset), (b"GNU.sparse.numbytes", b"%d" % length)]
    data = archive(pax(pairs), file(b"f", b"abc"))
    assert content(data, entries(data)[0]) == b"\0\0\0ab\0\0\0\0\0c" + bytes(9)
    with pytest.raises(Corrupt, match="alternate"):
        only(pax([pair for pair in pairs if pair[1] != b"3"]), file(b"f", b"abc"))


# -- Hostile bytes -----------------------------------------------------------------------------------------------------

PAX_SPARSE = {
    b"GNU.sparse.major": b"1",
    b"GNU.sparse.minor": b"0",
    b"GNU.sparse.name": b"sparse",
    b"GNU.sparse.realsize": b"5000",
}
EVERYTHING = archive(
    pax({b"comment": b"global", b"SCHILY.xattr.user.g": b"1"}, b"g"),
    directory(b"d/"),
    file(b"d/f", b"x" * 700, uid=2**31, mtime=-1),
    pax({b"path": LONG, b"mtime": b"1.5", b"LIBARCHIVE.xattr.user.a": b"AAEC"}) + file(b"cut", b"y"),
    long_path(LONG) + long_link(LONG) + symlink(b"cut", b"cut"),
    gnu_sparse(b"g", 90_000, [(number * 1000, 7) for number in range(30)], b"z" * 210),
    pax(PAX_SPARSE) + file(b"cut", padded(b"2\n0\n3\n4000\n4\n") + b"abcdefg"),
    pax({b"GNU.sparse.map": b"1,2,5,1", b"GNU.sparse.size": b"9"}) + file(b"old", b"abc"),
    character_device(b"c", 1, 3),
    hardlink(b"h", b"d/f"),
)


def test_the_sample_of_everything_is_whole() -> None:
    assert [entry.size for entry in entries(EVERYTHING)] == [0, 700, 1, 0, 90_000, 5000, 9, 0, 0]


@pytest.mark.parametrize("size", range(0, len(EVERYTHING), 100))
def test_a_cut_archive_gives_a_prefix_of_its_entries(size: int) -> None:
    """Nothing else is raised than the two errors, and no entry is given that the whole archive does not have."""
    found = []
    with suppress(Corrupt, Invalid):
        for entry in read_entries(io.BytesIO(EVERYTHING[:size])):
            found.append(entry)  # noqa: PERF402  # must keep what came before the error
    assert found == entries(EVERYTHING)[: len(found)]


@given(st.data())
def test_damaged_headers_with_a_right_checksum(data: st.DataObject) -> None:
    """The checksum protects from accidents only, so every field is also changed behind its back."""
    damaged = bytearray(EVERYTHING)
    for _ in range(data.draw(st.integers(1, 3))):
        start = BLOCK * data.draw(st.integers(0, len(damaged) // BLOCK - 1))
        field = slice(start + data.draw(st.integers(0, BLOCK - 1)), start + BLOCK)
        damaged[field] = (data.draw(st.binary(min_size=1, max_size=12)) + damaged[field])[: field.stop - field.start]
        damaged[start : start + BLOCK] = signed(bytes(damaged[start : start + BLOCK]))
    with suppress(Corrupt, Invalid):
        entries(bytes(damaged))


@given(st.binary(max_size=3000))
def test_random_bytes(data: bytes) -> None:
    with suppress(Corrupt, Invalid):
        entries(data)
