"""Rules that several families share."""

from __future__ import annotations

import math

from mt_core.config.checks import divisors, listed
from mt_core.config.schema import Config
from mt_core.errors import ConfigError


def check_tensor_parallel(config: Config, *, query_groups: int, ffn_size: int, heads: int | None = None) -> None:
    """Raise ConfigError unless each tensor-parallel rank gets whole key-value groups, or the same part of the query
    heads of one group, and equal feed-forward rows. heads: query heads; default: one a group."""
    size = config.parallel.tensor_model_parallel_size
    key = "parallel.tensor_model_parallel_size"
    heads = heads or query_groups
    # Of both rules below. Divisors of the groups, and multiples of them that divide the query heads, which have a part
    # of a group each (SelfAttention's ranks_per_group).
    legal = [n for n in divisors(math.gcd(heads, ffn_size)) if query_groups % n == 0 or n % query_groups == 0]
    if ffn_size % size:
        raise ConfigError(
            f"{key}={size} does not divide the width of the feed-forward (model.ffn_hidden_size)={ffn_size}; it can be "
            f"{listed(legal)}"
        )
    if size not in legal:
        raise ConfigError(
            f"{key}={size} does not fit model.num_query_groups={query_groups} key-value heads (each rank has whole "
            f"groups, or a part of one) and model.num_attention_heads={heads}; it can be {listed(legal)}"
        )
