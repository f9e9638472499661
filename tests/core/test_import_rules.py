"""Imports between distributions point down: each may import mt_core and what its pyproject.toml names of lower floors.

Read from the syntax tree, so that imports inside of functions and under TYPE_CHECKING count as well.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parents[2] / "packages"
FLOORS = (
    {"mt_core"},
    {"mt_models", "mt_data", "mt_ckpt", "mt_moe"},
    {"mt_infer", "mt_tools", "mt_import"},
    {"mt_eval", "mt_tune", "mt_retrieval", "mt_accelerate", "mt_ops"},
    {"mt_cli"},
)
"""From the ground up. Two distributions of one floor never import each other, and nothing imports mt_cli."""

WITHOUT_TORCH = (
    "mt_data",
    "mt_cli",
    "mt_core.config",
    "mt_core.specs",
    "mt_core.plugins",
    "mt_core.hookspecs",
    "mt_core.kinds",
    "mt_core.interfaces",
    "mt_core.checkpoint_specs",
    "mt_core.run_events",
    "mt_ops.reading",
    "mt_ops.report",
    "mt_ops.plot",
    "mt_ops.watch",
    "mt_ops.compare",
    "mt_ops.commands",
    "mt_core.run_requests",
    "mt_core.run_state",
)
"""Modules and packages that import no torch at their top level: they work where it is not installed."""
TRAINING_PARTS_OF_CLI = ("mt_cli.progress", "mt_cli.sample")
"""Loaded by a running trainer, which has imported torch."""


def floor(name: str) -> int:
    return next(number for number, names in enumerate(FLOORS) if name in names)


@dataclass(frozen=True)
class Module:
    """imports: the nodes of its syntax tree that import something. at_import: those of them that run when the module is
    imported. The rest of the tree is not kept: garbage collections of all later tests would go over it."""

    name: str
    imports: list[ast.AST]
    at_import: list[ast.AST]


@cache
def modules(package: str) -> list[Module]:
    source = PACKAGES / package.replace("_", "-") / "src"
    return [read_module(source, path) for path in sorted(source.rglob("*.py"))]


def read_module(source: Path, path: Path) -> Module:
    name = ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return Module(name, list(filter(imports, ast.walk(tree))), list(filter(imports, top_level(tree))))


def imports(node: ast.AST) -> bool:
    is_lazy = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Lazy"
    return is_lazy or isinstance(node, (ast.Import, ast.ImportFrom))


def top_level(tree: ast.Module) -> Iterator[ast.AST]:
    """Statements that run at import: not the bodies of functions, nor what only type checkers see."""
    for node in tree.body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Try):
            yield from node.body
        yield node


def imported(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    """Absolute names of modules, with their lines; also those that Lazy("module:attribute") names."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            yield node.module, node.lineno
        elif isinstance(node, ast.Call):
            texts = [entry.value for entry in node.args[:1] if isinstance(entry, ast.Constant)]
            yield from ((str(text).partition(":")[0], node.lineno) for text in texts)


def names() -> list[str]:
    return sorted(path.name.replace("-", "_") for path in PACKAGES.glob("mt-*"))


def required(package: str) -> set[str]:
    """Distributions of ours that the pyproject.toml names, as packages; also those of extras."""
    project = tomllib.loads((PACKAGES / package.replace("_", "-") / "pyproject.toml").read_text())["project"]
    extras = [entry for entries in project.get("optional-dependencies", {}).values() for entry in entries]
    wanted = [re.split(r"[\[<>=~; ]", entry)[0] for entry in [*project["dependencies"], *extras]]
    return {name.replace("-", "_") for name in wanted if name.startswith("mt-")}


def test_every_distribution_has_a_floor() -> None:
    assert set(names()) <= set().union(*FLOORS)


@pytest.mark.slow
@pytest.mark.parametrize("package", names())
def test_imports_point_down(package: str) -> None:
    allowed = {package, "mt_core"}
    allowed |= {name for name in required(package) if floor(name) < floor(package)}
    wrong = [
        f"{module.name}:{line} imports {name}"
        for module in modules(package)
        for name, line in imported(module.imports)
        if (top := name.partition(".")[0]).startswith("mt_") and top not in allowed
    ]
    assert wrong == []


@pytest.mark.parametrize("package", names())
def test_what_is_required_is_below(package: str) -> None:
    assert [name for name in required(package) - {package} if floor(name) >= floor(package)] == []


def test_the_contract_and_the_data_import_no_torch() -> None:
    wrong = [
        f"{module.name}:{line}"
        for package in names()
        for module in modules(package)
        if module.name.startswith(WITHOUT_TORCH) and module.name not in TRAINING_PARTS_OF_CLI
        for name, line in imported(module.at_import)
        if name.partition(".")[0] in ("torch", "transformers") or name.startswith(("mt_core.nn", "mt_core.train"))
    ]
    assert wrong == []


ORDER = (
    {"errors", "versions", "tensor_slice", "_torch_compat", "_huge_pages", "json_objects", "run_events", "wording"},
    {"paths", "run_requests", "run_state", "sandbox"},
    {"retention", "config_types"},
    {"interfaces", "kinds"},
    {"checkpoint_specs"},
    {"specs", "checkpoint_base"},
    {"hookspecs"},
    {"plugins"},
    {"checkpoint_lookup", "commands"},
    {"config", "name_map", "config_map"},
    {"config_refusals"},
    {"data"},
    {"parallel"},
    {"nn"},
    {"optim", "launch"},
    {"train"},
    {"testing", "_preload", "plugin"},
)
"""Modules and folders of mt_core, each importing only what stands above it, or its own folder."""


def room(name: str) -> str:
    """Module or folder directly below mt_core."""
    return name.split(".")[1] if "." in name else ""


def test_folders_of_mt_core_import_in_one_direction() -> None:
    level = {name: number for number, names in enumerate(ORDER) for name in names}
    upward = {
        f"{module.name} imports {found}"
        for module in modules("mt_core")
        for found, _ in imported(node for node in module.imports if not isinstance(node, ast.Call))
        if found.startswith("mt_core.")
        and room(module.name)
        and room(found) != room(module.name)
        and level[room(found)] >= level[room(module.name)]
    }
    assert upward == set()


def imports_within(package: str) -> dict[str, set[str]]:
    """Module -> modules of its own package that it imports, in functions and for types too."""
    names = {module.name for module in modules(package)}

    def targets(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in names else node.module

    return {
        module.name: {
            target for node in module.imports for target in targets(node) if target in names and target != module.name
        }
        for module in modules(package)
    }


@pytest.mark.parametrize(
    "package", sorted(set().union(*FLOORS) & {path.name.replace("-", "_") for path in PACKAGES.iterdir()})
)
def test_no_modules_import_each_other(package: str) -> None:
    """Modules that nothing left imports are taken away, again and again; those of a cycle remain."""
    remaining = imports_within(package)
    while free := [name for name, targets in remaining.items() if not targets & remaining.keys()]:
        for name in free:
            del remaining[name]
    assert sorted(remaining) == []


def without_circles(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """What remains of a graph when nodes that lead nowhere are taken away, again and again: its circles, and what leads
    to them."""
    remaining = {name: set(targets) for name, targets in graph.items()}
    while free := [name for name, targets in remaining.items() if not targets & remaining.keys()]:
        for name in free:
            del remaining[name]
    return remaining


def siblings(package: str) -> dict[str, dict[str, set[str]]]:
    """Folder -> its modules and folders by name -> those of its other entries that they import, from any depth."""
    found: dict[str, dict[str, set[str]]] = {}
    for module, targets in imports_within(package).items():
        for target in targets:
            ours, theirs = module.split("."), target.split(".")
            shared = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
            # None: one is the folder of the other.
            if shared is not None:
                entries = found.setdefault(".".join(ours[:shared]), {})
                entries.setdefault(ours[shared], set()).add(theirs[shared])
                entries.setdefault(theirs[shared], set())
    return found


@pytest.mark.parametrize("package", names())
def test_the_entries_of_each_folder_import_in_one_direction(package: str) -> None:
    """At every depth: modules and folders side by side have one order, also by imports in functions and for types."""
    circles = {folder: sorted(without_circles(graph)) for folder, graph in siblings(package).items()}
    assert {folder: entries for folder, entries in circles.items() if entries} == {}


def test_a_circle_of_folders_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    imports = {"p.a.x": {"p.b.y"}, "p.b.y": set(), "p.b.z": {"p.a.w"}, "p.a.w": set(), "p.c": {"p.a.x"}}
    monkeypatch.setattr(f"{__name__}.imports_within", lambda package: imports)
    assert siblings("p") == {"p": {"a": {"b"}, "b": {"a"}, "c": {"a"}}}
    assert without_circles(siblings("p")["p"]).keys() == {"a", "b", "c"}


LEAST_MEAN, MOST_LINES = 140, 600
"""Lines of the mean file over all packages, and of the longest: small modules of one topic are merged, long ones
divided."""


def test_files_are_few_and_none_is_long() -> None:
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGES.rglob("src/**/*.py")}
    assert sum(lines.values()) / len(lines) >= LEAST_MEAN
    assert [str(path.relative_to(PACKAGES)) for path, count in lines.items() if count > MOST_LINES] == []
