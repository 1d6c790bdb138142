"""Small images with what users reported as faults of similar systems, each with the tree that it must become.

The right tree follows from the image specification (layer.md: change types, whiteouts, opaque whiteouts) and, where
that leaves a choice, from docs/format/layers.md.
"""

from dataclasses import dataclass
from typing import Final

from tests import tarmaker as tar
from tests.ocimaker import Layer
from tests.views import Seen, View, folder, link, regular, view

SECOND: Final = 10**9

CAPABILITY: Final = bytes.fromhex("0100000200200000000000000000000000000000")
"""cap_net_raw=p in the kernel's form, version 2: 20 bytes with NULs (linux/capability.h)."""


NOW: Final = "directories that are only implied, and those that hold them, get the time of the unpacking"
"""How umoci differs in some cases."""


@dataclass(frozen=True, slots=True)
class Case:
    """`umoci` says how umoci's tree differs; empty where it must be the same."""

    layers: list[Layer | bytes]
    paths: View
    root: Seen | None = None
    umoci: str = ""

    @property
    def view(self) -> View:
        return view(self.paths, self.root)


def layer(*entries: bytes) -> bytes:
    return tar.archive(*entries)


# fmt: off
_UNDER_OPAQUE: Final = layer(
    tar.directory(b"./"), tar.directory(b"a/"), tar.directory(b"a/b/"),
    tar.file(b"a/b/old", b"old"), tar.file(b"a/keep", b"k"),
)
_AFTER_OPAQUE: Final[View] = {
    b"a": folder(), b"a/b": folder(), b"a/b/new": regular(b"new"), b"a/b/newer": regular(b"newer"),
    b"a/keep": regular(b"k"),
}
_NEW: Final = (tar.file(b"a/b/new", b"new"), tar.file(b"a/b/newer", b"newer"))
_OPAQUE: Final = tar.file(b"a/b/.wh..wh..opq")
_PARENTS: Final = (tar.directory(b"a/"), tar.directory(b"a/b/"))

_LONG_PATH: Final = b"/".join([b"d" * 60] * 6) + b"/" + b"n" * 255
_TWO_FILES: Final = layer(tar.file(b"one", b"x" * 70000), tar.file(b"two", b"y" * 70000))


CASES: Final[dict[str, Case]] = {
    "opaque marker before the new siblings": Case(
        [_UNDER_OPAQUE, layer(*_PARENTS, _OPAQUE, *_NEW)], _AFTER_OPAQUE
    ),
    "opaque marker between the new siblings": Case(
        [_UNDER_OPAQUE, layer(*_PARENTS, _NEW[0], _OPAQUE, _NEW[1])], _AFTER_OPAQUE
    ),
    "opaque marker after the new siblings": Case(
        [_UNDER_OPAQUE, layer(*_PARENTS, *_NEW, _OPAQUE)], _AFTER_OPAQUE
    ),
    "type changes without whiteouts": Case(
        [
            layer(
                tar.directory(b"t/"),
                tar.directory(b"t/d2f/"), tar.file(b"t/d2f/x", b"x"),
                tar.directory(b"t/d2l/"), tar.file(b"t/d2l/x", b"x"),
                tar.file(b"t/f2d", b"f"), tar.symlink(b"t/l2d", b"d2l"), tar.symlink(b"t/l2l", b"a"),
            ),
            layer(
                tar.directory(b"t/"),
                tar.file(b"t/d2f", b"file"), tar.symlink(b"t/d2l", b"d2f"),
                tar.directory(b"t/f2d/"), tar.file(b"t/f2d/n", b"n"),
                tar.directory(b"t/l2d/"), tar.file(b"t/l2d/n", b"n"), tar.symlink(b"t/l2l", b"b"),
            ),
        ],
        {
            b"t": folder(), b"t/d2f": regular(b"file"), b"t/d2l": link(b"d2f"),
            b"t/f2d": folder(), b"t/f2d/n": regular(b"n"),
            b"t/l2d": folder(), b"t/l2d/n": regular(b"n"), b"t/l2l": link(b"b"),
        },
    ),
    "hardlink into a lower layer": Case(
        [
            layer(tar.pax({b"SCHILY.xattr.user.k": b"v"}), tar.file(b"x", b"lower", mode=0o640, uid=7, gid=8)),
            layer(tar.hardlink(b"y", b"x"), tar.directory(b"d/")),
        ],
        {
            b"x": regular(b"lower", 0o640, uid=7, gid=8, xattrs={b"user.k": b"v"}),
            b"y": regular(b"lower", 0o640, uid=7, gid=8, xattrs={b"user.k": b"v"}, twin=b"x"),
            b"d": folder(),
        },
    ),
    "hardlink over a path of a lower layer": Case(
        [
            layer(tar.file(b"perl", b"p1"), tar.file(b"perl5", b"p2")),
            layer(tar.file(b"perl", b"p3"), tar.hardlink(b"perl5", b"perl")),
        ],
        {b"perl": regular(b"p3"), b"perl5": regular(b"p3", twin=b"perl")},
    ),
    "hardlink whose parents have no entries": Case(
        [layer(tar.file(b"bin/app", b"app", mode=0o4755, uid=1000), tar.hardlink(b"bin/r/_m/app", b"bin/app"))],
        {
            b"bin": folder(), b"bin/r": folder(), b"bin/r/_m": folder(),
            b"bin/app": regular(b"app", 0o4755, uid=1000),
            b"bin/r/_m/app": regular(b"app", 0o4755, uid=1000, twin=b"bin/app"),
        },
        umoci=NOW,
    ),
    "directory entry over a symlink to a directory": Case(
        [
            layer(
                tar.directory(b"usr/"), tar.directory(b"usr/lib/"), tar.file(b"usr/lib/ld.so", b"ld"),
                tar.symlink(b"lib", b"usr/lib"),
            ),
            layer(tar.directory(b"lib/"), tar.file(b"lib/foo", b"foo")),
        ],
        {
            b"usr": folder(), b"usr/lib": folder(), b"usr/lib/ld.so": regular(b"ld"),
            b"lib": folder(), b"lib/foo": regular(b"foo"),
        },
    ),
    "file below a symlink to a directory": Case(
        [
            layer(tar.directory(b"usr/"), tar.directory(b"usr/lib/", mode=0o711), tar.symlink(b"lib", b"/usr/lib")),
            layer(tar.file(b"lib/foo", b"foo")),
        ],
        {
            b"usr": folder(), b"usr/lib": folder(0o711), b"usr/lib/foo": regular(b"foo"), b"lib": link(b"/usr/lib"),
        },
    ),
    "implied directories": Case(
        [
            layer(
                tar.directory(b"opt/", mode=0o750, uid=1000, gid=1000, mtime=10**9),
                tar.directory(b"opt/x/", mode=0o700, uid=1000, gid=1000), tar.file(b"opt/x/f", b"f"),
            ),
            layer(tar.file(b"opt/x/new/g", b"g")),
        ],
        {
            b"opt": folder(0o750, uid=1000, gid=1000, mtime_ns=10**18),
            b"opt/x": folder(0o700, uid=1000, gid=1000), b"opt/x/f": regular(b"f"),
            b"opt/x/new": folder(), b"opt/x/new/g": regular(b"g"),
        },
        umoci=NOW,
    ),
    "binary xattrs": Case(
        [
            layer(
                tar.pax({b"SCHILY.xattr.security.capability": CAPABILITY, b"SCHILY.xattr.user.k": b"v=1\n2"}),
                tar.file(b"ping", b"elf", mode=0o755),
            )
        ],
        {b"ping": regular(b"elf", 0o755, xattrs={b"security.capability": CAPABILITY, b"user.k": b"v=1\n2"})},
    ),
    "xattrs that overlayfs uses itself": Case(
        [
            layer(
                tar.pax({b"SCHILY.xattr.trusted.overlay.opaque": b"y"}), tar.directory(b"d/"),
                tar.file(b"d/f", b"f"),
            ),
            layer(tar.directory(b"d/"), tar.file(b"d/g", b"g")),
            layer(tar.pax({b"SCHILY.xattr.trusted.overlay.opaque": b"y"}), tar.directory(b"d/")),
        ],
        {
            b"d": folder(xattrs={b"trusted.overlay.opaque": b"y"}),
            b"d/f": regular(b"f"), b"d/g": regular(b"g"),
        },
        umoci="it drops these xattrs",
    ),
    "names of any bytes": Case(
        [
            layer(
                tar.file(b"caf\xe9", b"latin1"), tar.file(b"nl\nname", b"n"), tar.file(b'sp ace "q" \\ $', b"s"),
                tar.file(b"trail ", b"t"), tar.file(b".hidden", b"h"), tar.file(b"\xe2\x82\xac", b"utf8"),
            )
        ],
        {
            b"caf\xe9": regular(b"latin1"), b"nl\nname": regular(b"n"), b'sp ace "q" \\ $': regular(b"s"),
            b"trail ": regular(b"t"), b".hidden": regular(b"h"), b"\xe2\x82\xac": regular(b"utf8"),
        },
    ),
    "long names": Case(
        [
            layer(
                tar.pax({b"path": _LONG_PATH}), tar.file(b"x", b"long"),
                tar.long_path(b"g/" + b"m" * 200), tar.file(b"g/short", b"gnu"),
                tar.long_link(b"k" * 150), tar.symlink(b"sl", b"k" * 100),
            )
        ],
        {
            **{b"/".join([b"d" * 60] * depth): folder() for depth in range(1, 7)},
            _LONG_PATH: regular(b"long"),
            b"g": folder(), b"g/" + b"m" * 200: regular(b"gnu"), b"sl": link(b"k" * 150),
        },
        umoci=NOW,
    ),
    "odd spellings of paths": Case(
        [layer(tar.directory(b"./"), tar.file(b"/abs", b"a"), tar.file(b"./dot//x/./y", b"d"))],
        {b"abs": regular(b"a"), b"dot": folder(), b"dot/x": folder(), b"dot/x/y": regular(b"d")},
        umoci=NOW,
    ),
    "the same path twice": Case(
        [
            layer(
                tar.file(b"dup", b"first", mode=0o600), tar.file(b"dup", b"second!", mode=0o755),
                tar.directory(b"dd/", mode=0o700), tar.file(b"dd/f", b"f"), tar.directory(b"dd/", mode=0o711),
            )
        ],
        {b"dup": regular(b"second!", 0o755), b"dd": folder(0o711), b"dd/f": regular(b"f")},
    ),
    "gzip of several members": Case(
        [Layer(_TWO_FILES, "gzip members")],
        {b"one": regular(b"x" * 70000), b"two": regular(b"y" * 70000)},
    ),
    "bytes after the end of the archive": Case(
        [tar.archive(tar.file(b"one", b"1"), end=tar.END + bytes(8192) + b"JUNKJUNK" * 64)],
        {b"one": regular(b"1")},
    ),
    "empty layers": Case([tar.END, layer(tar.file(b"f", b"f")), tar.END], {b"f": regular(b"f")}),
    "140 layers": Case(
        [layer(tar.file(b"f", b"%d" % number), tar.file(b"n%d" % number, b"x")) for number in range(140)],
        {b"f": regular(b"139"), **{b"n%d" % number: regular(b"x") for number in range(140)}},
    ),
    "setuid, setgid and sticky bits": Case(
        [
            layer(
                tar.directory(b"s/"), tar.file(b"s/su", b"su", mode=0o4755, uid=1000, gid=42),
                tar.hardlink(b"s/su2", b"s/su", mode=0o4755, uid=1000, gid=42),
                tar.directory(b"s/tmp/", mode=0o1777), tar.directory(b"s/sg/", mode=0o2775, gid=5),
            )
        ],
        {
            b"s": folder(), b"s/su": regular(b"su", 0o4755, uid=1000, gid=42),
            b"s/su2": regular(b"su", 0o4755, uid=1000, gid=42, twin=b"s/su"),
            b"s/tmp": folder(0o1777), b"s/sg": folder(0o2775, gid=5),
        },
    ),
    "whiteouts of nothing and leftovers of aufs": Case(
        [
            layer(tar.directory(b"p/"), tar.file(b"p/low", b"l")),
            layer(
                tar.directory(b"p/"), tar.file(b"p/.wh.gone"), tar.file(b"nodir/.wh.x"),
                tar.file(b"p/.wh..wh.plnk/1.2"), tar.directory(b".wh..wh.orph/"), tar.file(b"p/f", b"f"),
            ),
        ],
        {b"p": folder(), b"p/low": regular(b"l"), b"p/f": regular(b"f")},
        umoci="it unpacks leftovers of aufs as files",
    ),
    "directory times and modes that forbid writing": Case(
        [
            layer(
                tar.directory(b"m/", mtime=10**9), tar.file(b"m/f", b"f", mtime=11 * 10**8),
                tar.directory(b"r/", mode=0o500), tar.file(b"r/f", b"f"),
            ),
            layer(tar.file(b"m/g", b"g", mtime=12 * 10**8)),
        ],
        {
            b"m": folder(mtime_ns=10**18), b"m/f": regular(b"f", mtime_ns=11 * 10**17),
            b"m/g": regular(b"g", mtime_ns=12 * 10**17),
            b"r": folder(0o500), b"r/f": regular(b"f"),
        },
    ),
    "empty directories and symlinks": Case(
        [
            layer(
                tar.directory(b"docker-entrypoint-initdb.d/", mode=0o750), tar.directory(b"e/"),
                tar.directory(b"e/e2/"), tar.symlink(b"e/l", b"e2"),
            ),
            layer(tar.directory(b"e/"), tar.directory(b"e/e2/")),
        ],
        {
            b"docker-entrypoint-initdb.d": folder(0o750), b"e": folder(), b"e/e2": folder(), b"e/l": link(b"e2"),
        },
    ),
    "whiteouts far above what they hide": Case(
        [
            layer(tar.file(b"this-will-be-deleted", b"1"), tar.directory(b"d/"), tar.file(b"d/f", b"1")),
            *(layer(tar.file(b"n%d" % number, b"n")) for number in range(6)),
            layer(tar.file(b".wh.this-will-be-deleted"), tar.file(b".wh.d")),
        ],
        {b"n%d" % number: regular(b"n") for number in range(6)},
    ),
    "opaque marker on the root": Case(
        [
            layer(tar.directory(b"./", mode=0o711), tar.directory(b"a/"), tar.file(b"a/old"), tar.file(b"b", b"b")),
            layer(tar.file(b".wh..wh..opq"), tar.directory(b"a/"), tar.file(b"a/new", b"new")),
        ],
        {b"a": folder(), b"a/new": regular(b"new")},
        root=folder(0o711),
    ),
    "devices, fifos and times in nanoseconds": Case(
        [
            layer(
                tar.character_device(b"null", 1, 3, mode=0o666), tar.block_device(b"disk", 259, 70000),
                tar.fifo(b"pipe", mode=0o600), tar.pax({b"mtime": b"-1.000000001"}), tar.file(b"old"),
            )
        ],
        {
            b"null": Seen(0o020666, rdev=(1, 3)), b"disk": Seen(0o060644, rdev=(259, 70000)),
            b"pipe": Seen(0o010600), b"old": regular(mtime_ns=-SECOND - 1),
        },
    ),
}
# fmt: on
