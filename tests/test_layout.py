"""The shape of the tree that packaging and imports rely on."""

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
COMPONENTS = [package.split("/")[0] for package in PACKAGES if "/" in package]


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_component_folder_is_no_package(component: str) -> None:
    """Else `import fuse` or `import cli` would find our folder instead of somebody's module."""
    assert not (ROOT / component / "__init__.py").exists()


@pytest.mark.parametrize("package", PACKAGES)
def test_an_import_package_says_what_it_is_and_is_typed(package: str) -> None:
    assert (ROOT / package / "__init__.py").read_text(encoding="utf-8").startswith('"""')
    assert (ROOT / package / "py.typed").exists()


def test_every_component_is_known_to_all_tools() -> None:
    tools = PROJECT["tool"]
    names = [package.split("/")[-1] for package in PACKAGES]
    assert tools["hatch"]["build"]["dev-mode-dirs"] == [".", *COMPONENTS]
    assert tools["ruff"]["src"] == [".", *COMPONENTS]
    assert tools["ruff"]["lint"]["isort"]["known-first-party"] == names
    here = "$MYPY_CONFIG_FILE_DIR"
    assert tools["mypy"]["mypy_path"] == [here, *(f"{here}/{component}" for component in COMPONENTS)]
    assert set(PACKAGES) <= set(tools["mypy"]["files"])
    assert tools["importlinter"]["root_packages"] == names


@pytest.mark.parametrize("requirements", sorted((ROOT / "requirements").glob("*.txt")), ids=lambda path: path.name)
def test_requirements_name_releases_and_no_addresses(requirements: Path) -> None:
    """A lock must work with any package index, so it may hold neither one's address nor a locally built version."""
    text = requirements.read_text(encoding="utf-8")
    assert "://" not in text
    pins = [line for line in text.splitlines() if "==" in line]
    assert pins
    assert not [pin for pin in pins if "+" in pin.split(";")[0]]
