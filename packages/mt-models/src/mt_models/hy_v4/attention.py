"""Latent attention of Hy4: over the keys that an indexer chooses, with a sink in each head and a gate of each channel.

    o_n = attention_n of softmax(scores_n, sink_n), whose last weight has no value      out = W_o (sigmoid(W_g x) o)

Channels of the two halves of what is rotated turn together, in attention and in the indexer, where it is the last
channels of a head.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mt_core.nn.attention import AttentionCore, AttentionPattern, eager_attention
from mt_core.nn.cache import PagedScores
from mt_core.nn.layout import LayoutModule, ParameterLayout, Split, normal, zeros
from mt_core.nn.linear import ColumnParallelLinear
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.indexer import Indexer
from mt_models.blocks.rotary import RotaryAngles, rotate
from mt_models.blocks.sparse_latent_attention import Choices, SparseAttentionConfigLike, SparseLatentAttention


class LastChannelsIndexer(Indexer):
    """An indexer that rotates the last channels of its heads."""

    def rotated(self, heads: Tensor, angles: RotaryAngles) -> Tensor:
        turned = 2 * angles.cos.shape[-1]
        plain, last = heads.split((self.size - turned, turned), -1)
        return torch.cat((plain, super().rotated(last, angles)), -1)


class Sinks(LayoutModule):
    """A logit of each head without a value: softmax_offset [N] in fp32, sharded over tp as the heads are."""

    softmax_offset: Tensor

    def __init__(self, heads: int, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        layout = ParameterLayout((heads,), zeros, (Split(dim=0, axis="tp"),), dtype=torch.float32)
        self.declare("softmax_offset", layout)


class HyV4Attention(SparseLatentAttention):
    """Rows of linear_gate [N V, hidden] are for each head those of the channels of its value."""

    def __init__(
        self,
        config: SparseAttentionConfigLike,
        core: AttentionCore,
        ctx: ParallelContext,
        number: int,
        choices: Choices,
        *,
        remakes_heads: bool = False,
    ) -> None:
        super().__init__(config, core, ctx, number, choices, remakes_heads=remakes_heads)
        heads = config.num_attention_heads
        self.sinks = Sinks(heads, ctx)
        # The one that serves sinks on every device.
        self.core_of_latents = eager_attention()
        self.linear_gate = ColumnParallelLinear(
            config.hidden_size, heads * self.value, ctx, bias=False, init=normal(config.init_method_std)
        )

    def build_indexer(self, config: SparseAttentionConfigLike, ctx: ParallelContext) -> Indexer:
        return LastChannelsIndexer(config, ctx)

    def rotate(self, x: Tensor, angles: RotaryAngles) -> Tensor:
        return rotate(x, angles.cos, angles.sin, interleaved=False)

    def attend_heads(self, q: Tensor, k: Tensor, v: Tensor, pattern: AttentionPattern) -> Tensor:
        return self.core(q, k, v, pattern, self.dropout.begin(), self.sinks.softmax_offset)

    def attend_shared(self, q: Tensor, k: Tensor, v: Tensor, pattern: AttentionPattern) -> Tensor:
        return self.core_of_latents(q, k, v, pattern, 0.0, self.sinks.softmax_offset)

    def paged_scores(self) -> PagedScores:
        return replace(super().paged_scores(), sinks=self.sinks.softmax_offset)

    def key_weights(self, scores: Tensor) -> Tensor:
        sinks = self.sinks.softmax_offset.to(scores.dtype)[None, :, None].expand(*scores.shape[:2], 1)
        return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]

    def output(self, heads: Tensor, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.linear_gate(x)).unflatten(-1, (-1, self.value))
        return super().output(heads * gate, x)
