"""Triton kernels of blocks in Triton's interpreter against formulas in fp64, and compiled for Hopper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.core.nn.kernels.interpreter import run_interpreted
from torch import Tensor

from mt_models.blocks.gated_delta_rule import DeltaInputs

pytestmark = pytest.mark.long
STEPS = {
    "one position": (3, 1, 2, 4, 5, 7, False),
    "positions": (2, 3, 1, 3, 20, 18, False),
    "a decay of each channel": (2, 2, 3, 3, 6, 33, True),
}
"""Sequences, positions, key heads, value heads, channels of a key, of a value; whether each channel has a decay."""


def draw(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator) for shape in shapes]


def delta_case(rows: int, length: int, groups: int, heads: int, dim: int, value: int, by_channel: bool) -> tuple:
    """Queries, keys and values side by side in one tensor, as a projection leaves them."""
    width = 2 * groups * dim + heads * value
    decays = (rows, length, heads, dim) if by_channel else (rows, length, heads)
    mixed, g, beta, state = draw(1, (rows, length, width), decays, decays[:3], (rows, heads, dim, value))
    q, k, v = mixed.split((groups * dim, groups * dim, heads * value), -1)
    q, k, v = q.unflatten(-1, (-1, dim)), k.unflatten(-1, (-1, dim)), v.unflatten(-1, (-1, value))
    return DeltaInputs(q, k, v, -g.exp(), beta.sigmoid()), state


def delta_formula(x: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Head by head in fp64."""
    q, k, v, g, beta = (y.double() for y in x)
    out, last = torch.empty_like(v), state.double().clone()
    for row in range(v.shape[0]):
        for head in range(v.shape[2]):
            s, shared = last[row, head], head // (v.shape[2] // k.shape[2])
            for t in range(v.shape[1]):
                query, key = q[row, t, shared], k[row, t, shared]
                query, key = (y / (y @ y + 1e-6).sqrt() for y in (query, key))
                s = g[row, t, head].exp().expand(len(key))[:, None] * s
                s = s + torch.outer(key, beta[row, t, head] * (v[row, t, head] - key @ s))
                out[row, t, head] = query @ s / len(key) ** 0.5
            last[row, head] = s
    return out, last


def errors_of_blocks(rank: int, world: int) -> dict[str, float]:
    from mt_models.blocks.triton_kernels.delta_step import triton_delta_step

    found = {}
    for name, shape in STEPS.items():
        inputs, state = delta_case(*shape)
        results = zip(triton_delta_step(inputs, state=state), delta_formula(inputs, state), strict=True)
        found[name] = max(float((x - exact).abs().max()) for x, exact in results)
    return found


def test_kernels_compute_the_formulas() -> None:
    (errors,) = run_interpreted(errors_of_blocks)
    assert {name: error for name, error in errors.items() if not error < 5e-6} == {}
    assert len(errors) == len(STEPS)


# -- compiled ------------------------------------------------------------------------------------------

HALF, SINGLE = "*bf16", "*fp32"
STEP = {
    **dict.fromkeys("qkv", HALF), "o": HALF, **dict.fromkeys(("g", "beta", "state", "after"), SINGLE),
    "scale": "fp32", "eps": "fp32",
}  # fmt: skip


def compiled_cases() -> list[tuple[str, str, dict[str, str], dict[str, Any], int, int]]:
    from mt_models.blocks.triton_kernels.delta_step import columns_of

    cases = []
    for by_channel, dim in ((False, 128), (True, 128), (False, 256), (True, 64)):
        step = {"BY_CHANNEL": by_channel, "DIM": dim, "VALUE": dim, "BLOCK_DIM": dim}
        cases.append(("delta_step", "_delta_steps", STEP, {**step, "BLOCK_VALUE": columns_of(dim, dim)}, 4, 3))
    return cases


def test_kernels_compile_for_hopper_without_spills(tmp_path, monkeypatch) -> None:
    pytest.importorskip("triton")
    from tests.core.nn.kernels.cubin import bytes_of_stack
    from tests.core.nn.kernels.test_compilation import compile_for_hopper

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for module, *case in compiled_cases():
        assembly = compile_for_hopper(f"mt_models.blocks.triton_kernels.{module}", *case)
        assert bytes_of_stack(assembly["cubin"], tmp_path) == 0, case
