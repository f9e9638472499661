"""FLOPs of the feed-forwards of a model with MoE layers: those of a token's active experts, not of all."""

from __future__ import annotations

from typing import Protocol

from mt_core.nn.activations import is_gated
from mt_models.blocks.mixture import Mixture, MixtureShape


class MixtureFlopShape(MixtureShape, Protocol):
    """What is read from the configuration of a model."""

    @property
    def activation(self) -> str: ...


def mixture_flops(config: MixtureFlopShape) -> float:
    """Forward FLOPs for each token of one feed-forward, the mean over the layers: router, the chosen experts, shared
    experts and their gate; of dense layers the dense block."""
    mixture, matrices = Mixture(config), 3 if is_gated(config.activation) else 2
    hidden, latent = config.hidden_size, mixture["moe_latent_size"]
    width = latent or hidden
    experts = 2 * matrices * width * mixture.ffn_size * mixture.topk + (4 * hidden * latent if latent else 0)
    shared = 2 * matrices * hidden * (mixture.shared_size or 0)
    gates = 2 * hidden * (mixture.num_experts + bool(mixture["moe_shared_expert_gate"]))
    dense = 2 * matrices * hidden * config.ffn_size
    sparse_layers = sum(mixture.layers)
    total = sparse_layers * (experts + shared + gates) + (config.num_layers - sparse_layers) * dense
    return total / config.num_layers


def inactive_parameters(config: MixtureFlopShape) -> int:
    """Weights of the experts that a token does not use: total parameters minus these are the active ones."""
    mixture, matrices = Mixture(config), 3 if is_gated(config.activation) else 2
    width = mixture["moe_latent_size"] or config.hidden_size
    return sum(mixture.layers) * (mixture.num_experts - mixture.topk) * matrices * width * mixture.ffn_size
