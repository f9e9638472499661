"""Shapes that a formula cannot be computed with are refused with a sentence before a model is built."""

from __future__ import annotations

import pytest
from tests.models import decoder_reference as dense

from mt_core.errors import ConfigError

SMALL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 50}
EXPERTS = {"moe.num_experts": 6, "moe.moe_router_topk": 2}


@pytest.mark.parametrize(
    ("family", "keys", "words"),
    [
        ("llama", {"kv_channels": 7}, "model.kv_channels=7 is odd"),
        ("deepseek", {"qk_pos_emb_head_dim": 7}, "model.qk_pos_emb_head_dim=7 is odd"),
        ("qwen_moe", EXPERTS | {"rotary_percent": 0.4}, "model.rotary_percent=0.4 of 8 channels=3 is odd"),
        (
            "qwen_moe",
            EXPERTS | {"rotary_percent": 0.1},
            "leaves none to rotate; model.rotary_percent has to be at least 0.25",
        ),
        (
            "llama",
            {"rotary_base": 1.0, "rope_scaling_type": "yarn", "rope_scaling_factor": 2.0},
            "model.rotary_base=1.0 has to be above 1 with model.rope_scaling_type=yarn",
        ),
        ("t5", {"relative_attention_max_distance": 1}, "relative_attention_max_distance=1 must be above 16"),
        ("mixtral", EXPERTS | {"moe.moe_router_num_groups": 4, "moe.moe_router_group_topk": 1}, "does not divide .*=6"),
        ("mixtral", EXPERTS | {"moe.moe_router_num_groups": 3, "moe.moe_router_group_topk": 4}, "can be 1 to 3"),
    ],
)
def test_a_shape_without_a_meaning_is_refused(host, family: str, keys: dict[str, object], words: str) -> None:
    settings = [f"model.{key}={value}" for key, value in {"family": family, **SMALL, **keys}.items()]
    with pytest.raises(ConfigError, match=words):
        dense.load(host, "data.seq_length=8", *settings)
