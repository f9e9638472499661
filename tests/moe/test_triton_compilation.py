"""The grouped GEMM compiled for Hopper, which needs no GPU: its products are wgmma's, its loads are asynchronous."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

triton = pytest.importorskip("triton")

from tests.core.nn.kernels.test_compilation import bytes_of_stack  # noqa: E402

from mt_moe.kernels import grouped_product  # noqa: E402
from mt_moe.kernels.tiles import OUTER, ROWS, Tile  # noqa: E402

HALF, SINGLE, PLACES = "*bf16", "*fp32", "*i64"
OF_ROWS = {"x": HALF, "gather": PLACES, "matrices": HALF, "out": HALF, "scatter": PLACES, "ends": "*i32"}
OF_OUTER = {"left": HALF, "left_gather": PLACES, "right": HALF, "out": SINGLE, "ends": "*i32"}
COUNTS = ("rows_in_all", "mean_rows", "groups")
"""Numbers that need not be multiples of 16, as sizes of a model are."""


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], tile: Tile) -> dict[str, Any]:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {**constants, **tile.sizes(), "DTYPE": triton.language.float32}
    names = kernel.fn.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name] != "constexpr" and name not in COUNTS
    }
    source = ASTSource(kernel.fn, signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm


def assert_fit_for_hopper(assembly: dict[str, Any], tmp_path: Path) -> None:
    assert "wgmma.mma_async" in assembly["ptx"]
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?, 0x(\w+),", assembly["ptx"])
    assert {int(size, 16) for size in copies} <= {8, 16}  # 8: the places of rows
    assert copies.count("10") > len(copies) / 2
    assert bytes_of_stack(assembly["cubin"], tmp_path) == 0


def exhaustive_but_first(tiles: tuple[Tile, ...]) -> list[Any]:
    return [tiles[0], *(pytest.param(tile, marks=pytest.mark.exhaustive) for tile in tiles[1:])]


@pytest.mark.parametrize("tile", exhaustive_but_first(ROWS), ids=str)
def test_rows_times_matrices(tile, tmp_path, monkeypatch) -> None:
    """Gathered and scattered, of 128 experts."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = {"GROUPS": 128, "GATHER": True, "SCATTER": True, "WHOLE": True, "m_depth_stride": 1}
    assert_fit_for_hopper(compiled(grouped_product._grouped_gemm, OF_ROWS, constants, tile), tmp_path)


@pytest.mark.parametrize("tile", exhaustive_but_first(OUTER), ids=str)
@pytest.mark.parametrize("add", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_weight_gradients_that_are_accumulated(tile, add, tmp_path, monkeypatch) -> None:
    """add: to what is there; the first of a step is written over it."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = {"LEFT": True, "RIGHT": False, "ADD": add, "right_gather": None}
    assert_fit_for_hopper(compiled(grouped_product._grouped_gemm_outer, OF_OUTER, constants, tile), tmp_path)
