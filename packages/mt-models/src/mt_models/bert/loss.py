"""BERT's loss: masked words, and the order of the two texts."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_core.nn.loss import Loss, build_cross_entropy
from mt_core.parallel.context import ParallelContext
from mt_models.bert.model import BertOutput


class BertLoss:
    """Cross entropy of each masked word, plus that of its sample's order: [B, S], counted where words are masked.

    Masked, summed and divided by the number of masked words, that is the mean over words plus a mean over
    samples in which a sample weighs as many times as it has masked words. Both are independent of how the
    global batch is cut into micro-batches. With equally many masked words in every sample it is the sum of the
    two plain means, which is what Megatron takes for each micro-batch.
    """

    def __init__(self, words: Loss) -> None:
        self.words = words

    def __call__(self, output: BertOutput, batch: Mapping[str, Tensor]) -> Tensor:
        if output.logits is None:
            raise ConfigError('train.loss="bert" needs the masked-word head; set model.add_lm_head=true')
        losses = self.words(output.logits, batch)
        if output.binary_logits is None:
            return losses
        order = F.cross_entropy(output.binary_logits.float(), batch["is_random"], reduction="none")
        return losses + order[:, None]


def build_bert_loss(config: Config, parallel: ParallelContext | None = None) -> BertLoss:
    return BertLoss(build_cross_entropy(config, parallel))
