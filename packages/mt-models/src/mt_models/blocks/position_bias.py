"""Biases of attention scores by distance: T5's learned ones (Raffel et al., 2020) and the slopes of ALiBi."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from mt_core.nn.layout import Init, LayoutModule, ParameterLayout, Split
from mt_core.parallel.context import ParallelContext


class RelativeBias(LayoutModule):
    """Biases of scores from a table [buckets, heads], sharded by heads over tensor-parallel ranks.

    bidirectional: keys before and after a query have different buckets; otherwise keys after it share the bucket
    of distance 0, since a causal query does not see them.
    """

    relative_attention_bias: RelativeTable

    def __init__(
        self, buckets: int, heads: int, max_distance: int, ctx: ParallelContext, *, bidirectional: bool, init: Init
    ) -> None:
        super().__init__(ctx)
        self.buckets, self.max_distance, self.bidirectional = buckets, max_distance, bidirectional
        self.relative_attention_bias = RelativeTable(buckets, heads, init, ctx)

    def forward(self, queries: int, keys: int) -> Tensor:
        """[1, heads of this rank, queries, keys] for the last `queries` of `keys` positions."""
        device = self.relative_attention_bias.weight.device
        # A decode step has fewer queries than keys: its queries are the last
        # positions, so their rows are the last ones.
        places = torch.arange(keys, device=device)
        distance = places[None, :] - places[keys - queries :, None]
        chosen = buckets_of(distance, self.buckets, self.max_distance, bidirectional=self.bidirectional)
        # [queries, keys, heads] -> [1, heads, queries, keys], which broadcasts over the batch of scores.
        return self.relative_attention_bias(chosen).permute(2, 0, 1)[None]


class RelativeTable(LayoutModule):
    """[buckets, heads]"""

    weight: Tensor

    def __init__(self, buckets: int, heads: int, init: Init, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        self.declare("weight", ParameterLayout((buckets, heads), init, (Split(dim=1, axis="tp"),)))

    def forward(self, buckets: Tensor) -> Tensor:
        """[...] -> [..., heads of this rank]"""
        return F.embedding(buckets, self.weight)


def buckets_of(distance: Tensor, buckets: int, max_distance: int, *, bidirectional: bool) -> Tensor:
    """The bucket of each distance (key position - query position).

    Of the buckets of one direction the first half are single distances, and the second half are ranges whose bounds
    grow geometrically up to max_distance; larger distances share the last bucket.
    """
    # As in Mesh TensorFlow and transformers. buckets = 32, max_distance = 128, causal: distances 0 to 15 have buckets 0
    # to 15, 16 to 18 have bucket 16, 19 to 20 bucket 17, ... and 113 and above bucket 31.
    first = torch.zeros_like(distance)
    if bidirectional:
        # Half of the buckets for each direction: later keys have the second half, the query's own position bucket 0.
        buckets //= 2
        first = (distance > 0).long() * buckets
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    single = buckets // 2
    # 1 instead of a distance of 0 keeps the logarithm finite; the result is not used.
    growth = (distance.clamp(min=1).float() / single).log() / math.log(max_distance / single)
    ranged = (single + (growth * (buckets - single)).long()).clamp(max=buckets - 1)
    return first + torch.where(distance < single, distance, ranged)


# -- ALiBi (Press et al., Train Short, Test Long, 2021) ----------------------------------------------


def alibi_slopes(num_heads: int) -> Tensor:
    """[num_heads] slopes in fp32. For a power of two: 2^(-8 (i + 1) / n); else the paper's interleaving."""
    closest = 2 ** math.floor(math.log2(num_heads))
    slopes = _geometric(closest)
    if closest < num_heads:
        # 12 heads: the 8 slopes 2^-1, 2^-2, ... 2^-8 of 8 heads, and of those of 16 heads the first 4
        # that are not among them: 2^-0.5, 2^-1.5, 2^-2.5, 2^-3.5.
        slopes += _geometric(2 * closest)[0::2][: num_heads - closest]
    return torch.tensor(slopes, dtype=torch.float32)


def _geometric(count: int) -> list[float]:
    ratio = 2.0 ** (-8.0 / count)
    return [ratio ** (i + 1) for i in range(count)]
