"""Records: whole or not there, and a broken one is nobody else's trouble."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from dsec_snapshotter.compositions import Composition
from dsec_snapshotter.processes import Process
from dsec_snapshotter.records import Records
from dsec_store.digest import Digest
from dsec_store.errors import Denied

COMPOSITION = Composition(
    id="abcdefghij",
    kind="run",
    layers=(Digest.of(b"one"), Digest.of(b"two")),
    writable=True,
    path="/a/path",
    target=False,
    owner=Process(12, 345),
)


def numbers(folder: Path, kind: str = "number") -> Records[int]:
    def decode(value: dict[str, Any]) -> int:
        return int(value["number"])

    return Records(folder, kind, lambda number: {"number": number}, decode)


def test_what_is_written_is_read_by_the_next_process(tmp_path: Path) -> None:
    for number in range(3):
        numbers(tmp_path).write(f"id{number}", number)
    numbers(tmp_path).write("id0", 7)
    numbers(tmp_path).remove("id1")
    numbers(tmp_path).remove("id1")
    numbers(tmp_path, "other").write("id9", 9)
    assert numbers(tmp_path).load() == {"id0": 7, "id2": 2}


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[]", b"{}", b'{"number":"x"}', b"\xff", b'{"number":' + b"[" * 100_000]
)
def test_a_broken_record_is_moved_aside(tmp_path: Path, damage: bytes) -> None:
    records = numbers(tmp_path)
    records.write("good", 1)
    (tmp_path / "number-bad.json").write_bytes(damage)
    assert records.load() == {"good": 1}
    assert records.load() == {"good": 1}
    assert list(records.broken()) == ["bad"]
    records.forget_broken()
    assert os.listdir(tmp_path) == ["number-good.json"]


def test_an_unfinished_write_is_cleared_away(tmp_path: Path) -> None:
    (tmp_path / ".tmp-x").write_bytes(b'{"number":')
    assert numbers(tmp_path).load() == {}
    assert os.listdir(tmp_path) == []


def test_a_disk_that_takes_nothing(tmp_path: Path) -> None:
    with pytest.raises(Denied, match=r"number-a\.json cannot be written"):
        numbers(tmp_path / "missing").write("a", 1)


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(Denied, match="No space left"):
        numbers(tmp_path).write("a", 1)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("owner", [Process(12, 345), None])
def test_a_composition_survives_its_record(owner: Process | None) -> None:
    composition = Composition(
        **{**{field: getattr(COMPOSITION, field) for field in COMPOSITION.__slots__}, "owner": owner}
    )
    assert Composition.from_json(composition.as_json()) == composition
