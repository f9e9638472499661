"""The router's output, which a dispatcher takes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """The experts of T tokens, k each.

    experts: [T, k] int64, global expert numbers, distinct for each token. weights: [T, k], factors of the experts'
    outputs; differentiable. kept: [T, k] bool, False where the token was dropped by capacity; None: nothing dropped.
    padded_to: rows that every expert gets from this rank, padded with zeros; None: no padding. training: of a
    micro-batch that is trained on. counts: [E] int64, choices of each expert, dropped ones too; None: not counted.
    """

    experts: Tensor
    weights: Tensor
    num_experts: int
    kept: Tensor | None = None
    padded_to: int | None = None
    training: bool = False
    counts: Tensor | None = None

    @property
    def topk(self) -> int:
        return self.experts.shape[1]
