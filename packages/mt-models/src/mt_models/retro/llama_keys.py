"""A Llama as the start of a RETRO: its section [model] in the keys of a GPT, whose parameters it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_core.errors import ConfigError
from mt_models.gpt.hugging_face_relatives import SAME_KEYS
from mt_models.llama.config import LlamaConfig

SAME = (*SAME_KEYS, "attention_backend", "max_position_embeddings")
"""Keys of both families."""


def retro_keys_of_llama(stored: Mapping[str, Any]) -> dict[str, Any]:
    """See `mt_core.specs.ModelKeys`. Raises ConfigError for experts, rope scaling, and biases in some layers only."""
    llama = LlamaConfig.model_validate(stored)
    for key, allowed in (("moe", None), ("rope_scaling_type", "none"), ("mlp_bias", llama.attention_bias)):
        if getattr(llama, key) != allowed:
            raise ConfigError(
                f"the Llama of the checkpoint has model.{key}={getattr(llama, key)}, which model.family=retro cannot "
                f"have (it has to be {allowed}); start from another checkpoint"
            )
    return {
        **{key: getattr(llama, key) for key in SAME},
        "ffn_hidden_size": llama.ffn_size,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "add_bias_linear": llama.mlp_bias,
    }
