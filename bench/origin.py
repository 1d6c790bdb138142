"""An S3 origin at a distance: the real server of the tests behind a proxy that delays and counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from obstore.store import S3Store

from bench.measure import Failed, Stopwatch
from bench.proxy import DelayProxy
from tests.s3server import ACCESS_KEY, BUCKET, REGION, SECRET_KEY, S3Server, lacking


@dataclass(slots=True)
class Cost:
    """One sample: seconds of each step, and what was asked of the origin in all of them."""

    steps: dict[str, float] = field(default_factory=dict)
    gets: int = 0
    bytes: int = 0

    @property
    def seconds(self) -> float:
        return sum(self.steps.values())


Task = Callable[[int], Cost]
"""Takes one sample; called with its number."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Stores are URLs below `url`; `near` reaches them without the proxy and `far` through it."""

    url: str
    near: Mapping[str, str]
    far: Mapping[str, str]
    proxy: DelayProxy

    @contextmanager
    def counting(self, cost: Cost, step: str) -> Iterator[None]:
        """Add to `cost` how long the body takes, and what passes the proxy meanwhile."""
        before = self.proxy.traffic()
        with Stopwatch() as watch:
            yield
        passed = self.proxy.traffic() - before
        cost.steps[step] = watch.seconds
        cost.gets += passed.gets
        cost.bytes += passed.bytes

    def client(self, prefix: str) -> S3Store:
        """A plain client of what lies below `prefix`, through the proxy."""
        return S3Store(
            BUCKET,
            prefix=prefix,
            endpoint=self.proxy.endpoint,
            region=REGION,
            access_key_id=ACCESS_KEY,
            secret_access_key=SECRET_KEY,
            client_options={"allow_http": True},
        )


@contextmanager
def running_origin() -> Iterator[Origin]:
    if reason := lacking():
        raise Failed(reason)
    with S3Server() as server, DelayProxy(server.endpoint) as proxy:
        near = dict(server.environment)
        yield Origin(server.url, near, {**near, "AWS_ENDPOINT_URL": proxy.endpoint}, proxy)
