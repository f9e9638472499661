"""The grouped GEMM compiled for Hopper, which needs no GPU: its products are wgmma's, its loads are TMA's, or
asynchronous copies of 16 bytes where rows are gathered."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

triton = pytest.importorskip("triton")

from tests.core.nn.kernels.test_compilation import bytes_of_stack  # noqa: E402

from mt_moe.kernels import grouped_product  # noqa: E402
from mt_moe.kernels.tiles import OUTER, ROWS, Tile, first_that_fits  # noqa: E402

HALF, SINGLE, PLACES = "*bf16", "*fp32", "*i64"
HOPPER = 90
COUNTS = ("mean_rows", "groups")
"""Numbers that need not be multiples of 16, as sizes of a model are."""


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], tile: Tile, capability: int) -> Any:
    """types: of arguments that are no int; an argument without a type is None if it is an operand's. Triton's
    CompiledKernel, with `asm` and `metadata`."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {**constants, **tile.sizes(), "DTYPE": triton.language.float32}
    names = kernel.arg_names
    absent = [name for name in names if name.endswith(("_tma", "gather", "scatter")) and name not in types]
    constants |= dict.fromkeys(absent)
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if not signature[name].startswith(("constexpr", "tensordesc")) and name not in COUNTS
    }
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def block(*sizes: int) -> str:
    return f"tensordesc<bf16{list(sizes)}>"


def rows_times(
    tile: Tile, *, gather: bool, scatter: bool, transposed: bool, tma: bool, capability: int = HOPPER
) -> Any:
    """Of 128 experts; gathered while they are loaded, scattered while they are stored."""
    types = {"x": HALF, "matrices": HALF, "out": HALF, "ends": "*i32"}
    types |= {name: PLACES for name, used in (("gather", gather), ("scatter", scatter)) if used}
    if tma and not gather:
        types["x_tma"] = block(tile.rows, tile.depth)
    if tma:
        types["matrices_tma"] = block(1, *((tile.columns, tile.depth) if transposed else (tile.depth, tile.columns)))
    constants = {
        "GROUPS": 128, "GATHER": gather, "SCATTER": scatter, "TRANSPOSED": transposed, "WHOLE": True,
        "X_TMA": "x_tma" in types, "M_TMA": "matrices_tma" in types,
    }  # fmt: skip
    return compiled(grouped_product._grouped_gemm.fn, types, constants, tile, capability)


def outer_products(tile: Tile, *, gather: bool, add: bool, tma: bool, capability: int = HOPPER) -> Any:
    """gather: the rows of the right operand."""
    tile = tile.gathering() if gather else tile
    types = {"left": HALF, "right": HALF, "out": SINGLE, "ends": "*i32"} | ({"right_gather": PLACES} if gather else {})
    if tma:
        types["left_tma"] = block(tile.depth, tile.rows)
    if tma and not gather:
        types["right_tma"] = block(tile.depth, tile.columns)
    constants = {
        "LEFT": False, "RIGHT": gather, "LEFT_TMA": "left_tma" in types, "RIGHT_TMA": "right_tma" in types, "ADD": add,
    }  # fmt: skip
    return compiled(grouped_product._grouped_gemm_outer, types, constants, tile, capability)


def assert_fit_for_hopper(assembly: dict[str, Any], operands_by_tma: int, tmp_path: Path) -> None:
    """operands_by_tma: how many have copies by TMA, of which the pipeline starts at least one before its loop."""
    assert "wgmma.mma_async" in assembly["ptx"]
    assert "warp_group_dot" in assembly["ttgir"]
    by_tma = assembly["ttgir"].count("async_tma_copy_global_to_local")
    assert by_tma >= 2 * operands_by_tma
    assert bool(by_tma) == bool(operands_by_tma)
    assert ("cp.async.bulk.tensor" in assembly["ptx"]) == bool(operands_by_tma)
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?, 0x(\w+),", assembly["ptx"])
    assert {int(size, 16) for size in copies} <= {8, 16}  # 8: the places of rows
    assert not copies or "10" in copies
    assert bytes_of_stack(assembly["cubin"], tmp_path) == 0


def exhaustive_but_first(cases: list[Any]) -> list[Any]:
    return [cases[0], *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in cases[1:])]


def test_a_tile_that_is_not_timed_fits_into_shared_memory() -> None:
    """Of H100, A100 and RTX 4090."""
    assert [OUTER.index(first_that_fits(OUTER, size)) for size in (232_448, 166_912, 101_376)] == [0, 1, 3]
    assert [ROWS.index(first_that_fits(ROWS, size)) for size in (232_448, 166_912, 101_376)] == [0, 0, 4]


@pytest.mark.parametrize(
    ("tile", "gather", "transposed", "tma"),
    exhaustive_but_first(
        [
            (tile, *form)
            for tile in ROWS
            for form in ((False, True, True), (False, False, True), (True, True, True), (True, False, False))
        ]
    ),
    ids=str,
)
def test_rows_times_matrices(tile, gather, transposed, tma, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = rows_times(tile, gather=gather, scatter=not gather, transposed=transposed, tma=tma)
    assert_fit_for_hopper(kernel.asm, tma * (2 - gather), tmp_path)


@pytest.mark.parametrize(
    ("tile", "gather", "add", "tma"),
    exhaustive_but_first(
        [
            (tile, *form)
            for tile in OUTER
            for form in ((True, True, True), (False, True, True), (False, False, True), (True, False, False))
        ]
    ),
    ids=str,
)
def test_weight_gradients_that_are_accumulated(tile, gather, add, tma, tmp_path, monkeypatch) -> None:
    """add: to what is there; the first of a step is written over it."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = outer_products(tile, gather=gather, add=add, tma=tma)
    assert_fit_for_hopper(kernel.asm, tma * (2 - gather), tmp_path)
