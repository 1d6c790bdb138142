"""Layer trees for tests: a flat description that compares with `==`, and random trees for property tests."""

import stat
from dataclasses import replace
from typing import Any, NamedTuple

from hypothesis import strategies as st

from dsec_store.layer.tree import ID_MAX, Address, Directory, Inode, inode_of


class Facts(NamedTuple):
    """All that stat(2), readlink(2) and getxattr(2) tell of a file. `twin` is the first path (by byte order) of the
    same inode: its own, unless it is a hardlink."""

    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    rdev: tuple[int, int]
    target: bytes
    xattrs: dict[bytes, bytes]
    links: int
    twin: bytes


def describe(root: Directory) -> dict[bytes, Facts]:
    """The facts of every path of a tree, the root's path being empty. Sizes are those of regular files only."""
    nodes = {b"": root, **dict(root.walk())}
    names: dict[Inode, list[bytes]] = {}
    for path, node in nodes.items():
        names.setdefault(inode_of(node), []).append(path)
    facts = {}
    for path, node in nodes.items():
        inode = inode_of(node)
        links = len(names[inode])
        if isinstance(node, Directory):
            links = 2 + sum(isinstance(child, Directory) for child in node.entries.values())
        facts[path] = Facts(
            *(inode.mode, inode.uid, inode.gid, inode.size, inode.mtime_ns, inode.rdev, inode.target),
            dict(inode.xattrs),
            links,
            min(names[inode]),
        )
    return facts


def addresses(root: Directory) -> dict[bytes, Address | None]:
    """Where the contents of the regular files lie."""
    return {path: node.address for path, node in root.walk() if isinstance(node, Inode)}


NAMES = st.binary(min_size=1, max_size=255).filter(lambda name: not set(name) & {0, 47} and name not in {b".", b".."})
_DEVICE_NUMBERS = st.tuples(st.integers(0, 2**12 - 1), st.integers(0, 2**20 - 1))
_TARGETS = st.binary(min_size=1, max_size=4095).filter(lambda target: 0 not in target)
XATTR_NAMES = st.builds(
    lambda prefix, suffix: prefix + suffix,
    st.sampled_from([b"trusted.", b"security."]),
    st.binary(min_size=1, max_size=240).filter(lambda suffix: 0 not in suffix),
)
"""Names that the kernel shows on every type of file, whatever the value."""
ANY_XATTR_NAMES = st.one_of(
    XATTR_NAMES,
    XATTR_NAMES.map(lambda name: b"user." + name),
    st.sampled_from([b"system.posix_acl_access", b"system.posix_acl_default"]),
)


def _inodes(
    kind: int, xattr_names: st.SearchStrategy[bytes], **rest: st.SearchStrategy[Any]
) -> st.SearchStrategy[Inode]:
    """Inodes of one type of file, with random mode bits, owner, time and xattrs."""
    return st.builds(
        Inode,
        mode=st.integers(0, 0o7777).map(lambda bits: kind | bits),
        uid=st.integers(0, ID_MAX),
        gid=st.integers(0, ID_MAX),
        mtime_ns=st.integers(-(2**63) * 10**9, 2**63 * 10**9 - 1),
        xattrs=st.dictionaries(xattr_names, st.binary(max_size=300), max_size=3),
        **rest,
    )


def _filled(empty: Inode, device: int, ends: tuple[int, int], cut: int) -> Inode:
    """`empty` with a content from block to block of a device, less `cut` bytes of the last block."""
    first, last = sorted(ends)
    return replace(empty, size=(last - first + 1) * 4096 - cut, address=Address(device, first * 4096))


@st.composite
def trees(
    draw: st.DrawFn,
    devices: int = 2,
    blocks: int = 2**20,
    xattr_names: st.SearchStrategy[bytes] = ANY_XATTR_NAMES,
) -> Directory:
    """Random trees with all types of files and hardlinks; contents lie on `devices` blob devices of `blocks` blocks."""
    regular = _inodes(stat.S_IFREG, xattr_names)
    kinds = [
        regular,
        _inodes(stat.S_IFLNK, xattr_names, target=_TARGETS),
        _inodes(stat.S_IFIFO, xattr_names),
        _inodes(stat.S_IFSOCK, xattr_names),
        _inodes(stat.S_IFCHR, xattr_names, rdev=_DEVICE_NUMBERS),
        _inodes(stat.S_IFBLK, xattr_names, rdev=_DEVICE_NUMBERS),
    ]
    if devices:
        block = st.integers(0, blocks - 1)
        content = st.integers(0, devices - 1), st.tuples(block, block), st.integers(0, 4095)
        kinds.append(st.builds(_filled, regular, *content))
    directories = _inodes(stat.S_IFDIR, xattr_names)
    pool = draw(st.lists(st.one_of(kinds), min_size=1, max_size=6))
    nodes: st.SearchStrategy[Inode | Directory] = st.recursive(
        st.sampled_from(pool),
        lambda inner: st.builds(Directory, directories, st.dictionaries(NAMES, inner, max_size=5)),
        max_leaves=15,
    )
    return draw(st.builds(Directory, directories, st.dictionaries(NAMES, nodes, max_size=5)))
