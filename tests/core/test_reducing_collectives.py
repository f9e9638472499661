"""Reducing collectives are called in mt_core.parallel alone, so that the order of sums over ranks has one place."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from tests.core.test_import_rules import PACKAGES

ONE_PLACE = "mt-core/src/mt_core/parallel/"
PRIVATE_OPERATORS = "mt-core/src/mt_core/_torch_compat.py"
"""The operator that multiplies and reduces, called by mt_core.parallel.reductions."""
MODULES = ("torch.distributed", "torch.ops", "mt_core._torch_compat")
REDUCES = ("reduce", "allreduce")
"""In names of torch.distributed, torch.distributed.nn and torch.ops: all_reduce, reduce_scatter_tensor, allreduce_,
reduce, fused_matmul_reduce_scatter, ..."""


def imported_and_accessed(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each name that is imported and each attribute, as far as it is one of a module."""
    aliases = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases.update({entry.asname: entry.name for entry in node.names if entry.asname})
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {entry.asname or entry.name: f"{node.module}.{entry.name}" for entry in node.names}
            aliases |= names
            yield from ((node.lineno, name) for name in names.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root, *rest = ast.unparse(node).split(".")
            yield node.lineno, ".".join([aliases.get(root, root), *rest])


def is_reducing(name: str) -> bool:
    return name.startswith(MODULES) and any(
        part.lstrip("_").startswith(REDUCES) or "_reduce" in part for part in name.split(".")
    )


def reducing_calls(source: str) -> list[str]:
    return [f"{line}: {name}" for line, name in imported_and_accessed(ast.parse(source)) if is_reducing(name)]


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist\ndist.all_reduce(x)",
        "import torch\ntorch.distributed.reduce_scatter_tensor(x, y)",
        "from torch import distributed\ndistributed.reduce(x, 0)",
        "from torch.distributed import all_reduce",
        "from torch.distributed._functional_collectives import all_reduce_coalesced",
        "from torch.distributed.nn.functional import reduce_scatter",
        "import torch\ntorch.ops.c10d.allreduce_(x)",
        "import torch\ntorch.ops.symm_mem.fused_matmul_reduce_scatter(x)",
        "from mt_core._torch_compat import matmul_reduce_scatter",
        "from mt_core import _torch_compat\n_torch_compat.matmul_reduce_scatter(x)",
        "import torch.distributed as dist\nwork = lambda x: dist._reduce_scatter_base(x, x)",
    ],
)
def test_calls_are_recognized(source: str) -> None:
    assert reducing_calls(source)


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist\ndist.all_gather_into_tensor(x, y)\ndist.ReduceOp.SUM",
        "from mt_core.parallel.collectives import all_reduce\nall_reduce(x, axis)",
        "from functools import reduce",
    ],
)
def test_what_does_not_reduce_is_allowed(source: str) -> None:
    assert reducing_calls(source) == []


@pytest.mark.slow
def test_reducing_collectives_are_called_in_one_place() -> None:
    calls = {
        f"{path.relative_to(PACKAGES)}:{call}"
        for path in sorted(PACKAGES.glob("*/src/**/*.py"))
        if "distributed" in (source := path.read_text(encoding="utf-8")) or "torch.ops" in source
        for call in reducing_calls(source)
    }
    elsewhere = {call for call in calls if not call.startswith((ONE_PLACE, PRIVATE_OPERATORS))}
    assert elsewhere == set()
    assert len(calls) > len(elsewhere), "mt_core.parallel calls none either: the test looks for the wrong names"
