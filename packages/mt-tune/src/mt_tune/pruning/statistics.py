"""Activations of a model on calibration data, from which the importance of its parts follows (Minitron, Muralidharan et
al., 2024)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class LayerStatistics:
    """Sums over the positions of the calibration data, in fp64 on the CPU.

    influence: [], 1 - cosine of a layer's input and output (the block influence of ShortGPT). channels: [H], absolute
    values behind both norms. input_energy, middle_energy: [H], squares of the residual stream in front of the norm of
    attention and of the feed-forward. heads: [heads], squares of each head's output. ffn: [F], absolute values in front
    of linear_fc2. experts: [E], weights with which tokens were sent to each expert.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)
    positions: int = 0

    def add(self, name: str, value: Tensor) -> None:
        value = value.detach().double().cpu()
        self.sums[name] = self.sums[name] + value if name in self.sums else value


@dataclass
class Statistics:
    """final_energy: [H], squares of the input of the last norm."""

    layers: list[LayerStatistics]
    final_energy: Tensor | None = None


def collect(model: nn.Module, batches: Iterable[Tensor], head_dim: int) -> Statistics:
    """The statistics of a decoder of pre-norm layers over batches of token ids [B, S]. One forward pass each."""
    decoder: Any = model.get_submodule("decoder")
    layers = list(decoder.layers)
    statistics = Statistics([LayerStatistics() for _ in layers])
    hooks = [
        hook
        for layer, layer_statistics in zip(layers, statistics.layers, strict=True)
        for hook in _watch(layer, layer_statistics, head_dim)
    ]
    last: list[Tensor] = []
    hooks.append(layers[-1].register_forward_hook(lambda _module, _inputs, output: last.append(output)))
    model.eval()
    try:
        with torch.no_grad():
            for tokens in batches:
                model(tokens=tokens)
                energy = _squares(last.pop()).double().cpu()
                statistics.final_energy = (
                    energy if statistics.final_energy is None else statistics.final_energy + energy
                )
    finally:
        for hook in hooks:
            hook.remove()
    return statistics


def _watch(layer: Any, layer_statistics: LayerStatistics, head_dim: int) -> list[Any]:
    """Hooks that add the activations of a layer."""
    seen: dict[str, Tensor] = {}

    def attention_input(_module: nn.Module, inputs: Any) -> None:
        layer_statistics.add("channels", _magnitudes(inputs[0]))

    def attention_output(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        seen["attended"] = output

    def feed_forward_input(_module: nn.Module, inputs: Any) -> None:
        layer_statistics.add("channels", _magnitudes(inputs[0]))

    def whole_layer(_module: nn.Module, inputs: Any, output: Tensor) -> None:
        x = inputs[0]
        layer_statistics.positions += x.shape[0] * x.shape[1]
        layer_statistics.add("influence", (1.0 - F.cosine_similarity(x.double(), output.double(), dim=-1)).sum())
        layer_statistics.add("input_energy", _squares(x))
        layer_statistics.add("middle_energy", _squares(x + seen.pop("attended")))

    def projected(_module: nn.Module, inputs: Any) -> None:
        layer_statistics.add("heads", _squares(inputs[0]).view(-1, head_dim).sum(-1))

    def routed(_module: nn.Module, _inputs: Any, routing: Any) -> None:
        layer_statistics.add("experts", _mass(routing))

    def activated(_module: nn.Module, inputs: Any) -> None:
        layer_statistics.add("ffn", _magnitudes(inputs[0]))

    hooks = [
        layer.self_attention.register_forward_pre_hook(attention_input),
        layer.self_attention.register_forward_hook(attention_output),
        layer.self_attention.linear_proj.register_forward_pre_hook(projected),
        layer.mlp.register_forward_pre_hook(feed_forward_input),
        layer.register_forward_hook(whole_layer),
    ]
    if hasattr(layer.mlp, "router"):
        hooks.append(layer.mlp.router.register_forward_hook(routed))
    else:
        hooks.append(layer.mlp.linear_fc2.register_forward_pre_hook(activated))
    return hooks


def _mass(routing: Any) -> Tensor:
    """[E]: the sum of the weights of the tokens that chose each expert."""
    weights = routing.weights.double()
    zeros = torch.zeros(routing.num_experts, dtype=torch.float64, device=weights.device)
    return zeros.scatter_add(0, routing.experts.flatten(), weights.flatten())


def _squares(x: Tensor) -> Tensor:
    return x.double().square().flatten(0, -2).sum(0)


def _magnitudes(x: Tensor) -> Tensor:
    return x.double().abs().flatten(0, -2).sum(0)
