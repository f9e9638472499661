"""Floating-point operations of a GPT, with its layers of multi-token prediction."""

from __future__ import annotations

from mt_core.config.schema import Config
from mt_models.blocks.stream_config import depth_flops, stream_flops
from mt_models.flops import predicting_training_flops
from mt_models.gpt.config import GPTConfig


def training_flops(config: Config) -> float:
    """FLOPs of training on a sample (`ModelSpec.training_flops`)."""
    model = config.model
    assert isinstance(model, GPTConfig)
    # A connection each around attention and feed-forward.
    depths = model.mtp_num_layers * depth_flops(model, model.hidden_size, 2)
    connections = 3 * (stream_flops(model, model.hidden_size, 2 * model.num_layers) + depths)
    return predicting_training_flops(config) + config.data.seq_length * connections
