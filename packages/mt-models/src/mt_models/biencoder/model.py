"""The biencoder (Lee et al., Latent Retrieval, 2019): embeds questions and texts; scores are dot products. Its loss.

Shapes: B batch, S sequence, P width of the embeddings (biencoder_projection_dim, or hidden_size without projection).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.layout import normal
from mt_core.nn.model import Model
from mt_core.parallel.collectives import all_gather, gather_from
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.reductions import sum_over
from mt_models.bert.model import BertEncoder, first_position
from mt_models.biencoder.config import BiencoderConfig
from mt_models.blocks.linear import ReplicatedLinear


class Tower(BertEncoder):
    """tokens [B, S] -> embeddings [B, P]."""

    def __init__(self, config: BiencoderConfig, context: ModelBuildContext) -> None:
        super().__init__(config, context)
        self.projection_enc: ReplicatedLinear | None = None
        if config.biencoder_projection_dim:
            self.projection_enc = ReplicatedLinear(
                config.hidden_size, config.biencoder_projection_dim, self.ctx, init=normal(config.init_method_std)
            )

    def forward(
        self, tokens: Tensor, tokentype_ids: Tensor | None = None, padding_mask: Tensor | None = None
    ) -> Tensor:
        # The state itself: Megatron's biencoder has no pooler, whose tanh would bound the dot products.
        vector = first_position(self.hidden_states(tokens, tokentype_ids, padding_mask), self.ctx)
        return vector if self.projection_enc is None else self.projection_enc(vector)


class Vectors(NamedTuple):
    """query: [B, P]. context: [B, P], row i is of the text of question i; or [B, C, P], with C - 1 others behind it."""

    query: Tensor
    context: Tensor


class BiencoderModel(Model):
    """Questions [B, S] and the texts that they come from [B, S], or several for each [B, C, S] -> Vectors."""

    inputs: tuple[str, ...] = tuple(
        f"{side}_{name}" for side in ("query", "context") for name in ("tokens", "tokentype_ids", "padding_mask")
    )

    def __init__(self, config: BiencoderConfig, context: ModelBuildContext) -> None:
        super().__init__()
        self.config = config
        if config.biencoder_shared_query_context_model:
            self.shared_model = Tower(config, context)
        else:
            self.query_model = Tower(config, context)
            self.context_model = Tower(config, context)

    def forward(
        self,
        query_tokens: Tensor,
        context_tokens: Tensor,
        query_tokentype_ids: Tensor | None = None,
        query_padding_mask: Tensor | None = None,
        context_tokentype_ids: Tensor | None = None,
        context_padding_mask: Tensor | None = None,
    ) -> Vectors:
        # [B, C, S] or [B, S] -> [B C, S]: all texts in one batch of the tower
        rows = [
            None if x is None else x.flatten(0, -2)
            for x in (context_tokens, context_tokentype_ids, context_padding_mask)
        ]
        assert rows[0] is not None
        context = self.context_tower(rows[0], rows[1], rows[2])
        return Vectors(
            self.query_tower(query_tokens, query_tokentype_ids, query_padding_mask),
            context.unflatten(0, context_tokens.shape[:-1]),
        )

    def encoders(self) -> Mapping[str, nn.Module]:
        """See mt_ckpt.onnx.save.SupportsEncoding."""
        if self.config.biencoder_shared_query_context_model:
            return {"model": self.shared_model}
        return {"query": self.query_model, "context": self.context_model}

    def embed(self, tokens: Tensor, padding_mask: Tensor, input_type: Literal["query", "document"]) -> Tensor:
        """[B, S] -> [B, P], by the tower of questions or that of texts"""
        tower = self.query_tower if input_type == "query" else self.context_tower
        return tower(tokens, padding_mask=padding_mask)

    @property
    def query_tower(self) -> Tower:
        return self.shared_model if self.config.biencoder_shared_query_context_model else self.query_model

    @property
    def context_tower(self) -> Tower:
        return self.shared_model if self.config.biencoder_shared_query_context_model else self.context_model

    @property
    def max_sequence_length(self) -> int:
        return self.config.max_position_embeddings


def build_biencoder(config: BiencoderConfig, context: ModelBuildContext) -> BiencoderModel:
    return BiencoderModel(config, context)


# -- loss: contrastive, with the texts of the same micro-batch on all ranks as negatives -------------

PRESENT = "context_mask"
"""Field of a batch: 1 where there is a text, 0 where a question has fewer negatives than others, [B, C]."""


class RetrievalLoss:
    """-log softmax(q . c / divisor)[own text] for each question q over the texts c of all data-parallel ranks: [B].

    With several texts for each question, the first is its own and the others are negatives, for all questions. Each
    rank scores its own questions, so that the sum over ranks of losses (and of gradients) is that of one process with
    the whole micro-batch. Every rank has equally many samples.

    On validation sets it reports average_rank, from 0, of the question's own text among those of the micro-batch on all
    ranks, and top<k>_acc for each k of `top_k`, the share of questions with a rank below k.
    """

    def __init__(self, parallel: ParallelContext, divisor: float = 1.0, top_k: Sequence[int] = ()) -> None:
        self.parallel, self.divisor, self.top_k = parallel, divisor, tuple(top_k)
        self._ranks: list[Tensor] = []

    def __call__(self, vectors: Vectors, batch: Mapping[str, Tensor]) -> Tensor:
        scores = self.scores(vectors, batch)
        # Evaluation alone. The tensors stay on the device until take_metrics, so that the host does not wait here.
        if not torch.is_grad_enabled():
            self._ranks.append(self.ranks(scores))
        return F.cross_entropy(scores, self.own_texts(scores), reduction="none")

    def scores(self, vectors: Vectors, batch: Mapping[str, Tensor]) -> Tensor:
        """[B, B x C x data-parallel size] fp32: of this rank's questions for the texts of all ranks, in their order.
        -inf where there is no text."""
        # Backward sums the gradients of a text over the ranks whose questions it was compared with. Collective, in
        # evaluation too: ranks must have the same number of micro-batches.
        context = gather_from(vectors.context, 0, self.parallel.dp)
        # [B, P] x [P, texts of all ranks]; fp32 for the softmax
        scores = (vectors.query @ context.flatten(0, -2).T / self.divisor).float()
        if PRESENT not in batch:
            return scores
        present = batch[PRESENT]
        if self.parallel.dp.size > 1:
            present = all_gather(present, 0, self.parallel.dp)
        return scores.masked_fill(present.flatten() == 0, -math.inf)

    def own_texts(self, scores: Tensor) -> Tensor:
        """[B]: the column of each question's text."""
        count, columns = scores.shape
        texts = columns // (count * self.parallel.dp.size)
        # Column of question i of rank r: (r B + i) C, the first of its C texts.
        return (torch.arange(count, device=scores.device) + self.parallel.dp.rank * count) * texts

    def ranks(self, scores: Tensor) -> Tensor:
        """[B] fp32: number of texts with a higher score than the question's own, and half of those with the same."""
        # Ties count half: a model whose vectors are all equal gets the middle rank and not the first.
        positives = scores.gather(1, self.own_texts(scores)[:, None])
        return (scores > positives).sum(1).float() + ((scores == positives).sum(1) - 1) / 2

    def take_metrics(self) -> dict[str, float]:
        """See `mt_core.nn.loss.ReportsEvaluation`."""
        ranks = torch.cat(self._ranks) if self._ranks else torch.zeros(0)
        self._ranks = []
        sums = [float(len(ranks)), float(ranks.sum()), *(float((ranks < k).sum()) for k in self.top_k)]
        # One all-reduce of sums, from which every rank computes the same means.
        count, *totals = sum_over(sums, self.parallel.dp, ranks.device)
        names = ("average_rank", *(f"top{k}_acc" for k in self.top_k))
        return {name: total / max(count, 1.0) for name, total in zip(names, totals, strict=True)}


def build_retrieval_loss(config: Config, parallel: ParallelContext | None = None) -> RetrievalLoss:
    model = config.model
    if not isinstance(model, BiencoderConfig):
        raise ConfigError(
            f'train.loss="retrieval" compares vectors of questions and texts, which model.family={model.family} does '
            'not give; use model.family="biencoder"'
        )
    divisor = math.sqrt(model.hidden_size) if model.retriever_score_scaling else 1.0
    return RetrievalLoss(parallel or ParallelContext(), divisor, model.retriever_report_topk_accuracies)
