"""Git repositories for tests, made the same on every machine: fixed authors and times, no configuration of ours."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

TIME = 1_600_000_000
"""Committer's time of the first commit of a repository, in seconds since 1970; each later one is a second later."""


class Maker:
    """A repository at `path`, with a work tree."""

    def __init__(self, path: Path, *options: str) -> None:
        self.path = path
        self._time = TIME
        path.mkdir(parents=True)
        self.git("init", "-q", "--template=", "-b", "trunk", *options)

    def git(self, *arguments: str | bytes, data: bytes = b"") -> bytes:
        """What git writes, its last line end cut off."""
        return run_git(self.path, *arguments, data=data, time=self._time).removesuffix(b"\n")

    def write(self, **files: str | bytes) -> None:
        """Files of the work tree, `__` in a keyword being a slash."""
        for name, content in files.items():
            path = self.path / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)

    def commit(self, message: str = "one") -> str:
        """Commit all that is in the work tree; the new commit's id."""
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", message)
        self._time += 1
        return self.id()

    def commit_tree(self, tree: bytes, *parents: str) -> str:
        """A commit of a tree that was made by hand; HEAD is moved to it."""
        options = [option for parent in parents for option in ("-p", parent)]
        commit = self.git("commit-tree", "-m", "by hand", *options, tree).decode()
        self.git("update-ref", "--no-deref", "HEAD", commit)
        return commit

    def tree(self, *entries: tuple[int, bytes, str]) -> bytes:
        """The id of a tree object with these modes, names and ids, whatever git thinks of them."""
        data = b"".join(b"%o %s\0" % (mode, name) + bytes.fromhex(object_id) for mode, name, object_id in entries)
        return self.git("hash-object", "-t", "tree", "-w", "--stdin", "--literally", data=data)

    def blob(self, data: bytes) -> str:
        return self.git("hash-object", "-w", "--stdin", data=data).decode()

    def id(self, revision: str = "HEAD") -> str:
        return self.git("rev-parse", revision).decode()

    def loose(self, object_id: str) -> Path:
        """Where a loose object lies."""
        return self.path / ".git" / "objects" / object_id[:2] / object_id[2:]


def run_git(path: Path, *arguments: str | bytes, data: bytes = b"", time: int = TIME) -> bytes:
    """What git says in `path`. Skips the test where git lacks."""
    program = shutil.which("git")
    if program is None:
        pytest.skip("needs git")
    environment = {
        "PATH": os.environ["PATH"],
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_AUTHOR_NAME": "A",
        "GIT_AUTHOR_EMAIL": "a@example.org",
        "GIT_COMMITTER_NAME": "C",
        "GIT_COMMITTER_EMAIL": "c@example.org",
        "GIT_AUTHOR_DATE": f"{TIME - 60} +0000",
        "GIT_COMMITTER_DATE": f"{time} +0200",
    }
    command = [program, "-c", "protocol.file.allow=always", "-c", "advice.detachedHead=false", *arguments]
    result = subprocess.run(command, input=data, capture_output=True, cwd=path, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout
