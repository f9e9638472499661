"""From features of the tower to vectors of the decoder's width: [N, F, W] -> [N, F, H]."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from mt_core.nn.activations import activate
from mt_core.nn.layout import normal
from mt_core.nn.linear import ColumnParallelLinear, RowParallelLinear
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.replicated import ReplicatedLinear
from mt_models.llava.config import LlavaConfig


class ProjectionMLP(nn.Module):
    """linear_fc2(activation(linear_fc1(x)))"""

    def __init__(self, config: LlavaConfig, ctx: ParallelContext) -> None:
        super().__init__()
        self.activation = config.projection_activation
        hidden, bias, init = config.decoder.hidden_size, config.projection_bias, normal(config.decoder.init_method_std)
        self.linear_fc1 = ColumnParallelLinear(config.feature_width, hidden, ctx, bias=bias, init=init)
        self.linear_fc2 = RowParallelLinear(hidden, hidden, ctx, bias=bias, init=init)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(activate(self.activation, self.linear_fc1(x)))


class AffineProjection(ReplicatedLinear):
    """One matrix, the same on every tensor-parallel rank."""

    def __init__(self, config: LlavaConfig, ctx: ParallelContext) -> None:
        decoder = config.decoder
        init = normal(decoder.init_method_std)
        super().__init__(config.feature_width, decoder.hidden_size, ctx, init=init, bias=config.projection_bias)


class VisionProjection(nn.Module):
    """The projection that the configuration names, as `encoder`, which is Megatron's name for it."""

    def __init__(self, config: LlavaConfig, ctx: ParallelContext) -> None:
        super().__init__()
        kind = ProjectionMLP if config.vision_projection_type == "mlp" else AffineProjection
        self.encoder = kind(config, replace(ctx, sequence_parallel=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)
