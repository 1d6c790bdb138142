"""Python packages as toolkits. All wheels are made here; pip finds them through options in the requirements file."""

import base64
import csv
import hashlib
import os
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from dsec_store.errors import Corrupt, Invalid, NotFound
from dsec_store.inputs.python import PythonSource, open_python, parse_python, platform_tags
from dsec_store.inputs.wheels import MTIME_NS, Prefix

MACHINE = os.uname().machine
OWN = f"{sys.version_info.major}.{sys.version_info.minor}"
SITE = f"lib/python{OWN}/site-packages"

needs_pip = pytest.mark.skipif(find_spec("pip") is None, reason="needs pip in this environment")


class Wheels:
    """Wheels in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def add(
        self,
        name: str,
        version: str,
        files: dict[str, str],
        *,
        requires: tuple[str, ...] = (),
        scripts: str = "",
        tag: str = "py3-none-any",
        time: tuple[int, int, int, int, int, int] = (2020, 1, 1, 0, 0, 0),
        reverse: bool = False,
        record: Callable[[str], str] = lambda text: text,
    ) -> Path:
        """A wheel; `record` may spoil its RECORD. What differs in `time` and `reverse` must not show in a layer."""
        info = f"{name}-{version}.dist-info"
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        metadata += "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
        every = {
            **files,
            f"{info}/METADATA": metadata,
            f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
        }
        if scripts:
            every[f"{info}/entry_points.txt"] = f"[console_scripts]\n{scripts}\n"
        lines = [f"{path},{self._hash(text)},{len(text.encode())}\n" for path, text in every.items()]
        every[f"{info}/RECORD"] = record("".join(lines) + f"{info}/RECORD,,\n")
        wheel = self.folder / f"{name}-{version}-{tag}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for path, text in sorted(every.items(), reverse=reverse):
                item = zipfile.ZipInfo(path, time)
                item.external_attr = (0o100775 if path.endswith(".so") else 0o100600) << 16
                archive.writestr(item, text)
        return wheel

    def requirements(self, *lines: str) -> Path:
        """A requirements file that finds the wheels of this folder, and nothing else."""
        path = self.folder.parent / "requirements.txt"
        path.write_text("\n".join(["--no-index", f"--find-links {self.folder}", *lines]) + "\n")
        return path

    @staticmethod
    def _hash(text: str) -> str:
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        return f"sha256={digest.decode()}"


@pytest.fixture
def wheels(tmp_path: Path) -> Wheels:
    return Wheels(tmp_path / "wheels")


def demo(wheels: Wheels, **options: bool | tuple[int, int, int, int, int, int]) -> Path:
    files = {
        "demo/__init__.py": "def main():\n    print('demo runs')\n",
        "demo/native.so": "\x7fELF",
        "demo-1.0.data/scripts/old": "#!python -u\nimport demo; demo.main()\n",
        "demo-1.0.data/scripts/shell": "#!/bin/sh\necho shell\n",
        "demo-1.0.data/data/share/demo/data.txt": "data\n",
        "demo-1.0.data/headers/demo.h": "int x;\n",
    }
    return wheels.add("demo", "1.0", files, scripts="demo = demo:main", **options)  # type: ignore[arg-type]


def contents(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Mode, time and bytes of every path."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        data = path.read_bytes() if path.is_file() else b""
        found[path.relative_to(folder).as_posix()] = (status.st_mode & 0o7777, status.st_mtime_ns, data)
    return found


def unpacked(into: Path, *files: Path) -> Prefix:
    into.mkdir()
    prefix = Prefix(into, OWN)
    for wheel in files:
        prefix.add(wheel)
    prefix.finish()
    return prefix


# -- Unpacking ---------------------------------------------------------------------------------------------------------


def test_a_wheel_is_unpacked_where_python_looks(wheels: Wheels, tmp_path: Path) -> None:
    prefix = unpacked(tmp_path / "out", demo(wheels))
    found = contents(tmp_path / "out")
    assert {path: mode for path, (mode, _, data) in found.items() if data} == {
        "bin/demo": 0o755,
        "bin/old": 0o755,
        "bin/shell": 0o755,
        f"include/python{OWN}/demo.h": 0o644,
        f"{SITE}/demo-1.0.dist-info/METADATA": 0o644,
        f"{SITE}/demo-1.0.dist-info/RECORD": 0o644,
        f"{SITE}/demo-1.0.dist-info/WHEEL": 0o644,
        f"{SITE}/demo-1.0.dist-info/entry_points.txt": 0o644,
        f"{SITE}/demo/__init__.py": 0o644,
        f"{SITE}/demo/native.so": 0o755,
        "share/demo/data.txt": 0o644,
    }
    assert {time for _, time, _ in found.values()} == {MTIME_NS} == {(tmp_path / "out").stat().st_mtime_ns}
    assert {mode for mode, _, data in found.values() if not data} == {0o755}
    assert found["bin/demo"][2].startswith(b"#!/usr/bin/env python3\n")
    assert found["bin/old"][2].startswith(b"#!/usr/bin/env python3\nimport demo")
    assert found["bin/shell"][2].startswith(b"#!/bin/sh\n")
    assert prefix.notices == []


def test_record_is_sorted_and_right(wheels: Wheels, tmp_path: Path) -> None:
    unpacked(tmp_path / "out", demo(wheels))
    site = tmp_path / "out" / SITE
    rows = list(csv.reader((site / "demo-1.0.dist-info/RECORD").read_text().splitlines()))
    assert rows == sorted(rows)
    files = {path.resolve() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert {(site / path).resolve() for path, _, _ in rows} == files
    for path, digest, size in rows:
        if digest:
            data = (site / path).read_bytes()
            assert (digest, int(size)) == (Wheels._hash(data.decode()), len(data))


def test_how_the_wheel_was_packed_does_not_matter(wheels: Wheels, tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        unpacked(tmp_path / "first", demo(wheels))
        os.umask(0o077)
        unpacked(tmp_path / "second", demo(wheels, reverse=True, time=(2031, 5, 6, 7, 8, 10)))
    finally:
        os.umask(old)
    assert contents(tmp_path / "first") == contents(tmp_path / "second")


def test_a_file_of_two_wheels_is_the_later_ones_and_told_if_it_differs(wheels: Wheels, tmp_path: Path) -> None:
    one = wheels.add("one", "1", {"same.py": "s", "tests.py": "1"})
    two = wheels.add("two", "1", {"same.py": "s", "tests.py": "2"})
    prefix = unpacked(tmp_path / "out", one, two)
    assert (tmp_path / "out" / SITE / "tests.py").read_text() == "2"
    assert len(prefix.notices) == 1
    assert "tests.py is in one-1-py3-none-any.whl and two-1-py3-none-any.whl" in prefix.notices[0]


def test_bytecode_and_pth_files_are_told(wheels: Wheels, tmp_path: Path) -> None:
    wheel = wheels.add("one", "1", {"p/__pycache__/m.cpython-311.pyc": "x", "one.pth": "import one"})
    prefix = unpacked(tmp_path / "out", wheel)
    assert not (tmp_path / "out" / SITE / "p").exists()
    assert sorted(notice.split(" ")[1] for notice in prefix.notices) == ["compiled", "has"]


@pytest.mark.parametrize(
    "record",
    [
        lambda text: text.replace("sha256=", "sha256=AAAA", 1),
        lambda text: text.replace("m.py,", "other.py,"),
        lambda _: "",
        lambda _: '"',
    ],
)
def test_a_wheel_that_contradicts_its_record(wheels: Wheels, tmp_path: Path, record: Callable[[str], str]) -> None:
    wheel = wheels.add("bad", "1", {"m.py": "x"}, record=record)
    with pytest.raises(Corrupt, match=r"bad-1-py3-none-any\.whl"):
        unpacked(tmp_path / "out", wheel)


def test_a_cut_wheel(wheels: Wheels, tmp_path: Path) -> None:
    wheel = demo(wheels)
    wheel.write_bytes(wheel.read_bytes()[:-100])
    with pytest.raises(Corrupt, match=r"demo-1\.0"):
        unpacked(tmp_path / "out", wheel)


@pytest.mark.parametrize("path", ["../out.py", "/abs.py", "bad-1.data/scripts/../../x", "a//b"])
def test_paths_that_leave_the_prefix(wheels: Wheels, tmp_path: Path, path: str) -> None:
    wheel = wheels.add("bad", "1", {path: "x"})
    with pytest.raises((Invalid, Corrupt), match="bad-1"):
        unpacked(tmp_path / "out", wheel)
    assert not (tmp_path / "out.py").exists()
    assert not [file for file in (tmp_path / "out").rglob("*") if file.name in {"x", "abs.py", "b"}]


def test_entry_points_that_are_none(wheels: Wheels, tmp_path: Path) -> None:
    for number, text in enumerate(("x = module", "x = a%:b", "x = a:1b", "../x = a:b", "x = a:b.c-d", "x")):
        with pytest.raises((Corrupt, Invalid), match="bad-1"):
            unpacked(tmp_path / str(number), wheels.add("bad", "1", {"m.py": "x"}, scripts=text))


# -- With pip ----------------------------------------------------------------------------------------------------------


@needs_pip
def test_requirements_and_what_they_require(wheels: Wheels, tmp_path: Path) -> None:
    demo(wheels)
    wheels.add("unwanted", "1", {"unwanted.py": ""})
    wheels.add(
        "app", "2", {"app.py": "import demo\ndemo.main()\n"}, requires=("demo<2", 'unwanted; python_version < "3"')
    )
    wheels.add("app", "3", {"app.py": ""})
    with open_python(parse_python(f"pip:{wheels.requirements('app<3')}")) as tools:
        assert tools.packages == ("app 2", "demo 1.0")
        assert (tools.notices, tools.python) == ((), OWN)
        assert tools.env("/opt/t/") == (("PYTHONPATH", f"/opt/t/{SITE}"),)
        assert tools.path("/opt/t") == ("/opt/t/bin",)
        at = str(tools.folder)
        environment = dict(tools.env(at)) | {"PATH": f"{tools.path(at)[0]}:{Path(sys.executable).parent}:/usr/bin:/bin"}
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
        assert subprocess.check_output(["demo"], env=environment, cwd=tmp_path) == b"demo runs\n"
        command = [sys.executable, "-m", "app"]
        assert subprocess.check_output(command, env=environment, cwd=tmp_path) == b"demo runs\n"
        first = contents(tools.folder)
        folder = tools.folder
    assert not folder.parent.exists()
    with open_python(parse_python(f"pip:{wheels.requirements('app==2')}")) as tools:
        assert contents(tools.folder) == first


@needs_pip
def test_without_programs_nothing_is_added_to_path(wheels: Wheels) -> None:
    wheels.add("plain", "1", {"plain.py": ""})
    with open_python(parse_python(f"pip:{wheels.requirements('plain')}")) as tools:
        assert tools.path("/opt/t") == ()


@needs_pip
def test_hashes_in_the_file_are_checked(wheels: Wheels) -> None:
    digest = hashlib.sha256(demo(wheels).read_bytes()).hexdigest()
    with open_python(parse_python(f"pip:{wheels.requirements(f'demo==1.0 --hash=sha256:{digest}')}")) as tools:
        assert tools.packages == ("demo 1.0",)
    wrong = wheels.requirements(f"demo==1.0 --hash=sha256:{'0' * 64}")
    with pytest.raises(Invalid, match="DO NOT MATCH"), open_python(parse_python(f"pip:{wrong}")):
        pass


@needs_pip
def test_what_pip_does_not_find(wheels: Wheels) -> None:
    (wheels.folder / "source-1.tar.gz").write_bytes(b"")
    for requirement in ("nothing==1", "source"):
        with (
            pytest.raises(Invalid, match="No matching distribution found for") as error,
            open_python(parse_python(f"pip:{wheels.requirements(requirement)}")),
        ):
            pass
        assert "\n" not in str(error.value)


@needs_pip
def test_the_newest_fitting_platform_is_taken(wheels: Wheels) -> None:
    for number in (17, 24, 39):
        wheels.add("native", "1", {f"glibc{number}.py": ""}, tag=f"py3-none-manylinux_2_{number}_{MACHINE}")
    wheels.add("native", "1", {"musl.py": ""}, tag=f"py3-none-musllinux_1_1_{MACHINE}")
    file = wheels.requirements("native")
    for platform, module in {
        None: "glibc24.py",
        f"manylinux2014_{MACHINE}": "glibc17.py",
        f"manylinux_2_40_{MACHINE}": "glibc39.py",
        f"musllinux_1_2_{MACHINE}": "musl.py",
    }.items():
        with open_python(parse_python(f"pip:{file}", platform=platform)) as tools:
            assert (tools.folder / SITE / module).exists(), platform


def test_another_python_needs_its_interpreter(wheels: Wheels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    source = parse_python(f"pip:{wheels.requirements('demo')}", python="3.99")
    with pytest.raises(Invalid, match=r"no python3\.99 in PATH"), open_python(source):
        pass


# -- The words for it --------------------------------------------------------------------------------------------------


def test_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("needs").touch()
    default = platform_tags(f"manylinux_2_28_{MACHINE}")
    assert parse_python("pip:needs") == PythonSource((), Path("needs"), OWN, default)
    assert parse_python("pip:a==1,b>=2,<3,c[x,y]~=1.0,d", python="3.12") == PythonSource(
        ("a==1", "b>=2,<3", "c[x,y]~=1.0", "d"), None, "3.12", default
    )
    assert parse_python("pip:a @ https://example.org/a.whl").requirements == ("a @ https://example.org/a.whl",)
    for wrong in ("needs", "pip:", "pip: ", "pip:-r needs", "pip:a==1,,b", "pip:--index-url=x"):
        with pytest.raises(Invalid):
            parse_python(wrong)
    with pytest.raises(NotFound, match="absent"):
        parse_python("pip:./absent.txt")
    for version in ("3", "311", "3.11.2", "2.7", "python3.11"):
        with pytest.raises(Invalid, match="version"):
            parse_python("pip:a", python=version)


def test_platforms() -> None:
    tags = platform_tags(f"manylinux_2_18_{MACHINE}")
    assert tags[:3] == tuple(f"{name}_{MACHINE}" for name in ("manylinux_2_18", "manylinux_2_17", "manylinux2014"))
    assert platform_tags(f"musllinux_1_2_{MACHINE}") == (f"musllinux_1_2_{MACHINE}", f"musllinux_1_1_{MACHINE}")
    assert platform_tags(f"linux_{MACHINE}")[:2] == (f"linux_{MACHINE}", f"manylinux_2_28_{MACHINE}")
    for wrong in ("win_amd64", "manylinux_2_28", "manylinux_2_28_vax", "manylinux_3_1_x86_64", ""):
        with pytest.raises(Invalid, match="platform"):
            platform_tags(wrong)


def test_nothing_warns_at_import() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        subprocess.run([sys.executable, "-W", "error", "-c", "import dsec_store.inputs.python"], check=True)
