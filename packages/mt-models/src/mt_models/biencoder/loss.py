"""The retrieval loss: contrastive, with the texts of the same micro-batch on all ranks as negatives."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_core.parallel.collectives import gather_from
from mt_core.parallel.context import ParallelContext
from mt_models.biencoder.config import BiencoderConfig
from mt_models.biencoder.model import Vectors


class RetrievalLoss:
    """-log softmax(q . c / divisor)[own text] for each question q over the texts c of all data-parallel ranks: [B].

    Each rank scores its own questions, so that the sum over ranks of losses (and of gradients) is that of one
    process with the whole micro-batch. Every rank has equally many samples.
    """

    def __init__(self, parallel: ParallelContext, divisor: float = 1.0) -> None:
        self.parallel, self.divisor = parallel, divisor

    def __call__(self, vectors: Vectors, batch: Mapping[str, Tensor]) -> Tensor:
        scores = self.scores(vectors)
        return F.cross_entropy(scores.float(), self.own_texts(scores), reduction="none")

    def scores(self, vectors: Vectors) -> Tensor:
        """[B, B x data-parallel size]: of this rank's questions for the texts of all ranks, in their order."""
        return vectors.query @ gather_from(vectors.context, 0, self.parallel.dp).T / self.divisor

    def own_texts(self, scores: Tensor) -> Tensor:
        """[B]: the column of each question's text."""
        count = len(scores)
        return torch.arange(count, device=scores.device) + self.parallel.dp.rank * count

    def top_k_accuracy(self, vectors: Vectors, k: int) -> Tensor:
        """Share of this rank's questions whose text is among the k with the highest scores."""
        scores = self.scores(vectors)
        best = scores.topk(min(k, scores.shape[1]), dim=1).indices
        return (best == self.own_texts(scores)[:, None]).any(1).float().mean()


def build_retrieval_loss(config: Config, parallel: ParallelContext | None = None) -> RetrievalLoss:
    model = config.model
    if not isinstance(model, BiencoderConfig):
        raise ConfigError(
            f'train.loss="retrieval" compares vectors of questions and texts, which model.family={model.family} does '
            'not give; use model.family="biencoder"'
        )
    divisor = math.sqrt(model.hidden_size) if model.retriever_score_scaling else 1.0
    return RetrievalLoss(parallel or ParallelContext(), divisor)
