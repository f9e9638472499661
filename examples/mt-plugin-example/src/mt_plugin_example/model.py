"""A language model of gated causal convolutions.

B batch, S sequence, H hidden, C channels of this rank, K kernel size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mt_core.nn import (
    Cache,
    ColumnParallelLinear,
    LayoutModule,
    Model,
    ModelBuildContext,
    ParameterLayout,
    RMSNorm,
    RowParallelLinear,
    SequenceState,
    Split,
    VocabParallelEmbedding,
    VocabParallelOutput,
    normal,
)
from mt_core.parallel import ParallelContext, Stage
from mt_plugin_example.config import ConvConfig


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

    def forward(self, x: Tensor, segment_ids: Tensor | None, cache: Cache | None) -> Tensor:
        gate, value = self.linear_in(x).chunk(2, dim=-1)
        mixed = self.conv(value, None, segment_ids) if cache is None else cache.advance(self, self.advance, (value,))
        return self.linear_out(F.silu(gate) * mixed)

    def cached_state(self) -> SequenceState:
        """For generation: the last K - 1 inputs of the convolution, so that each position is computed once."""
        weight = self.conv.weight
        return SequenceState((((self.conv.kernel_size - 1, len(weight)), weight.dtype),))

    def advance(self, inputs: tuple[Tensor, ...], state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """value [B, S, C], past [B, K - 1, C] -> the convolution's output, and the past of what follows"""
        (value,), (past,) = inputs, state
        seen = self.conv.with_past(value, past)
        return self.conv(value, past), (seen[:, value.shape[1] :],)


class ConvLayer(nn.Module):
    """x + conv(norm(x)), then x + feed_forward(norm(x)): [B, S, H] -> the same."""

    def __init__(self, config: ConvConfig, environment: ModelBuildContext, number: int) -> None:
        super().__init__()
        ctx = environment.parallel
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_epsilon, ctx)
        self.mixer = GatedConv(config, ctx)
        self.pre_mlp_layernorm = RMSNorm(config.hidden_size, config.norm_epsilon, ctx)
        self.mlp = environment.feed_forward("dense", config, number)

    def forward(self, x: Tensor, segment_ids: Tensor | None, cache: Cache | None) -> Tensor:
        x = x + self.mixer(self.input_layernorm(x), segment_ids, cache)
        return x + self.mlp(self.pre_mlp_layernorm(x))


class ConvModel(Model):
    """tokens [B, S] -> logits [B, S, vocab]."""

    inputs = ("tokens", "segment_ids")
    """Arrays of a batch that the trainer passes."""
    continues_text = True
    """`mt generate` takes it: there is `decode_stage`."""

    def __init__(self, config: ConvConfig, environment: ModelBuildContext) -> None:
        super().__init__()
        assert config.vocab_size is not None  # filled in from the tokenizer before a model is built
        self.config = config
        table = {"init": normal(config.init_method_std), "divisible_by": config.make_vocab_size_divisible_by}
        shape = (config.vocab_size, config.hidden_size)
        self.word_embeddings = VocabParallelEmbedding(*shape, environment.parallel, **table)
        self.layers = nn.ModuleList(ConvLayer(config, environment, number) for number in range(config.num_layers))
        self.final_layernorm = RMSNorm(config.hidden_size, config.norm_epsilon, environment.parallel)
        self.output_layer = VocabParallelOutput(*shape, environment.parallel, **table)

    def forward(self, tokens: Tensor, segment_ids: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        x = self.word_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, segment_ids, cache)
        x = self.final_layernorm(x)
        return self.output_layer(x if cache is None else cache.positions_for_logits(x))

    def decode_stage(self, stage: Stage, hidden: Tensor | None, cache: Cache) -> Tensor:
        """The new positions of generated texts. All layers are one stage: the model has no pipeline stages."""
        return self(cache.tokens, cache=cache)

    @property
    def decoded_layers(self) -> int:
        return self.config.num_layers


def build_conv(config: ConvConfig, environment: ModelBuildContext) -> ConvModel:
    return ConvModel(config, environment)
