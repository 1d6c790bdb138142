"""The kernel's FUSE protocol, as far as a read-only file system needs it: bytes <-> values, no I/O.

Problem: the daemon must adopt a connection that its predecessor negotiated, and ask the kernel to resend what the
predecessor had read (FUSE_NOTIFY_RESEND, Linux 6.9). No Python binding of libfuse can do either. Choice: speak to
/dev/fuse directly; for a tree of read-only files that is fifteen messages of a few fixed fields. Cost: this file.

Source: include/uapi/linux/fuse.h of Linux, whose names are kept without their prefix. Both sides then use the smaller
minor version; fields are in the machine's own byte order, padded by hand to 64 bits.

    request = parse_request(message)                    # one read(2) from the device is one message
    if request.opcode == Opcode.READ:
        wanted = parse_read(request.body)
        device.write(reply(request.unique, data))       # one write(2) is one answer
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Final, NamedTuple

from dsec_store.errors import Invalid

MAJOR: Final = 7
MINOR: Final = 40
"""The version spoken: that of Linux 6.9, the first that can resend. Newer kernels come down to it."""

LEAST_MINOR: Final = 31
"""Linux 5.4. An older kernel is refused: its answers have other lengths."""

ROOT: Final = 1
"""Node id of the root directory (FUSE_ROOT_ID)."""

MAX_REQUEST: Final = 1 << 20
"""Bytes of the largest READ: 256 pages, the most that the kernel grants by default (fs.fuse.max_pages_limit). The mount
option `max_read` is not needed, and must not be less."""

MAX_READAHEAD: Final = 8 << 20
"""Bytes that the kernel may read ahead. It starts with less (128 KiB): who mounts raises read_ahead_kb of the bdi."""

MAX_BACKGROUND: Final = 1024
"""Asynchronous requests (read-ahead, direct I/O) that the kernel has under way at once; its default is 12. Further ones
wait in the kernel, whatever they read: so this is more than those take that wait for a silent store. Enough for 128
streams of MAX_READAHEAD in requests of MAX_REQUEST."""

MAX_WRITE: Final = 4096
"""Bytes. Nobody writes, but the kernel wants room for the largest WRITE in every buffer: this is the least it takes."""

BUFFER_SIZE: Final = 8192
"""Bytes of the buffer for one message (FUSE_MIN_READ_BUFFER)."""

FOREVER: Final = 1 << 30
"""Seconds that the kernel may keep an attribute or a name: what is named by a digest never changes."""

_IN_HEADER: Final = struct.Struct("=IIQQIIIHH")
_OUT_HEADER: Final = struct.Struct("=IiQ")
_INIT_IN: Final = struct.Struct("=IIII")
_INIT_OUT: Final = struct.Struct("=IIIIHHIIHHIIH22x")
_READ_IN: Final = struct.Struct("=QQI")
_UNIQUE: Final = struct.Struct("=Q")
_FLAGS2: Final = struct.Struct("=I")
_OPEN_OUT: Final = struct.Struct("=QII")
_ATTRIBUTES: Final = struct.Struct("=QQQ3Q3IIIIIIII")
_ENTRY: Final = struct.Struct("=QQQQII")
_ATTR_OUT: Final = struct.Struct("=QII")
_STATFS: Final = struct.Struct("=QQQQQIIII24x")
_DIRENT: Final = struct.Struct("=QQII")

_BLOCK: Final = 4096
_UNIQUE_RESENT: Final = 1 << 63
_NOTIFY_RESEND: Final = 7
_OPEN_KEEP_CACHE: Final = 1 << 1


class Opcode(enum.IntEnum):
    """Requests that are answered, and after them those that are refused by name: the kernel asks each once."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    OPEN = 14
    READ = 15
    STATFS = 17
    RELEASE = 18
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    INTERRUPT = 36
    DESTROY = 38
    BATCH_FORGET = 42

    GETXATTR = 22
    LISTXATTR = 23
    FLUSH = 25
    ACCESS = 34
    IOCTL = 39
    READDIRPLUS = 44
    LSEEK = 46
    STATX = 52


_NAMES: Final = {opcode.value: opcode.name for opcode in Opcode}


class Feature(enum.IntFlag):
    """What the two sides agree on at INIT (FUSE_ASYNC_READ and so on)."""

    ASYNC_READ = 1 << 0
    """Read-ahead is sent as many requests at once, and its readers wait for pages: a killed one leaves at once."""
    ASYNC_DIO = 1 << 15
    """The same for direct I/O, which is how EROFS reads a blob device with its option `directio`: with 20 ms a fetch
    and 8 MiB of read-ahead, 490 MiB/s instead of 46. The price: a process that itself opens a blob with O_DIRECT cannot
    be killed before its read ends. Readers of EROFS can."""
    NO_OPEN_SUPPORT = 1 << 17
    """ENOSYS to the first OPEN means that files need none, and that their pages stay cached. No handle, no state."""
    PARALLEL_DIROPS = 1 << 18
    """Several lookups in the one directory at once."""
    ABORT_ERROR = 1 << 21
    """An aborted connection reads as ECONNABORTED, an unmounted one as ENODEV."""
    MAX_PAGES = 1 << 22
    """MAX_REQUEST instead of 128 KiB."""
    INIT_EXT = 1 << 30
    """Features above bit 31 count."""
    HAS_RESEND = 1 << 39
    """We know that a request may come again, with bit 63 set in its number."""


WANTED: Final = (
    Feature.ASYNC_READ
    | Feature.ASYNC_DIO
    | Feature.NO_OPEN_SUPPORT
    | Feature.PARALLEL_DIROPS
    | Feature.ABORT_ERROR
    | Feature.MAX_PAGES
    | Feature.INIT_EXT
    | Feature.HAS_RESEND
)
"""Not wanted: DO_READDIRPLUS (a listing would open every blob to learn its size) and NO_OPENDIR_SUPPORT (the kernel
would cache the listing, which grows)."""


class Request(NamedTuple):
    """A message of the kernel. `unique` numbers it, `pid` is the thread that waits for it (0: none that we can see)."""

    opcode: int
    unique: int
    node: int
    pid: int
    body: bytes

    @property
    def resent(self) -> bool:
        """Whether another process had read it before."""
        return bool(self.unique & _UNIQUE_RESENT)

    @property
    def name(self) -> str:
        """The operation, for figures and messages."""
        return _NAMES.get(self.opcode, f"OPCODE_{self.opcode}")


class Init(NamedTuple):
    """What the kernel offers."""

    major: int
    minor: int
    max_readahead: int
    features: int


class Range(NamedTuple):
    """Bytes `offset` to `offset + size` of a file; in a directory, entries after `offset` in `size` bytes."""

    offset: int
    size: int


class Attributes(NamedTuple):
    """What stat(2) shows of a node; everything else is fixed."""

    node: int
    mode: int
    size: int
    links: int = 1


class Entry(NamedTuple):
    """A name in a directory. `cookie` says where to go on after it."""

    node: int
    cookie: int
    mode: int
    name: bytes


@dataclass(frozen=True, slots=True)
class Negotiated:
    """What both sides agreed on at INIT, once for the life of the connection: a successor cannot ask again."""

    minor: int
    max_readahead: int
    features: int

    @classmethod
    def from_offer(cls, offer: Init) -> Negotiated:
        """The part of the kernel's offer that we take. Raises `Invalid` for a kernel that is too old."""
        if (offer.major, offer.minor) < (MAJOR, LEAST_MINOR):
            spoken = f"{offer.major}.{offer.minor}"
            raise Invalid(f"the kernel speaks FUSE {spoken}, and {MAJOR}.{LEAST_MINOR} (Linux 5.4) is needed")
        return cls(min(offer.minor, MINOR), min(offer.max_readahead, MAX_READAHEAD), int(WANTED & offer.features))

    @property
    def can_resend(self) -> bool:
        return bool(self.features & Feature.HAS_RESEND)

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Negotiated:
        return cls(**json.loads(data))


def parse_request(message: bytes | bytearray | memoryview) -> Request:
    """Raises `Invalid` when `message` is not one whole request."""
    if len(message) < _IN_HEADER.size:
        raise Invalid(f"a FUSE request of {len(message)} bytes has no header")
    length, opcode, unique, node, _uid, _gid, pid, extensions, _ = _IN_HEADER.unpack_from(message)
    if length != len(message):
        raise Invalid(f"a FUSE request of {len(message)} bytes says that it has {length}")
    return Request(opcode, unique, node, pid, bytes(message[_IN_HEADER.size : length - 8 * extensions]))


def parse_init(body: bytes) -> Init:
    major, minor, max_readahead, features = _INIT_IN.unpack_from(body)
    if features & Feature.INIT_EXT:
        (high,) = _FLAGS2.unpack_from(body, _INIT_IN.size)
        features |= high << 32
    return Init(major, minor, max_readahead, features)


def parse_name(body: bytes) -> bytes:
    """Of a LOOKUP."""
    return body.partition(b"\0")[0]


def parse_read(body: bytes) -> Range:
    """Of a READ or READDIR."""
    _handle, offset, size = _READ_IN.unpack_from(body)
    return Range(offset, size)


def parse_interrupt(body: bytes) -> int:
    """The number of the request whose reader got a signal."""
    (unique,) = _UNIQUE.unpack_from(body)
    return int(unique)


def header(unique: int, size: int, error: int = 0) -> bytes:
    """The beginning of an answer: `size` bytes follow, or `error` (a positive errno) and nothing."""
    return _OUT_HEADER.pack(_OUT_HEADER.size + size, -error, unique)


def resend_notification() -> bytes:
    """Asks the kernel to queue again every request that was read and not answered."""
    return _OUT_HEADER.pack(_OUT_HEADER.size, _NOTIFY_RESEND, 0)


def init_reply(negotiated: Negotiated) -> bytes:
    low, high = negotiated.features & 0xFFFF_FFFF, negotiated.features >> 32
    congestion = MAX_BACKGROUND * 3 // 4  # the kernel's own ratio
    return _INIT_OUT.pack(
        MAJOR, negotiated.minor, negotiated.max_readahead, low, MAX_BACKGROUND, congestion, MAX_WRITE,
        1, MAX_REQUEST // _BLOCK, 0, high, 0, 0,
    )  # fmt: skip


def attributes_reply(attributes: Attributes) -> bytes:
    """Of a GETATTR."""
    return _ATTR_OUT.pack(FOREVER, 0, 0) + _attributes(attributes)


def entry_reply(attributes: Attributes) -> bytes:
    """Of a LOOKUP. A name that is not there must be answered by ENOENT, which the kernel does not remember."""
    return _ENTRY.pack(attributes.node, 0, FOREVER, FOREVER, 0, 0) + _attributes(attributes)


def open_reply(*, keep_cache: bool) -> bytes:
    """Of an OPEN or OPENDIR. There are no handles."""
    return _OPEN_OUT.pack(0, _OPEN_KEEP_CACHE if keep_cache else 0, 0)


def directory_reply(entries: Iterable[Entry], size: int) -> bytes:
    """Of a READDIR: as many of `entries` as fit in `size` bytes."""
    reply = bytearray()
    for entry in entries:
        packed = _DIRENT.pack(entry.node, entry.cookie, len(entry.name), entry.mode >> 12) + entry.name
        packed += bytes(-len(packed) % 8)
        if len(reply) + len(packed) > size:
            break
        reply += packed
    return bytes(reply)


def statfs_reply(files: int) -> bytes:
    """Of a STATFS: `files` files, nothing free."""
    return _STATFS.pack(0, 0, 0, files, 0, _BLOCK, 255, _BLOCK, 0)


def _attributes(attributes: Attributes) -> bytes:
    node, mode, size, links = attributes
    blocks = -(-size // 512)
    return _ATTRIBUTES.pack(node, size, blocks, 0, 0, 0, 0, 0, 0, mode, links, 0, 0, 0, _BLOCK, 0)
