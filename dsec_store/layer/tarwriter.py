"""The canonical tar: one tree, one archive, byte for byte, whoever writes it and wherever.

Problem: a tar leaves much to who writes it: how long paths, large numbers and xattrs are said, names of owners,
padding, order. Two programs, or two versions of one, give two digests for one tree.

Choice: an own writer with one way to say each thing, written down with test vectors in docs/format/canonical-tar.md. It
is ustar; what ustar cannot say is in one PAX header before the entry, and nothing else is. Headers are functions of
values; only `tar_of_tree` walks, and it reads contents through its caller.

>>> b"".join((header(b"a", TarKind.FILE, size=1), b"x", padding(1), END))
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from dsec_store.errors import Corrupt, Invalid
from dsec_store.layer.tar import MAJOR_MAX, MINOR_MAX, TarKind
from dsec_store.layer.tarheader import BLOCK_SIZE, EXTENSION_SIZE_MAX, SIGNED_64_MAX
from dsec_store.layer.tree import (
    ID_MAX,
    OPAQUE_VALUE,
    OPAQUE_XATTR,
    PATH_LENGTH_MAX,
    Directory,
    Inode,
    shown,
)

END: Final = bytes(2 * BLOCK_SIZE)
"""The end of an archive; nothing follows."""

PAX_PATH: Final = b"././@PaxHeader"
"""Path in the header of every PAX header."""

MARKER_PREFIX: Final = b".wh."
"""A name that begins so is a marker in an OCI layer, so no file can have it there."""

NANOSECONDS: Final = 10**9

_NAME_MAX: Final = 100
_PREFIX_MAX: Final = 155
_SMALL_MAX: Final = 8**7 - 1
"""The largest number in a header field of 8 bytes: mode, ids, devices."""
_LARGE_MAX: Final = 8**11 - 1
"""The largest number in a header field of 12 bytes: size and mtime. 8 GiB less one byte; the year 2242."""
_MAGIC: Final = b"ustar\x0000"
_NO_CHECKSUM: Final = b" " * 8
_PAX_MODE: Final = 0o644
_PAX_FLAG: Final = b"x"
_XATTR: Final = b"SCHILY.xattr."
_TYPEFLAGS: Final = {
    TarKind.FILE: b"0",
    TarKind.HARDLINK: b"1",
    TarKind.SYMLINK: b"2",
    TarKind.CHAR: b"3",
    TarKind.BLOCK: b"4",
    TarKind.DIRECTORY: b"5",
    TarKind.FIFO: b"6",
}
_KINDS: Final = {
    stat.S_IFREG: TarKind.FILE,
    stat.S_IFDIR: TarKind.DIRECTORY,
    stat.S_IFLNK: TarKind.SYMLINK,
    stat.S_IFCHR: TarKind.CHAR,
    stat.S_IFBLK: TarKind.BLOCK,
    stat.S_IFIFO: TarKind.FIFO,
}
_LINKS: Final = (TarKind.SYMLINK, TarKind.HARDLINK)
_DEVICES: Final = (TarKind.CHAR, TarKind.BLOCK)
_WHITEOUT_MODE: Final = 0o644
_OPAQUE_MARKER: Final = b".wh..wh..opq"
_OVERLAY: Final = b"trusted.overlay."
_ESCAPED: Final = b"trusted.overlay.overlay."


def header(
    path: bytes,
    kind: TarKind,
    *,
    mode: int = 0o644,
    uid: int = 0,
    gid: int = 0,
    mtime_ns: int = 0,
    size: int = 0,
    link: bytes = b"",
    rdev: tuple[int, int] = (0, 0),
    xattrs: Mapping[bytes, bytes] | None = None,
) -> bytes:
    """The header of one entry, with the PAX header before it if it needs one: a multiple of 512 bytes.

    `path` of a directory is without its final slash, which is added. `mode` has the 12 permission bits, `mtime_ns` is
    in nanoseconds since 1970; `size` in bytes is for a FILE, `link` for links, `rdev` for devices. Of a FILE, `size`
    bytes and `padding(size)` must follow. Raises `Invalid`, naming the path, for what the reader would not take back.
    """
    problem = _problem(path, kind, mode=mode, uid=uid, gid=gid, mtime_ns=mtime_ns, size=size, link=link, rdev=rdev)
    if problem:
        raise Invalid(f"{shown(path)} cannot be written to a tar: {problem}")
    full = path + b"/" if kind is TarKind.DIRECTORY else path
    records = {_xattr_keyword(name, path): value for name, value in (xattrs or {}).items()}
    split = _split(full)
    if split is None:
        records[b"path"] = full
    if len(link) > _NAME_MAX:
        records[b"linkpath"] = link
    seconds, fraction = divmod(mtime_ns, NANOSECONDS)
    if fraction or not 0 <= seconds <= _LARGE_MAX:
        records[b"mtime"] = pax_time(mtime_ns)
    for keyword, value, largest in ((b"uid", uid, _SMALL_MAX), (b"gid", gid, _SMALL_MAX), (b"size", size, _LARGE_MAX)):
        if value > largest:
            records[keyword] = b"%d" % value
    block = _block(
        split or (full[:_NAME_MAX], b""),
        _TYPEFLAGS[kind],
        mode=mode,
        uid=uid,
        gid=gid,
        size=size,
        seconds=seconds,
        link=link,
        rdev=rdev,
    )
    return _pax_header(records, path) + block if records else block


def padding(size: int) -> bytes:
    """The zeros behind a content of `size` bytes."""
    return bytes(-size % BLOCK_SIZE)


def pax_time(mtime_ns: int) -> bytes:
    """Nanoseconds as decimal seconds: `-` before 1970, no fraction that is zero, no zero at the end of one."""
    seconds, fraction = divmod(abs(mtime_ns), NANOSECONDS)
    text = b"%d.%09d" % (seconds, fraction)
    return (b"-" if mtime_ns < 0 else b"") + text.rstrip(b"0").rstrip(b".")


def pax_record(keyword: bytes, value: bytes) -> bytes:
    """`length keyword=value` and a line feed; the length is that of the whole record, its own digits included."""
    rest = len(keyword) + len(value) + 3
    length = rest + len(str(rest))
    if len(str(length)) > len(str(rest)):
        length += 1
    return b"%d %s=%s\n" % (length, keyword, value)


def refuse_marker(path: bytes) -> None:
    """Raise `Invalid` if the last name of `path` would be a marker in an OCI layer instead of a file."""
    if path.rpartition(b"/")[2].startswith(MARKER_PREFIX):
        raise Invalid(f"{shown(path)}: a name that begins with .wh. would delete files in an OCI layer; rename it")


def _problem(
    path: bytes,
    kind: TarKind,
    *,
    mode: int,
    uid: int,
    gid: int,
    mtime_ns: int,
    size: int,
    link: bytes,
    rdev: tuple[int, int],
) -> str | None:
    """What is wrong with the values, or None."""
    checks = (
        (not path or path.endswith(b"/"), "an empty path, or one that ends in a slash"),
        (
            max(len(path) + (kind is TarKind.DIRECTORY), len(link)) > PATH_LENGTH_MAX,
            f"its path or link target has more than {PATH_LENGTH_MAX} bytes",
        ),
        (b"\0" in path or b"\0" in link, "a NUL in its path or link target"),
        (bool(link) != (kind in _LINKS), "a link without a target, or a target of what is no link"),
        (not 0 <= mode <= 0o7777, f"mode {mode:o} has more than permission bits"),
        (not (0 <= uid <= ID_MAX and 0 <= gid <= ID_MAX), f"uid {uid} or gid {gid} is not between 0 and {ID_MAX}"),
        (abs(mtime_ns) > SIGNED_64_MAX * NANOSECONDS, "the seconds of its mtime do not fit into 64 bits"),
        (not 0 <= size <= (SIGNED_64_MAX if kind is TarKind.FILE else 0), f"{size} bytes of content"),
        (rdev != (0, 0) and kind not in _DEVICES, "device numbers of what is no device"),
        (
            not (0 <= rdev[0] <= MAJOR_MAX and 0 <= rdev[1] <= MINOR_MAX),
            f"device {rdev[0]}:{rdev[1]} is beyond {MAJOR_MAX}:{MINOR_MAX}",
        ),
    )
    return next((problem for wrong, problem in checks if wrong), None)


def _split(path: bytes) -> tuple[bytes, bytes] | None:
    """The fields name and prefix for `path`, None if it does not fit.

    Split is at the first slash that leaves a name of at most 100 bytes; neither part is empty.
    """
    if len(path) <= _NAME_MAX:
        return path, b""
    at = path.find(b"/", max(1, len(path) - 1 - _NAME_MAX), len(path) - 1)
    return (path[at + 1 :], path[:at]) if 0 < at <= _PREFIX_MAX else None


def _block(
    split: tuple[bytes, bytes],
    typeflag: bytes,
    *,
    mode: int,
    size: int,
    uid: int = 0,
    gid: int = 0,
    seconds: int = 0,
    link: bytes = b"",
    rdev: tuple[int, int] = (0, 0),
) -> bytes:
    """One header block. A number that does not fit is 0, and a path that does not fit is cut: PAX records say them."""
    name, prefix = split
    before = b"%s%07o\0%07o\0%07o\0%011o\0%011o\0" % (
        name.ljust(_NAME_MAX, b"\0"),
        mode,
        uid if uid <= _SMALL_MAX else 0,
        gid if gid <= _SMALL_MAX else 0,
        size if size <= _LARGE_MAX else 0,
        seconds if 0 <= seconds <= _LARGE_MAX else 0,
    )
    after = b"%s%s%s%s%07o\0%07o\0%s" % (
        typeflag,
        link[:_NAME_MAX].ljust(_NAME_MAX, b"\0"),
        _MAGIC,
        bytes(64),
        rdev[0],
        rdev[1],
        prefix.ljust(_PREFIX_MAX + 12, b"\0"),
    )
    checksum = sum(before) + sum(_NO_CHECKSUM) + sum(after)
    return b"%s%06o\0 %s" % (before, checksum, after)


def _pax_header(records: dict[bytes, bytes], path: bytes) -> bytes:
    data = b"".join(pax_record(keyword, value) for keyword, value in sorted(records.items()))
    if len(data) > EXTENSION_SIZE_MAX:
        raise Invalid(f"{shown(path)}: its xattrs need more than the {EXTENSION_SIZE_MAX} bytes of a PAX header")
    block = _block((PAX_PATH, b""), _PAX_FLAG, mode=_PAX_MODE, size=len(data))
    return block + data + padding(len(data))


def _xattr_keyword(name: bytes, path: bytes) -> bytes:
    """A keyword cannot hold `=`: GNU tar's escape for it, and for the escape itself."""
    if not name or b"\0" in name:
        raise Invalid(f"{shown(path)}: an xattr without a name, or with a NUL in it")
    return _XATTR + name.replace(b"%", b"%25").replace(b"=", b"%3D")


# -- Trees -------------------------------------------------------------------------------------------------------------

Contents = Callable[[Inode], Iterator[bytes]]
"""How to read a regular file that is not empty: `size` bytes, in pieces of any length."""


def tar_of_tree(root: Directory, contents: Contents, *, with_root: bool = False) -> Iterator[bytes]:
    """The canonical OCI layer of a tree, in pieces.

    Entries come parents first, names in byte order; the second and further names of an inode are hardlinks to the
    first. Overlay marks become OCI markers: a whiteout the empty file `.wh.NAME`, an opaque directory `.wh..wh..opq`
    right after its own entry. With `with_root` the first entry is `./`. Memory: a reference for each inode.

    Raises `Invalid` for what an OCI layer cannot say, and `Corrupt` when a content is not of its inode's size; both
    name the path.
    """
    if OPAQUE_XATTR in root.inode.xattrs:
        raise Invalid("the root is marked opaque: overlayfs ignores the mark there, and a tar would hide all below")
    if with_root:
        yield _header_of(b".", root.inode)
    names: dict[Inode, bytes] = {}
    for path, node in root.walk():
        refuse_marker(path)
        if isinstance(node, Directory):
            yield _header_of(path, node.inode)
            if node.is_opaque:
                yield _marker(path + b"/" + _OPAQUE_MARKER)
        elif node.is_whiteout:
            parent, slash, name = path.rpartition(b"/")
            yield _marker(parent + slash + MARKER_PREFIX + name)
        elif node in names:
            yield _header_of(path, node, names[node])
        else:
            names[node] = path
            yield _header_of(path, node)
            yield from _content(path, node, contents)
    yield END


def _header_of(path: bytes, inode: Inode, first_name: bytes | None = None) -> bytes:
    """A hardlink carries the inode's attributes again, so that a program that applies them changes nothing."""
    kind = _KINDS.get(stat.S_IFMT(inode.mode))
    if kind is None:
        raise Invalid(f"{shown(path)}: a tar has no entry for a file of type {stat.S_IFMT(inode.mode):o}")
    if first_name is not None:
        kind = TarKind.HARDLINK
    return header(
        path,
        kind,
        mode=stat.S_IMODE(inode.mode),
        uid=inode.uid,
        gid=inode.gid,
        mtime_ns=inode.mtime_ns,
        size=inode.size if kind is TarKind.FILE else 0,
        link=first_name if first_name is not None else inode.target,
        rdev=inode.rdev if kind in _DEVICES else (0, 0),
        xattrs=_plain_xattrs(inode.xattrs, path),
    )


def _marker(path: bytes) -> bytes:
    return header(path, TarKind.FILE, mode=_WHITEOUT_MODE)


def _plain_xattrs(xattrs: dict[bytes, bytes], path: bytes) -> dict[bytes, bytes]:
    """The xattrs as overlayfs shows them: without the opaque mark, and without the escape of the builder."""
    plain = {}
    for name, value in xattrs.items():
        if name.startswith(_ESCAPED):
            plain[_OVERLAY + name.removeprefix(_ESCAPED)] = value
        elif not name.startswith(_OVERLAY):
            plain[name] = value
        elif name != OPAQUE_XATTR or value != OPAQUE_VALUE:
            raise Invalid(f"{shown(path)}: an OCI layer has no form of the overlay mark {shown(name)}")
    return plain


def _content(path: bytes, inode: Inode, contents: Contents) -> Iterator[bytes]:
    if not stat.S_ISREG(inode.mode) or not inode.size:
        return
    left = inode.size
    for piece in contents(inode):
        left -= len(piece)
        if left < 0:
            break
        yield piece
    if left:
        raise Corrupt(f"{shown(path)}: its content is not of the {inode.size} bytes that its inode says")
    yield padding(inode.size)
