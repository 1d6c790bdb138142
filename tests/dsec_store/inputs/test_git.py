"""Commits as tars: exactly what is in git, nothing of what git would run, and no history but what was asked for."""

import hashlib
import io
import os
import shutil
import stat
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from dsec_store.errors import Corrupt, Denied, Invalid, NotFound, StoreError
from dsec_store.inputs import git as git_module
from dsec_store.inputs.git import GitSource, open_git, parse_git
from dsec_store.layer.assemble import assemble
from dsec_store.layer.tar import TarEntry, TarKind
from dsec_store.layer.tree import Directory
from dsec_store.layer.unpack import unpack
from tests.dsec_store.inputs.gitmaker import TIME, Maker, run_git
from tests.dsec_store.keptcontents import KeptContents
from tests.dsec_store.tarreading import content, entries


def tar_of(path: Path, revision: str = "HEAD", *, history: bool = False) -> bytes:
    with open_git(GitSource(path, revision, history)) as tree:
        return b"".join(tree.tar)


def files_of(tar: bytes) -> dict[bytes, TarEntry]:
    return {entry.path: entry for entry in entries(tar)}


def unpacked(tar: bytes, into: Path) -> Path:
    into.mkdir()
    subprocess.run(["tar", "-C", into, "-xpf", "-"], input=tar, check=True)
    return into


@pytest.fixture
def repo(tmp_path: Path) -> Maker:
    return Maker(tmp_path / "repo")


@pytest.fixture
def rich(repo: Maker) -> Maker:
    """A commit with all that a tree can hold, and attributes that a checkout would obey."""
    repo.write(
        file="text\n",
        tool="#!/bin/sh\n",
        a__x="in a directory",
        lfs="version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n",
        ident="$Id$\n",
    )
    repo.write(
        **{"a-b": "", "a.b": "", ".gitattributes": "* text eol=crlf\nident ident\nfile export-ignore filter=f\n"}
    )
    odd = os.fsencode(repo.path) + b"/\xff\n odd"
    Path(os.fsdecode(odd)).touch()
    (repo.path / "tool").chmod(0o755)
    (repo.path / "link").symlink_to("a/x")
    repo.git("config", "filter.f.smudge", "touch .git/smudged; cat")
    repo.commit()
    return repo


# -- The tree ----------------------------------------------------------------------------------------------------------


def test_a_commit_is_exactly_what_git_has(rich: Maker) -> None:
    tar = tar_of(rich.path)
    found = files_of(tar)
    assert list(found) == [
        *(b"./", b".gitattributes", b"a/", b"a/x", b"a-b", b"a.b", b"file", b"ident", b"lfs", b"link", b"tool"),
        b"\xff\n odd",
    ]
    assert {entry.mtime_ns for entry in found.values()} == {TIME * 10**9}
    assert {(entry.uid, entry.gid) for entry in found.values()} == {(0, 0)}
    assert [found[name].mode for name in (b"./", b"a/", b"file", b"tool", b"link")] == [
        0o755,
        0o755,
        0o644,
        0o755,
        0o777,
    ]
    assert (found[b"link"].kind, found[b"link"].link) == (TarKind.SYMLINK, b"a/x")
    for name in (b"file", b"ident", b"lfs", b"a/x"):
        assert content(tar, found[name]) == (rich.path / os.fsdecode(name)).read_bytes()
    assert not (rich.path / ".git" / "smudged").exists()


def test_the_bytes_are_the_same_on_every_machine(rich: Maker) -> None:
    rich.write(file="more\n" * 20_000)
    rich.commit()
    sums = [hashlib.sha256(tar_of(rich.path, history=history)).hexdigest() for history in (False, True)]
    assert sums == [PLAIN_SHA256, HISTORY_SHA256]


PLAIN_SHA256 = "e096e16446a3f5803409d3ff7369c6af5f996134ddcd6b937824436c6fc1a0bf"
HISTORY_SHA256 = "d52d87348562662a9be22ce3db3a018f5bc756553fc28bb95eec63871a6c0143"
"""Of the tars of the second commit that the test above makes. Another value is another format."""


def test_how_objects_lie_in_the_repository_does_not_matter(rich: Maker, tmp_path: Path) -> None:
    rich.write(file="more\n" * 50)
    rich.commit()
    loose = tar_of(rich.path, history=True)
    rich.git("gc", "-q", "--aggressive", "--prune=now")
    run_git(tmp_path, "clone", "-q", "--bare", str(rich.path), "bare.git")
    run_git(tmp_path, "clone", "-q", "--shared", str(rich.path), "shared")
    rich.git("worktree", "add", "-q", str(tmp_path / "worktree"))
    for name in ("repo", "bare.git", "shared", "worktree", "repo/.git"):
        assert tar_of(tmp_path / name, history=True) == loose, name


def test_a_submodule_is_an_empty_directory_and_is_told(repo: Maker) -> None:
    other = "12" * 20
    repo.commit_tree(repo.tree((0o100644, b"f", repo.blob(b"x")), (0o160000, b"sub", other)))
    with open_git(GitSource(repo.path)) as tree:
        assert tree.submodules == (b"sub",)
        assert (tree.commit, tree.seconds) == (repo.id(), TIME)
        assert list(files_of(b"".join(tree.tar))) == [b"./", b"f", b"sub/"]


def test_modes_of_early_versions_are_files(repo: Maker) -> None:
    repo.commit_tree(repo.tree((0o100664, b"f", repo.blob(b"x"))))
    assert files_of(tar_of(repo.path))[b"f"].mode == 0o644


def test_a_layer_takes_it(rich: Maker) -> None:
    tar = tar_of(rich.path, history=True)
    contents = KeptContents()
    tree = assemble(unpack(io.BytesIO(tar), contents), contents, None)
    assert isinstance(tree.root.find(b".git/refs/heads"), Directory)
    assert tree.root.inode.mode == stat.S_IFDIR | 0o755


def test_revisions(repo: Maker) -> None:
    repo.write(f="1")
    first = repo.commit()
    repo.git("tag", "-a", "-m", "t", "v1")
    repo.git("branch", "old@1")
    repo.write(f="2")
    second = repo.commit("two")

    def commit(revision: str) -> str:
        with open_git(GitSource(repo.path, revision)) as tree:
            return tree.commit

    assert [commit(name) for name in ("HEAD", "trunk", second[:10], "HEAD@{0}")] == [second] * 4
    assert [commit(name) for name in ("HEAD~1", "v1", "old@1", first, ":/one")] == [first] * 5


@pytest.mark.parametrize("revision", ["nothing", "HEAD:f", "HEAD..HEAD", "--all", "-h", "", "f" * 40])
def test_what_is_no_commit(repo: Maker, revision: str) -> None:
    repo.write(f="1")
    repo.commit()
    with pytest.raises(NotFound, match="no commit"):
        tar_of(repo.path, revision)


def test_what_is_no_repository(repo: Maker, tmp_path: Path) -> None:
    repo.write(sub__f="1")
    repo.commit()
    for path in (tmp_path, tmp_path / "absent", repo.path / "sub"):
        with pytest.raises(NotFound, match="no git repository"):
            tar_of(path)
    with pytest.raises(NotFound, match="no commit 'HEAD'"):
        tar_of(Maker(tmp_path / "empty").path)


def test_without_git(repo: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(Denied, match="git is not installed"):
        tar_of(repo.path)


def test_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("src", "at@home", "src@v2"):
        (tmp_path / name).mkdir()
    assert parse_git("git:src") == GitSource(Path("src"))
    assert parse_git("git:src@v1", history=True) == GitSource(Path("src"), "v1", history=True)
    assert parse_git("git:src@main@{1}") == GitSource(Path("src"), "main@{1}")
    assert parse_git("git:src@v2") == GitSource(Path("src@v2"))
    assert parse_git("git:src@v2@v3") == GitSource(Path("src@v2"), "v3")
    assert parse_git("git:at@home@x") == GitSource(Path("at@home"), "x")
    for wrong, error in {
        "src": Invalid,
        "git:": Invalid,
        "git:src@": Invalid,
        "git:no": NotFound,
        "git:no@x": NotFound,
    }.items():
        with pytest.raises(error):
            parse_git(wrong)


# -- History -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def busy(rich: Maker) -> Maker:
    """A repository with everything that could give away what comes after the commit `past`."""
    rich.write(file="two\n", big=bytes(range(256)) * 1000, sub__sub__f="deep")
    rich.commit("two")
    rich.git("checkout", "-q", "-b", "side", "HEAD~1")
    rich.write(side="s")
    rich.commit("side")
    rich.git("checkout", "-q", "trunk")
    rich.git("merge", "-q", "-m", "merged", "side")
    rich.git("tag", "past")
    rich.write(answer="42")
    rich.commit("later")
    rich.git("tag", "-a", "-m", "later", "later")
    rich.write(answer="stashed")
    rich.git("stash")
    rich.git("remote", "add", "origin", "https://example.org/secret")
    return rich


def test_history_is_that_of_the_commit_and_nothing_else(busy: Maker, tmp_path: Path) -> None:
    top = unpacked(tar_of(busy.path, "past", history=True), tmp_path / "out")
    names = sorted(path.relative_to(top / ".git").as_posix() for path in (top / ".git").rglob("*") if path.is_file())
    pack = run_git(top, "rev-parse", "--git-path", "objects/pack").decode()
    name = next(path.stem for path in (top / ".git/objects/pack").glob("*.pack"))
    assert pack.strip() == ".git/objects/pack"
    assert names == [
        "HEAD",
        "config",
        "index",
        f"objects/pack/{name}.idx",
        f"objects/pack/{name}.pack",
        "refs/heads/main",
    ]
    assert (top / ".git/config").read_text().split() == (
        ["[core]", "repositoryformatversion", "=", "0", "filemode", "=", "true", "bare", "=", "false"]
    )
    assert run_git(top, "fsck", "--strict", "--full") == b""
    assert run_git(top, "verify-pack", f".git/objects/pack/{name}.idx") == b""
    assert run_git(top, "log", "--format=%H %s") == busy.git("log", "--format=%H %s", "past") + b"\n"
    assert run_git(top, "for-each-ref", "--format=%(refname)") == b"refs/heads/main\n"
    packed = run_git(top, "cat-file", "--batch-all-objects", "--batch-check=%(objectname)").split()
    assert packed == sorted(busy.git("rev-list", "--objects", "--no-object-names", "past").split())
    for later in ("later^{}", "later^{tree}", "later^{}:answer", "later", "refs/stash"):
        assert busy.id(later).encode() not in packed


def test_the_work_tree_is_clean_and_stays_usable(busy: Maker, tmp_path: Path) -> None:
    top = unpacked(tar_of(busy.path, "past", history=True), tmp_path / "out")
    assert run_git(top, "status", "--porcelain=v2", "--branch").splitlines() == [
        b"# branch.oid " + busy.id("past").encode(),
        b"# branch.head main",
    ]
    (top / "file").write_text("changed\n")
    (top / "answer").touch()
    assert run_git(top, "status", "--porcelain") == b" M file\n?? answer\n"
    run_git(top, "commit", "-q", "-a", "-m", "next")
    run_git(top, "gc", "-q", "--prune=now")
    assert run_git(top, "fsck", "--strict") == b""
    assert run_git(top, "rev-parse", "HEAD^").strip() == busy.id("past").encode()


def test_a_submodule_and_a_long_name_are_in_the_index(repo: Maker, tmp_path: Path) -> None:
    blob = repo.blob(b"x")
    deep = repo.tree((0o100644, b"n" * 255, blob))
    for _ in range(15):  # the index has 12 bits for the length of a path
        deep = repo.tree((0o40000, b"d" * 200, deep.decode()))
    here = repo.tree((0o40000, b"deep", deep.decode()), (0o120000, b"link", blob), (0o160000, b"sub", "12" * 20))
    repo.commit_tree(here)
    repo.git("read-tree", "HEAD")
    staged = repo.git("ls-files", "--stage", "-z")
    top = unpacked_git_only(tar_of(repo.path, history=True), tmp_path / "out")
    assert run_git(top, "ls-files", "--stage", "-z") == staged


def unpacked_git_only(tar: bytes, into: Path) -> Path:
    into.mkdir()
    subprocess.run(["tar", "-C", into, "-xpf", "-", "./.git", ".git"], input=tar, check=False, capture_output=True)
    return into


def test_the_pack_of_a_commit_begins_with_that_of_its_first_parent(busy: Maker) -> None:
    """But for the number of objects in the header, and the checksum at the end."""
    packs = []
    for revision in ("past~1", "past", "later"):
        tar = tar_of(busy.path, revision, history=True)
        packs += [content(tar, entry) for entry in entries(tar) if entry.path.endswith(b".pack")]
    for first, second in pairwise(packs):
        assert len(first) < len(second)
        assert second[12:].startswith(first[12:-20])


def test_a_shallow_clone_stays_shallow(busy: Maker, tmp_path: Path) -> None:
    run_git(tmp_path, "clone", "-q", "--depth=2", f"file://{busy.path}", "shallow")
    top = unpacked(tar_of(tmp_path / "shallow", history=True), tmp_path / "out")
    assert (top / ".git/shallow").read_bytes() == (tmp_path / "shallow/.git/shallow").read_bytes()
    assert run_git(top, "fsck", "--strict") == b""
    assert len(run_git(top, "log", "--format=%H").split()) == 2


def test_a_commit_that_the_depth_does_not_reach_leaves_no_trace_in_shallow(busy: Maker, tmp_path: Path) -> None:
    run_git(tmp_path, "clone", "-q", "--depth=1", "--no-single-branch", f"file://{busy.path}", "shallow")
    clone = tmp_path / "shallow"
    assert len((clone / ".git/shallow").read_bytes().split()) > 1
    tar = tar_of(clone, "origin/side", history=True)
    entry = files_of(tar)[b".git/shallow"]
    assert content(tar, entry) == run_git(clone, "rev-parse", "origin/side")


def test_a_partial_clone_names_the_missing_object(busy: Maker, tmp_path: Path) -> None:
    busy.git("config", "uploadpack.allowFilter", "true")
    run_git(tmp_path, "clone", "-q", "--bare", "--filter=blob:none", f"file://{busy.path}", "partial.git")
    for history in (False, True):
        with pytest.raises((NotFound, Corrupt), match=r"git object [0-9a-f]{40} in") as error:
            tar_of(tmp_path / "partial.git", history=history)
        assert "partial" in str(error.value)
    missing = run_git(tmp_path / "partial.git", "rev-list", "--objects", "--all", "--missing=print").split()
    assert [word for word in missing if word.startswith(b"?")], "nothing was fetched"


def test_sha256_repositories(tmp_path: Path) -> None:
    repo = Maker(tmp_path / "repo", "--object-format=sha256")
    repo.write(f="1", d__g="2" * 100_000)
    repo.commit()
    repo.write(f="3")
    commit = repo.commit("two")
    top = unpacked(tar_of(repo.path, history=True), tmp_path / "out")
    assert run_git(top, "fsck", "--strict") == b""
    assert run_git(top, "status", "--porcelain") == b""
    assert run_git(top, "rev-parse", "HEAD").decode().strip() == commit
    assert len(commit) == 64


# -- Hostile and damaged repositories ----------------------------------------------------------------------------------


def test_nothing_that_a_repository_names_is_run(rich: Maker, tmp_path: Path) -> None:
    """Programs in its configuration, its hooks, and a remote that has the objects which lack."""
    marker = tmp_path / "ran"
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\necho $0 $* >> {marker}\n")
    program.chmod(0o755)
    for key in ("core.fsmonitor", "core.pager", "core.sshCommand", "core.askPass", "core.editor", "credential.helper"):
        rich.git("config", key, str(program))
    for alias in ("rev-parse", "cat-file"):
        rich.git("config", f"alias.{alias}", f"!{program}")
    rich.git("config", "core.hooksPath", str(tmp_path / "hooks"))
    (tmp_path / "hooks").mkdir()
    for hook in ("post-checkout", "reference-transaction", "post-index-change"):
        shutil.copy(program, tmp_path / "hooks" / hook)
    rich.git("config", "remote.origin.url", f"ext::{program}")
    rich.git("config", "remote.origin.uploadpack", str(program))
    rich.git("config", "remote.origin.promisor", "true")
    rich.git("config", "core.repositoryFormatVersion", "1")
    rich.git("config", "extensions.partialClone", "origin")
    rich.git("config", "protocol.allow", "always")
    marker.unlink(missing_ok=True)
    assert files_of(tar_of(rich.path, history=True))
    rich.loose(rich.id("HEAD:file")).unlink()
    for url in (f"ext::{program}", f"ssh://host/{program}", str(tmp_path)):
        rich.git("config", "remote.origin.url", url)
        marker.unlink(missing_ok=True)
        with pytest.raises(StoreError, match="git object"):
            tar_of(rich.path)
        assert not marker.exists(), url


def test_what_the_caller_set_for_git_does_not_count(
    rich: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tar_of(rich.path)
    other = Maker(tmp_path / "other")
    other.write(f="other")
    other.commit()
    monkeypatch.setenv("GIT_DIR", str(other.path / ".git"))
    monkeypatch.setenv("GIT_OBJECT_DIRECTORY", str(other.path / ".git/objects"))
    monkeypatch.setenv("GIT_CONFIG_PARAMETERS", "'core.bare'='true'")
    assert tar_of(rich.path) == expected


def test_a_repository_of_another_user_is_read(rich: Maker) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    expected = tar_of(rich.path)
    for path in (rich.path, rich.path / ".git"):
        os.chown(path, 12345, 12345)
    assert tar_of(rich.path) == expected


def test_replaced_objects_and_grafts_do_not_count(busy: Maker) -> None:
    expected = tar_of(busy.path, "past", history=True)
    busy.git("replace", "past", "later^{}")
    busy.git("replace", busy.id("past:file"), busy.id("later:answer"))
    (busy.path / ".git" / "info").mkdir(exist_ok=True)
    (busy.path / ".git/info/grafts").write_text(f"{busy.id('past')} {busy.id('past~1')}\n")
    assert tar_of(busy.path, "past", history=True) == expected


@pytest.mark.parametrize("name", [b"..", b".", b".git", b".GIT", b"a/b", b"", b".wh.f", b".wh..wh..opq"])
@pytest.mark.parametrize("below", [False, True])
def test_names_that_no_folder_can_have(repo: Maker, name: bytes, below: bool) -> None:
    tree = repo.tree((0o100644, name, repo.blob(b"x")))
    if below:
        tree = repo.tree((0o40000, b"folder", tree.decode()))
    repo.commit_tree(tree)
    with pytest.raises(Invalid, match=r"folder" if below else r"name"):
        tar_of(repo.path)


def test_such_names_in_the_past_do_not_matter(repo: Maker) -> None:
    bad = repo.commit_tree(repo.tree((0o100644, b"..", repo.blob(b"x"))))
    repo.commit_tree(repo.tree((0o100644, b"f", repo.blob(b"x"))), bad)
    assert b"f" in files_of(tar_of(repo.path, history=True))


@pytest.mark.parametrize("mode", [0o100600, 0o20644, 0o7, 0o170000])
def test_modes_that_git_does_not_know(repo: Maker, mode: int) -> None:
    data = b"%06o f\0" % mode + bytes.fromhex(repo.blob(b"x"))
    repo.commit_tree(repo.git("hash-object", "-t", "tree", "-w", "--stdin", "--literally", data=data))
    with pytest.raises(Invalid, match=r"'f'.*mode"):
        tar_of(repo.path)


def test_one_name_twice(repo: Maker) -> None:
    blob = repo.blob(b"x")
    repo.commit_tree(repo.tree((0o100644, b"f", blob), (0o120000, b"f", blob)))
    with pytest.raises(Invalid, match="twice"):
        tar_of(repo.path)


@pytest.mark.parametrize("target", [b"", b"a\0b", b"x" * 4096])
def test_symlinks_that_cannot_be(repo: Maker, target: bytes) -> None:
    repo.commit_tree(repo.tree((0o120000, b"link", repo.blob(target))))
    with pytest.raises(Invalid, match="'link'"):
        tar_of(repo.path)


def test_trees_that_hold_each_other_many_times(repo: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(git_module, "FILES_MAX", 1000)
    tree = repo.tree((0o100644, b"f", repo.blob(b"x"))).decode()
    for _ in range(40):  # 2**40 files
        tree = repo.tree((0o40000, b"a", tree), (0o40000, b"b", tree)).decode()
    repo.commit_tree(tree.encode())
    with pytest.raises(Invalid, match="more than 1000"):
        tar_of(repo.path)


def test_damage_is_told_with_the_object(rich: Maker) -> None:
    """An object that is not what its id says, one that is no object, and a tree in the place of a file."""
    blob, other = rich.id("HEAD:file"), rich.id("HEAD:a/x")
    path = rich.loose(blob)
    path.chmod(0o644)
    path.write_bytes(rich.loose(other).read_bytes())
    with pytest.raises(Corrupt, match=blob):
        tar_of(rich.path)
    path.write_bytes(b"nonsense")
    with pytest.raises((Corrupt, NotFound), match=blob):
        tar_of(rich.path)
    tree = rich.id("HEAD:a")
    rich.commit_tree(rich.tree((0o100644, b"f", tree)))
    with pytest.raises(Corrupt, match=f"{tree}.*not a blob"):
        tar_of(rich.path)


def test_a_reader_that_stops_leaves_no_process(rich: Maker) -> None:
    rich.write(big=bytes(5 << 20))
    rich.commit()
    with open_git(GitSource(rich.path, history=True)) as tree:
        next(tree.tar)
