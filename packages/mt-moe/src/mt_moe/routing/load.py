"""Expert load: how many tokens each expert gets, over a step and over all ranks.

A micro-batch is counted in its backward pass: that runs once even if the forward pass is recomputed, and never in an
evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from mt_core.parallel.collectives import all_reduce
from mt_core.parallel.context import ParallelContext


class _OnBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], object]) -> Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return grads[0], None


def on_backward(x: Tensor, call: Callable[[], object]) -> Tensor:
    """Identity on x; `call` is called in the backward pass, when the gradient of x is ready."""
    # Without a gradient there is no backward pass, and nothing to count: an evaluation.
    return _OnBackward.apply(x, call) if x.requires_grad else x


@dataclass(frozen=True)
class Load:
    """The load of a step over all ranks. window: [E + 1] fp64 on the device, choices of each expert before dropping,
    and dropped choices."""

    window: Tensor

    @property
    def tokens(self) -> Tensor:
        """[E] fp64 on the device: choices of each expert."""
        return self.window[:-1]

    @cached_property
    def _on_host(self) -> tuple[list[float], float]:
        """(choices of each expert, dropped choices): one copy to the host for all metrics, made when one is logged."""
        *tokens, dropped = self.window.tolist()
        return tokens, dropped

    @property
    def max_over_mean(self) -> float:
        """Largest load over mean load: 1 for an even load, E if one expert has all."""
        tokens, _ = self._on_host
        return max(tokens) * len(tokens) / sum(tokens) if any(tokens) else 0.0

    @property
    def entropy(self) -> float:
        """Entropy of the load, relative to that of an even load: 1 is even, 0 is one expert."""
        tokens, _ = self._on_host
        if len(tokens) == 1:
            return 1.0
        total = sum(tokens)
        shares = [count / total for count in tokens if count]
        return -sum(share * math.log(share) for share in shares) / math.log(len(tokens))

    @property
    def dead_experts(self) -> int:
        return self._on_host[0].count(0.0)

    @property
    def dropped_share(self) -> float:
        tokens, dropped = self._on_host
        return dropped / max(sum(tokens), 1.0)


class LoadCounter(nn.Module):
    """Counts the choices of this rank's tokens until the end of a step."""

    window: Tensor

    def __init__(self, num_experts: int, ctx: ParallelContext) -> None:
        super().__init__()
        self.ctx = ctx
        # fp64 represents every count exactly, and every backend can all-reduce it.
        window = torch.zeros(num_experts + 1, dtype=torch.float64, device=ctx.device)
        self.register_buffer("window", window, persistent=False)

    def add(self, counts: Tensor, dropped: Tensor | None) -> None:
        """counts: [E] choices. dropped: scalar."""
        self.window[:-1] += counts
        if dropped is not None:
            self.window[-1] += dropped

    def take(self) -> Load:
        """The load over all ranks since the last call; collective over the ranks of the layer's stage."""
        window = self.window.clone()
        self.window.zero_()
        # Every token is routed by exactly one of these ranks (see mt_moe.tokens).
        for axis in (self.ctx.tp, self.ctx.dp_cp):
            if axis.size > 1:
                window = all_reduce(window, axis)
        return Load(window)
