"""Gated delta net: a projection in, short convolutions of queries, keys and values, the gated delta rule, a gated norm
of each head, a projection out (Yang, Kautz and Hatamizadeh, 2024; Qwen3-Next, 2025).

Shapes: G key heads of D channels, H value heads of V channels, k taps of the convolution. Tensor parallelism gives each
rank whole key heads and the value heads that they serve.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mt_core.nn.attention import AttentionPattern
from mt_core.nn.cache import Cache, SequenceState
from mt_core.nn.kernels.choice import Kernels
from mt_core.nn.layout import Init, LayoutModule, ParameterLayout, Split, normal, ones
from mt_core.nn.linear import RowParallelLinear
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.convolutions import picked_convolutions
from mt_models.blocks.delta_backends import GATED, RuleSizes, build_rules
from mt_models.blocks.delta_scan import ContextParallelDeltaScan, DeltaHeads, DeltaScan, DeltaWeights
from mt_models.blocks.gated_head_norm import GatedHeadNorm
from mt_models.blocks.linear import PackedColumnParallelLinear
from mt_models.blocks.mamba_mixer import ConvolutionWeights
from mt_models.blocks.rotary import RotaryAngles


class DeltaNetConfigLike(Protocol):
    """What a gated delta net reads from the configuration of its model."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def linear_num_key_heads(self) -> int: ...
    @property
    def linear_num_value_heads(self) -> int: ...
    @property
    def linear_key_head_dim(self) -> int: ...
    @property
    def linear_value_head_dim(self) -> int: ...
    @property
    def linear_conv_kernel_dim(self) -> int: ...
    @property
    def linear_chunk_size(self) -> int: ...
    @property
    def linear_attention_backend(self) -> str: ...
    @property
    def linear_allow_neg_eigval(self) -> bool: ...
    @property
    def linear_norm_epsilon(self) -> float: ...
    @property
    def init_method_std(self) -> float: ...
    @property
    def output_init_std(self) -> float: ...


class GatedDeltaNet(LayoutModule):
    """x -> out_proj(out_norm(rule(q, k, v, g, beta)) silu(z)): [batch, sequence, hidden] -> the same.

    Rows of in_proj are the blocks q, k, v, z, b, a, in Megatron's order, and the channels of conv1d the blocks q, k, v.
    A_log and dt_bias are fp32 whatever the dtype of the other weights. It takes the place of self-attention in a layer.

    decay_rates, time_step_bias: initial values of A_log and dt_bias; default: those of Qwen3-Next.
    """

    A_log: Tensor
    dt_bias: Tensor

    def __init__(
        self,
        config: DeltaNetConfigLike,
        ctx: ParallelContext,
        *,
        decay_rates: Init | None = None,
        time_step_bias: Init = ones,
    ) -> None:
        super().__init__(ctx)
        key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        keys, values = key_heads * self.key_dim, value_heads * self.value_dim
        self.in_proj = PackedColumnParallelLinear(
            config.hidden_size,
            (keys, keys, values, values, value_heads, value_heads),
            ctx,
            bias=False,
            init=normal(config.init_method_std),
        )
        self.conv1d = ConvolutionWeights((keys, keys, values), config.linear_conv_kernel_dim, ctx, bias=False)
        self._declare_per_head("A_log", value_heads, decay_rates or log_uniform(0.01, 16.0))
        self._declare_per_head("dt_bias", value_heads, time_step_bias)
        self.out_norm = GatedHeadNorm(self.value_dim, config.linear_norm_epsilon, F.silu, ctx)
        self.out_proj = RowParallelLinear(
            values, config.hidden_size, ctx, bias=False, init=normal(config.output_init_std)
        )
        heads = DeltaHeads(key_heads // ctx.tp.size, self.key_dim, value_heads // ctx.tp.size, self.value_dim)
        sizes = RuleSizes.of(ctx, self.key_dim, self.value_dim)
        self.rules = build_rules(GATED, config.linear_attention_backend, config.linear_chunk_size, sizes)
        strength = 2.0 if config.linear_allow_neg_eigval else 1.0
        self.scan = DeltaScan(heads, self.rules.whole, strength, step=self.rules.step)
        # `_advance` calls `scan` itself: generation has whole sequences (mt_infer refuses context parallelism).
        self.scan_shards = ContextParallelDeltaScan(self.scan, ctx.cp) if ctx.cp.size > 1 else self.scan

    def _declare_per_head(self, name: str, heads: int, init: Init) -> None:
        # fp32: both enter the exponent of a decay that is applied at every position.
        split = Split(dim=0, axis="tp")
        self.declare(name, ParameterLayout((heads,), init, (split,), dtype=torch.float32))

    def use_kernels(self, kernels: Kernels) -> None:
        self.rules.note("gated delta rule", kernels)
        self.scan = replace(self.scan, convolutions=picked_convolutions(kernels, self.conv1d.weight.shape[2]))
        self.scan_shards = ContextParallelDeltaScan(self.scan, self.ctx.cp) if self.ctx.cp.size > 1 else self.scan

    def forward(
        self, hidden: Tensor, pattern: AttentionPattern, angles: RotaryAngles | None = None, cache: Cache | None = None
    ) -> Tensor:
        """pattern: its segment_ids [B, S] are the documents of a packed sequence, between which convolutions and state
        are reset. angles are not used: the recurrence has the order of its positions."""
        # mixed [B, S, 2 G D + H V] (queries, keys and values), z [B, S, H V], b and a [B, S, H], of this rank's heads.
        # With sequence parallelism in_proj gathers S, since the recurrence reads positions in order, and out_proj
        # scatters it.
        keys, _, values, gates, *rates = self.in_proj.local_blocks
        mixed, z, b, a = self.in_proj.joined(hidden).split((2 * keys + values, gates, *rates), -1)
        if cache is None:
            o = self.scan_shards(mixed, b, a, self.scan_weights(), pattern.segment_ids)
        else:
            o = self._advance((mixed, b, a), cache)
        normed = self.out_norm(o, z.unflatten(-1, (-1, self.value_dim)))
        return self.out_proj(normed.flatten(2))

    def _advance(self, inputs: tuple[Tensor, Tensor, Tensor], cache: Cache) -> Tensor:
        # Made once and not inside `advance`, which the cache may call for each sequence.
        weights = self.scan_weights()

        def advance(new: tuple[Tensor, ...], state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
            mixed, b, a = new
            past, before = state
            return self.scan.advance(mixed, b, a, weights, past, before)

        return cache.advance(self, advance, inputs)

    def cached_state(self) -> SequenceState:
        """The last inputs of the convolutions, and the state of the recurrence."""
        channels, _, taps = self.conv1d.weight.shape
        state = (self.A_log.shape[0], self.key_dim, self.value_dim)
        # The state sums over the whole sequence: fp32.
        return SequenceState((((taps - 1, channels), self.in_proj.weight.dtype), (state, torch.float32)))

    def scan_weights(self) -> DeltaWeights:
        return DeltaWeights(self.conv1d.weight.squeeze(1), self.A_log, self.dt_bias)


# -- initial values ------------------------------------------------------------------------------------


def log_uniform(low: float, high: float) -> Init:
    """Logarithms of numbers that are uniform from low to high, and not 0."""
    smallest = torch.finfo(torch.float32).tiny

    def fill(tensor: Tensor, generator: torch.Generator) -> None:
        tensor.uniform_(low, high, generator=generator).clamp_(min=smallest).log_()

    return fill
