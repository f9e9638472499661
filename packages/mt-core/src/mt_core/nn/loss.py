"""Losses: one number for each position, which the trainer masks, sums and divides by the global count."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor

from mt_core.config.schema import Config

Loss = Callable[[Tensor, Mapping[str, Tensor]], Tensor]
"""(model output, batch) -> losses [batch, sequence] in fp32"""


def cross_entropy(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """-log softmax(logits)[label] at each position, in fp32. logits: [batch, sequence, vocab]."""
    labels = batch["labels"]
    losses = F.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), reduction="none")
    return losses.view(labels.shape)


def build_cross_entropy(config: Config) -> Loss:
    return cross_entropy
