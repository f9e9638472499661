"""Dynamic fine-tuning (Wu et al., 2025): the loss of a token times the probability that the model gives it.

The factor has no gradient, so that a token's gradient is that of its probability: tokens that the model finds unlikely
change it less than with cross entropy.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mt_core.config.schema import Config
from mt_core.nn.kernels.choice import Kernels, use_kernels
from mt_core.nn.loss import Loss, build_cross_entropy
from mt_core.parallel.context import ParallelContext


class DynamicFineTuning:
    """Losses [B, S] of logits [B, S, ids of this rank]: -p log p with p of the label, detached in the first factor."""

    def __init__(self, cross_entropy: Loss) -> None:
        self.cross_entropy = cross_entropy

    def use_kernels(self, kernels: Kernels) -> None:
        use_kernels([self.cross_entropy], kernels)

    def __call__(self, logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        losses = self.cross_entropy(logits, batch)
        return losses * torch.exp(-losses.detach())


def build_dft(config: Config, parallel: ParallelContext | None = None) -> DynamicFineTuning:
    return DynamicFineTuning(build_cross_entropy(config, parallel))
