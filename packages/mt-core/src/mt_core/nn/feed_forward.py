"""The dense feed-forward block: two matrices with an activation between them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor, nn

from mt_core.config.fields import Section
from mt_core.config.schema import Activation
from mt_core.nn.activations import FUSED, activate, is_gated
from mt_core.nn.dropout import InnerDropout
from mt_core.nn.kernels.choice import Kernels
from mt_core.nn.kernels.request import Feature
from mt_core.nn.layout import Init, normal
from mt_core.nn.linear import ColumnParallelLinear, RowParallelLinear
from mt_core.parallel.context import ParallelContext

if TYPE_CHECKING:
    from mt_core.nn.build_context import ModelBuildContext


class FeedForwardConfigLike(Protocol):
    """What a feed-forward reads from the configuration of its model."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def ffn_size(self) -> int: ...
    @property
    def activation(self) -> Activation: ...
    @property
    def add_bias_linear(self) -> bool: ...
    @property
    def init_method_std(self) -> float: ...
    @property
    def output_init_std(self) -> float: ...


class JoinedFeedForward(Protocol):
    """Computes both products and the activation between them."""

    def __call__(self, x: Tensor, fc1: ColumnParallelLinear, fc2: RowParallelLinear) -> Tensor: ...


class DenseConfig(Section):
    """The dense block takes its shape from the model; it has no options of its own."""


class DenseFeedForward(nn.Module):
    """linear_fc2(dropout(activation(linear_fc1(x)))): [batch, sequence, hidden] -> the same.

    joined: computes all of it in place of the layers (FP8), except under torch.compile.
    """

    def __init__(self, config: FeedForwardConfigLike, ctx: ParallelContext) -> None:
        super().__init__()
        self.activation = config.activation
        self.activate: Callable[[Tensor], Tensor] = partial(activate, config.activation)
        self.joined: JoinedFeedForward | None = None
        # A key of the families alone whose published models have it.
        rate: float = getattr(config, "activation_dropout", 0.0)
        self.dropout = InnerDropout(rate, ctx) if rate > 0.0 else None
        blocks = 2 if is_gated(config.activation) else 1
        init: Init = normal(config.init_method_std)
        self.linear_fc1 = ColumnParallelLinear(
            config.hidden_size,
            blocks * config.ffn_size,
            ctx,
            bias=config.add_bias_linear,
            init=init,
            sections=blocks,
        )
        self.linear_fc2 = RowParallelLinear(
            config.ffn_size,
            config.hidden_size,
            ctx,
            bias=config.add_bias_linear,
            init=normal(config.output_init_std),
        )

    def use_kernels(self, kernels: Kernels) -> None:
        self.activate = pick_activation(self.activation, kernels)

    def forward(self, x: Tensor) -> Tensor:
        # The compiler joins the casts of separate layers with the operations before them.
        if self.joined is not None and not torch.compiler.is_compiling():
            return self.joined(x, self.linear_fc1, self.linear_fc2)
        inner = self.activate(self.linear_fc1(x))
        return self.linear_fc2(inner if self.dropout is None else self.dropout(inner))


def pick_activation(name: Activation, kernels: Kernels) -> Callable[[Tensor], Tensor]:
    """The activation of a tensor that has its bias already (the product adds it at no cost)."""
    plain = partial(activate, name)
    if name not in FUSED:
        return plain
    function = kernels.pick("activation", cast(Feature, name), plain=activate)
    # `pick` gives back `activate` where torch is chosen.
    return plain if function is activate else lambda x: function(x, None, name)


def build_dense(config: FeedForwardConfigLike, environment: ModelBuildContext, layer: int) -> nn.Module:
    return DenseFeedForward(config, environment.parallel)
