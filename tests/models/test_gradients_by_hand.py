"""Gradients that blocks of recurrent layers compute by hand, against numerical ones and against autograd's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mt_core.nn.batch_invariance import batch_invariant
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.convolutions import causal_conv
from mt_models.blocks.gated_head_norm import GatedHeadNorm


@pytest.mark.parametrize("length", [2, 7])
def test_shifted_convolution(length: int) -> None:
    """Fewer positions than taps, and more; part of a wider projection. conv1d computes it under batch invariance."""
    wide = torch.randn(2, length, 9, dtype=torch.float64, requires_grad=True)
    taps, bias = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((6, 4), (6,)))
    assert torch.autograd.gradcheck(lambda *x: causal_conv(x[0][..., 2:8], *x[1:]), (wide, taps, bias))
    with batch_invariant(True):
        expected = causal_conv(wide[..., 2:8], taps, bias)
    torch.testing.assert_close(causal_conv(wide[..., 2:8], taps, bias), expected)


def test_norm_with_a_gate() -> None:
    norm = GatedHeadNorm(5, 1e-3, F.silu, ParallelContext())
    values = [torch.randn(2, 3, 4, 5, requires_grad=True) for _ in range(2)]
    with torch.no_grad():
        norm.weight.normal_()
    y = norm(*values)
    leaves = [*(x.detach().double().requires_grad_() for x in (*values, norm.weight))]
    x, gate, weight = leaves
    expected = weight * x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * F.silu(gate)
    torch.testing.assert_close(y.double(), expected, atol=1e-6, rtol=1e-5)
    dy = torch.randn(y.shape)
    found = torch.autograd.grad(y, [*values, norm.weight], dy)
    for gradient, exact in zip(found, torch.autograd.grad(expected, leaves, dy.double()), strict=True):
        torch.testing.assert_close(gradient.double(), exact, atol=1e-6, rtol=1e-5)
