"""The grouped product that `moe_grouped_gemm=auto` takes, and that the one of GPUs permutes tokens itself."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from tests.moe.fake_gpu import act_as_a_gpu
from tests.moe.moe_cases import Shape, options

from mt_core.parallel.context import ParallelContext
from mt_core.plugins import load_plugins
from mt_moe.experts import experts
from mt_moe.experts.experts import resolve_product
from mt_moe.layer import MoeLayer, build_dispatcher

BF16 = torch.bfloat16
AMPERE, HOPPER, BLACKWELL = (8, 0), (9, 0), (10, 0)
HIDDEN, FFN, TOPK, TOKENS = 64, 32, 2, 12
EVEN, ODD = (HIDDEN, FFN, 2 * FFN), (HIDDEN, FFN + 1, 2 * FFN + 2)
"""Sizes of matrices: of whole 16 bytes, and others."""


@pytest.mark.parametrize(
    ("capability", "dtype", "sizes", "with_triton", "without"),
    [
        (None, BF16, EVEN, "loop", "loop"),
        ((7, 5), BF16, EVEN, "loop", "loop"),
        (AMPERE, BF16, EVEN, "triton", "loop"),
        (HOPPER, BF16, EVEN, "triton", "grouped"),
        (BLACKWELL, BF16, EVEN, "triton", "grouped"),
        ((12, 0), BF16, EVEN, "triton", "loop"),
        (HOPPER, BF16, ODD, "triton", "loop"),
        (HOPPER, torch.float16, EVEN, "triton", "loop"),
        (HOPPER, torch.float32, EVEN, "triton", "loop"),
    ],
)
def test_auto_by_gpu_dtype_and_sizes(capability, dtype, sizes, with_triton, without, monkeypatch) -> None:
    """On the GPU that the meta device represents; None: on a CPU."""
    ctx = ParallelContext(device=torch.device("meta"), params_dtype=dtype)
    assert resolve_product("auto", ctx, sizes, capability) == with_triton
    monkeypatch.setattr(experts, "triton_objection", lambda device_type: "Triton is not installed")
    assert resolve_product("auto", ctx, sizes, capability) == without


def launches(monkeypatch: pytest.MonkeyPatch, **keys: object) -> tuple[Counter[str], Counter[str]]:
    """Of Triton kernels in the forward and the backward pass of a layer in bf16 on Hopper. What reads a value of the
    meta device is an error, so that the host waits for nothing."""
    launched: Counter[str] = Counter()
    act_as_a_gpu(monkeypatch.setattr, launched)
    ctx = ParallelContext(device=torch.device("meta"), params_dtype=BF16)
    config = options(moe_permute_fusion=True, **keys)
    dispatcher = build_dispatcher(config, ctx, load_plugins())
    layer = MoeLayer(Shape(HIDDEN, FFN), config, dispatcher, 0, ctx, planned_capability=HOPPER)
    out = layer(torch.empty(1, TOKENS, HIDDEN, dtype=BF16, device="meta", requires_grad=True))
    forward = launched.copy()
    launched.clear()
    out.backward(torch.empty_like(out))
    return forward, launched


@pytest.mark.slow
def test_by_default_a_gpu_permutes_tokens_in_the_products(monkeypatch) -> None:
    """Two products forward; backward two for inputs and two for weights; and no kernel that copies or sums rows."""
    pytest.importorskip("triton")
    forward, backward = launches(monkeypatch)
    assert forward == {"_grouped_gemm": 2}
    assert backward == {"_grouped_gemm": 2, "_grouped_gemm_outer": 2}
    forward, backward = launches(monkeypatch, moe_grouped_gemm="grouped")
    assert forward == backward == {"_moe_gather_rows": 1, "_moe_sum_rows": 1}
