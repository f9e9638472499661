"""LLaVA (Liu et al., 2023): states of an image tower, side by side, projected to the hidden size of a decoder."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from mt_core.nn.activations import activate
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.layout import normal
from mt_core.nn.linear import ColumnParallelLinear, RowParallelLinear
from mt_core.nn.norm import build_norm
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.linear import ReplicatedLinear
from mt_models.llava.config import LlavaConfig, ProjectionActivation
from mt_models.llava.vision_language import FixedSizeImageModel
from mt_models.vision.model import pixel_shuffle

# -- projection to the decoder's width: [N, F, W] -> [N, F, H] ---------------------------------------


class ProjectionMLP(nn.Module):
    """linear_fc2(activation(linear_fc1(x))): [N, F, width] -> [N, F, H]"""

    def __init__(
        self,
        width: int,
        decoder: Any,
        activation: ProjectionActivation,
        ctx: ParallelContext,
        *,
        bias: bool,
        inner: int | None = None,
    ) -> None:
        """decoder: the configuration of the part that reads the vectors. inner: the width between the matrices."""
        super().__init__()
        self.activation = activation
        hidden, init = decoder.hidden_size, normal(decoder.init_method_std)
        # By default it is the decoder's, as in LLaVA 1.5.
        inner = inner or hidden
        self.linear_fc1 = ColumnParallelLinear(width, inner, ctx, bias=bias, init=init)
        self.linear_fc2 = RowParallelLinear(inner, hidden, ctx, bias=bias, init=init)

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
        self.grid, self.factor = config.vision_model.grid, config.scale_factor
        self.input_layernorm: nn.Module | None = None
        if (kind := config.projection_normalization) != "none":
            self.input_layernorm = build_norm(kind, config.feature_width, config.projection_norm_epsilon, whole)
        self.encoder: nn.Module
        if config.vision_projection_type == "mlp":
            self.encoder = ProjectionMLP(
                config.feature_width,
                config.decoder,
                config.projection_activation,
                whole,
                bias=config.projection_bias,
                inner=config.projection_ffn_hidden_size,
            )
        else:
            self.encoder = AffineProjection(config, whole)

    def forward(self, x: Tensor) -> Tensor:
        if self.factor > 1:
            x = pixel_shuffle(x, self.grid, self.factor)
        projected: Tensor = self.encoder(x if self.input_layernorm is None else self.input_layernorm(x))
        return projected


class LlavaModel(FixedSizeImageModel):
    """Features are the configured states of the tower."""

    config: LlavaConfig

    def build_projection(self, ctx: ParallelContext) -> nn.Module:
        return VisionProjection(self.config, ctx)

    def unread_modules(self) -> list[nn.Module]:
        modules: list[nn.Module] = self.vision_model.behind(max(self.config.feature_states))
        return modules

    def tower_states(self, images: Tensor) -> Tensor:
        wanted = self.config.feature_states
        # The generator runs a layer for each state that is taken: those behind the last one requested do not run.
        states = list(islice(self.vision_model.states(images), max(wanted) + 1))
        # [N, S, states x W]: several states of a patch side by side
        features = torch.cat([states[state] for state in wanted], dim=-1)
        return features[:, 1:] if self.config.drops_class_token else features


def build_llava(config: LlavaConfig, context: ModelBuildContext) -> LlavaModel:
    return LlavaModel(config, context)
