"""MiniMax-M2 against `transformers`."""

from __future__ import annotations

import pytest
from tests.models import decoder_reference as dense
from tests.models import moe_reference as ref

transformers = pytest.importorskip("transformers")

VOCAB = 97
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 12,
    "intermediate_size": 20,
    "num_local_experts": 7,
    "num_experts_per_tok": 3,
    "bos_token_id": None,
    "eos_token_id": None,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
HALF = {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    "keys", [{"rope_parameters": HALF}, {"tie_word_embeddings": True}], ids=["half", "whole, tied"]
)
def test_logits_and_gradients_equal_the_reference(host, randomize, keys) -> None:
    reference = transformers.MiniMaxM2ForCausalLM(transformers.MiniMaxM2Config(**{**SHAPE, **keys}))
    for layer in reference.model.layers:
        layer.mlp.e_score_correction_bias.uniform_(-0.3, 0.3)
    pair = ref.make_pair(host, reference, randomize)
    ref.assert_same_function(pair, dense.random_tokens(VOCAB, 21), unused=("expert_bias",))
    dense.assert_decoding_equals_forward(pair.ours, dense.random_tokens(VOCAB, 15))
    ref.assert_maps_round_trip(pair)


def test_the_preset_has_the_size_of_the_published_model(host) -> None:
    shapes = {"minimax-m2": (transformers.MiniMaxM2Config, transformers.MiniMaxM2ForCausalLM, {})}
    ref.assert_presets_match(host, "minimax_m2", shapes)


def test_balance_loss_and_its_gradient_equal_the_reference(host, randomize) -> None:
    """The class takes the softmax of logits of which its router takes sigmoids."""
    config = transformers.MiniMaxM2Config(**{**SHAPE, "num_hidden_layers": 1, "router_aux_loss_coef": 0.03})
    pair = ref.make_pair(host, transformers.MiniMaxM2ForCausalLM(config), randomize)
    assert pair.ours.config.moe["moe_aux_loss_coeff"] == [0.03]
    ref.assert_same_balance(pair, dense.random_tokens(VOCAB, 21), pair.theirs.model.layers[0].mlp.gate)
    assert pair.family.write_config(pair.ours.config)["router_aux_loss_coef"] == 0.03
