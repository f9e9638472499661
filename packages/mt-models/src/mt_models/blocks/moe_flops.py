"""FLOPs of the feed-forwards of a model with MoE layers: those of a token's active experts, not of all."""

from __future__ import annotations

from typing import Protocol

from mt_core.nn.activations import is_gated
from mt_models.blocks.moe import MoEConfigLike, MoEOptions


class MoEFlopConfigLike(MoEConfigLike, Protocol):
    """What is read from the configuration of a model."""

    @property
    def activation(self) -> str: ...


def moe_flops(config: MoEFlopConfigLike) -> float:
    """Forward FLOPs for each token of one feed-forward, the mean over the layers: router, the chosen experts, shared
    experts and their gate; of dense layers the dense block."""
    moe, matrices = MoEOptions(config), 3 if is_gated(config.activation) else 2
    hidden, latent = config.hidden_size, moe["moe_latent_size"]
    width = latent or hidden
    # With a latent the experts are `latent` wide, between a down and an up projection that all experts share.
    experts = 2 * matrices * width * moe.ffn_size * moe.topk + (4 * hidden * latent if latent else 0)
    shared = 2 * matrices * hidden * (moe.shared_size or 0)
    # The router has a row for each expert, whether chosen or not; the gate of the shared expert is one row.
    gates = 2 * hidden * (moe.num_experts + bool(moe["moe_shared_expert_gate"]))
    dense = 2 * matrices * hidden * config.ffn_size
    sparse_layers = sum(moe.layers)
    total = sparse_layers * (experts + shared + gates) + (config.num_layers - sparse_layers) * dense
    return total / config.num_layers


def inactive_parameters(config: MoEFlopConfigLike) -> int:
    """Weights of the experts that a token does not use: total parameters minus these are the active ones."""
    moe, matrices = MoEOptions(config), 3 if is_gated(config.activation) else 2
    width = moe["moe_latent_size"] or config.hidden_size
    return sum(moe.layers) * (moe.num_experts - moe.topk) * matrices * width * moe.ffn_size
