"""`ls`, `cat`, `tree`, `diff`, `du`, `inspect` and `check` without a mount, against what the kernel shows of one."""

from __future__ import annotations

import io
import os
import stat
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any, Final

import pytest

from dsec_store.backends.folder import FolderBlobs
from dsec_store.browse import Files
from dsec_store.errors import Invalid, NotFound
from dsec_store.objects import Objects
from dsec_store.quoting import escaped, unescaped
from tests.dsec_store.blobmaker import noise
from tests.flows.images import make_folder
from tests.flows.world import COMMANDS, World, ended, private_world
from tests.ocimaker import tar_of, write_layout
from tests.s3server import S3Server

pytestmark = pytest.mark.flow

STRANGE: Final = b"bytes \xff\n'quoted' \\ end"

LINKS: Final = {
    b"to-file": b"etc/hosts",
    b"absolute": b"/etc/hosts",
    b"chain": b"to-file",
    b"folder": b"etc",
    b"folder-slash": b"etc/",
    b"file-slash": b"etc/hosts/",
    b"beyond": b"../../../etc/hosts",
    b"loop": b"loop",
    b"ping": b"pong",
    b"pong": b"ping",
    b"dangling": b"nowhere/at/all",
    b"etc/back": b"../to-file",
    b"etc/self": b".",
    b"through": b"etc/self/self/../etc/back",
    STRANGE + b"-link": STRANGE,
}

PATHS: Final = (
    *(b"/" + name for name in LINKS),
    *(b"/" + name + b"/" for name in LINKS),
    *(b"/..", b"/../..//etc/hosts", b"/etc/../etc/./hosts", b"/etc/hosts/", b"/etc/hosts/..", b"/nothing"),
    *(b"/folder/back", b"/loop/x", b"/etc/removed", b"/opaque/old", b"/opaque/new", b"/usr/big", b"/" + STRANGE),
)


def base() -> bytes:
    members: list[tuple[tarfile.TarInfo, bytes]] = [
        (member("etc/hosts"), b"127.0.0.1 localhost\n"),
        (member("etc/removed"), b"gone"),
        (member("etc/changed"), b"before"),
        (member("opaque/old"), b"old"),
        (member("usr/big"), noise(3 << 20, "big")),
        (member("usr/empty"), b""),
        (member(os.fsdecode(STRANGE)), b"strange"),
        (member("owned", uid=4711, gid=70000, mode=0o4750, mtime=1234567890), b"owned"),
    ]
    links = [(member(os.fsdecode(name), tarfile.SYMTYPE, linkname=os.fsdecode(to)), b"") for name, to in LINKS.items()]
    twin = [(member("usr/twin", tarfile.LNKTYPE, linkname="usr/big"), b"")]
    device = [(member("null", tarfile.CHRTYPE, devmajor=1, devminor=3), b"")]
    return packed([*members, *links, *twin, *device])


def update() -> bytes:
    return packed(
        [
            (member("etc/.wh.removed"), b""),
            (member("etc/changed"), b"afterwards"),
            (member("opaque/.wh..wh..opq"), b""),
            (member("opaque/new"), b"new"),
        ]
    )


def member(name: str, kind: bytes = tarfile.REGTYPE, **attributes: Any) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type = kind
    for key, value in attributes.items():
        setattr(made, key, value)
    return made


def packed(members: list[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for each, data in members:
            each.size = len(data)
            tar.addfile(each, io.BytesIO(data))
    return buffer.getvalue()


@pytest.fixture(scope="module")
def looked(capable: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A world with `team/image:v1` of two layers, `flat` of the same as one run, and `base` of the lower one alone. The
    first is mounted, to be compared with."""
    folder = tmp_path_factory.mktemp("look")
    both = write_layout(folder / "both", [base(), update()]).path
    lower = write_layout(folder / "base", [base()]).path
    with private_world() as world:
        world.ok("dsec-image", "convert", f"oci:{both}", "team/image:v1")
        world.ok("dsec-image", "convert", f"oci:{both}", "flat")
        world.ok("dsec-image", "collapse", "flat")
        world.ok("dsec-image", "convert", f"oci:{lower}", "base")
        world.ok("dsec-image", "mount", "team/image:v1", str(world.make("target")))
        yield world


@pytest.fixture(params=["team/image:v1", "flat"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def listed(world: World, where: str, *options: str) -> dict[bytes, Any]:
    return {unescaped(row["path"]): row for row in world.json("dsec-image", "ls", where, *options)}


def as_seen(path: bytes) -> dict[str, Any]:
    """What the kernel tells of a path, as `ls --json` would."""
    status = os.lstat(path)
    kind = stat.S_IFMT(status.st_mode)
    facts: dict[str, Any] = {
        "mode": f"{stat.S_IMODE(status.st_mode):04o}",
        "links": status.st_nlink,
        "uid": status.st_uid,
        "gid": status.st_gid,
        "size": status.st_size if kind in (stat.S_IFREG, stat.S_IFLNK) else None,
        "mtime_ns": status.st_mtime_ns,
    }
    if kind == stat.S_IFLNK:
        facts["target"] = escaped(os.readlink(path))
    if kind == stat.S_IFCHR:
        facts["device"] = [os.major(status.st_rdev), os.minor(status.st_rdev)]
    return facts


def seen_below(target: bytes) -> dict[bytes, dict[str, Any]]:
    return {
        os.path.relpath(os.path.join(folder, name), target): as_seen(os.path.join(folder, name))
        for folder, folders, files in os.walk(target)
        for name in (*folders, *files)
    }


def test_a_recursive_list_is_what_the_kernel_shows(looked: World, name: str) -> None:
    target = os.fsencode(looked.folder / "target")
    expected = seen_below(target)
    rows = listed(looked, name, "--recursive")
    assert {path: {key: row[key] for key in expected[path]} for path, row in rows.items()} == {
        path: {**facts, "links": rows[path]["links"]} if name == "flat" else facts for path, facts in expected.items()
    }
    for folder in (b"", b"etc", b"usr"):
        assert sorted(listed(looked, f"{name}:/{folder.decode()}")) == sorted(os.listdir(os.path.join(target, folder)))


def test_every_content_is_what_the_kernel_reads(looked: World, name: str) -> None:
    target = os.fsencode(looked.folder / "target")
    files = [path for path, row in listed(looked, name, "--recursive").items() if row["type"] == "file"]
    expected = b"".join(Path(os.fsdecode(os.path.join(target, path))).read_bytes() for path in files)
    arguments = [f"{name}:/{os.fsdecode(path)}" for path in files]
    assert looked.ok("dsec-image", "cat", *arguments).stdout == expected
    assert len(expected) > 2 * (3 << 20)


READER: Final = """
import os, sys
os.chroot(sys.argv[1])
for path in map(os.fsencode, sys.argv[2:]):
    try:
        with open(path, "rb") as file:
            answer = file.read()
    except OSError as error:
        answer = type(error).__name__.encode()
    sys.stdout.buffer.write(b"%d:" % len(answer) + answer)
"""


def test_paths_lead_where_the_kernel_goes_with_the_image_as_root(looked: World, name: str) -> None:
    """Chains, loops, `..` beyond the root, slashes at the end: in a chroot of the mount, and without it."""
    command = [sys.executable, "-c", READER, str(looked.folder / "target"), *map(os.fsdecode, PATHS)]
    kernel = subprocess.run(command, capture_output=True, check=True).stdout
    objects = Objects(FolderBlobs(looked.store))
    ours = [content(objects, name, path) for path in PATHS]
    assert b"".join(b"%d:" % len(answer) + answer for answer in ours) == kernel
    assert {b"FileNotFoundError", b"NotADirectoryError", b"IsADirectoryError", b"OSError", b"new"} <= set(ours)


def content(objects: Objects, name: str, path: bytes) -> bytes:
    """What is read, or the name of the error that the kernel would give."""
    files = Files(objects, objects.image(objects.references.get(name)).mounted)
    try:
        return b"".join(files.read(files.lookup(path)))
    except NotFound:
        return b"FileNotFoundError"
    except Invalid as error:
        words = {"is not a directory": b"NotADirectoryError", "is a directory": b"IsADirectoryError"}
        return next((answer for text, answer in words.items() if text in str(error)), b"OSError")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/etc", "'/etc' is a directory, not a file"),
        ("/nothing", "there is no '/nothing' in the image"),
        ("/loop", "more than 40 symlinks"),
        ("/null", "'/null' is a character device, not a file"),
        ("/etc/hosts/x", "'/etc/hosts' is not a directory"),
    ],
)
def test_what_cannot_be_printed_is_told_and_the_rest_is_printed(looked: World, path: str, text: str) -> None:
    done = looked.run("dsec-image", "cat", "base:/etc/hosts", f"base:{path}", "base:/etc/changed")
    assert (done.code, done.stdout) == (1, b"127.0.0.1 localhost\nbefore")
    (error,) = done.errors
    assert error.startswith("dsec-image: base: ")
    assert text in error


@pytest.mark.parametrize("arguments", [["cat", "base"], ["cat"], ["cat", "BASE:/x"], ["ls", "-R"], ["ls", "base:x/y"]])
def test_wrong_usage(looked: World, arguments: list[str]) -> None:
    done = looked.run("dsec-image", *arguments)
    assert (done.code, done.stdout, len(done.errors)) == (2, b"", 1)


def test_a_reader_that_goes_away_is_no_fuss(looked: World) -> None:
    """More than a pipe holds, of which nobody reads anything."""
    process = looked.start("dsec-image", "cat", "base:/usr/big")
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    done = ended(process)
    assert done.errors == []


def test_long_lines_for_people(looked: World) -> None:
    lines = looked.ok("dsec-image", "ls", "team/image:v1:/").stdout.split(b"\n")
    (owned,) = [line for line in lines if line.endswith(b" owned")]
    assert owned.split() == [b"-rwsr-x---", b"1", b"4711", b"70000", b"5", b"2009-02-13", b"23:31:30", b"owned"]
    (null,) = [line for line in lines if line.endswith(b" null")]
    assert b"1, 3" in null
    assert any(line.endswith(b" to-file -> etc/hosts") for line in lines)
    link = looked.ok("dsec-image", "ls", "team/image:v1:/folder").lines
    assert len(link) == 1
    assert link[0].endswith("folder -> etc")
    inside = looked.ok("dsec-image", "ls", "team/image:v1:/folder/").lines
    assert [line.split()[7] for line in inside] == ["back", "changed", "hosts", "self"]


def test_names_are_raw_in_a_pipe_and_quoted_on_a_terminal(looked: World) -> None:
    assert b" " + STRANGE + b"\n" in looked.ok("dsec-image", "ls", "base:/").stdout
    command = f"{sys.executable} -m {COMMANDS['dsec-image']} ls base:/"
    done = subprocess.run(
        ["script", "-qec", command, "/dev/null"], env=looked.environment, capture_output=True, check=True
    )
    assert b"'bytes '$'\\377\\n'''\\''quoted'\\'' \\ end'" in done.stdout
    assert b"\xff" not in done.stdout


def test_tree(looked: World) -> None:
    lines = looked.ok("dsec-image", "tree", "team/image:v1:/etc").lines
    assert lines == ["/etc", "├── back -> ../to-file", "├── changed", "├── hosts", "└── self -> ."]
    shallow = looked.ok("dsec-image", "tree", "base", "--depth", "1").stdout
    assert b"hosts\n" not in shallow.replace(b"etc/hosts", b"")
    assert "│   └── hosts".replace("└", "├").encode() in looked.ok("dsec-image", "tree", "base").stdout
    rows = looked.json("dsec-image", "tree", "base", "--depth", "1")
    assert {unescaped(row["path"]) for row in rows} == set(listed(looked, "base"))
    assert looked.run("dsec-image", "tree", "base:/etc/hosts").code == 1


def test_diff(looked: World) -> None:
    found = looked.json("dsec-image", "diff", "base", "team/image:v1")
    changes = {unescaped(each["path"]): each["what"] or each["kind"] for each in found["changes"]}
    assert changes == {
        b"etc/changed": ["content"],
        b"etc/removed": "removed",
        b"opaque/new": "added",
        b"opaque/old": "removed",
    }
    assert found["chunks"]["both"]["plain_bytes"] > 3 << 20
    assert found["chunks"]["first"]["chunks"] == 0
    lines = looked.ok("dsec-image", "diff", "base:/etc", "team/image:v1:/folder/").lines
    assert lines[:2] == ["~ /changed (content)", "- /removed"]
    assert lines[2].startswith("chunks in both: ")
    assert looked.json("dsec-image", "diff", "team/image:v1", "flat")["changes"] == []


@pytest.mark.parametrize(("other", "code"), [("flat", 0), ("base", 1)])
def test_diff_tells_by_its_exit_code_when_asked(looked: World, other: str, code: int) -> None:
    assert looked.run("dsec-image", "diff", "team/image:v1", other).code == 0
    assert looked.run("dsec-image", "diff", "team/image:v1", other, "--exit-code").code == code


def test_du_and_inspect_agree(looked: World) -> None:
    usage = looked.json("dsec-image", "du")
    assert set(usage["images"]) == {"base", "flat", "team/image:v1"}
    assert (usage["problems"], usage["images"]["base"]["unique_bytes"]) == ([], 0)
    assert set(looked.json("dsec-image", "du", "base")["images"]) == {"base"}
    facts = looked.json("dsec-image", "inspect", "team/image:v1", "--sharing")
    assert {key: facts[key] for key in usage["images"]["team/image:v1"]} == usage["images"]["team/image:v1"]
    assert (
        sum(layer["stored_bytes"] for layer in facts["layers"]) + facts["recipe_stored_bytes"] == facts["stored_bytes"]
    )
    assert sum(layer["source_bytes"] for layer in facts["layers"]) == facts["source_bytes"]
    (run,) = looked.json("dsec-image", "inspect", "flat")["mounted"]
    assert run["run"] == [layer["descriptor"] for layer in facts["layers"]]
    for arguments in (["du"], ["inspect", "flat"], ["inspect", "base", "--sharing"]):
        assert looked.ok("dsec-image", *arguments).lines


def test_check_of_everything(looked: World) -> None:
    report = looked.json("dsec-image", "check", "--deep")
    assert (report["names"], report["problems"]) == ([{"name": name, "problems": []} for name in NAMES], [])
    assert looked.ok("dsec-image", "check").lines == ["3 names: 0 problems in 3 layers"]


NAMES: Final = ["base", "flat", "team/image:v1"]


def test_check_names_what_is_damaged_and_who_needs_it(world: World) -> None:
    for number, files in enumerate(({"same": b"same"}, {"same": b"same"}, {"other": noise(5000, "other")})):
        folder = make_folder(world.folder / f"f{number}", files)
        world.ok("dsec-image", "build", str(folder), f"n{number}", "--kind", "workspace")
    packs = {path for path in world.store.glob("packs/*/*") if path.stat().st_size > 5000}
    (damaged,) = packs
    data = bytearray(damaged.read_bytes())
    data[100] ^= 1
    damaged.write_bytes(data)
    assert world.run("dsec-image", "check").code == 0
    done = world.run("dsec-image", "check", "--deep")
    assert (done.code, done.errors) == (1, [])
    assert done.lines[0] == "n2: 1 problems"
    assert damaged.name in done.lines[1]


def test_it_all_works_on_s3_without_a_mount(world: World, s3_server: S3Server, s3_url: str, tmp_path: Path) -> None:
    cloud = world.with_(DSEC_STORE=s3_url, **s3_server.environment)
    files = {"etc/hosts": b"hosts\n", "usr/big": noise(1 << 20, "big")}
    layout = write_layout(tmp_path / "layout", [tar_of(files), tar_of({"etc/motd": b"motd\n"})]).path
    cloud.ok("dsec-image", "convert", f"oci:{layout}", "one:v1")
    cloud.ok("dsec-image", "convert", f"oci:{layout}", "two")
    assert cloud.ok("dsec-image", "cat", "one:v1:/usr/big", "two:/etc/motd").stdout == files["usr/big"] + b"motd\n"
    assert sorted(listed(cloud, "two", "-R")) == [b"etc", b"etc/hosts", b"etc/motd", b"usr", b"usr/big"]
    assert cloud.ok("dsec-image", "tree", "one:v1").lines[0] == "/"
    assert cloud.json("dsec-image", "diff", "one:v1", "two")["changes"] == []
    assert cloud.json("dsec-image", "du")["images"]["two"]["plain_bytes"] > 1 << 20
    assert cloud.json("dsec-image", "inspect", "two", "--sharing")["layers"][0]["recipe"]["stored_bytes"] > 0
    assert cloud.json("dsec-image", "check", "--deep")["problems"] == []
    assert cloud.mounts() == []
