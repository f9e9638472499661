"""Qwen2-MoE and Qwen3-MoE against `transformers`."""

from __future__ import annotations

import pytest
import torch
from tests.models import decoder_reference as dense
from tests.models import moe_reference as ref
from tests.models.prediction_reference import LENGTH, assert_same_prediction, causal, one_by_one

from mt_core.errors import ConfigError
from mt_models.flops import flops_per_token, inactive_parameters, moe_flops

transformers = pytest.importorskip("transformers")

VOCAB = 103
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "moe_intermediate_size": 12,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
SHARED = {"shared_expert_intermediate_size": 20}
CASES = {
    "Qwen2": ("Qwen2Moe", SHARED),
    "Qwen2, weights of the chosen experts add up to 1": ("Qwen2Moe", {**SHARED, "norm_topk_prob": True}),
    "Qwen2 without biases, every second layer dense": (
        "Qwen2Moe",
        {**SHARED, "qkv_bias": False, "decoder_sparse_step": 2, "tie_word_embeddings": True},
    ),
    "Qwen3": ("Qwen3Moe", {"head_dim": 16, "norm_topk_prob": True}),
    "Qwen3, dense layers by number": ("Qwen3Moe", {"head_dim": 8, "mlp_only_layers": [0, 2]}),
}


def qwen(kind: str, **keys):
    config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **keys})
    return getattr(transformers, f"{kind}ForCausalLM")(config)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_equal_the_reference(host, randomize, case) -> None:
    kind, keys = CASES[case]
    pair = ref.make_pair(host, qwen(kind, **keys), randomize)
    ref.assert_same_function(pair, dense.random_tokens(VOCAB, 21))
    dense.assert_decoding_equals_forward(pair.ours, dense.random_tokens(VOCAB, 15))
    ref.assert_maps_round_trip(pair)


def published_prediction(state):
    """Under the names of GLM-4.5's files, where the layer follows the others and repeats the embedding and the head."""
    found = {}
    for name, tensor in state.items():
        name = name.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
        found |= {f"model.layers.3.{published}": part for published, part in one_by_one(name, tensor).items()}
    return found


@pytest.mark.parametrize("normalized", [True, False])
def test_prediction_of_glm_equals_the_reference(host, randomize, normalized) -> None:
    from transformers.modeling_layers import MtpLayer

    keys = {key: value for key, value in SHAPE.items() if key != "num_experts"}
    keys |= {"n_routed_experts": 8, "head_dim": 8, "use_qk_norm": normalized, "attention_bias": True}
    config = transformers.Glm4MoeConfig(**keys, rms_norm_eps=1e-3, first_k_dense_replace=1)
    theirs = transformers.Glm4MoeForCausalLM(config)
    decoder = theirs.model.layers[2]
    layer = MtpLayer(theirs.config, type(decoder), type(decoder.input_layernorm), 2)
    randomize(theirs)
    randomize(layer, seed=1)
    places = torch.arange(LENGTH)[None]
    rotary = theirs.model.rotary_emb(torch.zeros(1), places)
    assert_same_prediction(
        host,
        theirs,
        layer,
        published_prediction,
        lambda embedded, hidden: layer(embedded, hidden, rotary, causal(), places, None),
        ("router.expert_bias",),
    )


@pytest.mark.parametrize("case", ["Qwen2", "Qwen3"])
def test_balance_loss_and_its_gradient_equal_the_reference(host, randomize, case) -> None:
    kind, keys = CASES[case]
    pair = ref.make_pair(host, qwen(kind, **keys, num_hidden_layers=1), randomize)
    ref.assert_same_balance(pair, dense.random_tokens(VOCAB, 11), pair.theirs.model.layers[0].mlp.gate)


def shape(kind, layers, hidden, heads, groups, ffn, expert_ffn, experts, vocab=151936, **keys):
    fields = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": ffn,
        "moe_intermediate_size": expert_ffn,
        "num_experts": experts,
        "vocab_size": vocab,
        **keys,
    }
    return getattr(transformers, f"{kind}Config"), getattr(transformers, f"{kind}ForCausalLM"), fields


@pytest.mark.slow
def test_presets_have_the_sizes_of_the_published_models(host) -> None:
    shapes = {
        "qwen1.5-moe-a2.7b": shape("Qwen2Moe", 24, 2048, 16, 16, 5632, 1408, 60, shared_expert_intermediate_size=5632),
        "qwen2-57b-a14b": shape("Qwen2Moe", 28, 3584, 28, 4, 18944, 2560, 64, shared_expert_intermediate_size=20480),
        "qwen3-30b-a3b": shape("Qwen3Moe", 48, 2048, 32, 4, 6144, 768, 128, head_dim=128),
        "qwen3-235b-a22b": shape("Qwen3Moe", 94, 4096, 64, 4, 12288, 1536, 128, head_dim=128),
        "glm-4.5-air": glm_shape(46, 4096, 10944, 1408, 128, 1, use_qk_norm=False),
        **dict.fromkeys(("glm-4.5", "glm-4.6", "glm-4.7"), glm_shape(92, 5120, 12288, 1536, 160, 3, use_qk_norm=True)),
    }
    ref.assert_presets_match(host, "qwen_moe", shapes, "model.mtp_num_layers=0")


def glm_shape(layers, hidden, ffn, expert_ffn, experts, dense_layers, **keys):
    fields = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": ffn}
    fields |= {"moe_intermediate_size": expert_ffn, "n_routed_experts": experts, "first_k_dense_replace": dense_layers}
    fields |= {"num_attention_heads": 96, "head_dim": 128, "attention_bias": True, "vocab_size": 151552, **keys}
    return transformers.Glm4MoeConfig, transformers.Glm4MoeForCausalLM, fields


@pytest.mark.parametrize(
    ("preset", "total", "active"),
    [("qwen3-30b-a3b", 30.5, 3.3), ("qwen3-235b-a22b", 235, 22), ("glm-4.5-air", 106, 12), ("glm-4.5", 355, 32)],
)
def test_total_and_active_parameters_are_the_published_ones(host, preset, total, active) -> None:
    """Z.ai counts weights of a token without the embedding and the LM head."""
    model = dense.build_preset(host, preset, "model.mtp_num_layers=0")
    count = dense.parameter_count(model)
    assert count / 1e9 == pytest.approx(total, rel=0.01)
    used = count - inactive_parameters(model.config)
    if preset.startswith("glm"):
        used -= 2 * model.config.vocab_size * model.config.hidden_size
    assert used / 1e9 == pytest.approx(active, rel=0.02)


def test_flops_are_those_of_the_chosen_and_the_shared_experts(build) -> None:
    config = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2, "vocab_size": 384}
    moe = {
        "num_experts": 8,
        "moe_router_topk": 3,
        "moe_ffn_hidden_size": 24,
        "moe_shared_expert_intermediate_size": 40,
        "moe_shared_expert_gate": True,
    }
    model = build(*ref.settings({"moe": moe}), family="qwen_moe", **config, attention_backend="eager")
    flops = flops_per_token(model.config, 16, convention="full", feed_forward=moe_flops(model.config))
    ref.assert_active_flops(model, flops, {"feed_forward": (".mlp",)})


# -- bad input -------------------------------------------------------------------------------------

SMALL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 50}


@pytest.mark.parametrize(
    ("keys", "moe", "words"),
    [
        ({"add_qkv_bias": True}, {}, "add_qkv_bias=true cannot be written as a Hugging Face qwen3_moe"),
        ({"qk_layernorm": False}, {}, "moe_shared_expert_intermediate_size is not set: a Hugging Face qwen2_moe"),
        ({}, {"moe_router_score_function": "sigmoid"}, "moe_router_score_function=sigmoid cannot be written"),
    ],
)
def test_models_without_a_hugging_face_form_are_refused(host, build, keys, moe, words) -> None:
    model = build(*ref.settings({"moe": {"num_experts": 4, **moe}}), family="qwen_moe", **SMALL, **keys)
    with pytest.raises(ConfigError, match=words):
        ref.family_of(host, "qwen3_moe").write_config(model.config)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"use_sliding_window": True}, "use_sliding_window=True is not supported; it can be False"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types has sliding_attention, which is not supported"),
        ({"shared_experts": 1}, "fields that are not known: shared_experts=1"),
    ],
)
def test_a_hugging_face_configuration_that_cannot_be_read(host, fields, words) -> None:
    external = {key: value for key, value in SHAPE.items() if "implementation" not in key}
    with pytest.raises(ConfigError, match=words):
        ref.family_of(host, "qwen2_moe").read_config({"model_type": "qwen2_moe", **external, **fields})
