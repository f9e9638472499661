"""The public names are those of the stubs `__init__.pyi`: they exist, have docstrings, and are what examples import."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.docs.blocks import blocks

from mt_core.plugins import CORE_KINDS

ROOT = Path(__file__).parents[2]
STUBS = sorted(ROOT.glob("packages/*/src/**/__init__.pyi"))
MODULES_OF_THEIR_OWN = {
    "mt_core.specs": "the kinds of things that plugins register, by which a host is asked",
    "mt_accelerate.utils": "the names of accelerate.utils, in one module as there",
    "mt_infer.chat.tool_calls": "what forms of tool calls are put together from",
    "mt_ckpt.megatron.arguments": "tables of arguments, shown to say where they are",
}
"""Modules that documentation imports from although no folder lists their names."""


class Public(NamedTuple):
    folder: str
    module: str
    name: str


def public_names() -> Iterator[Public]:
    for stub in STUBS:
        folder = ".".join(stub.relative_to(ROOT).parts[3:-1])
        for node in ast.parse(stub.read_text()).body:
            assert isinstance(node, ast.ImportFrom), f"{stub}: {ast.unparse(node)}"
            yield from (Public(folder, f"{folder}.{node.module}", alias.name) for alias in node.names)


PUBLIC = sorted(public_names())


def documented(module: str) -> set[str]:
    """Names of a module that have a docstring: classes, functions, and assignments followed by a string."""
    source = ROOT.glob(f"packages/*/src/{module.replace('.', '/')}.py")
    body = ast.parse(next(source).read_text(encoding="utf-8")).body
    found = set()
    for node, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            found.add(node.name)
        is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        if isinstance(node, ast.Assign | ast.AnnAssign) and is_text:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def test_their_number_is_bounded() -> None:
    # Without those of Accelerate, which has chosen them.
    assert 150 <= sum(one.folder != "mt_accelerate" for one in PUBLIC) <= 231
    assert len({(one.folder, one.name) for one in PUBLIC}) == len(PUBLIC)


@pytest.mark.parametrize("folder", sorted({one.folder for one in PUBLIC}))
def test_the_names_of_a_folder_are_those_of_its_stub(folder: str) -> None:
    package = importlib.import_module(folder)
    expected = {one.name: one.module for one in PUBLIC if one.folder == folder}
    assert sorted(package.__all__) == sorted(expected)
    for name, module in expected.items():
        assert getattr(package, name) is getattr(importlib.import_module(module), name)
    modules = {path.stem for path in Path(package.__path__[0]).iterdir()}
    assert not modules & expected.keys(), "a name cannot be a module and what the module defines"


def test_what_hooks_return_is_public() -> None:
    public = {one.name for one in PUBLIC if one.folder == "mt_core"}
    assert [kind.spec_type.__name__ for kind in CORE_KINDS if kind.spec_type.__name__ not in public] == []


@pytest.mark.slow
def test_each_has_a_docstring() -> None:
    known = {module: documented(module) for module in {one.module for one in PUBLIC}}
    assert [f"{one.module}.{one.name}" for one in PUBLIC if one.name not in known[one.module]] == []


def test_the_reference_lists_them_all_and_nothing_else() -> None:
    pages = "".join(path.read_text() for path in sorted(ROOT.glob("docs/api/*.md")))
    assert sorted(re.findall(r"^::: (\S+)$", pages, re.M)) == sorted(f"{one.folder}.{one.name}" for one in PUBLIC)


def shown_imports() -> Iterator[tuple[str, str, str]]:
    """(place, module, name) of each import from a package of mt, in documentation and examples."""
    sources = [(block.place, block.text) for block in blocks() if block.language == "python"]
    sources += [(path.name, path.read_text()) for path in sorted(ROOT.glob("examples/*/src/**/*.py"))]
    for place, text in sources:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and re.match(r"mt_(?!\w*_example)", node.module or ""):
                yield from ((place, node.module or "", alias.name) for alias in node.names)


def test_documentation_imports_public_names_only() -> None:
    legal = {(one.folder, one.name) for one in PUBLIC}
    others = [
        one for one in shown_imports() if one[1:] not in legal and not one[1].startswith(tuple(MODULES_OF_THEIR_OWN))
    ]
    assert others == []
