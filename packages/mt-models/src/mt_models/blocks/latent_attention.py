"""Multi-head latent attention (DeepSeek-V2, 2024): keys and values of all heads come from one small latent.

For a position with hidden state x, C channels in its latent, and N heads:

    c = norm(W_dkv x)  [C]      k_pos = rotate(W_kr x)  [R], the same for every head
    k_n = [W_uk,n c, k_pos]     v_n = W_uv,n c
    q_n = [q_nope,n, rotate(q_pos,n)], from x or from a separate latent

Rotary positions rotate adjacent channels (interleaved).

The decoding cache holds c and k_pos only. Queries then attend to the latents (absorbed form): the product of q_nope,n
with W_uk,n c equals that of W_uk,n^T q_nope,n with c, and W_uv,n is applied to the weighted sum of latents.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mt_core.nn.attention import AttentionCore, AttentionPattern, sdpa_attention
from mt_core.nn.cache import Cache, PagedScores, Pages, PositionState
from mt_core.nn.dropout import AttentionDropout
from mt_core.nn.layout import normal
from mt_core.nn.linear import SEQUENCE_DIM, ColumnParallelLinear, RowParallelLinear
from mt_core.nn.norm import Normalization, build_norm
from mt_core.nn.recompute import remade
from mt_core.parallel.collectives import copy_to, gather_from
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.linear import ReplicatedLinear, effective_weight
from mt_models.blocks.rotary import RotaryAngles, rotate


class LatentAttentionConfigLike(Protocol):
    """What latent attention reads from the configuration of its model."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def q_lora_rank(self) -> int | None: ...
    @property
    def kv_lora_rank(self) -> int: ...
    @property
    def qk_head_dim(self) -> int: ...
    @property
    def qk_pos_emb_head_dim(self) -> int: ...
    @property
    def v_head_dim(self) -> int: ...
    @property
    def attention_scale(self) -> float: ...
    @property
    def normalization(self) -> Normalization: ...
    @property
    def latent_epsilon(self) -> float: ...
    @property
    def attention_dropout(self) -> float: ...
    @property
    def init_method_std(self) -> float: ...
    @property
    def output_init_std(self) -> float: ...


class LatentAttention(nn.Module):
    """x -> linear_proj(attention): [B, S, hidden] -> the same.

    The down projections are replicated over tensor-parallel ranks, the up projections are sharded by heads. Rows of
    linear_q_up_proj (or linear_q_proj) are for each head the plain and then the rotated channels; rows of
    linear_kv_up_proj for each head those of the key and then of the value; linear_kv_down_proj has the rows of the
    latent and then of the rotated key. All as Megatron stores them.

    remakes_heads: backward recomputes queries, keys and values of heads from latents (or the hidden state).
    """

    def __init__(
        self,
        config: LatentAttentionConfigLike,
        core: AttentionCore,
        ctx: ParallelContext,
        *,
        remakes_heads: bool = False,
    ) -> None:
        super().__init__()
        self.core, self.ctx, self.remakes_heads = core, ctx, remakes_heads
        self.dropout = AttentionDropout(config.attention_dropout, ctx)
        self.latent, self.plain, self.rotated = config.kv_lora_rank, config.qk_head_dim, config.qk_pos_emb_head_dim
        self.value, self.scale = config.v_head_dim, config.attention_scale
        hidden, heads, init = config.hidden_size, config.num_attention_heads, normal(config.init_method_std)
        self._declare_queries(config)
        # Replicated, since every head needs the whole latent: the product is small, hidden x (C + R), and sharding it
        # would cost an all-gather. on_sequence: with sequence parallelism each rank projects its own positions.
        self.linear_kv_down_proj = ReplicatedLinear(
            hidden, self.latent + self.rotated, ctx, init=init, bias=False, on_sequence=True
        )
        self.kv_layernorm = build_norm(config.normalization, self.latent, config.latent_epsilon, ctx)
        self.linear_kv_up_proj = ColumnParallelLinear(
            self.latent, heads * (self.plain + self.value), ctx, bias=False, init=init
        )
        self.linear_proj = RowParallelLinear(
            heads * self.value, hidden, ctx, bias=False, init=normal(config.output_init_std)
        )

    def _declare_queries(self, config: LatentAttentionConfigLike) -> None:
        """One matrix, or a down and an up projection with a latent between them."""
        hidden, rank, ctx, init = config.hidden_size, config.q_lora_rank, self.ctx, normal(config.init_method_std)
        width = config.num_attention_heads * (self.plain + self.rotated)
        self.linear_q_proj: nn.Module | None = None
        self.linear_q_down_proj: nn.Module | None = None
        self.q_layernorm: nn.Module | None = None
        self.linear_q_up_proj: nn.Module | None = None
        # DeepSeek-V2-Lite: queries without a latent.
        if rank is None:
            self.linear_q_proj = ColumnParallelLinear(hidden, width, ctx, bias=False, init=init)
            return
        self.linear_q_down_proj = ReplicatedLinear(hidden, rank, ctx, init=init, bias=False, on_sequence=True)
        self.q_layernorm = build_norm(config.normalization, rank, config.latent_epsilon, ctx)
        self.linear_q_up_proj = ColumnParallelLinear(rank, width, ctx, bias=False, init=init)

    def forward(self, x: Tensor, pattern: AttentionPattern, angles: RotaryAngles | None, cache: Cache | None) -> Tensor:
        assert angles is not None
        source = self.query_source(x)
        latents, positional = self.latents(x, angles)
        if cache is None:
            out = self.over_sequence(source, latents, positional, pattern, angles)
        else:
            out = self._cached(self.queries(source, angles), latents, positional, pattern, cache)
        return self.output(out, x)

    def output(self, heads: Tensor, x: Tensor) -> Tensor:
        """[B, S, heads of this rank, value] of all positions, and the input x [B, S, H] -> [B, S, H]"""
        projected: Tensor = self.linear_proj(heads.flatten(2))
        return projected

    def over_sequence(
        self, source: Tensor, latents: Tensor, positional: Tensor, pattern: AttentionPattern, angles: RotaryAngles
    ) -> Tensor:
        """Attention of a whole sequence, as in training: [B, S, heads of this rank, value], from `query_source` and
        `latents`. It expands keys and values of every head and runs the backend's kernel."""

        # Per position the heads hold N (plain + rotated) and N (plain + rotated + value) numbers; what they are made
        # from, the latents, C + R. `remade` lets backward compute the heads again rather than keep them.
        def heads() -> tuple[Tensor, Tensor, Tensor]:
            return self.queries(source, angles), *self.keys_and_values(self.linear_kv_up_proj(latents), positional)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.attend_heads(q, k, v, pattern)

        return remade(heads, attend) if self.remakes_heads else attend(*heads())

    def query_source(self, x: Tensor) -> Tensor:
        """[B, S, H] -> the normalized latent of the queries [B, S, C], or x where they have none"""
        if self.linear_q_down_proj is None:
            return x
        assert self.q_layernorm is not None
        latent: Tensor = self.q_layernorm(self.linear_q_down_proj(x))
        return latent

    def queries(self, source: Tensor, angles: RotaryAngles) -> Tensor:
        """[B, S, C or H] -> [B, S, heads of this rank, plain + rotated], times the scale of YaRN"""
        up = self.linear_q_up_proj if self.linear_q_proj is None else self.linear_q_proj
        assert up is not None
        rows: Tensor = up(source)
        plain, turned = rows.unflatten(-1, (-1, self.plain + self.rotated)).split((self.plain, self.rotated), -1)
        # The rotated channels stand behind the plain ones in every head, as in keys_and_values.
        q = torch.cat((plain, self.rotate(turned, angles)), -1)
        # The core divides by sqrt(plain + rotated). YaRN's further factor is put
        # on the queries, in every form of attention; so is that of queries that grow with their positions.
        q = q if self.scale == 1.0 else q * self.scale
        return q if angles.query_scale is None else q * angles.query_scale.to(q.dtype)

    def rotate(self, x: Tensor, angles: RotaryAngles) -> Tensor:
        """[B, S, N, R] by the angles of its positions."""
        return rotate_pairs(x, angles)

    def latents(self, x: Tensor, angles: RotaryAngles) -> tuple[Tensor, Tensor]:
        """[B, S, H] -> [B, S, C] (S sharded with sequence parallelism), rotated keys [B, S, 1, R] of all positions"""
        latents, positional = self.linear_kv_down_proj(x).split((self.latent, self.rotated), -1)
        # All heads share one rotated key. Each rank uses it for its own heads, so its gradient is summed over ranks.
        if self.ctx.sequence_parallel:
            positional = gather_from(positional, SEQUENCE_DIM, self.ctx.tp)
        else:
            positional = copy_to(positional, self.ctx.tp)
        return self.kv_layernorm(latents), self.rotate(positional.unsqueeze(2), angles)

    def keys_and_values(self, rows: Tensor, positional: Tensor) -> tuple[Tensor, Tensor]:
        """rows [B, T, heads x (plain + value)] -> [B, T, heads, plain + rotated] and [B, T, heads, value]"""
        plain, values = rows.unflatten(-1, (-1, self.plain + self.value)).split((self.plain, self.value), -1)
        # positional [B, T, 1, R]: a view for all heads, of which cat makes copies. Backward sums over the heads.
        return torch.cat((plain, positional.expand(-1, -1, plain.shape[2], -1)), -1), values

    def expanded(self, q: Tensor, rows: Tensor, positional: Tensor, pattern: AttentionPattern) -> Tensor:
        """rows [B, T, heads of this rank x (plain + value)] -> [B, S, heads of this rank, value]"""
        return self.attend_heads(q, *self.keys_and_values(rows, positional), pattern)

    def attend_heads(self, q: Tensor, k: Tensor, v: Tensor, pattern: AttentionPattern) -> Tensor:
        """q [B, S, N, plain + rotated], k [B, T, N, plain + rotated], v [B, T, N, value] -> [B, S, N, value]"""
        return self.core(q, k, v, pattern, self.dropout.begin())

    def absorbed(self, q: Tensor, latents: Tensor, positional: Tensor, pattern: AttentionPattern) -> Tensor:
        """latents [B, T, C], positional [B, T, 1, R] -> [B, S, heads of this rank, value]

        All heads share the same keys and values. Their size is larger than training kernels support, so torch's
        attention is used for every backend; there is no backward pass here.
        """
        plain, turned = self._absorbed_queries(q)
        # The core divides by the root of the size that it sees.
        correction = math.sqrt((self.latent + self.rotated) / (self.plain + self.rotated))
        # One key-value group for all heads: keys [B, T, 1, C + R], values [B, T, 1, C].
        keys = torch.cat((latents.unsqueeze(2), positional), -1)
        query = torch.cat((plain, turned), -1) * correction
        return self._expanded_values(self.attend_shared(query, keys, latents.unsqueeze(2), pattern))

    def attend_shared(self, q: Tensor, k: Tensor, v: Tensor, pattern: AttentionPattern) -> Tensor:
        """The same over one key-value group for all heads, without dropout and without a backward pass."""
        return sdpa_attention(q, k, v, pattern, 0.0)

    def paged(self, pages: Pages, q: Tensor, latents: Tensor, positional: Tensor) -> Tensor:
        """`absorbed` over all places of a paged cache: latents [places, C], positional [places, 1, R]"""
        # [places, 1, C]. The same memory is key and value: the page has no second copy.
        values = latents.unsqueeze(1)
        queries, scores = self._absorbed_queries(q), self.paged_scores()
        return self._expanded_values(pages.attend(queries, (values, positional), values, scores))

    def paged_scores(self) -> PagedScores:
        """The scores of `attend_shared`, for decoding from a paged cache."""
        # No correction here: the scale is given, where the core derives it from the size of the queries.
        return PagedScores((self.plain + self.rotated) ** -0.5)

    def _absorbed_queries(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S, N, plain + rotated] -> [B, S, N, C] for the latents, [B, S, N, R] for the rotated keys"""
        plain, turned = q.split((self.plain, self.rotated), -1)
        # W_uk^T q: [B, S, N, plain] x [N, plain, C]. N C numbers for each
        # query replace N plain for each cached position.
        return torch.einsum("bsnd,ndc->bsnc", plain, self._up_projections()[0]), turned

    def _expanded_values(self, latents: Tensor) -> Tensor:
        """Sums of latents [B, S, N, C] -> [B, S, N, value]"""
        return torch.einsum("bsnc,nvc->bsnv", latents, self._up_projections()[1])

    def _up_projections(self) -> tuple[Tensor, Tensor]:
        """From the latent to each head's key [N, plain, C] and value [N, value, C]"""
        # [N (plain + value), C] -> [N, plain + value, C], of this rank's heads
        up = effective_weight(self.linear_kv_up_proj).unflatten(0, (-1, self.plain + self.value))
        keys, values = up.split((self.plain, self.value), 1)
        return keys, values

    def _cached(
        self, q: Tensor, latents: Tensor, positional: Tensor, pattern: AttentionPattern, cache: Cache
    ) -> Tensor:
        """A new sequence expands its keys and values once; those that go on attend to the latents."""
        latents = self.of_all_positions(latents)

        def attend(q: Tensor, latents: Tensor, positional: Tensor) -> Tensor:
            return self.attend_to_latents(q, latents, positional, pattern, cache)

        return cache.attend(self, attend, (q,), (latents, positional), self.paged)

    def attend_to_latents(
        self, q: Tensor, latents: Tensor, positional: Tensor, pattern: AttentionPattern, cache: Cache
    ) -> Tensor:
        """Queries of one sequence over all its latents [1, T, C], in the form that suits their numbers."""
        # As many queries as keys: a new sequence. Expanded it has smaller heads, and the kernels of training. The
        # absorbed form rounds differently, so that it is excluded where bits have to be those of the training pass.
        if q.shape[1] == latents.shape[1] or cache.is_batch_invariant:
            rows = F.linear(latents, effective_weight(self.linear_kv_up_proj))
            return self.expanded(q, rows, positional, pattern)
        return self.absorbed(q, latents, positional, pattern)

    def of_all_positions(self, latents: Tensor) -> Tensor:
        """[B, S, C] of this rank's positions -> of all. The cache holds all of them on every rank of tp."""
        # In training ColumnParallelLinear gathers them instead.
        return gather_from(latents, SEQUENCE_DIM, self.ctx.tp) if self.ctx.sequence_parallel else latents

    def cached_state(self) -> PositionState:
        """The latent, and the rotated key that all heads share."""
        shapes = ((self.latent,), (1, self.rotated))
        return PositionState(shapes, self.linear_kv_up_proj.weight.dtype, is_paged=True)


class UnrotatedLatentAttention(LatentAttention):
    """The same without positions: the channels that all heads share are not rotated (Kimi Linear)."""

    def rotate(self, x: Tensor, angles: RotaryAngles) -> Tensor:
        return x


def rotate_pairs(x: Tensor, angles: RotaryAngles) -> Tensor:
    """[B, S, N, R] -> the same, channels 2i and 2i + 1 rotated together."""
    return rotate(x, angles.cos, angles.sin, interleaved=True)
