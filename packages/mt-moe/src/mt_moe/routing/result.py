"""What the router hands to a dispatcher."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """The experts of T tokens, k each.

    experts: [T, k] int64, numbers over all ranks; no token has one twice. weights: [T, k], what the experts'
    outputs are multiplied by; differentiable. kept: [T, k] bool, False where an expert is full; None: all stay.
    padded_to: rows that every expert gets from this rank, filled up with zeros; None: as many as there are.
    """

    experts: Tensor
    weights: Tensor
    num_experts: int
    kept: Tensor | None = None
    padded_to: int | None = None

    @property
    def topk(self) -> int:
        return self.experts.shape[1]
