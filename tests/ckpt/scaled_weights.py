"""Models whose weights have about the size that trained ones have, so that logits and losses are reasonable numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mt_ckpt.model import expected_parameters
from mt_core.config.loading import config_from_dict
from mt_core.plugins import PluginHost

LOCAL = {"transformer_impl": "local"}


class ScaledWeights:
    """A `CheckpointReader` with weights of about the size that trained ones have, all different.

    logit_offset: moves all logits of a model with a final LayerNorm by about so much, as GPT-2's are near -35.
    arguments: of Megatron's, that its run had; with --transformer-impl local weights are named as its own layers name
    them.
    """

    def __init__(
        self,
        model: Mapping[str, Any],
        host: PluginHost,
        *,
        logit_offset: float = 0.0,
        arguments: Mapping[str, Any] = LOCAL,
    ) -> None:
        layouts = expected_parameters(config_from_dict({"model": dict(model)}, host), host)
        generator = torch.Generator().manual_seed(1)
        self.tensors: dict[str, Tensor] = {}
        for name, layout in layouts.items():
            value = torch.randn(layout.shape, generator=generator)
            fan_in = layout.shape[-1] if len(layout.shape) > 1 else 25
            value = 1 + 0.2 * value if name.endswith("norm.weight") else value / math.sqrt(fan_in)
            if name.endswith("token_experts"):  # numbers of experts
                value = torch.randint(-256, -252, layout.shape, generator=generator)
            self.tensors[f"model.{name}"] = value.to(layout.dtype or torch.float32)
        if logit_offset:
            self._move_logits(logit_offset, generator)
        self.metadata = {
            "iteration": 0,
            "config": {"model": dict(model)},
            "megatron": {"args": dict(arguments)},
        }

    def _move_logits(self, offset: float, generator: torch.Generator) -> None:
        """All embeddings get a common part that the final norm's bias meets."""
        bias = self.tensors["model.decoder.final_layernorm.bias"]
        table = self.tensors.get("model.output_layer.weight", self.tensors["model.embedding.word_embeddings.weight"])
        common = torch.randn(len(bias), generator=generator)
        table += common
        bias += offset * common / common.square().sum()

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def dtypes(self) -> Mapping[str, torch.dtype]:
        return {name: tensor.dtype for name, tensor in self.tensors.items()}

    def read(self, name: str) -> Tensor:
        return self.tensors[name]

    def files(self) -> Mapping[str, bytes]:
        return {}
