"""The grouped products compiled by Triton, for a GPU that need not be there."""

from __future__ import annotations

from typing import Any

import triton

from mt_moe.kernels import grouped_product
from mt_moe.kernels.tiles import Tile

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
