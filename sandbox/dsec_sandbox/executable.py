"""Will this command run? Found out in the root file system, from outside, before and after the fact.

A runtime reports all failures alike, as text. So *before* the container is made the program is looked up here, as
execvp(3) does it: what is not there is "not found", what lacks every execute bit "not executable". What only the kernel
can tell (permissions of the user, file formats, registered handlers) is left to execve(2); when it fails, `refusal`
looks *afterwards* at the file to name the one cause that execve reports as "not found": a missing interpreter. Source:
execve(2), elf(5).
"""

from __future__ import annotations

import posixpath
import stat
import struct
from typing import Final

from dsec_sandbox import outcome
from dsec_sandbox.outcome import NotStartedError, Outcome
from dsec_sandbox.rootpath import RootPath

_HEAD: Final = 1 << 16
"""Bytes of a program that are read to find its interpreter: program headers lie at the start of ELF files."""

_SCRIPT_LINE: Final = 256
"""Bytes of a script's first line that the kernel reads (`BINPRM_BUF_SIZE`)."""

_MAX_INTERPRETERS: Final = 5
"""Length of a chain of interpreters that the kernel follows."""

_EXECUTE_BITS: Final = stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH
_PT_INTERP: Final = 3


def find_executable(root: RootPath, name: str, path: str, workdir: str) -> str:
    """The path inside of the program that `name` stands for, by `path` (as in PATH) unless it holds a slash.

    Raises `NotStartedError` with a not-found or not-executable outcome. Permissions of users are not looked at.
    """
    found = ""
    for candidate in _candidates(name, path, workdir):
        try:
            mode = root.stat(candidate).st_mode
        except OSError:  # missing, or a component is no directory: both mean the next one
            continue
        if stat.S_ISREG(mode) and mode & _EXECUTE_BITS:
            return candidate
        found = found or candidate
    if found:
        which = "" if found == name else f"{name}: "
        raise NotStartedError(outcome.not_executable(f"{which}{found} is not an executable file"))
    where = "" if "/" in name else " in PATH"
    raise NotStartedError(outcome.not_found(f"{name}: not found{where}"))


def refusal(root: RootPath, program: str) -> Outcome:
    """Why execve(2) refused `program`, which exists: its interpreter is missing, or it cannot be executed at all."""
    current = program
    for _ in range(_MAX_INTERPRETERS):
        try:
            current = interpreter_of(root.read(current, _HEAD))
        except FileNotFoundError:
            return outcome.not_found(f"{program}: its interpreter {current} does not exist in the image")
        except OSError:
            break
        if not current:
            break
    return outcome.not_executable(
        f"{program}: the kernel cannot execute it: wrong format or architecture, or not allowed for this user"
    )


def interpreter_of(head: bytes) -> str:
    """The interpreter that a program with these first bytes asks for; "" for none, or where the format is not known."""
    if head.startswith(b"#!"):
        line = head[2:_SCRIPT_LINE].split(b"\n", 1)[0]
        return line.strip(b" \t").replace(b"\t", b" ").split(b" ", 1)[0].decode(errors="surrogateescape")
    if head.startswith(b"\x7fELF"):
        try:
            return _elf_interpreter(head)
        except struct.error:  # truncated or damaged
            return ""
    return ""


def _elf_interpreter(head: bytes) -> str:
    """The content of the PT_INTERP segment (elf(5), Elf32_Ehdr and Elf64_Ehdr)."""
    wide, order = head[4:5] == b"\x02", ">" if head[5:6] == b"\x02" else "<"
    (table,) = struct.unpack_from(order + ("Q" if wide else "I"), head, 32 if wide else 28)
    size, count = struct.unpack_from(order + "HH", head, 54 if wide else 42)
    for entry in range(table, table + size * count, size or 1):
        kind, offset, length = (
            struct.unpack_from(order + "I4xQ16xQ", head, entry)
            if wide
            else struct.unpack_from(order + "II8xI", head, entry)
        )
        if kind == _PT_INTERP:
            return head[offset : offset + length].rstrip(b"\0").decode(errors="surrogateescape")
    return ""


def _candidates(name: str, path: str, workdir: str) -> list[str]:
    if not name:
        return []
    if "/" in name:
        return [posixpath.join(workdir, name)]
    return [posixpath.join(workdir, folder, name) for folder in path.split(":")]
