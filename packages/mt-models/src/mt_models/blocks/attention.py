"""Self-attention: fused QKV projection, positions, the core, the output projection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn

from mt_core.nn.attention import AttentionCore, AttentionPattern
from mt_core.nn.cache import Cache, PagedScores, Pages, PositionState
from mt_core.nn.dropout import AttentionDropout
from mt_core.nn.kernels.choice import Kernels
from mt_core.nn.kernels.reference.layers import HeadNorms
from mt_core.nn.layout import normal
from mt_core.nn.linear import ColumnParallelLinear, RowParallelLinear
from mt_core.nn.norm import Norm, Normalization, build_head_norm
from mt_core.parallel.collectives import gather_from
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.norm import WideRMSNorm
from mt_models.blocks.rotary import RotaryAngles, plain_rotary, rotary_features


class AttentionConfigLike(Protocol):
    """What attention reads from the configuration of its model."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def query_groups(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def add_bias_linear(self) -> bool: ...
    @property
    def add_qkv_bias(self) -> bool: ...
    @property
    def qk_layernorm(self) -> bool: ...
    @property
    def normalization(self) -> Normalization: ...
    @property
    def norm_epsilon(self) -> float: ...
    @property
    def attention_dropout(self) -> float: ...
    @property
    def rotary_interleaved(self) -> bool: ...
    @property
    def init_method_std(self) -> float: ...
    @property
    def output_init_std(self) -> float: ...


class SelfAttention(nn.Module):
    """x -> linear_proj(core(q, k, v)): [batch, sequence, hidden] -> the same.

    Rows of linear_qkv are grouped by key-value group, as Megatron stores them: for each group its query
    heads, then its key head, then its value head. Tensor parallelism gives each rank whole groups. With more ranks than
    groups, ranks share a group and each has some of its query heads; the rows are padded to a multiple of the ranks.
    window: see AttentionPattern. qkv_bias, output_bias: of linear_qkv and linear_proj; default: as the
    configuration's biases. rotates: False for a layer without positions. scales_queries: by RotaryAngles.query_scale.
    norms_over_heads: q_layernorm and k_layernorm are over all heads together. norms_after_rotary: they are behind the
    rotation.
    """

    def __init__(
        self,
        config: AttentionConfigLike,
        core: AttentionCore,
        ctx: ParallelContext,
        *,
        window: int | None = None,
        qkv_bias: bool | None = None,
        output_bias: bool | None = None,
        rotates: bool = True,
        scales_queries: bool = False,
        norms_over_heads: bool = False,
        norms_after_rotary: bool = False,
    ) -> None:
        super().__init__()
        self.core = core
        self.window = window
        self.rotates, self.scales_queries, self.norms_after_rotary = rotates, scales_queries, norms_after_rotary
        self.query_groups = config.query_groups
        self.heads_per_group = config.num_attention_heads // config.query_groups
        self.head_dim = config.head_dim
        self.dropout = AttentionDropout(config.attention_dropout, ctx)
        self.rotary_interleaved = config.rotary_interleaved
        # Replaced by `use_kernels`, which is called once the model is built and its device is known.
        self.apply_rotary: Callable[..., tuple[Tensor, Tensor]] = plain_rotary
        self.split_and_rotate: Callable[..., tuple[Tensor, ...]] | None = None
        self.rotary_features = rotary_features(config)
        self.tp = ctx.tp
        # 1 unless tp exceeds the groups. tp = 8, 2 groups: 4 ranks share a group.
        self.ranks_per_group = max(ctx.tp.size // config.query_groups, 1)
        width = config.num_attention_heads * config.head_dim
        self.rows = width + 2 * config.query_groups * config.head_dim
        self.linear_qkv = ColumnParallelLinear(
            config.hidden_size,
            self.rows,
            ctx,
            bias=config.add_bias_linear or config.add_qkv_bias if qkv_bias is None else qkv_bias,
            init=normal(config.init_method_std),
            padded=-(-self.rows // ctx.tp.size) * ctx.tp.size,
        )
        self.linear_proj = RowParallelLinear(
            width,
            config.hidden_size,
            ctx,
            bias=config.add_bias_linear if output_bias is None else output_bias,
            init=normal(config.output_init_std),
        )
        self.query_scale = 1.0  # of the queries, behind their norm
        self.q_layernorm: nn.Module | None = None
        self.k_layernorm: nn.Module | None = None
        if config.qk_layernorm and norms_over_heads:
            self.q_layernorm = WideRMSNorm(config.num_attention_heads, config.head_dim, config.norm_epsilon, ctx)
            self.k_layernorm = WideRMSNorm(config.query_groups, config.head_dim, config.norm_epsilon, ctx)
        elif config.qk_layernorm:
            self.q_layernorm = build_head_norm(config.normalization, config.head_dim, config.norm_epsilon, ctx)
            self.k_layernorm = build_head_norm(config.normalization, config.head_dim, config.norm_epsilon, ctx)

    def use_kernels(self, kernels: Kernels) -> None:
        if self.rotary_features is not None:
            self.apply_rotary = kernels.pick("rotary", *self.rotary_features, width=self.head_dim, plain=plain_rotary)
            if self._rotates_what_it_splits:
                self.split_and_rotate = kernels.pick_fused(
                    "rotary",
                    *self.rotary_features,
                    width=self.head_dim,
                    joined=None if self.q_layernorm is None else "rms_norm",
                )

    @property
    def _rotates_what_it_splits(self) -> bool:
        """Whether between the split of qkv and the positions nothing is computed but RMSNorms of heads, by a subclass
        either."""
        # The fused kernel stands for project, normalize and the rotation. A subclass that overrides one of
        # the methods would be computed without its override.
        not_overridden = type(self).project is SelfAttention.project and type(self).normalize is SelfAttention.normalize
        norms = (self.q_layernorm, self.k_layernorm)
        in_kernel = all(isinstance(norm, Norm) and norm.kernel_name == "rms_norm" for norm in norms)
        plain = self.q_layernorm is None and self.query_scale == 1.0
        in_order = plain or not self.norms_after_rotary
        return not_overridden and (in_kernel or plain) and in_order and self.ranks_per_group == 1

    def _head_norms(self) -> HeadNorms | None:
        q_norm, k_norm = self.q_layernorm, self.k_layernorm
        if not isinstance(q_norm, Norm) or not isinstance(k_norm, Norm):
            return None
        # eps and the zero-centered flag are options of the norm; both norms are built with the same.
        q_weight, *options = q_norm.operands()
        return HeadNorms(q_weight, k_norm.operands()[0], self.query_scale, *options)

    def forward(self, x: Tensor, pattern: AttentionPattern, angles: RotaryAngles | None, cache: Cache | None) -> Tensor:
        # Keys are cached after rotation: their positions never change, and a decode step rotates the new key alone.
        rotation = angles.within(self.window) if angles is not None and self.rotates else None
        q, k, v = self.project_and_rotate(x, rotation)
        if self.scales_queries and angles is not None and angles.query_scale is not None:
            q = q * angles.query_scale.to(q.dtype)
        return self.linear_proj(self.attend_or_decode(q, k, v, pattern, cache).flatten(2))

    def attend_or_decode(
        self, q: Tensor, k: Tensor, v: Tensor, pattern: AttentionPattern, cache: Cache | None
    ) -> Tensor:
        """`attend`, with a cache over what that keeps of the positions before too: [B, S, N, D]."""
        # Layers of one model may differ in their window, so the pattern that all share gets this layer's here.
        within = pattern.within(self.window)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.attend(q, k, v, within)

        def paged(pages: Pages, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return pages.attend((q,), (k,), v, self.paged_scores(within))

        return attend(q, k, v) if cache is None else cache.attend(self, attend, (q,), (k, v), paged)

    def cached_state(self) -> PositionState:
        """Keys and values of this rank's groups."""
        # With more ranks than groups every rank caches the one group that it shares.
        shape = (max(self.query_groups // self.tp.size, 1), self.head_dim)
        return PositionState((shape, shape), self.linear_qkv.weight.dtype, self.window, is_paged=True)

    def paged_scores(self, pattern: AttentionPattern) -> PagedScores:
        """The scores of `attend`, for decoding from a paged cache."""
        return PagedScores(self.head_dim**-0.5, self.window, slopes=pattern.alibi_slopes)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pattern: AttentionPattern) -> Tensor:
        """q [B, S, N, D], k and v [B, T, G, D] -> [B, S, N, D], of this rank's heads."""
        return self.core(q, k, v, pattern, self.dropout.begin())

    def project_and_rotate(self, x: Tensor, angles: RotaryAngles | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of `project`, with the norms of heads and with positions."""
        if self.split_and_rotate is not None and angles is not None:
            # [B, S, G, N / G + 2, D]; the kernel splits, normalizes and rotates in one pass over memory.
            qkv, norms = self.groups_of_rows(x), self._head_norms()
            q, k, v = self.split_and_rotate(qkv, angles.cos, angles.sin, self.rotary_interleaved, norms)
            return q, k, v
        q, k, v = self.project(x)
        # Before the positions in Qwen3 and Gemma 3, behind them in Hunyuan: norm and rotation do not commute where the
        # norm has a weight.
        if not self.norms_after_rotary:
            q, k = self.normalize(q, k)
        if angles is not None:
            q, k = self.apply_rotary(q, k, angles.cos, angles.sin, self.rotary_interleaved)
        return (*self.normalize(q, k), v) if self.norms_after_rotary else (q, k, v)

    def groups_of_rows(self, x: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, G, N / G + 2, D]: of each group its queries, its key and its value."""
        rows = self.linear_qkv(x)
        if self.ranks_per_group > 1:
            rows = self._group_of_rank(rows)
        # The rows of a group: those of its queries, key and value, and what a subclass has beside them.
        return rows.unflatten(-1, (-1, self.rows // (self.query_groups * self.head_dim), self.head_dim))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, S, H] -> q [B, S, N, D], k and v [B, S, G, D], of this rank's groups"""
        # q [B, S, G, N / G, D], k and v [B, S, G, 1, D]: views, in the grouped order of the rows.
        q, k, v = self.groups_of_rows(x).split((self.heads_per_group, 1, 1), dim=3)
        if self.ranks_per_group > 1:
            # The ranks of a group have its keys and values alike, and each computes its part of the queries.
            q = q.chunk(self.ranks_per_group, 3)[self.tp.rank % self.ranks_per_group]
        return q.flatten(2, 3), k.squeeze(3), v.squeeze(3)

    def _group_of_rank(self, rows: Tensor) -> Tensor:
        """[B, S, rows of this rank] -> [B, S, rows of the group that it shares with other ranks], as Megatron does it:
        all rows are gathered, and each rank keeps its group's (and computes with its share of the queries)."""
        whole = gather_from(rows, rows.dim() - 1, self.tp)[..., : self.rows]  # without padding
        return whole.chunk(self.tp.size // self.ranks_per_group, -1)[self.tp.rank // self.ranks_per_group]

    def normalize(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Applied to each head of the queries and keys, if the model has it."""
        if self.q_layernorm is not None and self.k_layernorm is not None:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        return q if self.query_scale == 1.0 else q * self.query_scale, k
