"""Rules that several families share."""

from __future__ import annotations

from mt_core.config.checks import must_divide
from mt_core.config.schema import Config


def check_tensor_parallel(config: Config, *, query_groups: int, ffn_size: int) -> None:
    """Raise ConfigError unless each tensor-parallel rank gets whole key-value groups and equal feed-forward rows."""
    size = config.parallel.tensor_model_parallel_size
    key = "parallel.tensor_model_parallel_size"
    must_divide(key, size, "the number of key-value heads (model.num_query_groups)", query_groups)
    must_divide(key, size, "the width of the feed-forward (model.ffn_hidden_size)", ffn_size)
