"""FLOPs of DeepSeek for each token, from its configuration (counted as in mt_models.flops)."""

from __future__ import annotations

from dataclasses import dataclass

from mt_core.errors import ConfigError
from mt_models.blocks.moe_flops import moe_flops
from mt_models.deepseek.config import DeepseekConfig
from mt_models.flops import Convention, TokenFlops, dense_feed_forward_flops


@dataclass(frozen=True)
class DeepseekFlops(TokenFlops):
    """Forward FLOPs for each token, over all layers."""

    prediction: float = 0.0
    """Layers of multi-token prediction and their logits, in training."""

    @property
    def forward(self) -> float:
        """Of the model without multi-token prediction."""
        return super().forward - self.prediction

    @property
    def training(self) -> float:
        """Forward and backward, MTP included."""
        return 3 * (self.forward + self.prediction)


def flops_per_token(config: DeepseekConfig, seq_length: int, *, convention: Convention = "seen") -> DeepseekFlops:
    """The mean over the tokens of a sequence of `seq_length`. Raises ConfigError when the vocabulary is unknown."""
    if config.vocab_size is None:
        raise ConfigError("model.vocab_size is not set, and the output layer's FLOPs depend on it")
    layers, projections = config.num_layers, projection_flops(config)
    keys = seq_length if convention == "full" else (seq_length + 1) / 2
    core = 2 * keys * config.num_attention_heads * (config.head_dim + config.v_head_dim)
    output = 2 * config.hidden_size * config.vocab_size
    counted = config.with_predicted_layers()
    feed_forward, with_predicted = layers * _feed_forward(config), counted.num_layers * _feed_forward(counted)
    # 4 H^2: eh_proj, [H, 2 H]. Each depth computes logits of its own with the model's LM head.
    each_depth = projections + core + 4 * config.hidden_size**2 + output
    return DeepseekFlops(
        attention_projections=layers * projections,
        attention_core=layers * core,
        feed_forward=feed_forward,
        output=output,
        prediction=config.mtp_num_layers * each_depth + with_predicted - feed_forward,
    )


def projection_flops(config: DeepseekConfig) -> float:
    """One layer's attention: the down and up projections, and the output projection."""
    hidden, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    rank, query = config.q_lora_rank, heads * config.head_dim
    queries = hidden * query if rank is None else hidden * rank + rank * query
    # The expanded form, which training uses; decoding's absorbed form has other products.
    keys_values = hidden * (latent + config.qk_pos_emb_head_dim)
    keys_values += latent * heads * (config.qk_head_dim + config.v_head_dim)
    return 2.0 * (queries + keys_values + heads * config.v_head_dim * hidden)


def _feed_forward(config: DeepseekConfig) -> float:
    return dense_feed_forward_flops(config) if config.moe is None else moe_flops(config)
