"""Granite-MoE against `transformers`."""

from __future__ import annotations

import pytest
from tests.models import decoder_reference as dense
from tests.models import moe_reference as ref

from mt_core.errors import ConfigError
from mt_models.flops import flops_per_token, inactive_parameters, moe_flops

transformers = pytest.importorskip("transformers")

VOCAB = 99
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 12,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "attention_multiplier": 0.2,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
CASES = {
    "every factor, tied": {
        "embedding_multiplier": 5.0,
        "residual_multiplier": 0.3,
        "logits_scaling": 4.0,
        "tie_word_embeddings": True,
    },
    "scores alone": {},
}


def granite(**keys):
    return transformers.GraniteMoeForCausalLM(transformers.GraniteMoeConfig(**{**SHAPE, **keys}))


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_equal_the_reference(host, randomize, case) -> None:
    pair = ref.make_pair(host, granite(**CASES[case]), randomize)
    ref.assert_same_function(pair, dense.random_tokens(VOCAB, 21))
    dense.assert_decoding_equals_forward(pair.ours, dense.random_tokens(VOCAB, 15))
    ref.assert_maps_round_trip(pair)


def test_balance_loss_and_its_gradient_equal_the_reference(host, randomize) -> None:
    pair = ref.make_pair(host, granite(num_hidden_layers=1, router_aux_loss_coef=0.03), randomize)
    router = pair.theirs.model.layers[0].block_sparse_moe.router
    ref.assert_same_balance(pair, dense.random_tokens(VOCAB, 11), router)


@pytest.mark.slow
def test_presets_have_the_sizes_of_the_published_models(host) -> None:
    def shape(layers, hidden, heads, experts):
        fields = {
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": 8,
            "intermediate_size": 512,
            "num_local_experts": experts,
            "vocab_size": 49155,
            "tie_word_embeddings": True,
        }
        return transformers.GraniteMoeConfig, transformers.GraniteMoeForCausalLM, fields

    shapes = {
        "granite-3.0-1b-a400m": shape(24, 1024, 16, 32),
        "granite-3.0-3b-a800m": shape(32, 1536, 24, 40),
    }
    ref.assert_presets_match(host, "granite_moe", shapes)
    model = dense.build_preset(host, "granite-3.0-1b-a400m")
    active = dense.parameter_count(model) - inactive_parameters(model.config)
    assert active / 1e6 == pytest.approx(430, rel=0.02)


def test_flops_are_those_of_the_chosen_experts(build) -> None:
    config = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 384, "ffn_hidden_size": 24}
    moe = ref.settings({"moe": {"num_experts": 8, "moe_router_topk": 3}})
    model = build(*moe, family="granite_moe", **config, attention_backend="eager")
    flops = flops_per_token(model.config, 16, convention="full", feed_forward=moe_flops(model.config))
    ref.assert_active_flops(model, flops, {"feed_forward": (".mlp",)})


def test_biases_on_attention_are_refused(host) -> None:
    external = {"model_type": "granitemoe", "hidden_size": 32, "vocab_size": 50, "num_hidden_layers": 2}
    with pytest.raises(ConfigError, match="attention_bias=True is not supported; it can be False"):
        ref.family_of(host, "granitemoe").read_config({**external, "attention_bias": True})
