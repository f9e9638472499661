"""Which dimensions of which tensors a pruned part is, by canonical names of pre-norm decoders."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mt_core.errors import ConfigError
from mt_tune.pruning.selection import Kept, KeptOfLayer

LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
CHANNELS, QKV, HEADS, FFN, GATED_FFN, EXPERTS, WHOLE = "channels", "qkv", "heads", "ffn", "gated_ffn", "experts", ""
OUTER: dict[str, tuple[str, ...]] = {
    "embedding.word_embeddings.weight": (WHOLE, CHANNELS),
    "decoder.final_layernorm.weight": (CHANNELS,),
    "output_layer.weight": (WHOLE, CHANNELS),
}
"""Name -> what each dimension counts."""
OF_LAYER: dict[str, tuple[str, ...]] = {
    "input_layernorm.weight": (CHANNELS,),
    "self_attention.linear_qkv.weight": (QKV, CHANNELS),
    "self_attention.linear_qkv.bias": (QKV,),
    "self_attention.linear_proj.weight": (CHANNELS, HEADS),
    "self_attention.linear_proj.bias": (CHANNELS,),
    "self_attention.q_layernorm.weight": (WHOLE,),
    "self_attention.k_layernorm.weight": (WHOLE,),
    "pre_mlp_layernorm.weight": (CHANNELS,),
    "mlp.linear_fc1.weight": (GATED_FFN, CHANNELS),
    "mlp.linear_fc1.bias": (GATED_FFN,),
    "mlp.linear_fc2.weight": (CHANNELS, FFN),
    "mlp.linear_fc2.bias": (CHANNELS,),
    "mlp.router.weight": (EXPERTS, CHANNELS),
    "mlp.router.bias": (EXPERTS,),
    "mlp.router.expert_bias": (EXPERTS,),
    "mlp.router.expert_scale": (EXPERTS,),
    "mlp.experts.linear_fc1.weight": (EXPERTS, WHOLE, CHANNELS),
    "mlp.experts.linear_fc1.bias": (EXPERTS, WHOLE),
    "mlp.experts.linear_fc2.weight": (EXPERTS, CHANNELS, WHOLE),
    "mlp.experts.linear_fc2.bias": (EXPERTS, CHANNELS),
    "mlp.shared_experts.gate_weight": (WHOLE, CHANNELS),
    "mlp.shared_experts.linear_fc1.weight": (WHOLE, CHANNELS),
    "mlp.shared_experts.linear_fc2.weight": (CHANNELS, WHOLE),
}
NORMS = ("input_layernorm.weight", "pre_mlp_layernorm.weight")


class PrunedTensors:
    """The smaller model's tensors as parts of the larger one's. model: the configuration of the larger one."""

    def __init__(self, kept: Kept, model: Any) -> None:
        self.kept, self.model = kept, model

    def source_of(self, name: str) -> str:
        """The name in the larger model: layers are numbered again."""
        match = LAYER.fullmatch(name)
        return name if match is None else f"decoder.layers.{self.kept.layers[int(match[1])]}.{match[2]}"

    def prune(self, name: str, tensor: Tensor) -> Tensor:
        """name: in the larger model. The kept part, in the tensor's dtype."""
        match = LAYER.fullmatch(name)
        layer = None if match is None else self.kept.of_layers[int(match[1])]
        for dim, what in enumerate(dimensions_of(name, self.model.family)):
            places = None if what == WHOLE else self._places(what, layer)
            if places is not None:
                tensor = tensor.index_select(dim, places)
        factor = self._norm_factor(name, layer)
        return tensor if factor == 1.0 else (tensor.float() * factor).to(tensor.dtype)

    def _places(self, what: str, layer: KeptOfLayer | None) -> Tensor | None:
        """The kept indices of a dimension; None: all."""
        if what == CHANNELS:
            return self.kept.channels
        assert layer is not None
        find: dict[str, Callable[[KeptOfLayer], Tensor | None]] = {
            QKV: self._qkv_rows,
            HEADS: lambda kept: None if kept.heads is None else _blocks(kept.heads, self.model.head_dim),
            FFN: lambda kept: kept.ffn,
            # All gate rows, then all up rows.
            GATED_FFN: lambda kept: None if kept.ffn is None else torch.cat([kept.ffn, kept.ffn + self.model.ffn_size]),
            EXPERTS: lambda kept: kept.experts,
        }
        return find[what](layer)

    def _qkv_rows(self, layer: KeptOfLayer) -> Tensor | None:
        """For each kept key-value head its kept query heads, its keys, its values."""
        if layer.heads is None or layer.groups is None:
            return None
        each = self.model.num_attention_heads // self.model.query_groups
        blocks = []
        for group in layer.groups.tolist():
            first = group * (each + 2)
            queries = [head - group * each for head in layer.heads.tolist() if head // each == group]
            blocks += [first + place for place in (*queries, each, each + 1)]
        return _blocks(torch.tensor(blocks), self.model.head_dim)

    def _norm_factor(self, name: str, layer: KeptOfLayer | None) -> float:
        if name == "decoder.final_layernorm.weight":
            return self.kept.final_norm_factor
        for norm, factor in zip(NORMS, layer.norm_factors if layer is not None else (), strict=False):
            if name.endswith(norm):
                return factor
        return 1.0


def dimensions_of(name: str, family: str) -> tuple[str, ...]:
    """What each dimension of a tensor counts. Raises ConfigError for a name that is not known."""
    match = LAYER.fullmatch(name)
    known = OUTER.get(name) if match is None else OF_LAYER.get(match[2])
    if known is None:
        raise ConfigError(
            f"model.family={family}: mt tune prune does not know what the dimensions of {name} are; a model with such "
            "parameters cannot be pruned"
        )
    return known


def _blocks(numbers: Tensor, size: int) -> Tensor:
    """Numbers of blocks -> numbers of their rows."""
    return (numbers[:, None] * size + torch.arange(size)).flatten()
