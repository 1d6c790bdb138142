"""The examples in docstrings are true."""

from __future__ import annotations

import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", ["chunker", "chunkmap", "compression", "digest", "document", "pack"])
def test_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"dsec_store.{name}"))
    assert (result.failed, result.attempted > 0) == (0, True)
