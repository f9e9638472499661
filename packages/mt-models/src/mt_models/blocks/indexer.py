"""Lightning indexer of DeepSeek sparse attention (DeepSeek-V3.2, 2025): which keys a query attends to.

For a position t with the input x of attention and the latent c of its queries, and a position s before it:

    q_h = rotate(W_q,h c)  [D]      k = rotate(norm(W_k x))  [D], one for all heads      w = W_w x / sqrt(heads)
    I_ts = sum over heads h of w_th relu(q_th . k_s / sqrt(D))

The `topk` keys with the highest I_ts are chosen; of equal ones those that torch.topk takes. No gradient passes the
choice: the indexer learns from a loss of its own (`indexer_loss`). It is the same on every tensor-parallel rank; under
sequence parallelism each rank chooses for its own positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mt_core.nn.attention import AttentionPattern
from mt_core.nn.batch_invariance import is_batch_invariant
from mt_core.nn.cache import Cache, Pages, PositionState
from mt_core.nn.kernels.choice import Kernels
from mt_core.nn.kernels.reference import index_scores as reference
from mt_core.nn.kernels.request import WIDEST_INDEX
from mt_core.nn.layout import normal
from mt_core.nn.linear import SEQUENCE_DIM
from mt_core.nn.norm import build_norm
from mt_core.parallel.collectives import all_gather, gather_from
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.has_triton import has_triton
from mt_models.blocks.linear import ReplicatedLinear, effective_weight
from mt_models.blocks.rotary import RotaryAngles, rotate

PRODUCTS_AT_ONCE = 2**26
"""Products of queries and keys, over all heads, that are in memory at a time (fp32)."""

Scores = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`index_scores` or what computes the same"""


class IndexerConfigLike(Protocol):
    """What an indexer reads from the configuration of its model."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def q_lora_rank(self) -> int | None: ...
    @property
    def init_method_std(self) -> float: ...
    @property
    def dsa_indexer_n_heads(self) -> int: ...
    @property
    def dsa_indexer_head_dim(self) -> int: ...
    @property
    def dsa_indexer_topk(self) -> int: ...
    @property
    def dsa_indexer_k_norm_epsilon(self) -> float: ...
    @property
    def dsa_indexer_rope_interleaved(self) -> bool: ...


@dataclass(frozen=True)
class IndexerInputs:
    """queries [B, S, H, D], weights [B, S, H] in fp32, keys [B, S, D]; S: this rank's positions under sequence
    parallelism."""

    queries: Tensor
    weights: Tensor
    keys: Tensor


class UsesScores:
    """An indexer, whose scores are computed as `kernels.index_scores` says. size: channels of its queries."""

    size: int

    @property
    def score(self) -> Scores:
        """(queries [B, S, H, D], weights [B, S, H], keys [B, T, D]) -> [B, S, T] in fp32"""
        return self.__dict__.get("_score", index_scores)

    def use_kernels(self, kernels: Kernels) -> None:
        """Choose what computes the scores. Raises ConfigError where the named kernel cannot serve."""
        self._score = picked_scores(kernels, self.size)


class Indexer(UsesScores, nn.Module):
    """Chooses keys. Its parameters have Megatron's names.

    query_size: channels of what its queries come from; default: those of the latent of attention's queries.
    """

    def __init__(self, config: IndexerConfigLike, ctx: ParallelContext, query_size: int | None = None) -> None:
        super().__init__()
        query_size = query_size or config.q_lora_rank
        assert query_size is not None  # required by the configuration of the family
        self.ctx, self.topk = ctx, config.dsa_indexer_topk
        self.heads, self.size = config.dsa_indexer_n_heads, config.dsa_indexer_head_dim
        self.interleaved = config.dsa_indexer_rope_interleaved
        init = normal(config.init_method_std)

        def linear(inputs: int, outputs: int) -> ReplicatedLinear:
            return ReplicatedLinear(inputs, outputs, ctx, init=init, bias=False, on_sequence=True)

        self.linear_wq_b = linear(query_size, self.heads * self.size)
        self.linear_wk = linear(config.hidden_size, self.size)
        self.k_norm = build_norm("LayerNorm", self.size, config.dsa_indexer_k_norm_epsilon, ctx)
        self.linear_weights_proj = linear(config.hidden_size, self.heads)

    def project(self, x: Tensor, source: Tensor, angles: RotaryAngles) -> IndexerInputs:
        """x [B, S, hidden], the input of attention; source [B, S, C], what its queries come from."""
        keys = self.k_norm(self.linear_wk(x)).unsqueeze(2)
        # In fp32 whatever the dtype of the model, as in the published code: the weights order near-equal keys.
        weights = F.linear(x.float(), effective_weight(self.linear_weights_proj).float()) * self.heads**-0.5
        queries = self.rotated(self.query_heads(source, angles), angles)
        return IndexerInputs(queries, weights, self.rotated(keys, angles).squeeze(2))

    def query_heads(self, source: Tensor, angles: RotaryAngles) -> Tensor:
        """[B, S, C] -> [B, S, H, D], before their rotation. angles: of all positions."""
        queries: Tensor = self.linear_wq_b(source)
        return queries.unflatten(-1, (self.heads, self.size))

    def rotated(self, heads: Tensor, angles: RotaryAngles) -> Tensor:
        """[B, S, N, D] by the angles of this rank's positions."""
        return rotate(heads, self.own_positions(angles.cos), self.own_positions(angles.sin), self.interleaved)

    def own_positions(self, values: Tensor) -> Tensor:
        """[B, S, ...] of all positions -> of this rank's, under sequence parallelism."""
        tp = self.ctx.tp
        return values.chunk(tp.size, SEQUENCE_DIM)[tp.rank] if self.ctx.sequence_parallel else values

    def scores(self, inputs: IndexerInputs) -> Tensor:
        """I [B, S, T] in fp32, with the keys of all positions of the sequence."""
        keys = inputs.keys
        if self.ctx.sequence_parallel:
            keys = gather_from(keys, SEQUENCE_DIM, self.ctx.tp)
        return self.score(inputs.queries, inputs.weights, keys)

    def choose(self, scores: Tensor, visible: Tensor) -> Tensor:
        """scores [B, S, T], visible [B or 1, S, T] bool, of this rank's positions -> [B, S, topk] int64, of all
        positions; T has to be above topk. A query that sees fewer keys chooses some that it does not see."""
        chosen = chosen_keys(scores, visible, self.topk)
        return all_gather(chosen, SEQUENCE_DIM, self.ctx.tp) if self.ctx.sequence_parallel else chosen

    def choose_cached(self, inputs: IndexerInputs, pattern: AttentionPattern, cache: Cache) -> Tensor:
        """[1, S, topk] int32 of the new positions S in the cache, zeros for sequences of at most topk keys."""

        def choose(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
            count, length = queries.shape[1], keys.shape[1]
            if length <= self.topk:
                return queries.new_zeros((1, count, self.topk), dtype=torch.int32)
            visible = seen(pattern, count, length, keys.device)
            return chosen_keys(self.score(queries, weights, keys), visible, self.topk).int()

        queries, weights, keys = inputs.queries, inputs.weights, inputs.keys
        if self.ctx.sequence_parallel:
            queries, weights, keys = (all_gather(x, SEQUENCE_DIM, self.ctx.tp) for x in (queries, weights, keys))
        return cache.attend(self, choose, (queries, weights), (keys,), self._choose_paged)

    def _choose_paged(self, pages: Pages, queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
        """[1, B, H, D], [1, B, H], [places, D] -> [1, B, topk] int32: for the new position of each of B sequences, of
        which a short one chooses positions behind its last, too; zeros where none can have more than topk."""
        if pages.room <= self.topk:
            return queries.new_zeros((1, queries.shape[1], self.topk), dtype=torch.int32)
        positions = torch.arange(pages.room, device=keys.device)[None]
        # Shapes are static: keys of all positions that there is room for, of which those behind the last are not seen.
        sequence_keys = keys[pages.places(positions.expand(queries.shape[1], -1))]  # [B, T, D]
        scores = self.score(queries.transpose(0, 1), weights.transpose(0, 1), sequence_keys)  # [B, 1, T]
        visible = (positions <= pages.last[:, None]).unsqueeze(1)
        return chosen_keys(scores, visible, self.topk).int().transpose(0, 1)

    def cached_state(self) -> PositionState:
        """The one key for all heads."""
        return PositionState(((self.size,),), self.linear_wk.weight.dtype, is_paged=True)


def index_scores(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """queries [B, S, H, D], weights [B, S, H], keys [B, T, D] -> [B, S, T] in fp32"""
    if _takes_kernel(queries, weights, keys):
        from mt_core.nn.kernels.triton_kernels.index_scores import scores_alone

        return scores_alone(queries, weights, keys)
    return torch_index_scores(queries, weights, keys)


def torch_index_scores(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """The same by torch."""
    batch, count, heads, _ = queries.shape
    rows = max(PRODUCTS_AT_ONCE // (batch * heads * keys.shape[1]), 1)
    # Products of all heads with all keys would be heads times as large as the scores. Backward makes them again.
    again = torch.is_grad_enabled() and count > rows
    scores = reference.index_scores
    blocks = [
        checkpoint(scores, q, w, keys, use_reentrant=False) if again else scores(q, w, keys)
        for q, w in zip(queries.split(rows, 1), weights.split(rows, 1), strict=True)
    ]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, 1)


def picked_scores(kernels: Kernels, channels: int) -> Scores:
    """What `kernels.index_scores` says; torch under batch invariance."""
    scores: Scores = kernels.pick("index_scores", width=channels, plain=torch_index_scores)
    if kernels.choice_of("index_scores", width=channels).automatic:
        return index_scores

    def varying(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
        return (torch_index_scores if is_batch_invariant() else scores)(queries, weights, keys)

    return varying


def _takes_kernel(queries: Tensor, weights: Tensor, keys: Tensor) -> bool:
    """Whether mt's Triton kernel serves: on a GPU, without gradients."""
    if not queries.is_cuda or queries.dtype != keys.dtype or queries.shape[-1] > WIDEST_INDEX:
        return False
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (queries, weights, keys))
    return not learns and not is_batch_invariant() and has_triton()


def chosen_keys(scores: Tensor, visible: Tensor, topk: int) -> Tensor:
    """[B, S, T] -> [B, S, topk] int64: the keys with the highest scores of those that a query sees."""
    return scores.detach().masked_fill(~visible, float("-inf")).topk(topk, dim=-1).indices


def seen(pattern: AttentionPattern, queries: int, keys: int, device: torch.device) -> Tensor:
    """[B or 1, S, T] bool: which keys a query sees before any are chosen."""
    # A copy: the pattern keeps one mask, in the dtype that attention asks for.
    mask = replace(pattern, _mask=None, _within={}).additive_mask(queries, keys, torch.float32, device)
    return ~mask.isneginf().squeeze(1)


def among(chosen: Tensor, keys: int) -> Tensor:
    """chosen [B, S, topk] -> [B, S, T] bool: whether each of T keys is one of them."""
    shape = (*chosen.shape[:-1], keys)
    return torch.zeros(shape, dtype=torch.bool, device=chosen.device).scatter_(-1, chosen.long(), True)


def narrowed(pattern: AttentionPattern, chosen: Tensor, keys: int, dtype: torch.dtype) -> AttentionPattern:
    """The pattern in which a query sees of T keys those among chosen [B, S, topk] alone."""
    bias = torch.zeros((*chosen.shape[:-1], keys), dtype=dtype, device=chosen.device)
    bias = bias.masked_fill_(~among(chosen, keys), float("-inf")).unsqueeze(1)
    return replace(pattern, bias=bias, _mask=None, _within={})
