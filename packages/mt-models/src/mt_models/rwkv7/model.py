"""RWKV-7: x + time_mixing(norm(x)), then x + channel_mixing(norm(x)), over normed embeddings.

Every layer mixes its values with those of the first. They travel with the residual stream from layer to layer, and
between pipeline stages: [B, S, H] and, behind them, as many channels of values.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mt_core.nn.attention import AttentionPattern
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.cache import Cache
from mt_core.nn.layout import LayoutModule, ParameterLayout, normal
from mt_core.nn.linear import ColumnParallelLinear, RowParallelLinear
from mt_core.nn.norm import Norm, build_norm
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.decoder import CausalDecoder, TokenEmbedding
from mt_models.blocks.rotary import RotaryAngles
from mt_models.blocks.token_shift import TokenShift
from mt_models.rwkv7.config import Rwkv7Config
from mt_models.rwkv7.initial_values import initial_mix
from mt_models.rwkv7.time_mixing import TimeMixing, whole_sequences


def stream_norm(config: Rwkv7Config, ctx: ParallelContext) -> Norm:
    return build_norm("LayerNorm", config.hidden_size, config.norm_epsilon, ctx)


class ChannelMixing(LayoutModule):
    """linear_fc2(relu(linear_fc1(x + mix (x_before - x)))^2): [B, S, H] -> the same."""

    mix: Tensor

    def __init__(self, config: Rwkv7Config, ctx: ParallelContext, number: int) -> None:
        super().__init__(ctx)
        hidden = config.hidden_size
        self.shift = TokenShift(hidden, ctx.params_dtype)
        height = 1.0 - number / config.num_layers
        self.declare("mix", ParameterLayout((hidden,), initial_mix([height**4])))
        inner = replace(ctx, sequence_parallel=False)  # sequences are whole within the block
        self.linear_fc1 = ColumnParallelLinear(
            hidden, config.ffn_size, inner, bias=False, init=normal(config.init_method_std)
        )
        self.linear_fc2 = RowParallelLinear(
            config.ffn_size, hidden, ctx, bias=False, init=normal(config.output_init_std)
        )

    def forward(self, x: Tensor, segment_ids: Tensor | None, cache: Cache | None) -> Tensor:
        x = whole_sequences(x, self.ctx)
        mixed = torch.addcmul(x, self.shift(x, segment_ids, cache) - x, self.mix)
        return self.linear_fc2(F.relu(self.linear_fc1(mixed)).square())


class Rwkv7Layer(nn.Module):
    """Layer `number`: [B, S, H] (the first) or [B, S, H + values] -> the input of the next layer, of the last [B, S,
    H]."""

    def __init__(self, config: Rwkv7Config, ctx: ParallelContext, number: int) -> None:
        super().__init__()
        self.hidden, self.is_last = config.hidden_size, number == config.num_layers - 1
        self.input_layernorm = stream_norm(config, ctx)
        self.time_mixing = TimeMixing(config, ctx, number)
        self.pre_mlp_layernorm = stream_norm(config, ctx)
        self.mlp = ChannelMixing(config, ctx, number)

    def forward(
        self,
        x: Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        x, carried = x.split((self.hidden, x.shape[-1] - self.hidden), -1)
        x, normed = self.input_layernorm.add(x)
        # Values are whole sequences of this rank's heads. With sequence parallelism x is a shard of the sequence with
        # all channels, which are as many numbers: values travel in its shape.
        width = self.hidden // self.time_mixing.ctx.tp.size
        values = carried.reshape(len(x), -1, width) if carried.numel() else None
        mixed, values = self.time_mixing(normed, values, pattern.segment_ids, cache)
        x, normed = self.pre_mlp_layernorm.add(x, mixed)
        x = x + self.mlp(normed, pattern.segment_ids, cache)
        return x if self.is_last else torch.cat((x, values.reshape(*x.shape[:2], -1)), -1)


class NormedEmbedding(TokenEmbedding):
    """norm(E[token])"""

    def __init__(self, config: Rwkv7Config, ctx: ParallelContext) -> None:
        super().__init__(config, ctx)
        self.layernorm = stream_norm(config, ctx)

    def forward(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        return self.layernorm(self.word_embeddings(tokens))


class Rwkv7Model(CausalDecoder):
    """tokens [B, S] -> logits [B, S, vocab], of any length."""

    def __init__(self, config: Rwkv7Config, context: ModelBuildContext) -> None:
        ctx = context.parallel
        # DecoderConfigLike requires the shape of attention too, which attention alone reads.
        super().__init__(config, context, NormedEmbedding, lambda number: Rwkv7Layer(config, ctx, number))  # type: ignore[arg-type]


def build_rwkv7(config: Rwkv7Config, context: ModelBuildContext) -> Rwkv7Model:
    """See `ModelSpec.build`."""
    return Rwkv7Model(config, context)
