"""Mean loss over the first batches of a validation set: the same ones every time."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from mt_core.train.step import Batch, ForwardStep, masked_sum


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Batch], forward_step: ForwardStep) -> float:
    """Sum of token losses over the count of unmasked tokens; the model is left in the mode it was in."""
    training = model.training
    model.eval()
    try:
        total, tokens = torch.zeros((), dtype=torch.float64), 0.0
        for batch in batches:
            losses: Tensor = forward_step(model, batch)
            total += masked_sum(losses, batch["loss_mask"]).double().cpu()
            tokens += float(batch["loss_mask"].sum())
        return float(total) / max(tokens, 1.0)
    finally:
        model.train(training)
