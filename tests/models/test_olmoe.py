"""OLMoE against `transformers`, and its norms over all heads under tensor parallelism."""

from __future__ import annotations

import pytest
from tests.models import decoder_reference as dense
from tests.models import moe_reference as ref

from mt_core.errors import ConfigError
from mt_models.flops import flops_per_token, inactive_parameters, moe_flops

transformers = pytest.importorskip("transformers")

VOCAB = 97
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 12,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "pad_token_id": None,
    "eos_token_id": None,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
CASES = {"plain": {}, "grouped queries, normalized weights": {"num_key_value_heads": 2, "norm_topk_prob": True}}


def olmoe(**keys):
    return transformers.OlmoeForCausalLM(transformers.OlmoeConfig(**{**SHAPE, **keys}))


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_equal_the_reference(host, randomize, case) -> None:
    pair = ref.make_pair(host, olmoe(**CASES[case]), randomize)
    ref.assert_same_function(pair, dense.random_tokens(VOCAB, 21))
    dense.assert_decoding_equals_forward(pair.ours, dense.random_tokens(VOCAB, 15))
    ref.assert_maps_round_trip(pair)


def test_balance_loss_and_its_gradient_equal_the_reference(host, randomize) -> None:
    pair = ref.make_pair(host, olmoe(num_hidden_layers=1), randomize)
    ref.assert_same_balance(pair, dense.random_tokens(VOCAB, 11), pair.theirs.model.layers[0].mlp.gate)


def test_the_preset_has_the_size_of_the_published_model(host) -> None:
    fields = {"intermediate_size": 1024}
    shapes = {"olmoe-1b-7b": (transformers.OlmoeConfig, transformers.OlmoeForCausalLM, fields)}
    ref.assert_presets_match(host, "olmoe", shapes)
    model = dense.build_preset(host, "olmoe-1b-7b")
    count = dense.parameter_count(model)
    assert count / 1e9 == pytest.approx(6.9, rel=0.01)
    assert (count - inactive_parameters(model.config)) / 1e9 == pytest.approx(1.3, rel=0.02)


def test_flops_are_those_of_the_chosen_experts(build) -> None:
    config = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 384}
    moe = {"num_experts": 16, "moe_router_topk": 4, "moe_ffn_hidden_size": 24, "moe_router_pre_softmax": True}
    model = build(*ref.settings({"moe": moe}), family="olmoe", **config, attention_backend="eager")
    flops = flops_per_token(model.config, 16, convention="full", feed_forward=moe_flops(model.config))
    ref.assert_active_flops(model, flops, {"feed_forward": (".mlp",)})


# -- bad input -------------------------------------------------------------------------------------


def test_ranks_that_would_share_a_key_head_are_refused(monkeypatch, build) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    shape = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "vocab_size": 50}
    sharded = ["parallel.tensor_model_parallel_size=4", *ref.settings({"moe": {"num_experts": 4}})]
    with pytest.raises(ConfigError, match="tensor_model_parallel_size=4 does not divide model.num_query_groups=2"):
        build(*sharded, family="olmoe", **shape, ffn_hidden_size=32)
