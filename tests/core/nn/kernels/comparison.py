"""A kernel against a formula in fp64: values, and gradients by autograd of the formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
"""Relative to the largest value. In bf16 two last places, since triton's interpreter cuts off where a GPU rounds."""


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normal numbers that ask for a gradient."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()


def assert_agrees(kernel: Callable[..., Any], formula: Callable[..., Any], *args: Any) -> None:
    """kernel(*args) and formula(*args in fp64) have the same values and gradients; dtypes are kept."""
    given = [_copy(x, None) for x in args]
    exact = [_copy(x, torch.float64) for x in args]
    got, wanted = _tuple(kernel(*given)), _tuple(formula(*exact))
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        _close(one, other, args)
    _weighted_sum(got).backward()
    _weighted_sum(wanted).backward()
    for one, other in zip(given, exact, strict=True):
        if isinstance(one, Tensor) and one.requires_grad:
            assert one.grad is not None
            assert one.grad.dtype == one.dtype
            _close(one.grad, other.grad, args)


def _copy(x: Any, dtype: torch.dtype | None) -> Any:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    return x.detach().to(dtype or x.dtype).clone().requires_grad_(x.requires_grad)


def _tuple(x: Any) -> tuple[Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)


def _weighted_sum(outputs: tuple[Tensor, ...]) -> Tensor:
    """Other weights for neighbours, the same numbers in each dtype: multiples of 1/8 between -1 and 1."""
    weights = [((torch.arange(x.numel(), device=x.device) * 7 % 17 - 8) / 8).view(x.shape) for x in outputs]
    return torch.stack([(x * w.to(x.dtype)).sum() for x, w in zip(outputs, weights, strict=True)]).sum()


def _close(got: Tensor, wanted: Tensor, args: tuple[Any, ...]) -> None:
    assert got.shape == wanted.shape
    if not got.numel():
        return
    dtype = next(x.dtype for x in args if isinstance(x, Tensor) and x.is_floating_point())
    difference = (got.double() - wanted).abs().max().item()
    assert difference <= TOLERANCE[dtype] * max(wanted.abs().max().item(), 1.0), f"{difference:.2e} of {got.shape}"
