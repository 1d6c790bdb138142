"""The lease of a node over stores that take it, refuse it, or are silent."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dsec_snapshotter.storelease import ID_FILE, StoreLease
from dsec_store import keys
from dsec_store.around import Operation
from dsec_store.backends.memory import MemoryBlobs
from dsec_store.digest import Digest
from dsec_store.errors import Unavailable
from dsec_store.fault import Fault, FaultBlobs
from dsec_store.leases import MOUNT, read_leases
from dsec_store.meter import MeteredBlobs
from tests.dsec_snapshotter.nodes import until

ONE, TWO, THREE = (Digest.of(bytes([number])) for number in range(3))


def held(blobs: MemoryBlobs) -> set[str]:
    return {key for record in read_leases(blobs, MOUNT) for key in record.holds}


def expected(*layers: Digest) -> set[str]:
    return set(map(keys.layer, layers))


def test_one_put_for_all_layers_and_none_for_those_that_are_held(tmp_path: Path) -> None:
    blobs = MemoryBlobs()
    metered = MeteredBlobs(blobs)
    lease = StoreLease(metered, folder=tmp_path)
    lease.hold([ONE, TWO])
    lease.hold([TWO])
    lease.hold([TWO, ONE])
    assert metered.snapshot().by_operation[Operation.PUT].requests == metered.snapshot().total.requests == 1
    lease.hold([THREE])
    assert held(blobs) == expected(ONE, TWO, THREE)
    assert len(read_leases(blobs, MOUNT)) == 1


def test_it_shrinks_and_goes(tmp_path: Path) -> None:
    blobs = MemoryBlobs()
    lease = StoreLease(blobs, folder=tmp_path)
    lease.start([])
    lease.hold([ONE, TWO])
    lease.set([TWO])
    until(lambda: held(blobs) == expected(TWO))
    lease.end()
    assert read_leases(blobs, MOUNT) == []


def test_the_next_node_goes_on_with_it(tmp_path: Path) -> None:
    blobs = MemoryBlobs()
    StoreLease(blobs, folder=tmp_path).hold([ONE])
    (first,) = read_leases(blobs, MOUNT)
    blobs.delete(first.key)
    successor = StoreLease(blobs, folder=tmp_path)
    successor.start([ONE, TWO])
    until(lambda: held(blobs) == expected(ONE, TWO))
    assert [record.id for record in read_leases(blobs, MOUNT)] == [first.id]
    successor.end()


@pytest.mark.parametrize("damaged", [b"", b"../refs/x", b"\xff"])
def test_a_damaged_id_is_replaced(tmp_path: Path, damaged: bytes) -> None:
    (tmp_path / ID_FILE).write_bytes(damaged)
    blobs = MemoryBlobs()
    StoreLease(blobs, folder=tmp_path).hold([ONE])
    (record,) = read_leases(blobs, MOUNT)
    assert (tmp_path / ID_FILE).read_text() == f"{record.id}\n"


def test_a_store_that_refuses_is_a_problem_and_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    refusing = FaultBlobs(MemoryBlobs(), lambda request: Fault.DENIED if request.operation is Operation.PUT else None)
    lease = StoreLease(refusing, folder=tmp_path)
    lease.hold([ONE])
    lease.hold([TWO])
    (problem,) = lease.problems()
    assert "gc may free what is mounted here" in problem
    assert refusing.injected[Fault.DENIED] == 1
    assert len(caplog.records) == 1


def test_a_store_that_takes_it_again_is_no_problem_any_more(tmp_path: Path) -> None:
    faults: list[Fault | None] = [Fault.DENIED]
    take: Callable[[object], Fault | None] = lambda request: faults.pop() if faults else None  # noqa: E731
    blobs = MemoryBlobs()
    lease = StoreLease(FaultBlobs(blobs, take), folder=tmp_path)
    lease.hold([ONE])
    assert lease.problems() != []
    lease.start([ONE])
    until(lambda: held(blobs) == expected(ONE))
    assert lease.problems() == []
    lease.end()


def test_a_store_that_is_silent_is_an_error(tmp_path: Path) -> None:
    lease = StoreLease(FaultBlobs(MemoryBlobs(), lambda request: Fault.UNAVAILABLE), folder=tmp_path)
    with pytest.raises(Unavailable):
        lease.hold([ONE])
