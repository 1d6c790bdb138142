"""Wrappers keep the contract of what they wrap, and each adds what it says."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import settings

from dsec_store.around import AroundBlobs, Operation
from dsec_store.backends.memory import MemoryBlobs
from dsec_store.blobs import BlobStore
from dsec_store.digest import Digest
from dsec_store.errors import Corrupt, Denied, NotFound, StoreError, Unavailable
from dsec_store.fault import Fault, FaultBlobs, scripted, seeded
from dsec_store.meter import MeteredBlobs, Traffic
from dsec_store.retry import RetryBlobs, RetryPolicy
from dsec_store.testing import USES, BlobStoreContract, listed
from dsec_store.throttle import ThrottleBlobs
from dsec_store.verify import VerifyBlobs
from tests.dsec_store.test_backends import AgainstDict

DATA = b"in a pack"
PACK = f"packs/ab/{Digest.of(DATA).hex}"


class Clock:
    """Time that passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sleeps: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds


def retrying(store: BlobStore, clock: Clock | None = None, jitter: float = 1.0, **policy: Any) -> RetryBlobs:
    """Retries that take no time, and with full waits unless told otherwise."""
    clock = clock or Clock()
    return RetryBlobs(store, RetryPolicy(**policy), sleep=clock.sleep, clock=clock, jitter=lambda: jitter)


def stored(data: bytes = DATA, key: str = PACK) -> MemoryBlobs:
    store = MemoryBlobs()
    store.put(key, data)
    return store


@pytest.mark.parametrize(
    "wrap",
    [
        AroundBlobs,
        VerifyBlobs,
        RetryBlobs,
        MeteredBlobs,
        ThrottleBlobs,
        lambda inner: FaultBlobs(inner, scripted()),
        # Enough attempts that never all of them fail, in however many requests.
        lambda inner: retrying(
            VerifyBlobs(FaultBlobs(inner, seeded(5, 0.2, [Fault.UNAVAILABLE, Fault.LOST]))), attempts=40, deadline=1e9
        ),
    ],
    ids=["around", "verify", "retry", "meter", "throttle", "no faults", "faults and retries"],
)
class TestWrapped(BlobStoreContract):
    @pytest.fixture
    def store(self, wrap: Callable[[BlobStore], BlobStore]) -> BlobStore:
        return wrap(MemoryBlobs())


class FaultyAgainstDict(AgainstDict):
    """A store whose requests fail in every third case is a dictionary all the same, with retries around it."""

    def make_store(self) -> BlobStore:
        faulty = FaultBlobs(MemoryBlobs(), seeded(11, 0.3, [Fault.UNAVAILABLE, Fault.LOST]))
        return retrying(faulty, attempts=50)


TestFaultyAgainstDict = FaultyAgainstDict.TestCase
TestFaultyAgainstDict.settings = settings(max_examples=60, deadline=None)


# Verify


@pytest.mark.parametrize("fault", [Fault.SHORT, Fault.LONG, Fault.FLIPPED, Fault.STALE])
def test_a_whole_blob_that_does_not_match_its_key_is_corrupt(fault: Fault) -> None:
    store = VerifyBlobs(FaultBlobs(stored(), scripted(fault)))
    with pytest.raises(Corrupt, match=f"{store.location}/{PACK}: .* do not match blake3:"):
        store.get(PACK)
    assert store.get(PACK) == DATA


def test_manifests_and_configs_are_checked_by_sha256() -> None:
    key = f"oci/ab/{Digest.of(DATA, 'sha256').hex}"
    store = VerifyBlobs(FaultBlobs(stored(key=key), scripted(None, Fault.FLIPPED)))
    assert store.get(key) == DATA
    with pytest.raises(Corrupt):
        store.get(key)


def test_a_blob_without_a_digest_in_its_key_is_not_checked() -> None:
    store = VerifyBlobs(FaultBlobs(stored(key="refs/demo"), scripted(Fault.FLIPPED)))
    assert store.get("refs/demo") != DATA


@pytest.mark.parametrize("fault", [Fault.SHORT, Fault.LONG])
def test_a_range_of_a_wrong_length_is_unavailable(fault: Fault) -> None:
    store = VerifyBlobs(FaultBlobs(stored(), scripted(fault)))
    with pytest.raises(Unavailable, match="bytes came, 5 were promised"):
        store.get_range(PACK, 3, 5)


# Retry


@pytest.mark.parametrize("fault", [Fault.UNAVAILABLE, Fault.LOST])
def test_every_operation_is_repeated(fault: Fault) -> None:
    for use in [*USES, lambda store, _: listed(store)]:
        inner = FaultBlobs(stored(key="a"), scripted(fault, fault))
        use(retrying(inner), "a")
        assert inner.injected[fault] == 2


def test_what_will_not_pass_is_not_repeated() -> None:
    for fault, expected in ((Fault.DENIED, Denied), (None, NotFound)):
        clock = Clock()
        with pytest.raises(expected):
            retrying(FaultBlobs(MemoryBlobs(), scripted(fault)), clock).get("a")
        assert clock.sleeps == []


def test_the_last_error_is_raised_with_the_number_of_tries() -> None:
    metered = MeteredBlobs(FaultBlobs(stored(), scripted(*[Fault.UNAVAILABLE] * 9)))
    with pytest.raises(Unavailable, match=r"injected fault \(tried 4 times\)"):
        retrying(metered, attempts=4).get(PACK)
    assert metered.snapshot().total == Traffic(requests=4, failures=4)


def test_waits_double_up_to_their_limit() -> None:
    clock = Clock()
    faulty = FaultBlobs(stored(), scripted(*[Fault.UNAVAILABLE] * 6))
    assert retrying(faulty, clock, first_delay=1.0, max_delay=10.0).get(PACK) == DATA
    assert clock.sleeps == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def test_waits_are_drawn_from_zero_to_their_limit() -> None:
    clock = Clock()
    faulty = FaultBlobs(stored(), scripted(*[Fault.UNAVAILABLE] * 3))
    retrying(faulty, clock, jitter=0.25, first_delay=1.0).get(PACK)
    assert clock.sleeps == [0.25, 0.5, 1.0]


def test_no_attempt_starts_after_the_deadline() -> None:
    clock = Clock()
    faulty = FaultBlobs(stored(), scripted(*[Fault.UNAVAILABLE] * 99))
    with pytest.raises(Unavailable, match="tried 3 times"):
        retrying(faulty, clock, attempts=99, first_delay=1.0, deadline=5.0).get(PACK)
    assert clock.now == 3.0


@pytest.mark.parametrize("fault", [Fault.SHORT, Fault.LONG, Fault.FLIPPED, Fault.STALE])
def test_a_corrupt_answer_gets_another_try(fault: Fault) -> None:
    store = retrying(VerifyBlobs(FaultBlobs(stored(), scripted(fault, fault))), corrupt_attempts=3)
    assert store.get(PACK) == DATA


def test_a_blob_that_stays_corrupt_is_given_up_soon() -> None:
    metered = MeteredBlobs(stored(b"damaged", PACK))
    with pytest.raises(Corrupt, match="tried 3 times"):
        retrying(VerifyBlobs(metered), corrupt_attempts=3).get(PACK)
    assert metered.snapshot().total.requests == 3


def test_other_errors_pass_through_retries() -> None:
    class Broken(MemoryBlobs):
        def get(self, key: str, limit: int | None = None) -> bytes:
            raise RuntimeError(key)

    with pytest.raises(RuntimeError):
        retrying(Broken()).get("a")


# Meter


def test_traffic_is_counted_by_operation() -> None:
    store = MeteredBlobs(MemoryBlobs())
    store.put("a", b"12345")
    store.put("b", memoryview(b"67"))
    store.get("a")
    store.get_range("a", 1, 3)
    store.stat("a")
    before = store.snapshot()
    list(store.list(""))
    store.delete("a")
    with pytest.raises(NotFound):
        store.get("a")
    after = store.snapshot()
    assert after.by_operation == {
        Operation.PUT: Traffic(requests=2, bytes_sent=7),
        Operation.GET: Traffic(requests=2, failures=1, bytes_received=5),
        Operation.GET_RANGE: Traffic(requests=1, bytes_received=3),
        Operation.STAT: Traffic(requests=1),
        Operation.LIST: Traffic(requests=1),
        Operation.DELETE: Traffic(requests=1),
    }
    assert before.total == Traffic(requests=5, bytes_sent=7, bytes_received=8)
    assert after.total - before.total == Traffic(requests=3, failures=1)


def test_many_threads_are_counted_exactly() -> None:
    store = MeteredBlobs(stored(b"1234", "a"))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: store.get("a"), range(800)))
    assert store.snapshot().total == Traffic(requests=800, bytes_received=3200)


# Throttle


def test_every_request_takes_the_delay_and_its_share_of_the_link() -> None:
    clock = Clock()
    store = ThrottleBlobs(MemoryBlobs(), delay=0.5, bandwidth=100.0, sleep=clock.sleep, clock=clock)
    store.put("a", bytes(200))
    store.get("a")
    store.get_range("a", 0, 50)
    store.stat("a")
    assert clock.sleeps == [2.5, 2.5, 1.0, 0.5]


def test_the_link_is_shared() -> None:
    """Requests at the same moment wait behind each other."""
    waits: list[float] = []
    store = ThrottleBlobs(stored(bytes(100), "a"), bandwidth=100.0, sleep=waits.append, clock=lambda: 7.0)
    for _ in range(3):
        store.get("a")
    assert waits == [1.0, 2.0, 3.0]


# Fault


def test_faults_are_dealt_in_order_to_what_they_can_hit() -> None:
    store = FaultBlobs(stored(b"12345", "a"), scripted(Fault.SHORT, None, Fault.WRONG_RANGE, Fault.LONG))
    assert store.stat("a") is not None
    assert store.get("a") == b"1234"
    assert store.get("a") == b"12345"
    assert store.get("a") == b"12345"
    assert store.get_range("a", 1, 3) == b"123"
    assert store.get_range("a", 1, 3) == b"234\0"
    assert store.get("a") == b"12345"
    assert store.injected == {Fault.SHORT: 1, Fault.WRONG_RANGE: 1, Fault.LONG: 1}


def test_stale_bytes_are_those_of_another_blob() -> None:
    inner = stored(b"12345", "a")
    store = FaultBlobs(inner, scripted(Fault.STALE, Fault.STALE, Fault.STALE))
    assert store.get("a") == b""
    inner.put("b", b"other")
    assert store.get("a") == b"other"
    assert store.get_range("a", 3, 2) == b"er"


def test_a_lost_answer_has_had_its_effect_and_a_failed_request_none() -> None:
    store = FaultBlobs(MemoryBlobs(), scripted(Fault.UNAVAILABLE, None, Fault.LOST))
    with pytest.raises(Unavailable):
        store.put("a", b"1")
    assert store.stat("a") is None
    with pytest.raises(Unavailable):
        store.put("a", b"1")
    assert store.get("a") == b"1"


def test_a_slow_answer_is_right() -> None:
    clock = Clock()
    store = FaultBlobs(stored(), scripted(Fault.SLOW), delay=3.0, sleep=clock.sleep)
    assert store.get(PACK) == DATA
    assert clock.sleeps == [3.0]


def test_the_same_seed_gives_the_same_faults() -> None:
    def outcomes(seed: int) -> list[str]:
        store = FaultBlobs(stored(), seeded(seed, 0.5), sleep=lambda _: None)
        found = []
        for _ in range(60):
            try:
                found.append(store.get(PACK).hex())
            except StoreError as error:
                found.append(str(type(error)))
        return found

    assert outcomes(1) == outcomes(1) != outcomes(2)
    assert 15 < outcomes(1).count(DATA.hex()) < 45


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_to_whole_blobs_the_right_bytes_come_or_an_error(seed: int) -> None:
    """The wrap order of production over a backend that does everything wrong."""
    inner = stored()
    inner.put("refs/other", b"other")
    faulty = FaultBlobs(inner, seeded(seed, 0.5, set(Fault) - {Fault.DENIED}), sleep=lambda _: None)
    store = retrying(VerifyBlobs(faulty), attempts=30, corrupt_attempts=30)
    assert [store.get(PACK) for _ in range(20)] == [DATA] * 20
    assert faulty.injected.total() > 5
