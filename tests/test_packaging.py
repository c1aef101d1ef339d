"""The promises of the packages' metadata, and the arrows between them (adapters and backends know core only)."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
# What each package may import of ours, itself included. The Hugging Face adapter keeps the reference design's names
# (`forward_with_torch_backend`), which choose a backend by its name, so it needs no import of one either.
ARROWS = {
    "logitless": {"logitless"},
    "logitless_torch": {"logitless", "logitless_torch"},
    "logitless_triton": {"logitless", "logitless_triton"},
    "logitless_hf": {"logitless", "logitless_hf"},
    "logitless_mcore": {"logitless", "logitless_mcore"},
}


def project(folder: Path) -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return table


def requirements(folder: Path) -> Iterator[Requirement]:
    table = project(folder)
    for group in [table["dependencies"], *table.get("optional-dependencies", {}).values()]:
        yield from map(Requirement, group)


PROJECTS = {canonicalize_name(project(folder)["name"]): project(folder) for folder in FOLDERS}
MODULES = [path for folder in FOLDERS for path in sorted(folder.glob("src/**/*.py"))]
each_package = pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)


def test_the_packages_are_these() -> None:
    assert {project(folder)["name"].replace("-", "_") for folder in FOLDERS} == set(ARROWS)


@each_package
def test_metadata_is_complete_and_static(folder: Path) -> None:
    table = project(folder)
    assert isinstance(table["version"], str)
    assert "dynamic" not in table
    assert table["license"] == "Apache-2.0"
    assert table["requires-python"] == ">=3.10"


@each_package
def test_brings_its_own_papers(folder: Path) -> None:
    table = project(folder)
    assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert (folder / "README.md").read_text().startswith(f"# {table['name']}\n")
    assert f"## {table['version']}" in (folder / "CHANGELOG.md").read_text()
    import_name = table["name"].replace("-", "_")
    assert (folder / "src" / import_name / "py.typed").is_file()
    assert [path.name for path in (folder / "src").iterdir() if path.suffix != ".egg-info"] == [import_name]


@each_package
def test_ranges_of_siblings_admit_them(folder: Path) -> None:
    siblings = [item for item in requirements(folder) if canonicalize_name(item.name) in PROJECTS]
    assert [item.name for item in siblings] == ([] if folder.name == "core" else ["logitless"])
    for item in siblings:
        assert item.specifier.contains(PROJECTS[canonicalize_name(item.name)]["version"]), str(item)


@each_package
def test_entry_points_lead_somewhere(folder: Path) -> None:
    table = project(folder)
    entries = [*table.get("scripts", {}).values()]
    for group in table.get("entry-points", {}).values():
        entries += group.values()
    for entry in entries:
        module, name = entry.split(":")
        stem = folder / "src" / Path(*module.split("."))
        source = stem.with_suffix(".py") if stem.with_suffix(".py").exists() else stem / "__init__.py"
        assert source.exists(), f"{entry}: no module {module} in {folder.name}"
        assert name in bound_names(ast.parse(source.read_text())), f"{entry}: {module} binds no {name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: "/".join(path.parts[path.parts.index("src") + 1 :]))
def test_arrows_point_to_core(path: Path) -> None:
    package = path.parts[path.parts.index("src") + 1]
    ours = {name for name in imported_roots(ast.parse(path.read_text())) if name.split("_")[0] == "logitless"}
    assert ours <= ARROWS[package]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_compiles_on_the_oldest_torch(path: Path) -> None:
    """torch.compile on torch 2.9 knows no `isinstance(x, A | B)`, which is what ran into it."""
    calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    asked = (call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "isinstance")
    assert not [call.lineno for call in asked if isinstance(call.args[1], ast.BinOp)]


def test_uv_takes_every_sibling_from_the_tree() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert set(settings["tool"]["uv"]["sources"]) == set(PROJECTS)
    assert "project" not in settings


def imported_roots(tree: ast.AST) -> set[str]:
    """Top-level packages that a module imports anywhere, by statement or by `import_module("...")`."""
    roots = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            roots.add(node.module.split(".")[0])
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
            if called in {"import_module", "__import__"}:
                roots.add(str(node.args[0].value).split(".")[0])
    return roots


def bound_names(tree: ast.Module) -> set[str]:
    """What a module's own statements bind, imports included."""
    names = set()
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names
