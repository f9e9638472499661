"""Scales and casts against the formats written out in fp64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.core.nn.fp8 import formulas
from torch import Tensor

from mt_core.nn.kernels.reference.fp8_casts import (
    E4M3,
    E5M2,
    FORMATS,
    Scaled,
    cast_row_blocks,
    cast_rows,
    cast_square_blocks,
    cast_tensor,
    padded,
    scale_of,
    to_fp8,
)

NAMES = {"e4m3": E4M3, "e5m2": E5M2}
ONE = torch.tensor(1.0)


def wide_values(rows: int, columns: int) -> Tensor:
    """Magnitudes over many powers of two, and exact zeros."""
    generator = torch.Generator().manual_seed(rows + columns)
    x = torch.randn(rows, columns, generator=generator) * torch.exp2(torch.randint(-12, 5, (rows, columns)).float())
    x[0, :3] = 0.0
    return x


def blocks_amax(x: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """The largest magnitude of each block, at every element of it; the last blocks may be short."""
    found = np.empty_like(x)
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], columns):
            found[i : i + rows, j : j + columns] = np.abs(x[i : i + rows, j : j + columns]).max()
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_number_of_the_format_stands_for_itself(name) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(NAMES[name]).float()
    every = every[every.isfinite()]
    assert len(every) in (254, 248)
    assert torch.equal(to_fp8(every, ONE, NAMES[name]).float(), every)
    assert np.array_equal(formulas.rounded(every.numpy(), name), every.numpy())


@pytest.mark.parametrize("name", NAMES)
def test_the_middle_of_two_numbers_goes_to_the_even_one_and_too_much_to_the_largest(name) -> None:
    every = torch.arange(128, dtype=torch.uint8).view(NAMES[name]).float()
    every = every[every.isfinite()]
    middles = (every[1:] + every[:-1]) / 2
    found = to_fp8(middles, ONE, NAMES[name])
    assert bool((found.view(torch.uint8) % 2 == 0).all())
    assert np.array_equal(found.float().numpy(), formulas.rounded(middles.numpy(), name))
    assert to_fp8(torch.tensor([1e9, -1e9]), ONE, NAMES[name]).float().tolist() == [every[-1], -every[-1]]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("margin", [0, 2])
@pytest.mark.parametrize(
    ("cast", "block"),
    [(cast_rows, (1, 10**6)), (cast_row_blocks, (1, 128)), (cast_square_blocks, (128, 128))],
)
def test_casts_by_rows_and_blocks(cast, block, margin, name) -> None:
    x = wide_values(256, 384)
    expected = formulas.cast(x.double().numpy(), blocks_amax(x.double().numpy(), *block), name, margin)
    assert_same_numbers(cast(x, NAMES[name], margin), expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_cast_by_one_scale(name) -> None:
    x = wide_values(33, 48)
    scale = scale_of(x.abs().max(), NAMES[name], margin=1)
    assert_same_numbers(
        cast_tensor(x, scale, NAMES[name]), formulas.cast(x.double().numpy(), float(x.abs().max()), name, 1)
    )


def assert_same_numbers(found: Scaled, expected: np.ndarray) -> None:
    """The scale is rounded to fp32, so that a number in the middle of two may fall to the other side: one in
    thousands, and by one step."""
    assert found.scale.dtype == torch.float32
    mine = found.decode().double().numpy()[:, : expected.shape[1]]
    off = np.abs(mine - expected) > 1e-6 * np.abs(expected)
    assert off.mean() < 1e-3
    assert np.abs(mine - expected).max() <= np.abs(expected).max() * 2**-3


@pytest.mark.parametrize("cast", [cast_rows, cast_row_blocks])
def test_odd_lengths_are_padded_with_zeros_that_change_no_scale(cast) -> None:
    x = wide_values(5, 37)
    scaled = cast(x, E4M3)
    assert scaled.data.shape[1] % 16 == 0
    assert not scaled.decode()[:, 37:].any()
    assert_same_numbers(scaled, formulas.cast(x.double().numpy(), blocks_amax(x.double().numpy(), 1, 128), "e4m3"))


def test_padding_of_bytes_keeps_them() -> None:
    data = torch.randn(3, 5).to(E5M2)
    longer = padded(data, 16)
    assert longer.dtype == E5M2
    assert torch.equal(longer.float(), torch.nn.functional.pad(data.float(), (0, 11)))


def test_zeros_keep_the_scale_one_and_what_is_not_finite_becomes_nan() -> None:
    amax = torch.tensor([0.0, 448.0, float("inf"), float("nan")])
    scale = scale_of(amax, E4M3)
    assert scale[:2].tolist() == [1.0, 1.0]
    x = torch.ones(4, 16)
    x[0] = 0.0
    x[2, 3], x[3, 3] = float("inf"), float("nan")
    decoded = cast_rows(x, E4M3).decode()
    assert torch.equal(decoded[:2], x[:2])
    assert bool(decoded[2:].isnan().all(1).all())


def test_gradients_have_the_wider_format_in_hybrid_alone() -> None:
    assert {role: FORMATS["hybrid"][role] for role in ("input", "weight", "gradient")} == {
        "input": torch.float8_e4m3fn,
        "weight": torch.float8_e4m3fn,
        "gradient": torch.float8_e5m2,
    }
    assert set(FORMATS["e4m3"].values()) == {torch.float8_e4m3fn}
