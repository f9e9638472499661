"""AFMoE (Arcee Trinity) against `transformers`."""

from __future__ import annotations

from typing import Any

import pytest
from tests.models import decoder_reference as dense
from tests.models import moe_reference as ref

from mt_core.errors import ConfigError
from mt_models.afmoe.flops import flops_per_token

transformers = pytest.importorskip("transformers")

VOCAB = 97
SLIDING, FULL = "sliding_attention", "full_attention"
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 10,
    "intermediate_size": 44,
    "moe_intermediate_size": 12,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "num_dense_layers": 1,
    "layer_types": [SLIDING, FULL, SLIDING],
    "sliding_window": 5,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}


@pytest.mark.parametrize(
    "keys",
    [
        {"mup_enabled": True, "route_scale": 1.7},
        {
            "tie_word_embeddings": True,
            "num_dense_layers": 0,
            "num_shared_experts": 1,
            "layer_types": [FULL, FULL, SLIDING],
        },
    ],
    ids=["scaled", "tied, no dense layer"],
)
def test_logits_and_gradients_equal_the_reference(host, randomize, keys) -> None:
    reference = transformers.AfmoeForCausalLM(transformers.AfmoeConfig(**{**SHAPE, **keys}))
    pair = ref.make_pair(host, reference, randomize)
    ref.assert_same_function(pair, dense.random_tokens(VOCAB, 21), unused=("expert_bias",))
    dense.assert_decoding_equals_forward(pair.ours, dense.random_tokens(VOCAB, 15))
    ref.assert_maps_round_trip(pair)


SMALL: dict[str, Any] = {"num_dense_layers": 2, "num_shared_experts": 1, "mup_enabled": True, "route_scale": 2.826}
TRINITY: dict[str, dict[str, Any]] = {
    "trinity-nano": {
        **SMALL,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "moe_intermediate_size": 256,
        "num_hidden_layers": 56,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
    "trinity-mini": {
        **SMALL,
        "moe_intermediate_size": 1024,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
    "trinity-large": {
        **SMALL,
        "hidden_size": 3072,
        "intermediate_size": 12288,
        "moe_intermediate_size": 3072,
        "num_hidden_layers": 60,
        "num_dense_layers": 6,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "num_experts": 256,
        "num_experts_per_tok": 4,
    },
}


@pytest.mark.slow
def test_presets_have_the_sizes_of_published_models(host) -> None:
    kinds = transformers.AfmoeConfig, transformers.AfmoeForCausalLM
    ref.assert_presets_match(host, "afmoe", {name: (*kinds, shape) for name, shape in TRINITY.items()})


def test_flops_of_parts(host) -> None:
    """By hand, 2 operations a multiply-add, of 4 positions."""
    keys = ref.family_of(host, "afmoe").read_config({"model_type": "afmoe", **{k: SHAPE[k] for k in list(SHAPE)[:-2]}})
    flops = flops_per_token(ref.build_from(host, keys).config, 4)
    # Queries, gates and output of 6 heads, keys and values of 3, in 3 layers.
    assert flops.attention_projections == 3 * 2 * 36 * 10 * (3 * 6 + 2 * 3)
    assert flops.attention_core == 3 * 4 * 6 * 10 * (1 + 2 + 3 + 4) / 4
    # A dense layer, and two with 3 experts of 12 channels, 2 shared ones, and a router of 7.
    assert flops.feed_forward == pytest.approx(2 * 36 * (3 * 44 + 2 * (3 * 5 * 12 + 7)))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok=1 is not supported"),
        ({"num_shared_experts": 0}, "num_shared_experts=0 is not supported"),
        ({"layer_types": [FULL]}, "for each of 3 layers"),
        ({"sliding_window": None}, "sliding_window=None is not supported"),
        ({"score_func": "softmax"}, "score_func='softmax' is not supported"),
        ({"n_group": 2}, "n_group=2 is not supported"),
    ],
)
def test_a_configuration_that_cannot_be_read(host, fields, words) -> None:
    external = {key: value for key, value in SHAPE.items() if "implementation" not in key}
    with pytest.raises(ConfigError, match=words):
        ref.family_of(host, "afmoe").read_config({"model_type": "afmoe", **external, **fields})
