"""A language model of gated causal convolutions.

B batch, S sequence, H hidden, C channels of this rank, K kernel size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mt_core.nn import (
    ColumnParallelLinear,
    LayoutModule,
    Model,
    ModelEnvironment,
    ParameterLayout,
    RMSNorm,
    RowParallelLinear,
    Split,
    VocabParallelEmbedding,
    VocabParallelOutput,
    normal,
)
from mt_core.parallel import ParallelContext
from mt_plugin_example.config import ConvConfig


class ConvCache:
    """The last K - 1 inputs of every convolution, so that decoding computes each position once."""

    def __init__(self, num_layers: int) -> None:
        self.past: list[Tensor | None] = [None] * num_layers


class CausalConv(LayoutModule):
    """y[s] = sum over k of w[k] * x[s - k], for each channel by itself."""

    weight: Tensor

    def __init__(self, channels: int, kernel_size: int, ctx: ParallelContext, *, std: float) -> None:
        super().__init__(ctx)
        self.kernel_size = kernel_size
        # A parameter with a layout of its own: channels are sharded over the tensor-parallel axis.
        layout = ParameterLayout((channels, kernel_size), normal(std), (Split(dim=0, axis="tp"),))
        self.declare("weight", layout)

    def forward(self, x: Tensor, past: Tensor | None = None, segment_ids: Tensor | None = None) -> Tensor:
        """[B, S, C] -> the same. past [B, K - 1, C]: inputs before x, else zeros. segment_ids [B, S]: positions
        see only their own document."""
        padded = self.with_past(x, past)
        documents = None if segment_ids is None else F.pad(segment_ids, (self.kernel_size - 1, 0), value=-1)
        y = torch.zeros_like(x)
        for back in range(self.kernel_size):
            start = self.kernel_size - 1 - back
            shifted = padded[:, start : start + x.shape[1]]
            if documents is not None:
                same = documents[:, start : start + x.shape[1]] == segment_ids
                shifted = shifted * same[..., None]
            y = y + shifted * self.weight[:, back]
        return y

    def with_past(self, x: Tensor, past: Tensor | None) -> Tensor:
        """[B, S, C] -> [B, K - 1 + S, C]"""
        return F.pad(x, (0, 0, self.kernel_size - 1, 0)) if past is None else torch.cat([past, x], dim=1)


class GatedConv(nn.Module):
    """linear_out(silu(gate) * conv(value)), gate and value from one matrix."""

    def __init__(self, config: ConvConfig, ctx: ParallelContext) -> None:
        super().__init__()
        hidden, std = config.hidden_size, config.init_method_std
        self.linear_in = ColumnParallelLinear(hidden, 2 * hidden, ctx, bias=False, init=normal(std), sections=2)
        self.conv = CausalConv(hidden, config.kernel_size, ctx, std=config.kernel_size**-0.5)
        self.linear_out = RowParallelLinear(hidden, hidden, ctx, bias=False, init=normal(config.output_init_std))

    def forward(self, x: Tensor, segment_ids: Tensor | None, cache: ConvCache | None, layer: int) -> Tensor:
        gate, value = self.linear_in(x).chunk(2, dim=-1)
        past = cache.past[layer] if cache else None
        if cache is not None:
            seen = self.conv.with_past(value, past)
            cache.past[layer] = seen[:, seen.shape[1] - (self.conv.kernel_size - 1) :]
        return self.linear_out(F.silu(gate) * self.conv(value, past, segment_ids))


class ConvLayer(nn.Module):
    """x + conv(norm(x)), then x + feed_forward(norm(x)): [B, S, H] -> the same."""

    def __init__(self, config: ConvConfig, environment: ModelEnvironment, number: int) -> None:
        super().__init__()
        ctx = environment.parallel
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_epsilon, ctx)
        self.mixer = GatedConv(config, ctx)
        self.pre_mlp_layernorm = RMSNorm(config.hidden_size, config.norm_epsilon, ctx)
        self.mlp = environment.feed_forward("dense", config, number)

    def forward(self, x: Tensor, segment_ids: Tensor | None, cache: ConvCache | None, layer: int) -> Tensor:
        x = x + self.mixer(self.input_layernorm(x), segment_ids, cache, layer)
        return x + self.mlp(self.pre_mlp_layernorm(x))


class ConvModel(Model):
    """tokens [B, S] -> logits [B, S, vocab]."""

    inputs = ("tokens", "segment_ids")
    """Arrays of a batch that the trainer passes."""
    continues_text = True
    """`mt generate` takes it: there is `new_cache`."""

    def __init__(self, config: ConvConfig, environment: ModelEnvironment) -> None:
        super().__init__()
        assert config.vocab_size is not None  # filled in from the tokenizer before a model is built
        self.config = config
        table = {"init": normal(config.init_method_std), "divisible_by": config.make_vocab_size_divisible_by}
        shape = (config.vocab_size, config.hidden_size)
        self.word_embeddings = VocabParallelEmbedding(*shape, environment.parallel, **table)
        self.layers = nn.ModuleList(ConvLayer(config, environment, number) for number in range(config.num_layers))
        self.final_layernorm = RMSNorm(config.hidden_size, config.norm_epsilon, environment.parallel)
        self.output_layer = VocabParallelOutput(*shape, environment.parallel, **table)

    def forward(self, tokens: Tensor, segment_ids: Tensor | None = None, cache: ConvCache | None = None) -> Tensor:
        x = self.word_embeddings(tokens)
        for number, layer in enumerate(self.layers):
            x = layer(x, segment_ids, cache, number)
        return self.output_layer(self.final_layernorm(x))

    def new_cache(self, capacity: int) -> ConvCache:
        """For `mt generate`; what is kept does not grow with `capacity`."""
        return ConvCache(self.config.num_layers)


def build_conv(config: ConvConfig, environment: ModelEnvironment) -> ConvModel:
    return ConvModel(config, environment)
