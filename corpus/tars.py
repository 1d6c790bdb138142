"""Every tar of other projects' tests: read, compared with what other programs read in it, and made again byte for byte.

Each archive is read in a process of its own with limits of memory and time. It is either refused, as `corpus.expected`
says, or all its entries are what Python's tarfile or GNU tar find in it, and its recipe gives its bytes again.
"""

from __future__ import annotations

import io
import json
import re
import resource
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any, Final

from corpus.expected import ALONE, NO_LAYER, REFUSED
from corpus.report import Result
from corpus.sources import collections
from dsec_store.layer.decompress import open_decompressed

SECONDS: Final = 60
"""For one archive. Each of them takes well under one second beside the start of the process."""

MEMORY: Final = 128 << 20
"""Bytes of resident memory for one archive."""

ADDRESSES: Final = 4 << 30
"""Bytes of address space, threads' stacks and all: where the kernel ends what has run away."""

Entries = list[list[Any]]
"""Path, kind, mode, uid, gid, mtime in ns, size, link, device: as `corpus.tarcase` gives them."""

_KINDS: Final = {
    tarfile.DIRTYPE: "directory",
    tarfile.SYMTYPE: "symlink",
    tarfile.LNKTYPE: "hardlink",
    tarfile.CHRTYPE: "character device",
    tarfile.BLKTYPE: "block device",
    tarfile.FIFOTYPE: "fifo",
    b"D": "directory",
}
_LETTERS: Final = {
    "file": "-",
    "directory": "d",
    "symlink": "l",
    "hardlink": "h",
    "character device": "c",
    "block device": "b",
    "fifo": "p",
}
_LISTED: Final = re.compile(r"(.)(.{9}) (\d+)/(\d+) +(\d+(?:,\d+)?) ([\d-]+ [\d:]+)(?:\.\d+)? (.*)")


def check() -> list[Result]:
    return [_collection(name, archives) for name, archives in collections().items()]


def _collection(name: str, archives: list[Path]) -> Result:
    result = Result(name, "tar archives")
    for archive in archives:
        found, problem = _read(archive)
        again = shlex.join([sys.executable, "-m", "corpus.tarcase", str(archive)])
        expected = REFUSED[name].get(archive.name, "")
        if not problem and "refused" in found and expected:
            kind, _, text = expected.partition(": ")
            if found["refused"].startswith(kind) and text in found["refused"]:
                result.refused += 1
                continue
            problem = f"refused with {found['refused']!r}, expected {expected!r}"
        result.check(archive.name, problem or _wrong(found, expected, name, archive), again)
    return result


def _read(archive: Path) -> tuple[dict[str, Any], str]:
    """What the child says, and what was wrong with it as a process."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES, ADDRESSES))

    command = [sys.executable, "-m", "corpus.tarcase", str(archive)]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=SECONDS, preexec_fn=limit)
    except subprocess.TimeoutExpired:
        return {}, f"not read in {SECONDS} s"
    if done.returncode:
        return {}, (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    found: dict[str, Any] = json.loads(done.stdout)
    too_much = found["memory"] > MEMORY
    return found, f"{found['memory']} bytes of memory (at most {MEMORY})" if too_much else ""


def _wrong(found: dict[str, Any], expected: str, collection: str, archive: Path) -> str:
    if "refused" in found or expected:
        return f"refused: {found['refused']}" if "refused" in found else f"read, but expected {expected!r}"
    if found["remade"] is False:
        return "its recipe gives other bytes"
    no_layer = NO_LAYER[collection].get(archive.name, "")
    if no_layer not in found["layer"] or bool(no_layer) != bool(found["layer"]):
        return f"as a layer: {found['layer']!r}, expected {no_layer!r}"
    return "" if archive.name in ALONE[collection] else _differs(found["entries"], archive)


# -- other programs' opinions ------------------------------------------------------------------------------------------


def _differs(ours: Entries, archive: Path) -> str:
    """Empty if some other program that reads the archive finds the same in it, or if none reads it."""
    with archive.open("rb") as file:
        data = open_decompressed(file).read() if archive.stat().st_size < ADDRESSES else b""
    opinions = [(name, read(data, ours)) for name, read in (("tarfile", _tarfile), ("GNU tar", _gnu_tar))]
    known = [(name, difference) for name, difference in opinions if difference is not None]
    if not known or any(not difference for _, difference in known):
        return ""
    return "; ".join(f"{name}: {difference}" for name, difference in known)


def _tarfile(data: bytes, ours: Entries) -> str | None:
    try:
        with _opened(data) as archive:
            theirs = [_facts(member) for member in archive if member.type != b"V"]
    except (tarfile.TarError, ValueError, OverflowError):
        return None
    return _first_difference([[entry[0].rstrip("/"), *entry[1:]] for entry in ours], theirs)


def _opened(data: bytes) -> tarfile.TarFile:
    return tarfile.open(fileobj=io.BytesIO(data), mode="r:", encoding="utf-8", errors="surrogateescape")


def _facts(member: tarfile.TarInfo) -> list[Any]:
    kind = _KINDS.get(member.type, "file")
    device = [member.devmajor, member.devminor] if kind.endswith("device") else [0, 0]
    link = _latin(member.linkname) if kind in ("symlink", "hardlink") else ""
    seconds = int(member.mtime // 1)
    size = member.size if kind == "file" else 0
    return [_latin(member.name), kind, member.mode & 0o7777, member.uid, member.gid, seconds, size, link, device]


def _latin(text: str) -> str:
    return text.encode("utf-8", "surrogateescape").decode("latin-1")


def _first_difference(ours: Entries, theirs: Entries) -> str:
    whole = [[*entry[:5], entry[5] // 10**9, *entry[6:]] for entry in ours]
    for mine, other in zip(whole, theirs, strict=False):
        if mine != other:
            return f"{mine} here, {other} there"
    return "" if len(whole) == len(theirs) else f"{len(whole)} entries here, {len(theirs)} there"


def _gnu_tar(data: bytes, ours: Entries) -> str | None:
    """By its listing; None if it complains."""
    options = ("--numeric-owner", "--full-time", "--quoting-style=escape", "--absolute-names")
    environment = {"TZ": "UTC", "LC_ALL": "C", "PATH": "/usr/bin:/bin"}
    command = ["tar", "--list", "--verbose", *options]
    done = subprocess.run(command, check=False, input=data, capture_output=True, env=environment)
    lines = [line for line in done.stdout.decode("latin-1").splitlines() if not line.startswith("V")]
    if done.returncode or done.stderr:
        return None
    for entry, line in zip(ours, lines, strict=False):
        match = _LISTED.fullmatch(line)
        if not match or (wrong := _listed_otherwise(entry, match)):
            return f"{entry} here, {line!r} there" if not match else wrong
    return "" if len(lines) == len(ours) else f"{len(ours)} entries here, {len(lines)} there"


def _listed_otherwise(entry: list[Any], match: re.Match[str]) -> str:
    path, kind, _, uid, gid, mtime_ns, size, link, device = entry
    letter, _, their_uid, their_gid, number, _, text = match.groups()
    name = _escaped(path)
    if link:
        name += (" link to " if kind == "hardlink" else " -> ") + _escaped(link)
    want = f"{device[0]},{device[1]}" if kind.endswith("device") else str(size)
    mine = (_LETTERS[kind], str(uid), str(gid), want, name)
    number = "0" if kind == "directory" else number  # the size of a list of names, which GNU's directories may have
    theirs = (letter.replace("C", "-"), their_uid, their_gid, number, text)
    return "" if mine == theirs else f"{mine} here, {theirs} there (mtime {mtime_ns})"


def _escaped(text: str) -> str:
    """As GNU tar writes names."""
    special = {"\n": "\\n", "\t": "\\t", "\\": "\\\\", "\r": "\\r", "\a": "\\a", "\b": "\\b", "\f": "\\f", "\v": "\\v"}
    return "".join(special.get(each) or (each if " " <= each <= "~" else f"\\{ord(each):03o}") for each in text)
