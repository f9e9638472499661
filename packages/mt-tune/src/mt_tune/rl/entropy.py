"""The entropy of next-token distributions, of logits that may be divided over the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from mt_core.parallel.context import Axis
from mt_core.parallel.reductions import all_reduce_


@torch.no_grad()
def entropy(logits: Tensor, tp: Axis) -> Tensor:
    """[B, S, ids of this rank] in fp32 -> [B, S] in nats."""
    largest = logits.amax(-1) if logits.shape[-1] else logits.new_full(logits.shape[:-1], float("-inf"))
    if tp.size > 1:
        all_reduce_(largest, tp, "max")
    shifted = logits - largest[..., None]
    exponentials = shifted.exp()
    # log Z - sum(p z); masked ids have -inf and probability 0.
    products = torch.where(exponentials > 0, shifted, 0.0) * exponentials
    sums = torch.stack((exponentials.sum(-1), products.sum(-1)))
    if tp.size > 1:
        all_reduce_(sums, tp)
    return sums[0].log() - sums[1] / sums[0]
