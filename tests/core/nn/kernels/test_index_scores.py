"""Scores of an indexer: mt's Triton kernels in Triton's interpreter against the formula in fp64, with the gradients of
queries, weights and keys, and compiled for Hopper."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from tests.core.nn.kernels.interpreter import implementation, run_interpreted
from torch import Tensor

from mt_core.nn.kernels.reference.index_scores import index_scores


class Case(NamedTuple):
    rows: int
    queries: int
    heads: int
    channels: int
    keys: int
    dtype: torch.dtype = torch.float32


CASES = {
    "decode step": Case(2, 1, 3, 20, 70),
    "several tiles of queries and keys": Case(1, 67, 2, 6, 130),
    "few keys": Case(2, 20, 1, 16, 3),
    "bf16": Case(1, 70, 3, 32, 66, torch.bfloat16),
}
NAMES = ("scores", "dq", "dw", "dk")
LARGEST = {torch.float32: 3e-6, torch.bfloat16: 1e-2}
"""Error, as a part of the largest number. Of bf16, gradients of products are rounded before they are multiplied."""


def draw(case: Case) -> tuple[list[Tensor], Tensor]:
    """Queries, weights and keys as slices of wider tensors, and the gradient of scores, 0 for every third key as of one
    that is not seen."""
    generator = torch.Generator().manual_seed(2)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    queries = normal(case.rows, case.queries, case.heads, case.channels + 5)[..., : case.channels].to(case.dtype)
    weights = normal(case.rows, case.queries, case.heads + 1)[..., 1:]
    keys = normal(case.rows, case.keys, case.channels + 3)[..., : case.channels].to(case.dtype)
    grads = normal(case.rows, case.queries, case.keys)
    grads[..., ::3] = 0.0
    return [queries, weights, keys], grads


def formula(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    products = torch.einsum("bshd,btd->bsht", queries, keys) * queries.shape[-1] ** -0.5
    return torch.einsum("bsh,bsht->bst", weights, products.relu())


def results(function: Any, case: Case, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Scores and gradients; dtype: of all inputs, in place of their own."""
    inputs, grads = draw(case)
    leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs]
    scores = function(*leaves)
    return [x.detach() for x in (scores, *torch.autograd.grad(scores, leaves, grads.to(scores.dtype)))]


def error_of(x: Tensor, exact: Tensor) -> float:
    return float((x - exact).abs().max() / exact.abs().max())


def errors_of(function: Any, case: Case) -> dict[str, float]:
    both = zip(results(function, case), results(formula, case, torch.float64), strict=True)
    return {name: error_of(*pair) for name, pair in zip(NAMES, both, strict=True)}


def errors_of_kernels(rank: int, world: int) -> dict[str, dict[str, float]]:
    return {name: errors_of(implementation("index_scores", "triton"), case) for name, case in CASES.items()}


def test_the_reference_is_the_formula() -> None:
    assert max(errors_of(index_scores, CASES["several tiles of queries and keys"]).values()) < 3e-6


@pytest.mark.long
def test_kernels_compute_the_formula_and_its_gradients() -> None:
    (errors,) = run_interpreted(errors_of_kernels)
    assert errors.keys() == CASES.keys()
    for name, of_results in errors.items():
        assert of_results.keys() == set(NAMES)
        limit = LARGEST[CASES[name].dtype]
        assert {part: error for part, error in of_results.items() if not error < limit} == {}, name


def launched() -> None:
    """Scores of an indexer of DeepSeek-V3.2 and their gradients; those of a step of decoding, and of fp32."""
    from mt_core.nn.kernels.triton_kernels.index_scores import index_scores as by_kernels
    from mt_core.nn.kernels.triton_kernels.index_scores import scores_alone

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(*shape, device="meta", dtype=dtype, requires_grad=True)

    single = torch.float32
    queries, weights, keys = empty(1, 4096, 64, 128), empty(1, 4096, 64, dtype=single), empty(1, 4096, 128)
    scores = by_kernels(queries, weights, keys)
    torch.autograd.grad(scores, (queries, weights, keys), torch.empty_like(scores))
    scores_alone(queries[:, :1], weights[:, :1], keys)
    scores_alone(empty(1, 64, 64, 128, dtype=single), weights[:, :64], empty(1, 4096, 128, dtype=single))


@pytest.mark.long
def test_kernels_compile_for_hopper_without_spills(tmp_path, monkeypatch) -> None:
    pytest.importorskip("triton")
    from tests.core.nn.kernels.recorded_launches import compiled, launches_of

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches = launches_of(launched, monkeypatch.setattr)
    assert len(launches) == 5
    for kernel in (compiled(launch, tmp_path) for launch in launches):
        assert kernel.stack == 0, kernel.name
