"""What becomes of archives that are not simply read: a change of any of these shows.

By collection and file name. Texts are part of the message.
"""

from __future__ import annotations

from typing import Final

_ID: Final = "an id is not between 0 and"
_CUT: Final = "bytes of content, but the archive has 0 more"

REFUSED: Final[dict[str, dict[str, str]]] = {
    "CPython": {
        "recursion.tar": "Corrupt: malformed PAX record",  # a record of length 0
        "testtar.tar": f"Invalid: {_ID}",  # one file has the uid 2^32 - 1, which Linux has for "none"
    },
    "Go archive/tar": {
        "issue10968.tar": f"Invalid: {_ID}",  # made by a fuzzer, as the next three
        "issue11169.tar": "Corrupt: malformed PAX record",
        "issue12435.tar": "Invalid: an extension header of",
        "neg-size.tar": f"Invalid: {_ID}",
        "pax-bad-hdr-file.tar": "Corrupt: malformed PAX record",
        "pax-bad-hdr-large.tar.bz2 unpacked.tar": "Invalid: an extension header of 1048577 bytes",
        "pax-bad-mtime-file.tar": "Corrupt: a PAX time that is no number",
        "pax-nul-path.tar": "Invalid: a NUL in its path",
        "pax-path-hdr.tar": "Corrupt: ends after an extension header",
        "writer-big.tar": f"Corrupt: 17179869184 {_CUT}",  # the header alone, to compare with what a writer makes
        "writer-big-long.tar": f"Corrupt: 17179869184 {_CUT}",
    },
    "libarchive": {
        "test_compat_gzip_2.tgz": "Corrupt: gzip stream is damaged or cut",  # "This is extra garbage" after the member
        "test_compat_plexus_archiver_tar.tar": "Corrupt: the header's checksum is wrong",  # a lone zero, then junk
        "test_read_format_gtar_sparse_1_17_posix10_modified.tar": "Corrupt: the number of sparse runs is no number",
        "test_read_format_gtar_sparse_skip_entry.tar.Z unpacked.tar": "Corrupt: sparse runs end at",  # two real sizes
        "test_read_format_tar_empty_pax.tar.Z unpacked.tar": "Corrupt: ends after an extension header",
        "test_read_format_tar_invalid_pax_size.tar": "Corrupt: malformed PAX record",
    },
}
"""Refused by the reader: which error, and a part of its message."""

NO_LAYER: Final[dict[str, dict[str, str]]] = {
    "CPython": {},
    "Go archive/tar": {},
    "libarchive": {"test_patterns_4.tar": "a path that climbs"},
}
"""Read, and its bytes come back, but what it says can be in no layer."""

ALONE: Final[dict[str, dict[str, str]]] = {
    "CPython": {},
    "Go archive/tar": {"pax-global-records.tar": "an empty value ends a global record, as Go's own reader has it"},
    "libarchive": {
        "test_compat_solaris_tar_acl.tar": "typeflag A: a file, as POSIX asks, which the next entry replaces"
    },
}
"""Read in another way than by tarfile and by GNU tar; why."""
