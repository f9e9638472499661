"""Hy3 against `transformers`, and the names of its layer of multi-token prediction."""

from __future__ import annotations

import pytest
from tests.infer.decoding import cached_logits
from tests.models import decoder_reference as dense
from tests.models import moe_reference as ref
from torch import nn

from mt_core.errors import ConfigError

transformers = pytest.importorskip("transformers")

VOCAB = 89
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 10,
    "intermediate_size": 44,
    "moe_intermediate_size": 14,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "num_shared_experts": 2,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}


def reference_of(**keys) -> nn.Module:
    model = transformers.HYV3ForCausalLM(transformers.HYV3Config(**{**SHAPE, **keys}))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.3, 0.3)
    return model


def test_logits_gradients_and_continuations_equal_the_reference(host, randomize) -> None:
    keys = {"attention_bias": True, "mlp_layer_types": ["sparse", "dense", "sparse"]}
    pair = ref.make_pair(host, reference_of(**keys), randomize)
    ref.assert_same_function(pair, dense.random_tokens(VOCAB, 23), ("expert_bias",))
    ref.assert_maps_round_trip(pair)
    prompt = dense.random_tokens(VOCAB, 9, batch=1)
    theirs = pair.theirs.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    logits = cached_logits(pair.ours, theirs, [9, *range(10, 22)])
    assert logits[0, 8:-1].argmax(-1).tolist() == theirs[0, 9:].tolist()


@pytest.mark.slow
def test_the_preset_has_the_size_of_the_published_model(host) -> None:
    shapes = {"hy3": (transformers.HYV3Config, transformers.HYV3ForCausalLM, {})}
    ref.assert_presets_match(host, "hy_v3", shapes, "model.mtp_num_layers=0")


OURS = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 48,
    "vocab_size": 101,
    "moe": {
        "num_experts": 2,
        "moe_router_topk": 2,
        "moe_layer_freq": "([0]*1+[1]*1)",
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_shared_expert_intermediate_size": 48,
    },
}
PREDICTION = {
    *("enorm", "hnorm", "eh_proj", "final_layernorm", "input_layernorm", "post_attention_layernorm"),
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *(
        f"mlp.{part}.{name}_proj"
        for part in ("shared_mlp", "experts.0", "experts.1")
        for name in ("gate", "up", "down")
    ),
    "mlp.router.gate",
}
"""Of the layer behind the last one in tencent/Hy3, whose experts are 192."""


def test_the_layer_that_predicts_has_the_names_of_published_files(host) -> None:
    config = ref.build_from(host, {"family": "hy_v3", **OURS, "mtp_num_layers": 1}).config
    rules = ref.family_of(host, "hy_v3").name_map(config).rules
    names = [name for rule in rules for name in rule.sources if name.startswith("model.layers.2.")]
    assert set(names) == {f"model.layers.2.{name}.weight" for name in PREDICTION} | {"model.layers.2.mlp.expert_bias"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"first_k_dense_replace": 2}, "first_k_dense_replace=2 without mlp_layer_types is not supported"),
        ({"expert_hidden_dim": 15}, "expert_hidden_dim=15 and moe_intermediate_size=14 contradict"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok=1 is not supported"),
        ({"qk_norm": False}, "qk_norm=False is not supported"),
    ],
)
def test_a_configuration_that_cannot_be_read(host, fields, words) -> None:
    external = {key: value for key, value in SHAPE.items() if "implementation" not in key}
    with pytest.raises(ConfigError, match=words):
        ref.family_of(host, "hy_v3").read_config({"model_type": "hy_v3", **external, **fields})
