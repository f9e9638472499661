"""Multi-head latent attention over the keys that an indexer chooses (DeepSeek-V3.2, GLM-5)."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from mt_core.nn.attention import AttentionCore, AttentionPattern
from mt_core.nn.auxiliary import AuxiliaryLoss
from mt_core.nn.cache import Cache, Pages
from mt_core.nn.linear import SEQUENCE_DIM
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.indexer import Indexer, IndexerConfigLike, IndexerInputs, among, narrowed, seen
from mt_models.blocks.indexer_loss import indexer_loss, mean_attention
from mt_models.blocks.latent_attention import LatentAttention, LatentAttentionConfigLike
from mt_models.blocks.rotary import RotaryAngles


class SparseAttentionConfigLike(LatentAttentionConfigLike, IndexerConfigLike, Protocol):
    """What sparse latent attention reads from the configuration of its model."""

    @property
    def dsa_indexer_loss_coeff(self) -> float: ...
    @property
    def dsa_indexer_use_sparse_loss(self) -> bool: ...
    @property
    def dsa_dense_warmup(self) -> bool: ...
    def indexer_of(self, layer: int) -> int: ...


@dataclass
class PassChoices:
    """What the layers of one forward pass share. visible [B or 1, S, T]: which keys a query sees before any are
    chosen. chosen: of a layer with an indexer, the keys of each query, or None where all are attended to. latents: of a
    layer whose latents others read, what `LatentAttention.latents` gives."""

    visible: Tensor | None = None
    chosen: dict[int, Tensor | None] = field(default_factory=dict)
    latents: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


class Choices:
    """`PassChoices` by forward pass: one object of a model, for all its layers. holders: the layers whose latents
    others read."""

    def __init__(self) -> None:
        self.holders: dict[int, LatentAttention] = {}
        # The angles are one object for all layers of a pass, also where a layer is recomputed.
        self._of_pass: MutableMapping[RotaryAngles, PassChoices] = WeakKeyDictionary()

    def of_pass(self, angles: RotaryAngles) -> PassChoices:
        return self._of_pass.setdefault(angles, PassChoices())


class SparseCore(nn.Module):
    """Holder of the indexer, under Megatron's name. indexer: None in a layer that attends to the keys that an earlier
    layer's indexer has chosen."""

    def __init__(self, indexer: Indexer | None) -> None:
        super().__init__()
        self.indexer = indexer


class SparseLatentAttention(LatentAttention):
    """x -> linear_proj(attention over chosen keys): [B, S, hidden] -> the same.

    number: of the layer, from 0. choices: that of the model.
    """

    def __init__(
        self,
        config: SparseAttentionConfigLike,
        core: AttentionCore,
        ctx: ParallelContext,
        number: int,
        choices: Choices,
        *,
        remakes_heads: bool = False,
    ) -> None:
        super().__init__(config, core, ctx, remakes_heads=remakes_heads)
        self.number, self.choices, self.topk = number, choices, config.dsa_indexer_topk
        self.heads, self.dense = config.num_attention_heads, config.dsa_dense_warmup
        self.chooser = config.indexer_of(number)
        self.core_attention = SparseCore(self.build_indexer(config, ctx) if self.chooser == number else None)
        self.coefficient, self.sparse_loss = config.dsa_indexer_loss_coeff, config.dsa_indexer_use_sparse_loss
        learns = self.coefficient > 0 and self.core_attention.indexer is not None
        self.loss = AuxiliaryLoss(f"dsa/layer_{number}/indexer_loss") if learns else None

    def build_indexer(self, config: SparseAttentionConfigLike, ctx: ParallelContext) -> Indexer:
        return Indexer(config, ctx)

    @property
    def holder(self) -> LatentAttention:
        """The layer whose latents are kept for the positions to come, and read here."""
        return self

    def forward(self, x: Tensor, pattern: AttentionPattern, angles: RotaryAngles | None, cache: Cache | None) -> Tensor:
        assert angles is not None
        source = self.query_source(x)
        latents, positional = self.latents(x, angles)
        if cache is not None:
            chosen = self._chosen_cached(x, source, pattern, angles, cache)
            q, latents = self.queries(source, angles), self.of_all_positions(latents)
            return self.output(self._attend_cached(q, chosen, latents, positional, pattern, cache), x)
        scores = self._scores(x, source, angles)
        sparse = self._sparse_pattern(scores, pattern, angles, x)
        out = self.output(self.over_sequence(source, latents, positional, sparse, angles), x)
        if self.loss is None or scores is None:
            return out
        target = self._target(source, latents, positional, angles)
        return self.loss(out, self.coefficient * self._loss(scores, target, angles))

    # -- whole sequences -----------------------------------------------------------------------------

    def _length(self, x: Tensor) -> int:
        return x.shape[SEQUENCE_DIM] * (self.ctx.tp.size if self.ctx.sequence_parallel else 1)

    def _scores(self, x: Tensor, source: Tensor, angles: RotaryAngles) -> Tensor | None:
        """[B, S, T] of this rank's positions; None where no one needs them."""
        indexer, learns = self.core_attention.indexer, self._learns
        if indexer is None or not (learns or self._chooses(self._length(x))):
            return None
        with torch.set_grad_enabled(learns):
            # Detached: the model learns from the language model's loss alone.
            return indexer.scores(indexer.project(x.detach(), source.detach(), angles))

    @property
    def _learns(self) -> bool:
        return self.loss is not None and self.training and torch.is_grad_enabled()

    def _chooses(self, keys: int) -> bool:
        """Whether keys are left out."""
        return keys > self.topk and not self.dense

    def _sparse_pattern(
        self, scores: Tensor | None, pattern: AttentionPattern, angles: RotaryAngles, x: Tensor
    ) -> AttentionPattern:
        length, indexer, shared = self._length(x), self.core_attention.indexer, self.choices.of_pass(angles)
        if shared.visible is None and (scores is not None or self._chooses(length)):
            shared.visible = seen(pattern, length, length, x.device)
        if indexer is not None:
            shared.chosen[self.number] = None
            if self._chooses(length):
                assert scores is not None
                assert shared.visible is not None
                shared.chosen[self.number] = indexer.choose(scores, self._own_rows(shared.visible))
        chosen = shared.chosen[self.chooser]
        return pattern if chosen is None else narrowed(pattern, chosen, length, x.dtype)

    def _own_rows(self, values: Tensor) -> Tensor:
        """[B or 1, S, T] of all positions -> of this rank's, under sequence parallelism."""
        tp = self.ctx.tp
        return values.chunk(tp.size, 1)[tp.rank] if self.ctx.sequence_parallel else values

    # -- the indexer's loss --------------------------------------------------------------------------

    def _allowed(self, angles: RotaryAngles) -> Tensor:
        """[B or 1, S, T] bool, of all positions: the keys that the loss is about."""
        shared = self.choices.of_pass(angles)
        assert shared.visible is not None
        chosen = shared.chosen[self.number]
        if chosen is None or not self.sparse_loss:
            return shared.visible
        return shared.visible & among(chosen, shared.visible.shape[-1])

    @torch.no_grad()
    def _target(self, source: Tensor, latents: Tensor, positional: Tensor, angles: RotaryAngles) -> Tensor:
        queries = self.queries(source, angles)
        keys, _ = self.keys_and_values(self.linear_kv_up_proj(latents), positional)
        return mean_attention(queries, keys, self._allowed(angles), self.heads, self.ctx)

    def _loss(self, scores: Tensor, target: Tensor, angles: RotaryAngles) -> Tensor:
        return indexer_loss(scores, target, self._own_rows(self._allowed(angles)), self.ctx)

    # -- a cache -------------------------------------------------------------------------------------

    def _chosen_cached(
        self, x: Tensor, source: Tensor, pattern: AttentionPattern, angles: RotaryAngles, cache: Cache
    ) -> Tensor:
        """[1, S, topk]"""
        shared, indexer = self.choices.of_pass(angles), self.core_attention.indexer
        if indexer is not None:
            inputs: IndexerInputs = indexer.project(x, source, angles)
            shared.chosen[self.number] = indexer.choose_cached(inputs, pattern, cache)
        chosen = shared.chosen[self.chooser]
        assert chosen is not None
        return chosen

    def _attend_cached(
        self, q: Tensor, chosen: Tensor, latents: Tensor, positional: Tensor, pattern: AttentionPattern, cache: Cache
    ) -> Tensor:
        def attend(q: Tensor, chosen: Tensor, latents: Tensor, positional: Tensor) -> Tensor:
            keys = latents.shape[1]
            if not self._chooses(keys):
                return self.attend_to_latents(q, latents, positional, pattern, cache)
            if q.shape[1] == 1:
                # One query reads its own keys alone, whatever the length of the sequence. It is the last position and
                # sees them all.
                rows = chosen[0, 0].long()
                return self.absorbed(q, latents[:, rows], positional[:, rows], pattern)
            return self.attend_to_latents(q, latents, positional, narrowed(pattern, chosen, keys, q.dtype), cache)

        return cache.attend(self.holder, attend, (q, chosen), (latents, positional), self._attend_paged)

    def _attend_paged(self, pages: Pages, q: Tensor, chosen: Tensor, latents: Tensor, positional: Tensor) -> Tensor:
        """q [1, B, N, plain + rotated], chosen [1, B, K], latents [places, C], positional [places, 1, R] of the whole
        cache -> [1, B, N, value]: the new position of each sequence over its own choice, of static size."""
        if not self._chooses(pages.room):
            return self.paged(pages, q, latents, positional)
        rows = chosen[0].long()  # [B, K]
        places = pages.places(rows)
        chosen_latents, chosen_rotated = latents[places], positional[places].squeeze(2)  # [B, K, C], [B, K, R]
        plain, turned = (x[0] for x in self._absorbed_queries(q))  # [B, N, C], [B, N, R]
        # All heads read the same rows: two products of matrices a sequence, and one with the weights.
        scores = (plain @ chosen_latents.mT).float() + (turned @ chosen_rotated.mT).float()
        scores = scores * (self.plain + self.rotated) ** -0.5
        # A sequence of fewer than K positions has chosen some behind its last.
        scores = scores.masked_fill((rows > pages.last[:, None]).unsqueeze(1), float("-inf"))
        return self._expanded_values((self.key_weights(scores).to(chosen_latents.dtype) @ chosen_latents)[None])

    def key_weights(self, scores: Tensor) -> Tensor:
        """Scores [B, N, K] of each head in fp32 -> the weights of the keys."""
        return scores.softmax(-1)
