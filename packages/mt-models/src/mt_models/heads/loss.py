"""The loss of classification and multiple choice: cross entropy of the right class or text, one value per sample."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from mt_core.config.schema import Config
from mt_core.nn.loss import Loss, seen_labels
from mt_core.parallel.context import ParallelContext


def classification_loss(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """logits [B, C], batch["labels"] [B] -> losses [B] in fp32; loss_mask [B] leaves out samples without a label."""
    return F.cross_entropy(logits.float(), seen_labels(batch), reduction="none")


def build_classification_loss(config: Config, parallel: ParallelContext | None = None) -> Loss:
    return classification_loss
