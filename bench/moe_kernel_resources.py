"""Registers and shared memory of the grouped products, compiled for a GPU that need not be there.

    uv run python bench/moe_kernel_resources.py [--capability 90]

bf16, 128 experts, every tile. Rows in order and matrices are loaded by TMA from compute capability 9.0 on.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import triton
from tests.core.nn.kernels.cubin import resources
from tests.moe.compiled_products import outer_products, rows_times

from mt_moe.kernels.tiles import OUTER, ROWS, Tile

Compile = Callable[..., Any]
FORMS: dict[str, tuple[tuple[Tile, ...], Compile]] = {
    "rows in order": (ROWS, partial(rows_times, gather=False, scatter=False, transposed=True)),
    "gathered rows": (ROWS, partial(rows_times, gather=True, scatter=False, transposed=True)),
    "rows in order, scattered": (ROWS, partial(rows_times, gather=False, scatter=True, transposed=True)),
    "weight gradient": (OUTER, partial(outer_products, gather=False, add=True)),
    "weight gradient, one operand gathered": (OUTER, partial(outer_products, gather=True, add=True)),
}
"""Matrices are those of the forward pass; weight gradients are added to fp32."""


def lines(capability: int, folder: Path) -> Iterator[str]:
    yield "| product | tile, stages, warps | registers | bytes of stack | KiB of shared memory |"
    yield "| --- | --- | --- | --- | --- |"
    for name, (tiles, compile_form) in FORMS.items():
        for tile in tiles:
            kernel = compile_form(tile, tma=capability >= 90, capability=capability)
            found = resources(kernel.asm["cubin"], folder)
            sizes = f"{tile.rows} x {tile.columns} x {tile.depth}, {tile.stages}, {tile.warps}"
            yield f"| {name} | {sizes} | {found['REG']} | {found['STACK']} | {kernel.metadata.shared >> 10} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, default=90, help="Ten times the compute capability, from 80 on.")
    capability = parser.parse_args().capability
    with TemporaryDirectory() as folder:
        # What is in the cache of an earlier run would be of other sources.
        os.environ["TRITON_CACHE_DIR"] = folder
        print(f"triton {triton.__version__}, sm_{capability}, bf16, 128 experts\n")
        for line in lines(capability, Path(folder)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
