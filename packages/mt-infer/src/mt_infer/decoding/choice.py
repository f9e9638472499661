"""Which implementation of paged attention a device gets."""

from __future__ import annotations

import torch

from mt_core.nn.kernels.request import KernelRequest, supports_triton
from mt_infer.decoding.paged_attention import PagedAttention, plain_paged_attention


def choose_paged_attention(device: torch.device, dtype: torch.dtype) -> PagedAttention:
    """The Triton kernel on a GPU that it can run on, else plain torch."""
    request = KernelRequest(device_type=device.type, dtype=str(dtype).removeprefix("torch."))
    if device.type != "cuda" or supports_triton(request) is not True:
        return plain_paged_attention
    # Not at the top of the module: Triton is not installed everywhere.
    from mt_infer.decoding.triton_attention import triton_paged_attention

    return triton_paged_attention
