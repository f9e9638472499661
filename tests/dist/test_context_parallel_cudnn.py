"""cuDNN's attention for blocks of keys: the call, which block gets it, and sums over blocks through it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.tensor  # looks for the operators when it is imported, which a test replaces
from tests.dist.test_context_parallel_parts import tensors

from mt_core import _torch_compat
from mt_core.nn.context_parallel import blocks
from mt_core.nn.context_parallel.blocks import CUDNN, FLASH_CUDA, MATH, Softmax, pick_block_attention
from mt_core.nn.context_parallel.masks import BlockMask


def through_cudnn(device: str) -> list[torch.Tensor]:
    q, k, v, grad = (x.to(device) for x in tensors(16, 16, torch.bfloat16))
    mask = BlockMask(causal=True)
    out, lse = CUDNN.forward(q, k, v, mask)
    return [out, lse, *CUDNN.backward(grad, q, k, v, out, lse, mask)]


def test_the_operators_take_these_arguments() -> None:
    """On meta tensors, which checks the call and the shapes and computes nothing."""
    out, lse, dq, dk, dv = through_cudnn("meta")
    assert out.shape == dq.shape == (2, 6, 16, 8)
    assert lse.shape == (2, 6, 16)
    assert lse.dtype == torch.float32
    assert dk.shape == dv.shape == (2, 3, 16, 8)


class OnGpu:
    """As much of a tensor as the choice looks at."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, head_dim: int = 128) -> None:
        self.dtype, self.shape, self.device = dtype, (1, 8, 64, head_dim), torch.device("cuda")


@pytest.mark.parametrize(
    ("capability", "tensor", "mask", "chosen"),
    [
        ((9, 0), OnGpu(), BlockMask(causal=True), CUDNN),
        ((10, 0), OnGpu(torch.float16, 64), BlockMask(), CUDNN),
        ((8, 0), OnGpu(), BlockMask(), FLASH_CUDA),
        ((9, 0), OnGpu(head_dim=256), BlockMask(), FLASH_CUDA),
        ((9, 0), OnGpu(head_dim=100), BlockMask(), MATH),
        ((9, 0), OnGpu(torch.float32), BlockMask(), MATH),
        ((9, 0), OnGpu(), BlockMask(bias=torch.zeros(1, 1, 4, 4)), MATH),
        ((7, 5), OnGpu(), BlockMask(), MATH),
    ],
)
def test_a_block_gets_the_fastest_kernel_that_serves(capability, tensor, mask, chosen, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    assert pick_block_attention(tensor, tensor, mask, "auto") is chosen
    assert pick_block_attention(tensor, tensor, mask, "math") is MATH


def test_deterministic_runs_do_without_cudnn(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert pick_block_attention(OnGpu(), OnGpu(), BlockMask(), "auto") is FLASH_CUDA


class FakeCudnn:
    """cuDNN's operators on a CPU: torch's flash attention there, with the statistics in cuDNN's shape [B, N, S, 1]."""

    def forward(self, q, k, v, bias, compute_lse, dropout, causal):
        assert bias is None
        assert compute_lse
        assert dropout == 0.0
        out, lse = _torch_compat.flash_cpu_forward(q, k, v, causal, None)
        return out, lse.unsqueeze(-1), None, None, q.shape[2], k.shape[2], None, None, None

    def backward(
        self, grad, q, k, v, out, lse, seed, offset, bias, starts, key_starts, longest, longest_key, p, causal
    ):
        assert lse.shape == (*q.shape[:3], 1)
        assert (bias, starts, key_starts, p) == (None, None, None, 0.0)
        assert (longest, longest_key) == (q.shape[2], k.shape[2])
        return _torch_compat.flash_cpu_backward(grad, q, k, v, out, lse.squeeze(-1), causal, None)


def test_blocks_through_cudnn_add_up_to_one_softmax(monkeypatch) -> None:
    fake = FakeCudnn()
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", fake.forward)
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention_backward", fake.backward)
    q, k, v, grad = tensors(10, 12)
    expected, lse = blocks.math_forward(q, k, v, BlockMask())
    gradients = blocks.math_backward(grad, q, k, v, expected, lse, BlockMask())
    parts = [slice(0, 5), slice(5, 12)]
    result = Softmax(*CUDNN.forward(q, k[:, :, parts[0]], v[:, :, parts[0]], BlockMask()))
    result.add(slice(0, 10), *CUDNN.forward(q, k[:, :, parts[1]], v[:, :, parts[1]], BlockMask()))
    torch.testing.assert_close(result.out, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(result.lse, lse, rtol=1e-5, atol=1e-6)
    found = [
        CUDNN.backward(grad, q, k[:, :, rows], v[:, :, rows], result.out, result.lse, BlockMask()) for rows in parts
    ]
    torch.testing.assert_close(found[0][0] + found[1][0], gradients[0], rtol=1e-5, atol=1e-5)
    for which in (1, 2):
        torch.testing.assert_close(torch.cat([f[which] for f in found], 2), gradients[which], rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs a Hopper GPU"
)
@pytest.mark.parametrize("causal", [False, True])
def test_the_operators_agree_with_the_formula(causal: bool) -> None:
    q, k, v, grad = (x.float() for x in tensors(16, 16, torch.bfloat16))
    mask = BlockMask(causal=causal)
    out, lse = MATH.forward(q, k, v, mask)
    expected = [out, lse, *MATH.backward(grad, q, k, v, out, lse, mask)]
    q, k, v, grad = (x.cuda().bfloat16() for x in (q, k, v, grad))
    out, lse = CUDNN.forward(q, k, v, mask)
    for found, right in zip([out, lse, *CUDNN.backward(grad, q, k, v, out, lse, mask)], expected, strict=True):
        torch.testing.assert_close(found.cpu().float(), right, rtol=2e-2, atol=2e-2)
