"""Names of gated delta nets and gated attention in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mt_core.errors import ConfigError
from mt_core.name_map import Rule
from mt_models.blocks.delta_net_config import DeltaNetKeys, frequency_of_attention, linear_layers
from mt_models.blocks.hugging_face_decoder import FULL

LINEAR = "linear_attention"
"""Value of `layer_types`, beside FULL."""


@dataclass(frozen=True)
class Blocks(Rule):
    """Tensors of different sizes end to end along dimension 0. sizes: rows of each."""

    sizes: tuple[int, ...] = ()

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(tensors))

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        return [part.contiguous() for part in tensor.split(self.sizes)]


@dataclass(frozen=True)
class ByKeyHead(Rule):
    """Two matrices there, of which each has the rows of key head 0, then those of key head 1, and so on: q, k, v, z,
    and b, a. Here the blocks q, k, v, z, b, a one after the other.

    rows: of a key head, in each of the six blocks.
    """

    heads: int = 1
    rows: tuple[int, ...] = ()

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        # [heads, rows of a head, in] of q, k, v, z, then of b, a
        parts = [
            part
            for tensor, rows in zip(tensors, (self.rows[:4], self.rows[4:]), strict=True)
            for part in tensor.unflatten(0, (self.heads, -1)).split(rows, dim=1)
        ]
        return torch.cat([part.flatten(0, 1) for part in parts])

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        blocks = tensor.split([self.heads * rows for rows in self.rows])
        by_head = [block.unflatten(0, (self.heads, -1)) for block in blocks]
        return [torch.cat(part, dim=1).flatten(0, 1) for part in (by_head[:4], by_head[4:])]


@dataclass(frozen=True)
class GatedGroupedQKV(Rule):
    """q_proj with the rows [heads, (query, gate), size], k_proj and v_proj there; here the rows of each key-value
    group: its queries, their gates, its key, its value."""

    groups: int = 1
    heads: int = 1

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        q, k, v = tensors
        # [groups, heads of a group, 2, size, in] -> [groups, 2, heads of a group, size, in]
        q = q.unflatten(0, (self.groups, self.heads // self.groups, 2, -1)).transpose(1, 2).flatten(1, 3)
        k, v = (x.unflatten(0, (self.groups, -1)) for x in (k, v))
        return torch.cat((q, k, v), dim=1).flatten(0, 1)

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        per_group = self.heads // self.groups
        grouped = tensor.unflatten(0, (self.groups, -1))
        size = grouped.shape[1] // (2 * per_group + 2)
        q, k, v = grouped.split([2 * per_group * size, size, size], dim=1)
        q = q.unflatten(1, (2, per_group, size)).transpose(1, 2).flatten(0, 3)
        return [q.contiguous(), k.flatten(0, 1).contiguous(), v.flatten(0, 1).contiguous()]


# -- configuration ---------------------------------------------------------------------------------------


def import_kinds(external: Mapping[str, Any], layers: int) -> int | str:
    """`linear_attention_freq` from `layer_types`, or from `full_attention_interval` where a file has no list. Raises
    ConfigError for a list of other kinds or length."""
    kinds = external.get("layer_types")
    if kinds is None:
        return int(external.get("full_attention_interval", 4))
    others = sorted({str(kind) for kind in kinds} - {LINEAR, FULL})
    if others or len(kinds) != layers:
        raise ConfigError(
            f"layer_types has {len(kinds)} entries{', with ' + ', '.join(others) if others else ''}; it needs {LINEAR} "
            f"or {FULL} for each of the num_hidden_layers={layers}"
        )
    return frequency_of_attention([kind == LINEAR for kind in kinds])


def export_kinds(config: Any) -> list[str]:
    return [LINEAR if linear else FULL for linear in linear_layers(config)]


def rows_of_key_head(config: DeltaNetKeys) -> tuple[int, ...]:
    """Rows of q, k, v, z, b and a for each key head."""
    repeats = config.linear_num_value_heads // config.linear_num_key_heads
    key, values = config.linear_key_head_dim, repeats * config.linear_value_head_dim
    return key, key, values, values, repeats, repeats
