"""The grouped GEMM compiled for Hopper, which needs no GPU: its products are wgmma's, its loads are TMA's, or
asynchronous copies of 16 bytes where rows are gathered."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long

triton = pytest.importorskip("triton")

from tests.core.nn.kernels.cubin import bytes_of_stack  # noqa: E402
from tests.moe.compiled_products import outer_products, rows_times  # noqa: E402

from mt_moe.kernels.tiles import OUTER, ROWS, first_that_fits, mean_rows, not_mostly_empty  # noqa: E402

H100 = 232_448
"""Bytes of shared memory that a program can have."""


def assert_fit_for_hopper(assembly: dict[str, Any], operands_by_tma: int, tmp_path: Path) -> None:
    """operands_by_tma: how many have copies by TMA, of which the pipeline starts at least one before its loop."""
    # Sums of 16 products each: those of an element are the same, in the same order, in every tile.
    assert set(re.findall(r"wgmma\.mma_async\S*?k(\d+)\.", assembly["ptx"])) == {"16"}
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


GPUS = {
    "H100": (9, H100, 0, 0),
    "A100": (8, 166_912, 2, 2),
    "RTX 4090": (8, 101_376, 4, 3),
    "B200": (10, 232_448, 0, 0),
    "RTX 5090": (12, 101_376, 4, 3),
}
"""Major compute capability, bytes of shared memory of a program; numbers of the tiles of rows and of outer products."""


@pytest.mark.parametrize("gpu", GPUS)
def test_a_tile_that_is_not_timed_fits_into_shared_memory_and_registers(gpu) -> None:
    major, memory, rows, outer = GPUS[gpu]
    assert ROWS.index(first_that_fits(ROWS, major, memory)) == rows
    assert OUTER.index(first_that_fits(OUTER, major, memory)) == outer


@pytest.mark.parametrize(
    ("capability", "number"), [(80, 2), *(pytest.param(c, 3, marks=pytest.mark.exhaustive) for c in (89, 120))]
)
def test_a_weight_gradient_spills_no_register_where_operands_take_some(
    capability, number, tmp_path, monkeypatch
) -> None:
    """Of tiles with 256 columns it does there."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = outer_products(OUTER[number], gather=True, add=True, tma=capability >= 90, capability=capability)
    assert bytes_of_stack(kernel.asm["cubin"], tmp_path) == 0
    assert kernel.metadata.shared <= 101_376


def test_tiles_of_groups_with_few_rows() -> None:
    """0 to 100,000 rows a group."""
    assert [mean_rows(8 * rows, 8) for rows in (0, 8, 65, 100, 100_000)] == [64, 64, 128, 128, 1024]
    assert not_mostly_empty(ROWS, 128) == ROWS
    assert {tile.rows for tile in not_mostly_empty(ROWS, 64)} == {64}


def test_programs_of_a_multiprocessor_fit_into_its_shared_memory() -> None:
    """228 KiB on Hopper: one of 120 KiB and more, two of 96 KiB; on an A100 with 164 KiB one."""
    assert [tile.resident(228 << 10) for tile in ROWS] == [1, 1, 1, 1, 2]
    assert ROWS[-1].resident(164 << 10) == 1


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
    assert 0 <= kernel.metadata.shared - tile.shared_memory < 1024  # barriers


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
    assert f"memdesc<{tile.stages}x{tile.depth}x{tile.columns}xbf16" in kernel.asm["ttgir"]
    assert kernel.metadata.shared <= H100
