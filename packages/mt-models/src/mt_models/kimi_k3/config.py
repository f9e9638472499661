"""Configuration of Kimi K3, and its published size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from mt_core.config.fields import PositiveFloat, PositiveInt
from mt_models.kimi_linear.config import KimiLinearConfig, shrink_kimi_linear


class KimiK3Config(KimiLinearConfig):
    """Kimi K3 (Moonshot AI, 2026), text."""

    linear_decay_lower_bound: Annotated[float, Field(lt=0)] | None = None
    """The least logarithm of a decay, which is this times a sigmoid. Default: decays are not bounded, and their
    logarithm is a scaled softplus."""
    residual_block_size: PositiveInt = 12
    """Layers whose outputs are summed before later blocks may weigh the sum by itself."""
    situ_beta: PositiveFloat = 4.0
    """Bound of the gate of a feed-forward: this times tanh(gate / this), times sigmoid(gate)."""
    situ_linear_beta: PositiveFloat = 25.0
    """The same of what the gate multiplies, without the sigmoid."""

    @property
    def activation(self) -> Any:
        return f"situ:{self.situ_beta},{self.situ_linear_beta}"

    @property
    def moe_combined_epsilon(self) -> float:
        """Added to the mean square in the norm of the experts' latents."""
        return self.norm_epsilon

    def begins_run(self, layer: int) -> bool:
        """Whether the sum of outputs before the layer becomes a source of its own, and a new sum begins."""
        return layer % self.residual_block_size == 0

    def sources_before(self, layer: int) -> int:
        """How many sources the layer reads: sums of whole runs, the embedding among them, and the current one."""
        return -(-layer // self.residual_block_size) + 1


def shrink_kimi_k3(model: Mapping[str, Any], seq_length: int) -> dict[str, Any]:
    """Both kinds of layers stay, and several runs."""
    return {**shrink_kimi_linear(model, seq_length), "residual_block_size": 2}


# -- published size ------------------------------------------------------------------------------------

PRESETS: dict[str, dict[str, Any]] = {
    "kimi-k3": {
        "model": {
            "num_layers": 93,
            "hidden_size": 7168,
            "num_attention_heads": 96,
            "ffn_hidden_size": 33792,
            "vocab_size": 163840,
            "max_position_embeddings": 1048576,
            "norm_epsilon": 1e-5,
            "latent_norm_epsilon": 1e-6,
            "q_lora_rank": 1536,
            "linear_attention_freq": "([1]*3+[0]*1)*23+[0]*1",
            "linear_num_key_heads": 96,
            "linear_num_value_heads": 96,
            "linear_decay_lower_bound": -5.0,
            "moe": {
                "num_experts": 896,
                "moe_router_topk": 16,
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
                "moe_ffn_hidden_size": 3072,
                "moe_latent_size": 3584,
                "moe_shared_expert_intermediate_size": 6144,
                "moe_router_load_balancing_type": ["seq_aux_loss"],
                "moe_aux_loss_coeff": [0.0001],
                "moe_layer_freq": "([0]*1+[1]*92)",
            },
        },
        "data": {"seq_length": 4096},
    },
}
