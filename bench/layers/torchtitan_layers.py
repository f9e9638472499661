"""torchtitan's Llama 3 8B layers, run as written: its recipes compile each layer, which this does not count."""

from __future__ import annotations

from collections.abc import Callable

import torch
from counting import FlashAttention, Launches, use_fused_norms
from shapes import HIDDEN, LENGTH
from torch import Tensor, nn


def build(launches: Launches, layers: int) -> tuple[nn.Module, Callable[[Tensor], Tensor], Tensor]:
    use_fused_norms(launches)
    from torchtitan.models.common.attention import FlexAttention
    from torchtitan.models.llama3 import llama3_configs

    def attention(self: nn.Module, q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        """q [B, S, N, D], k and v [B, S, G, D] -> [B, S, N, D]"""
        return FlashAttention.apply(launches, *(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

    FlexAttention.forward = attention
    config = llama3_configs["8B"](attn_backend="flex")
    with torch.device("meta"):
        blocks = nn.ModuleList([config.layers[number].build() for number in range(layers)]).to(torch.bfloat16)
    positions = torch.empty((1, LENGTH), dtype=torch.int64, device="meta")

    def run(hidden: Tensor) -> Tensor:
        for block in blocks:
            hidden = block(hidden, None, positions)
        return hidden

    return blocks, run, torch.empty((1, LENGTH, HIDDEN), dtype=torch.bfloat16, device="meta", requires_grad=True)
