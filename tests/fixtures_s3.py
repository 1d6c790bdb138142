"""Fixtures of the real S3 server: one for the whole run, a fresh prefix for each test.

Loaded once, by `pytest_plugins` in tests/conftest.py, so that all components share the one server.
"""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest

from dsec_store.blobs import BlobStore
from dsec_store.locate import open_store
from tests.s3server import S3Server, lacking

pytest.register_assert_rewrite("dsec_store.testing")


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """The running server. Tests must leave it running."""
    if reason := lacking():
        pytest.skip(reason)
    with S3Server() as server:
        yield server


@pytest.fixture
def s3_url(s3_server: S3Server) -> str:
    """URL of an empty store on the server, to be opened with `s3_server.environment`."""
    return f"{s3_server.url}/{uuid4()}"


@pytest.fixture
def s3_store(s3_server: S3Server, s3_url: str) -> BlobStore:
    """An empty store on the server, without wrappers."""
    return open_store(s3_url, environment=s3_server.environment)
