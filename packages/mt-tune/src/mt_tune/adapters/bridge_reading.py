"""An open adapter of Megatron-Bridge: what its run_config.yaml and its tensors say of it.

`linear_in.weight` is A and `linear_out.weight` is B, with rows in Megatron's order: queries, keys and values by group,
gate and up in halves. Parts of a fused layer share one A. CanonicalLoRA has a pair for each part instead, and DoRA
`weight_magnitude`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from mt_ckpt.megatron_dist.bridge_adapter import read_adapters, read_run_config
from mt_core.errors import CheckpointError, ConfigError

KINDS = {"LoRA": "lora", "VLMLoRA": "lora", "CanonicalLoRA": "lora", "DoRA": "dora"}
"""Class of Megatron-Bridge -> adapter.type"""
IN, OUT, MAGNITUDE = "linear_in.weight", "linear_out.weight", "weight_magnitude"
OF_PARTS: Mapping[str, tuple[str, ...]] = {
    "linear_qkv": ("adapter_q", "adapter_k", "adapter_v"),
    "linear_fc1": ("adapter_gate", "adapter_up"),
}
"""Fused layer -> adapters of its parts in CanonicalLoRA, in the order of their rows."""


class BridgeAdapter:
    """Raises ConfigError and CheckpointError for a folder that is none, is damaged, or has tensors of other names."""

    def __init__(self, path: Path) -> None:
        self.path, content = path, read_run_config(path)
        self.peft: Mapping[str, Any] = content["peft"]
        self.model: Mapping[str, Any] = content.get("model") or {}
        self.base: str | None = (content.get("checkpoint") or {}).get("pretrained_checkpoint")
        self.layers = read_adapters(path)
        unknown = [
            f"{layer}.adapter.{name}"
            for layer, parameters in self.layers.items()
            for name in parameters
            if not _known(name)
        ]
        if unknown:
            raise CheckpointError(f"{path}: nothing takes {', '.join(unknown[:5])}: no names of Megatron-Bridge's LoRA")

    @cached_property
    def kind(self) -> str:
        name = str(self.peft.get("_target_", "")).rpartition(".")[2]
        if name not in KINDS:
            raise ConfigError(
                f"{self.path}: peft._target_={self.peft.get('_target_')!r} is not supported; it can be "
                f"{', '.join(KINDS)} of megatron.bridge.peft"
            )
        return KINDS[name]

    def divided(self, axis: str) -> bool:
        """Whether the run had more than one rank of tensor_model_parallel_size or of another key."""
        return int(self.model.get(axis) or 1) > 1

    def read(self, layer: str, name: str) -> Tensor:
        return self.layers[layer][name].piece.read().float()

    def rank(self, layer: str) -> int:
        ranks = {entry.piece.shape[-2] for name, entry in self.layers[layer].items() if name.endswith(IN)}
        if len(ranks) != 1:
            raise CheckpointError(f"{self.path}: {layer} has adapters of the ranks {sorted(ranks)}, where one is read")
        return int(ranks.pop())

    def section(self) -> dict[str, Any]:
        """Keys of [adapter] that describe it."""
        ranks = {layer: self.rank(layer) for layer in self.layers}
        if not ranks:
            raise CheckpointError(f"{self.path}: has no tensor of an adapter")
        usual, alpha = Counter(ranks.values()).most_common(1)[0][0], float(self.peft.get("alpha", 32))
        section: dict[str, Any] = {
            "type": self.kind,
            "rank": usual,
            "alpha": alpha,
            "targets": sorted(ranks),
            "rank_pattern": {re.escape(layer): rank for layer, rank in ranks.items() if rank != usual},
        }
        if any(
            ".experts." in layer and name.startswith("adapter_")
            for layer, parameters in self.layers.items()
            for name in parameters
        ):
            section["experts"] = "per_expert"
        return section


def _known(name: str) -> bool:
    parts = [part for of_layer in OF_PARTS.values() for part in of_layer]
    return name in (IN, OUT, MAGNITUDE, *(f"{part}.{leaf}" for part in parts for leaf in (IN, OUT)))
