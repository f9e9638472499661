"""The Mamba-2 mixer: a projection in, short convolutions and a recurrence over the sequence, a gated norm, one out.

Shapes: H heads, P head size, G groups, N state size, k taps of the convolution. Tensor parallelism gives each rank
whole groups and the heads that they serve.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from mt_core.nn.cache import Cache, SequenceState
from mt_core.nn.kernels.choice import Kernels
from mt_core.nn.layout import Init, LayoutModule, ParameterLayout, Split, normal, ones
from mt_core.nn.linear import RowParallelLinear
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.convolutions import picked_convolutions
from mt_models.blocks.linear import PackedColumnParallelLinear, packed_layout
from mt_models.blocks.mamba_backends import STATE_SPACE, build_scans
from mt_models.blocks.mamba_config import MambaLayerConfig
from mt_models.blocks.mamba_scan import ContextParallelScan, MambaScan, ScanInputs, ScanState, ScanWeights
from mt_models.blocks.norm import GatedRMSNorm


class MambaMixer(LayoutModule):
    """x -> out_proj(norm(scan(x, B, C, dt), gate z)): [batch, sequence, hidden] -> the same.

    Rows of in_proj are the blocks z, x, B, C, dt, in Megatron's order, and the channels of conv1d the
    blocks x, B, C. A_log, D and dt_bias are fp32 whatever the dtype of the other weights.
    """

    A_log: Tensor
    D: Tensor
    dt_bias: Tensor

    def __init__(self, config: MambaLayerConfig, ctx: ParallelContext, output_init_std: float) -> None:
        super().__init__(ctx)
        self.head_dim, self.state_dim = config.mamba_head_dim, config.mamba_state_dim
        heads, inner, bias = config.mamba_heads, config.mamba_inner_size, config.mamba_proj_bias
        # B and C have one row for each group and state channel; z and x one
        # for each head channel; dt one for each head.
        shared = config.mamba_num_groups * config.mamba_state_dim
        self.in_proj = PackedColumnParallelLinear(
            config.hidden_size,
            (inner, inner, shared, shared, heads),
            ctx,
            bias=bias,
            init=normal(config.init_method_std),
        )
        self.conv1d = ConvolutionWeights(
            (inner, shared, shared), config.mamba_conv_kernel, ctx, bias=config.mamba_conv_bias
        )
        self._declare_per_head("A_log", heads, decay_rates)
        self._declare_per_head("D", heads, ones)
        self._declare_per_head(
            "dt_bias", heads, time_step_bias(config.mamba_dt_min, config.mamba_dt_max, config.mamba_dt_init_floor)
        )
        self.norm = GatedRMSNorm(inner, config.mamba_num_groups, config.norm_epsilon, ctx)
        self.out_proj = RowParallelLinear(inner, config.hidden_size, ctx, bias=bias, init=normal(output_init_std))
        self.scans = build_scans(STATE_SPACE, config.mamba_scan_backend, ctx, self.state_dim)
        self.scan = MambaScan(
            config.mamba_chunk_size,
            config.mamba_dt_lower_limit,
            config.mamba_dt_upper_limit,
            scan=self.scans.whole,
            step=self.scans.step,
        )
        # `_advance` calls `scan` itself: generation has whole sequences (mt_infer refuses context parallelism).
        self.scan_shards = ContextParallelScan(self.scan, ctx.cp) if ctx.cp.size > 1 else self.scan

    def use_kernels(self, kernels: Kernels) -> None:
        self.scans.note("Mamba-2", kernels)
        self.scan = replace(self.scan, convolutions=picked_convolutions(kernels, self.conv1d.weight.shape[2]))
        self.scan_shards = ContextParallelScan(self.scan, self.ctx.cp) if self.ctx.cp.size > 1 else self.scan

    def _declare_per_head(self, name: str, heads: int, init: Init) -> None:
        # fp32: A_log and dt_bias enter the exponent of a decay that is applied at every position. They are
        # a few numbers for each layer, so that this costs no memory.
        split = Split(dim=0, axis="tp")
        self.declare(name, ParameterLayout((heads,), init, (split,), dtype=torch.float32))

    def forward(self, hidden: Tensor, segment_ids: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """segment_ids [B, S]: the documents of a packed sequence; convolutions and state are reset between them."""
        # z and x [B, S, H P], b and c [B, S, G N], dt [B, S, H], of this rank's groups. With sequence parallelism
        # in_proj gathers S, since the recurrence reads positions in order, and out_proj scatters it.
        z, x, b, c, dt = self.project(hidden)
        inputs = ScanInputs(self._heads(x), self._groups(b), self._groups(c), dt)
        if cache is None:
            y = self.scan_shards(inputs, self.scan_weights(), segment_ids)
        else:
            y = self._advance(inputs, cache)
        return self.out_proj(self.gated(y.flatten(2), z))

    def project(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """[B, S, hidden] -> z, x, b, c and dt"""
        parts: tuple[Tensor, ...] = self.in_proj(hidden)
        return parts

    def gated(self, y: Tensor, z: Tensor) -> Tensor:
        """The output of the scan and the gate, [B, S, H P] each -> the input of out_proj"""
        return self.norm(y, z)

    def _advance(self, inputs: ScanInputs, cache: Cache) -> Tensor:
        # Made once and not inside `advance`, which the cache may call for each sequence.
        weights = self.scan_weights()

        def advance(inputs: tuple[Tensor, ...], state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
            return self.scan.advance(ScanInputs(*inputs), weights, ScanState(*state))

        return cache.advance(self, advance, inputs)

    def cached_state(self) -> SequenceState:
        """The last inputs of the convolutions of x, b and c, and the state of the recurrence. See ScanState."""
        # Inputs of the convolution are activations in the dtype of the weights.
        # The state sums over the whole sequence: fp32.
        kept, dtype = self.conv1d.weight.shape[-1] - 1, self.in_proj.weight.dtype
        convolutions = tuple(((kept, channels), dtype) for channels in self.conv1d.local_blocks)
        heads = self.A_log.shape[0]
        return SequenceState((*convolutions, ((heads, self.head_dim, self.state_dim), torch.float32)))

    def scan_weights(self) -> ScanWeights:
        # [channels, 1, k] -> [channels, k] -> the blocks x, B, C
        weights = self.conv1d.blocks(self.conv1d.weight.squeeze(1))
        biases = None if self.conv1d.bias is None else self.conv1d.blocks(self.conv1d.bias)
        return ScanWeights(
            self._by_head_and_group(weights),
            None if biases is None else self._by_head_and_group(biases),
            self.A_log,
            self.D,
            self.dt_bias,
        )

    def _by_head_and_group(self, blocks: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x, b, c = blocks
        return (
            x.unflatten(0, (-1, self.head_dim)),
            # [H P, ...] -> [H, P, ...] and [G N, ...] -> [G, N, ...]:
            # ContextParallelScan divides heads and groups over ranks.
            b.unflatten(0, (-1, self.state_dim)),
            c.unflatten(0, (-1, self.state_dim)),
        )

    def _heads(self, x: Tensor) -> Tensor:
        """[B, S, H P] -> [B, S, H, P]"""
        return x.unflatten(-1, (-1, self.head_dim))

    def _groups(self, x: Tensor) -> Tensor:
        """[B, S, G N] -> [B, S, G, N]"""
        return x.unflatten(-1, (-1, self.state_dim))


class ConvolutionWeights(LayoutModule):
    """Taps of three concatenated blocks of channels: weight [channels, 1, k], as in torch's Conv1d."""

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        blocks: tuple[int, int, int],
        taps: int,
        ctx: ParallelContext,
        *,
        bias: bool,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(ctx)
        self.local_blocks = [block // ctx.tp.size for block in blocks]
        # torch's default for a depthwise Conv1d, whose fan-in is its taps, and which mamba_ssm leaves as it is.
        init = uniform(1.0 / math.sqrt(taps))
        self.declare("weight", replace(packed_layout(blocks, (1, taps), init), dtype=dtype))
        self.declare("bias", packed_layout(blocks, (), init) if bias else None)

    def blocks(self, channels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[channels, ...] -> its blocks of this rank"""
        x, b, c = channels.split(self.local_blocks)
        return x, b, c


# -- initial values, as those of Dao and Gu --------------------------------------------------------


def uniform(bound: float) -> Init:
    return lambda tensor, generator: tensor.uniform_(-bound, bound, generator=generator)


def decay_rates(tensor: Tensor, generator: torch.Generator) -> None:
    """Logarithms of decay rates, uniform from 1 to 16."""
    tensor.uniform_(1.0, 16.0, generator=generator).log_()


def time_step_bias(low: float, high: float, floor: float) -> Init:
    """Inverse softplus of time steps that are log-uniform from `low` to `high`."""

    def fill(tensor: Tensor, generator: torch.Generator) -> None:
        # softplus^-1(t) = log(exp(t) - 1) = t + log(1 - exp(-t)). The second form does not overflow, and expm1
        # keeps the digits of small t, which are those here: 0.001 to 0.1.
        steps = tensor.uniform_(math.log(low), math.log(high), generator=generator).exp().clamp(min=floor)
        tensor.copy_(steps + torch.log(-torch.expm1(-steps)))

    return fill
