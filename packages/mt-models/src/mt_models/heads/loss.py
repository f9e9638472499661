"""The losses of classification, multiple choice and regression, one value per sample."""

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


def regression_loss(outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """outputs [B, 1], batch["labels"] [B] -> squared errors [B] in fp32."""
    return F.mse_loss(outputs[:, 0].float(), batch["labels"].float(), reduction="none")


def build_regression_loss(config: Config, parallel: ParallelContext | None = None) -> Loss:
    return regression_loss
