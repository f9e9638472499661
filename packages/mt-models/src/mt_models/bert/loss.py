"""BERT's loss: MLM, and sentence order."""

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
    """Cross entropy of each masked token, plus that of its sample's order: [B, S], counted at masked tokens.

    Masked, summed and divided by the number of masked tokens, this is the mean over tokens plus a mean over
    samples weighted by their numbers of masked tokens. Both are independent of how the
    global batch is split into micro-batches. With equally many masked tokens in every sample it is the sum of the
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
        if "is_random" not in batch:
            raise ConfigError(
                "model.bert_binary_head=true learns whether the second segment of a sample follows its first, and the "
                "data set gives no is_random; use data.dataset_type=bert, or set model.bert_binary_head=false"
            )
        order = F.cross_entropy(output.binary_logits.float(), batch["is_random"], reduction="none")
        # [B, S] + [B, 1]: added at every position; the loss mask leaves the masked tokens of the sample.
        return losses + order[:, None]


def build_bert_loss(config: Config, parallel: ParallelContext | None = None) -> BertLoss:
    return BertLoss(build_cross_entropy(config, parallel))
