"""Floating-point operations of a GPT, with its layers of multi-token prediction."""

from __future__ import annotations

from mt_core.config.schema import Config
from mt_models.flops import experts_flops, flops_per_token, output_flops
from mt_models.gpt.config import GPTConfig


def training_flops(config: Config) -> float:
    """FLOPs of training on a sample (`ModelSpec.training_flops`)."""
    model, length = config.model, config.data.seq_length
    assert isinstance(model, GPTConfig)
    forward = _forward(model, length)
    if depths := model.mtp_num_layers:
        layers = _forward(model.with_predicted_layers(), length) - forward
        # 4 H^2: eh_proj, [H, 2 H]. Each depth computes logits of its own with the model's LM head.
        each = 4 * model.hidden_size**2 + output_flops(model.hidden_size, model.vocab_size)
        forward += layers + depths * each
    return 3 * length * forward


def _forward(model: GPTConfig, length: int) -> float:
    """For each token, without what multi-token prediction adds to the layers."""
    return flops_per_token(model, length, feed_forward=experts_flops(model)).forward
