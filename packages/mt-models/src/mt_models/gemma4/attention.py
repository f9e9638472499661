"""Attention of Gemma 4: norms of query, key and value heads, keys that are values, keys and values of another layer.

    q = rotate(norm(W_q x))    k = rotate(norm(W_k x))    v = norm0(W_v x), or norm0(W_k x)    scores = q . k

Norms of queries and keys have a weight, that of values has none. Scores are not divided by sqrt(head size).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor

from mt_core.nn.attention import AttentionCore, AttentionPattern
from mt_core.nn.cache import Cache, CachedSequence, Pages
from mt_core.nn.layout import normal
from mt_core.nn.linear import ColumnParallelLinear
from mt_core.nn.norm import RMSNorm, build_head_norm
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.attention import SelfAttention
from mt_models.blocks.norm import ScaleFreeRMSNorm
from mt_models.blocks.rotary import RotaryAngles, rotate
from mt_models.gemma4.config import Gemma4Config


class ScaledQueryNorm(RMSNorm):
    """RMSNorm of query heads, multiplied by sqrt(head size), so that scores are not scaled: the attention core divides
    them by it. The multiplication is a part of the weight, in fp32, so that the output is rounded once."""

    def __init__(self, size: int, eps: float, ctx: ParallelContext) -> None:
        super().__init__(size, eps, ctx, ("tp",) if ctx.tp.size > 1 else ())
        self.scale = size**0.5

    def operands(self) -> tuple[Any, ...]:
        return self.weight.float() * self.scale, self.eps


@dataclass
class ImagePattern(AttentionPattern):
    """A causal pattern in which, within windows, the positions of an image see one another too.

    places: bool [B, T], where images are; images side by side are one. image_token: the id of their positions in the
    sequences of a cache.
    """

    places: Tensor | None = None
    image_token: int = -1
    _of_windows: dict[Any, AttentionPattern] = field(default_factory=dict)

    def within(self, window: int | None) -> AttentionPattern:
        if window is None or self.places is None:
            return super().within(window)
        places = self.places
        return self._known(window, lambda: with_images(places, window, self.segment_ids))

    def of_sequences(self, cache: Cache, window: int) -> Iterator[AttentionPattern]:
        """The pattern of each sequence of a cache over the positions that it has kept."""
        for number, sequence in enumerate(cache.sequences):
            yield self._known((number, window), lambda s=sequence: self._of_sequence(s, window))  # type: ignore[misc]

    def _of_sequence(self, sequence: CachedSequence, window: int) -> AttentionPattern:
        features = sequence.conditioning.get(IMAGE_TOKENS)
        places = torch.cat([sequence.past, sequence.new]) == self.image_token
        if features is None or not places[sequence.start :].any():
            return super().within(window)
        # Image tokens that were generated are words.
        places &= places.cumsum(0) <= int(features)
        return with_images(places[None], window, None)

    def _known(self, key: Any, make: Callable[[], AttentionPattern]) -> AttentionPattern:
        if key not in self._of_windows:
            self._of_windows[key] = make()
        return self._of_windows[key]


IMAGE_TOKENS = "image_tokens"
"""In a sequence's conditioning: how many positions of images its prompt has, on the host."""


def with_images(places: Tensor, window: int, segment_ids: Tensor | None) -> AttentionPattern:
    """The whole mask as a bias, which is what every backend that serves one can add."""
    starts = places & ~torch.nn.functional.pad(places[:, :-1], (1, 0))
    images = starts.cumsum(1).masked_fill(~places, 0)  # [B, T], numbers from 1, 0 for words

    def bias(queries: int, keys: int) -> Tensor:
        """[B, 1, S, T]: -inf where the last S of T positions do not see a key."""
        numbers = images[:, images.shape[1] - keys :]
        same_image = (numbers[:, keys - queries :, None] == numbers[:, None]) & (numbers > 0)[:, None]
        positions = torch.arange(keys, device=places.device)
        distance = positions[keys - queries :, None] - positions
        seen = ((distance >= 0) | same_image) & (distance < window)
        return torch.zeros(seen.shape, device=places.device).masked_fill(~seen, float("-inf"))[:, None]

    return AttentionPattern(causal=False, segment_ids=segment_ids, bias=bias)


class SharedKV:
    """Keys and values of one forward pass that later layers read: of each window the layer that computed them last."""

    def __init__(self) -> None:
        self._last: dict[int | None, tuple[SelfAttention, Tensor, Tensor]] = {}

    def put(self, layer: SelfAttention, k: Tensor, v: Tensor) -> None:
        self._last[layer.window] = layer, k, v

    def get(self, window: int | None) -> tuple[SelfAttention, Tensor, Tensor]:
        return self._last[window]


class Gemma4Attention(SelfAttention):
    """config: with the sizes of the layer (`Gemma4Config.of_layer`).

    Rows of linear_qkv are grouped as those of SelfAttention: of each group its query heads, then its key head, then its
    value head. keys_are_values: without value rows. shares_kv: without key rows either.
    """

    def __init__(
        self,
        config: Gemma4Config,
        core: AttentionCore,
        ctx: ParallelContext,
        window: int | None,
        *,
        keys_are_values: bool,
        shares_kv: bool,
    ) -> None:
        super().__init__(config, core, ctx, window=window)
        self.keys_are_values, self.shares_kv = keys_are_values, shares_kv
        self.q_layernorm = ScaledQueryNorm(config.head_dim, config.norm_epsilon, ctx)
        self.k_layernorm = None if shares_kv else build_head_norm("RMSNorm", config.head_dim, config.norm_epsilon, ctx)
        self.v_layernorm = ScaleFreeRMSNorm(config.norm_epsilon)
        # Replaces the matrix that SelfAttention has built by one without the rows that are not there.
        heads = 0 if shares_kv else 1 if keys_are_values else 2
        self.rows -= (2 - heads) * config.query_groups * config.head_dim
        if heads < 2:
            self.linear_qkv = ColumnParallelLinear(
                config.hidden_size,
                self.rows,
                ctx,
                bias=False,
                init=normal(config.init_method_std),
                padded=-(-self.rows // ctx.tp.size) * ctx.tp.size,
            )

    def forward(
        self,
        x: Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None,
        cache: Cache | None,
        shared: SharedKV | None = None,
    ) -> Tensor:
        assert angles is not None
        assert shared is not None
        angles = angles.within(self.window)
        if self.shares_kv:
            q = self.q_layernorm(self._queries(x))  # type: ignore[misc]
            q = rotate(q, angles.cos, angles.sin, interleaved=False)
            source, k, v = shared.get(self.window)
        else:
            q, k, v = self.project(x)
            q, k = self.normalize(q, k)
            q, k = self.apply_rotary(q, k, angles.cos, angles.sin, self.rotary_interleaved)
            source, v = self, self.v_layernorm(v)
            shared.put(self, k, v)
        return self.linear_proj(self._attend(source, q, k, v, pattern, cache).flatten(2))

    def _attend(
        self, source: SelfAttention, q: Tensor, k: Tensor, v: Tensor, pattern: AttentionPattern, cache: Cache | None
    ) -> Tensor:
        """[B, S, N, D] of queries over keys and values of `source`, with a cache over what that has kept."""
        within = pattern.within(self.window)
        patterns: Iterator[AttentionPattern] = repeat(within)
        if cache is not None and self.window is not None and isinstance(pattern, ImagePattern):
            # A cache calls `attend` once for each sequence, in order, and then for filler.
            patterns = chain(pattern.of_sequences(cache, self.window), patterns)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.attend(q, k, v, next(patterns))

        def paged(pages: Pages, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return pages.attend((q,), (k,), v, self.paged_scores(within))

        # A layer that shares them writes the new keys and values of its source again, to the same places.
        return attend(q, k, v) if cache is None else cache.attend(source, attend, (q,), (k, v), paged)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, S, H] -> q [B, S, N, D], k and v [B, S, G, D], of this rank's groups, before their norms"""
        if not self.keys_are_values:
            return super().project(x)
        q, k = self.groups_of_rows(x).split((self.heads_per_group, 1), dim=3)
        k = k.squeeze(3)
        return self._own_queries(q), k, k

    def _queries(self, x: Tensor) -> Tensor:
        return self._own_queries(self.groups_of_rows(x))

    def _own_queries(self, q: Tensor) -> Tensor:
        """[B, S, G, N / G, D] -> [B, S, N, D]"""
        if self.ranks_per_group > 1:
            q = q.chunk(self.ranks_per_group, 3)[self.tp.rank % self.ranks_per_group]
        return q.flatten(2, 3)
