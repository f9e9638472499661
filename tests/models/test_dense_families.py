"""Dense families that differ from Llama by little, against `transformers` on shapes that are no powers of two."""

from __future__ import annotations

from typing import Any

import pytest
from tests.models import decoder_reference as ref

transformers = pytest.importorskip("transformers")

VOCAB = 97
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 44,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "attn_implementation": "eager",
}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 4.0, 8.0]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 500000.0}
MINISTRAL = {**YARN, "original_max_position_embeddings": 5, "llama_4_scaling_beta": 0.3, "mscale": 1.0}
LOCAL = {"rope_type": "default", "rope_theta": 10000.0}
WINDOWS = ["sliding_attention", "sliding_attention", "full_attention"]
ALPHA = {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}

PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.5}
LFM3 = {
    "head_dim": 10,
    "layer_types": ["conv", "sliding_attention", "full_attention"],
    "sliding_window": 5,
    "conv_L_cache": 4,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("Phi3", {"sliding_window": 5}),
    "phi3, tied, half of each head": (
        "Phi3",
        {"hidden_size": 72, "rope_parameters": {"partial_rotary_factor": 0.5}, "tie_word_embeddings": True},
    ),
    "phi3, longrope, short": ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}),
    "phi3, longrope, long": ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 8}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "smollm3, biased, by a list": (
        "SmolLM3",
        {"no_rope_layers": [0, 1, 1], "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    ),
    "ministral3": ("Ministral3", {"head_dim": 10, "rope_parameters": MINISTRAL}),
    "ministral3, windows": ("Ministral3", {"head_dim": 10, "rope_parameters": MINISTRAL, "sliding_window": 4}),
    "olmo2": ("Olmo2", {}),
    "olmo2, biased, yarn": ("Olmo2", {"attention_bias": True, "rope_parameters": YARN, "tie_word_embeddings": True}),
    "olmo3": ("Olmo3", {"layer_types": WINDOWS, "sliding_window": 5}),
    "olmo3, yarn in global layers, another base in local ones": (
        "Olmo3",
        {
            "layer_types": WINDOWS,
            "sliding_window": 5,
            "rope_parameters": {"full_attention": YARN, "sliding_attention": LOCAL},
        },
    ),
    "exaone4": ("Exaone4", {"layer_types": WINDOWS, "sliding_window": 5}),
    "exaone4, no windows": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "seed_oss": ("SeedOss", {"head_dim": 10}),
    "seed_oss, all biases": ("SeedOss", {"head_dim": 10, "attention_out_bias": True, "mlp_bias": True}),
    "granite": (
        "Granite",
        {
            "attention_multiplier": 0.3,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
            "tie_word_embeddings": True,
        },
    ),
    "granite, biased": ("Granite", {"attention_bias": True, "mlp_bias": True, "attention_multiplier": 0.4}),
    "ernie4_5": ("Ernie4_5", {"head_dim": 10}),
    "ernie4_5, biased": ("Ernie4_5", {"head_dim": 10, "use_bias": True, "tie_word_embeddings": False}),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "conv", "full_attention"], "block_multiple_of": 10}),
    "lfm2, biased": (
        "Lfm2",
        {"full_attn_idxs": [1], "conv_bias": True, "block_auto_adjust_ff_dim": False, "tie_word_embeddings": False},
    ),
    "lfm3": ("Lfm3", LFM3),
    "lfm3, biased, without gates and norms behind blocks": (
        "Lfm3",
        {
            **LFM3,
            "attention_bias": True,
            "conv_bias": True,
            "use_attention_gate": False,
            "use_sandwich_norm": False,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "full_attention": {**PROPORTIONAL, "factor": 2.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "hunyuan": ("HunYuanDenseV1", {"head_dim": 10, "rope_parameters": ALPHA}),
    "hunyuan, biased, no scaling": ("HunYuanDenseV1", {"head_dim": 10, "attention_bias": True}),
}


def model_of(name: str):
    stem, keys = CASES[name]
    config = getattr(transformers, f"{stem}Config")(**{**SHAPE, **keys})
    return getattr(transformers, f"{stem}ForCausalLM")(config)


@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_equal_the_reference(host, randomize, name) -> None:
    pair = ref.make_pair(host, model_of(name), randomize)
    ref.assert_same_function(pair, ref.random_tokens(VOCAB, 17))
    ref.assert_decoding_equals_forward(pair.ours, ref.random_tokens(VOCAB, 17))
    ref.assert_maps_round_trip(pair)
