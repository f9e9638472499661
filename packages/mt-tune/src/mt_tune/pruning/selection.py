"""Which layers, channels, heads and experts are kept: those with the largest statistics."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mt_tune.pruning.sizes import Sizes
from mt_tune.pruning.statistics import LayerStatistics, Statistics


@dataclass(frozen=True)
class KeptOfLayer:
    """Indices, ascending; None: all. groups: key-value heads; heads: query heads of the whole layer. norm_factors: of
    the weights of the norms of attention and of the feed-forward."""

    heads: Tensor | None
    groups: Tensor | None
    ffn: Tensor | None
    experts: Tensor | None
    norm_factors: tuple[float, float]


@dataclass(frozen=True)
class Kept:
    """layers: numbers of the larger model's layers. channels: of the residual stream."""

    layers: tuple[int, ...]
    channels: Tensor | None
    of_layers: dict[int, KeptOfLayer]
    final_norm_factor: float


def select(statistics: Statistics, sizes: Sizes, model: Any) -> Kept:
    """model: the configuration of the larger model, which `require_prunable` has accepted."""
    influence = torch.stack([layer.sums["influence"] for layer in statistics.layers])
    layers = tuple(_largest(influence, sizes.depth or len(influence)).tolist())
    channels = None
    if sizes.width is not None:
        # One residual stream: its channels are the same in all layers.
        total = torch.stack([statistics.layers[number].sums["channels"] for number in layers]).sum(0)
        channels = _largest(total, sizes.width)
    of_layers = {number: _of_layer(statistics.layers[number], channels, sizes, model) for number in layers}
    assert statistics.final_energy is not None
    return Kept(layers, channels, of_layers, _norm_factor(statistics.final_energy, channels))


def _of_layer(layer_statistics: LayerStatistics, channels: Tensor | None, sizes: Sizes, model: Any) -> KeptOfLayer:
    heads, groups = _heads(layer_statistics.sums["heads"], sizes.heads, model.query_groups)
    factors = tuple(_norm_factor(layer_statistics.sums[name], channels) for name in ("input_energy", "middle_energy"))
    return KeptOfLayer(
        heads=heads,
        groups=groups,
        ffn=None if sizes.ffn is None else _largest(layer_statistics.sums["ffn"], sizes.ffn),
        experts=None if sizes.experts is None else _largest(layer_statistics.sums["experts"], sizes.experts),
        norm_factors=(factors[0], factors[1]),
    )


def _heads(energy: Tensor, count: int | None, groups: int) -> tuple[Tensor | None, Tensor | None]:
    """(query heads, key-value heads). Where each query head has keys of its own both are pruned; else each key-value
    head keeps its most important query heads."""
    if count is None:
        return None, None
    if groups == len(energy):
        kept = _largest(energy, count)
        return kept, kept
    of_group = energy.view(groups, -1)
    of_groups = [_largest(row, count // groups) + number * of_group.shape[1] for number, row in enumerate(of_group)]
    return torch.cat(of_groups), torch.arange(groups)


def _norm_factor(energy: Tensor, channels: Tensor | None) -> float:
    """Root mean square of the kept channels over that of all: the factor by which RMSNorm would make the kept channels
    too large or too small without those that are left out."""
    if channels is None:
        return 1.0
    return math.sqrt(float(energy[channels].mean()) / max(float(energy.mean()), 1e-30))


def _largest(values: Tensor, count: int) -> Tensor:
    """Places of the largest values, ascending; of equal ones the first."""
    return values.sort(descending=True, stable=True).indices[:count].sort().values
