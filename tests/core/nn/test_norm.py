"""Norms without kernels of their own."""

from __future__ import annotations

import torch

from mt_core.nn.norm import build_norm
from mt_core.parallel.context import ParallelContext


def test_the_residual_stream_keeps_its_dtype_whatever_that_of_a_branch() -> None:
    norm = build_norm("LayerNorm", 4, 1e-5, ParallelContext(params_dtype=torch.bfloat16))
    torch.nn.init.ones_(norm.weight)
    torch.nn.init.zeros_(norm.bias)
    x = torch.tensor([[1.0, 2.0, 3.0, 5.0]], dtype=torch.bfloat16)
    branch = torch.tensor([[0.1, 0.2, 0.3, 0.5]])
    total, normed = norm.add(x, branch)
    assert (total.dtype, normed.dtype) == (torch.bfloat16, torch.bfloat16)
    assert torch.equal(total, (x.float() + branch).bfloat16())
