"""Contents of a layer that are kept in memory, for tests of trees without a store."""

from collections.abc import Iterable

from dsec_store.layer.contents import exactly
from dsec_store.layer.tree import Address, Directory, Inode


class KeptContents:
    """As `dsec_store.layer.contents.Contents` asks for; an address is the number of a content in `kept`."""

    small = 1 << 10

    def __init__(self) -> None:
        self.kept: list[bytes] = []

    def add_small(self, data: bytes) -> Address:
        if data not in self.kept:
            self.kept.append(data)
        return Address(0, self.kept.index(data))

    def add(self, pieces: Iterable[bytes], size: int, what: object) -> Address:
        return self.add_small(b"".join(exactly(pieces, size, what)))

    def of(self, node: Inode | Directory | None) -> bytes:
        """The bytes of a file of the tree."""
        assert isinstance(node, Inode)
        return self.kept[node.address.offset] if node.address else b""
