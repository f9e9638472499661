"""Attention residuals (Kimi K3, 2026): a block reads a weighted mean of sums of earlier outputs in place of the last.

The layers are cut into runs. The sum of the outputs of a run's blocks, attentions and feed-forwards, is a source, as is
the token's embedding; so is the sum of the outputs so far of the run that a block is in. For sources r_1 ... r_n [H]:

    p = softmax over i of <r_i / rms(r_i), w * q>      x = sum over i of p_i r_i

all in fp32, with w the weight of a norm and q a query. Sources are [B, S, n H] between layers and pipeline stages:
those of a token side by side, the run's own sum last. There are more of them the later a layer is.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mt_core.nn.layout import LayoutModule, ParameterLayout, sequence_axes
from mt_core.parallel.context import ParallelContext


class AttentionResidual(LayoutModule):
    """Sources [B, S, n H] of any number n -> their weighted mean [B, S, H].

    weight: [2 H], w and then q. q begins at 0, so that the mean is a plain one.
    """

    weight: Tensor

    def __init__(self, hidden_size: int, epsilon: float, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        self.hidden_size, self.epsilon = hidden_size, epsilon
        # One parameter, since formats hold the two apart or their product. Sequence parallelism gives each rank other
        # positions.
        layout = ParameterLayout((2 * hidden_size,), ones_and_zeros, partial_gradient=sequence_axes(ctx))
        self.declare("weight", layout)

    def forward(self, sources: Tensor) -> Tensor:
        # [B, S, n, H]
        apart = sources.unflatten(-1, (-1, self.hidden_size)).float()
        norm_weight, query = self.weight.float().chunk(2)
        # The norm's factor is one number for each source: the product is multiplied by it rather than the source.
        scores = (apart @ (norm_weight * query)) * (apart.square().mean(-1) + self.epsilon).rsqrt()
        return (scores.softmax(-1).unsqueeze(-2) @ apart).squeeze(-2).to(sources.dtype)


def ones_and_zeros(tensor: Tensor, generator: torch.Generator) -> None:
    """Initialization of the first half with 1 and of the second with 0."""
    first, second = tensor.chunk(2)
    first.fill_(1.0)
    second.zero_()


class ResidualOutput(nn.Module):
    """norm(weighted mean of the sources), the input of the LM head: [B, S, n H] -> [B, S, H]"""

    def __init__(self, residual: AttentionResidual, norm: nn.Module) -> None:
        super().__init__()
        self.residual, self.norm = residual, norm

    def forward(self, sources: Tensor) -> Tensor:
        normed: Tensor = self.norm(self.residual(sources))
        return normed


def with_output(sources: Tensor, output: Tensor) -> Tensor:
    """The sources [B, S, n H] with a block's output [B, S, H] added to the last."""
    others, last = sources.split((sources.shape[-1] - output.shape[-1], output.shape[-1]), -1)
    # The sources keep their dtype, whatever the block was computed in.
    return torch.cat((others, (last + output).to(last.dtype)), -1)


def with_new_run(sources: Tensor, output: Tensor) -> Tensor:
    """The sources [B, S, n H] and a block's output [B, S, H], with which a run begins: [B, S, (n + 1) H]"""
    return torch.cat((sources, output.to(sources.dtype)), -1)
