"""From features of the tower to vectors of the decoder's width: [N, F, W] -> [N, F, H]."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from mt_core.nn.activations import activate
from mt_core.nn.layout import normal
from mt_core.nn.linear import ColumnParallelLinear, RowParallelLinear
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.replicated import ReplicatedLinear
from mt_models.llava.config import LlavaConfig, ProjectionActivation


class ProjectionMLP(nn.Module):
    """linear_fc2(activation(linear_fc1(x))): [N, F, width] -> [N, F, H]"""

    def __init__(
        self, width: int, decoder: Any, activation: ProjectionActivation, ctx: ParallelContext, *, bias: bool
    ) -> None:
        """decoder: the configuration of the part that reads the vectors."""
        super().__init__()
        self.activation = activation
        hidden, init = decoder.hidden_size, normal(decoder.init_method_std)
        # The inner width is the decoder's, as in LLaVA 1.5.
        self.linear_fc1 = ColumnParallelLinear(width, hidden, ctx, bias=bias, init=init)
        self.linear_fc2 = RowParallelLinear(hidden, hidden, ctx, bias=bias, init=init)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(activate(self.activation, self.linear_fc1(x)))


class AffineProjection(ReplicatedLinear):
    """One matrix, the same on every tensor-parallel rank."""

    def __init__(self, config: LlavaConfig, ctx: ParallelContext) -> None:
        decoder = config.decoder
        # As a part of the decoder, whose embeddings its outputs stand beside.
        init = normal(decoder.init_method_std)
        super().__init__(config.feature_width, decoder.hidden_size, ctx, init=init, bias=config.projection_bias)


class VisionProjection(nn.Module):
    """The projection that the configuration names, as `encoder`, which is Megatron's name for it."""

    def __init__(self, config: LlavaConfig, ctx: ParallelContext) -> None:
        super().__init__()
        # The tower has whole sequences on every rank.
        whole = replace(ctx, sequence_parallel=False)
        self.encoder: nn.Module
        if config.vision_projection_type == "mlp":
            self.encoder = ProjectionMLP(
                config.feature_width,
                config.decoder,
                config.projection_activation,
                whole,
                bias=config.projection_bias,
            )
        else:
            self.encoder = AffineProjection(config, whole)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.encoder(x)
        return projected
