"""Kimi delta attention as a block of a decoder: projections in, short convolutions of queries, keys and values, the
rule with a decay of each channel, a gated norm of each head, a projection out (Kimi Linear, 2025).

Decays and the gate of the output come from the input by two matrices each, with as many channels between them as a head
has, or by one: both of Ling 3.0 (2026), the gate of Kimi K3 (2026). Tensor parallelism gives each rank whole heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from mt_core.nn.attention import AttentionPattern
from mt_core.nn.cache import Cache, SequenceState
from mt_core.nn.kernels.choice import Kernels
from mt_core.nn.layout import Init, LayoutModule, ParameterLayout, Split, normal
from mt_core.nn.linear import ColumnParallelLinear, RowParallelLinear
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.convolutions import picked_convolutions
from mt_models.blocks.delta_backends import KIMI, RuleSizes, build_rules
from mt_models.blocks.delta_scan import ContextParallelDeltaScan, DeltaHeads, DeltaScan, DeltaWeights
from mt_models.blocks.gated_delta_net import DeltaNetConfigLike, log_uniform
from mt_models.blocks.gated_head_norm import Fp32GatedHeadNorm
from mt_models.blocks.kimi_delta_rule import recurrent_kimi_rule
from mt_models.blocks.linear import PackedColumnParallelLinear, ReplicatedLinear
from mt_models.blocks.mamba_mixer import ConvolutionWeights, time_step_bias
from mt_models.blocks.rotary import RotaryAngles


@dataclass(frozen=True)
class KimiDeltaScan(DeltaScan):
    """DeltaScan with a [B, S, H D] and dt_bias [H D]: a decay of each channel.

    lower_bound: g = lower_bound sigmoid(exp(A_log) (a + dt_bias)) in place of -exp(A_log) softplus(a + dt_bias).
    """

    lower_bound: float | None = None

    def _decays(self, a: Tensor, weights: DeltaWeights) -> Tensor:
        """[B, S, H, D]"""
        inner = (a.float() + weights.dt_bias).unflatten(-1, (-1, self.heads.key_dim))
        rates = weights.A_log.float().exp()[:, None]
        return -rates * F.softplus(inner) if self.lower_bound is None else self.lower_bound * (rates * inner).sigmoid()


class KimiDeltaNet(LayoutModule):
    """x -> out_proj(out_norm(rule(q, k, v, g, beta)) sigmoid(gate)): [batch, sequence, hidden] -> the same.

    Rows of in_proj are the blocks q, k, v, b. A_log and dt_bias are fp32 whatever the dtype of the other weights. It
    takes the place of self-attention in a layer.

    lower_bound: see `KimiDeltaScan`. fp32_taps: so are the taps of the convolutions, which are computed in it.
    initial_rates: of A_log; default: rates from 1 to 16.
    """

    A_log: Tensor
    dt_bias: Tensor

    def __init__(
        self,
        config: DeltaNetConfigLike,
        ctx: ParallelContext,
        *,
        lower_bound: float | None = None,
        fp32_taps: bool = False,
        initial_rates: Init | None = None,
    ) -> None:
        super().__init__(ctx)
        heads, self.size = config.linear_num_key_heads, config.linear_key_head_dim
        width, init = heads * self.size, normal(config.init_method_std)
        self.in_proj = PackedColumnParallelLinear(
            config.hidden_size, (width, width, width, heads), ctx, bias=False, init=init
        )
        self.conv1d = ConvolutionWeights(
            (width, width, width),
            config.linear_conv_kernel_dim,
            ctx,
            bias=False,
            dtype=torch.float32 if fp32_taps else None,
        )
        self._declare_gates(config, width)
        split, rates = Split(dim=0, axis="tp"), initial_rates or log_uniform(1.0, 16.0)
        self.declare("A_log", ParameterLayout((heads,), rates, (split,), dtype=torch.float32))
        steps = time_step_bias(1e-3, 0.1, 1e-4)
        self.declare("dt_bias", ParameterLayout((width,), steps, (split,), dtype=torch.float32))
        self.out_norm = Fp32GatedHeadNorm(self.size, config.linear_norm_epsilon, torch.sigmoid, ctx)
        self.out_proj = RowParallelLinear(
            width, config.hidden_size, ctx, bias=False, init=normal(config.output_init_std)
        )
        local = DeltaHeads(heads // ctx.tp.size, self.size, heads // ctx.tp.size, self.size)
        sizes = RuleSizes.of(ctx, self.size, self.size)
        self.rules = build_rules(KIMI, config.linear_attention_backend, config.linear_chunk_size, sizes)
        self.scan = KimiDeltaScan(local, self.rules.whole, 1.0, recurrent_kimi_rule, self.rules.step, lower_bound)
        self.scan_shards = ContextParallelDeltaScan(self.scan, ctx.cp) if ctx.cp.size > 1 else self.scan

    def _declare_gates(self, config: DeltaNetConfigLike, width: int) -> None:
        """The matrices of decays and of the gate of the output."""
        self.forget_down_proj, self.forget_up_proj = self._low_rank(config, width)
        self.gate_down_proj, self.gate_up_proj = self._low_rank(config, width)

    def _low_rank(self, config: DeltaNetConfigLike, width: int) -> tuple[ReplicatedLinear, ColumnParallelLinear]:
        init = normal(config.init_method_std)
        down = ReplicatedLinear(config.hidden_size, self.size, self.ctx, init=init, bias=False, on_sequence=True)
        return down, ColumnParallelLinear(self.size, width, self.ctx, bias=False, init=init)

    def _full_rank(self, config: DeltaNetConfigLike, width: int) -> ColumnParallelLinear:
        return ColumnParallelLinear(
            config.hidden_size, width, self.ctx, bias=False, init=normal(config.init_method_std)
        )

    def use_kernels(self, kernels: Kernels) -> None:
        self.rules.note("Kimi delta rule", kernels)
        self.scan = replace(self.scan, convolutions=picked_convolutions(kernels, self.conv1d.weight.shape[2]))
        self.scan_shards = ContextParallelDeltaScan(self.scan, self.ctx.cp) if self.ctx.cp.size > 1 else self.scan

    def decay_input(self, hidden: Tensor) -> Tensor:
        """[B, S, H D] of this rank's heads, without dt_bias."""
        decays: Tensor = self.forget_up_proj(self.forget_down_proj(hidden))
        return decays

    def output_gate(self, hidden: Tensor) -> Tensor:
        """[B, S, H D] of this rank's heads, before the sigmoid."""
        gate: Tensor = self.gate_up_proj(self.gate_down_proj(hidden))
        return gate

    def forward(
        self, hidden: Tensor, pattern: AttentionPattern, angles: RotaryAngles | None = None, cache: Cache | None = None
    ) -> Tensor:
        """pattern: its segment_ids [B, S] are the documents of a packed sequence, between which convolutions and state
        are reset. angles are not used."""
        *qkv, heads = self.in_proj.local_blocks
        mixed, b = self.in_proj.joined(hidden).split((sum(qkv), heads), -1)
        a, gate = self.decay_input(hidden), self.output_gate(hidden)
        if cache is None:
            o = self.scan_shards(mixed, b, a, self.scan_weights(), pattern.segment_ids)
        else:
            o = self._advance((mixed, b, a), cache)
        return self.out_proj(self.out_norm(o, gate.unflatten(-1, (-1, self.size))).flatten(2))

    def _advance(self, inputs: tuple[Tensor, Tensor, Tensor], cache: Cache) -> Tensor:
        weights = self.scan_weights()

        def advance(new: tuple[Tensor, ...], state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
            mixed, b, a = new
            past, before = state
            return self.scan.advance(mixed, b, a, weights, past, before)

        return cache.advance(self, advance, inputs)

    def cached_state(self) -> SequenceState:
        """The last inputs of the convolutions, and the state of the recurrence."""
        channels, _, taps = self.conv1d.weight.shape
        state = (self.A_log.shape[0], self.size, self.size)
        return SequenceState((((taps - 1, channels), self.in_proj.weight.dtype), (state, torch.float32)))

    def scan_weights(self) -> DeltaWeights:
        return DeltaWeights(self.conv1d.weight.squeeze(1), self.A_log, self.dt_bias)


class FullGateKimiDeltaNet(KimiDeltaNet):
    """The same with one matrix for the gate of the output."""

    def _declare_gates(self, config: DeltaNetConfigLike, width: int) -> None:
        self.forget_down_proj, self.forget_up_proj = self._low_rank(config, width)
        self.gate_proj = self._full_rank(config, width)

    def output_gate(self, hidden: Tensor) -> Tensor:
        gate: Tensor = self.gate_proj(hidden)
        return gate


class FullRankKimiDeltaNet(FullGateKimiDeltaNet):
    """The same with one matrix for decays, too."""

    def _declare_gates(self, config: DeltaNetConfigLike, width: int) -> None:
        self.forget_proj, self.gate_proj = self._full_rank(config, width), self._full_rank(config, width)

    def decay_input(self, hidden: Tensor) -> Tensor:
        decays: Tensor = self.forget_proj(hidden)
        return decays
