"""MiMo-V2-Flash against `transformers`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.models import decoder_reference as dense
from tests.models import moe_reference as ref
from torch import nn

from mt_core.errors import ConfigError
from mt_models.hugging_face import to_reference
from mt_models.mimo_v2_flash.flops import flops_per_token

transformers = pytest.importorskip("transformers")

VOCAB = 97
SLIDING, FULL = "sliding_attention", "full_attention"
HALF = {"rope_type": "default", "partial_rotary_factor": 0.5}
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 12,
    "v_head_dim": 7,
    "intermediate_size": 44,
    "moe_intermediate_size": 12,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "layer_types": [FULL, SLIDING, SLIDING, FULL],
    "sliding_window": 5,
    "rope_parameters": {FULL: {**HALF, "rope_theta": 5e6}, SLIDING: {**HALF, "rope_theta": 1e4}},
    "bos_token_id": None,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}


def reference_of(**keys) -> nn.Module:
    model = transformers.MiMoV2FlashForCausalLM(transformers.MiMoV2FlashConfig(**{**SHAPE, **keys}))
    generator = torch.Generator().manual_seed(5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    return model


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {
            "num_key_value_heads": 1,
            "attention_bias": True,
            "attention_value_scale": None,
            "tie_word_embeddings": True,
            "routed_scaling_factor": 2.5,
            "n_group": 3,
            "topk_group": 2,
            "mlp_layer_types": ["sparse", "dense", "sparse", "dense"],
            "layer_types": [SLIDING, FULL, SLIDING, SLIDING],
        },
    ],
    ids=["as published", "biased, grouped experts"],
)
def test_logits_and_gradients_equal_the_reference(host, randomize, keys) -> None:
    pair = ref.make_pair(host, reference_of(**keys), randomize)
    ref.assert_same_function(pair, dense.random_tokens(VOCAB, 21), unused=("expert_bias",))
    dense.assert_decoding_equals_forward(pair.ours, dense.random_tokens(VOCAB, 15))
    ref.assert_maps_round_trip(pair)


def test_the_preset_has_the_size_of_the_published_model(host) -> None:
    kinds = transformers.MiMoV2FlashConfig, transformers.MiMoV2FlashForCausalLM
    ref.assert_presets_match(host, "mimo_v2_flash", {"mimo-v2-flash": (*kinds, {})})


OURS = {
    "num_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 8,
    "v_head_dim": 5,
    "ffn_hidden_size": 40,
    "sliding_window": 2,
    "rotary_percent": 0.5,
    "mtp_num_layers": 1,
    "vocab_size": 50,
}


def test_a_predicted_layer_is_a_layer_with_a_window_around_which_state_and_embedding_are_joined(build) -> None:
    """A depth computes what its layer does, taken out of it, and its loss is that of tokens two places ahead."""
    model = build(family="mimo_v2_flash", **OURS)
    depth = model.mtp.layers[0]
    hidden, embedded = (torch.randn(2, 9, 24, generator=torch.Generator().manual_seed(n)) for n in range(2))
    pattern, angles = model.pattern(None, hidden.device), model.angles(torch.arange(9)[None], None)
    x = depth.eh_proj.weight @ torch.cat((depth.enorm(embedded), depth.hnorm(hidden)), -1)[..., None]
    layer = model.decoder.layers[1]
    layer.load_state_dict(depth.mtp_model_layer.state_dict())
    expected = depth.final_layernorm(layer(x.squeeze(-1), pattern, angles))
    torch.testing.assert_close(depth(hidden, embedded, pattern, angles), expected)


def test_predicted_layers_are_written_under_the_names_of_published_files(build, host) -> None:
    model = build(family="mimo_v2_flash", **OURS)
    family = ref.family_of(host, "mimo_v2_flash")
    names = {name for name in to_reference(model, family) if name.startswith("model.mtp.")}
    of_layer = ("self_attn.attention_sink_bias", *(f"self_attn.{x}_proj.weight" for x in "qkvo"))
    of_layer += tuple(f"mlp.{x}_proj.weight" for x in ("gate", "up", "down"))
    of_layer += ("input_layernorm.weight", "pre_mlp_layernorm.weight", "enorm.weight", "hnorm.weight")
    assert names == {f"model.mtp.layers.0.{name}" for name in (*of_layer, "eh_proj.weight", "final_layernorm.weight")}
    external = family.write_config(model.config)
    assert family.read_config(family.held(external, names))["mtp_num_layers"] == 1
    assert family.read_config(family.held(external, []))["mtp_num_layers"] == 0


def test_flops_of_parts(build) -> None:
    """By hand, 2 operations a multiply-add, of 4 positions."""
    flops = flops_per_token(build(family="mimo_v2_flash", **OURS).config, 4)
    first, second = 2 * 24 * (4 + 2) * (8 + 5), 2 * 24 * (4 + 4) * (8 + 5)
    assert flops.attention_projections == first + second
    whole, windowed = 2 * 4 * (8 + 5) * 10 / 4, 2 * 4 * (8 + 5) * 7 / 4
    assert flops.attention_core == whole + windowed
    assert flops.prediction == 4 * 24**2 + second + windowed + 2 * 3 * 24 * 40 + 2 * 24 * 50


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"num_query_groups": 4}, "of layers with a window"),
        ({"rope_scaling_type": "linear", "rope_scaling_factor": 2.0}, "it can be none"),
        ({"window_attn_skip_freq": "([0]*1+[1]*2)"}, "has 3 entries"),
    ],
)
def test_impossible_shapes_are_refused(build, keys, words) -> None:
    with pytest.raises(ConfigError, match=words):
        build(family="mimo_v2_flash", **{**OURS, **keys})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hybrid_layer_pattern": [0, 0, 1, 0]}, "hybrid_layer_pattern=.* contradicts"),
        ({"swa_rope_theta": 5e6}, "swa_rope_theta=5000000.0 contradicts"),
        ({"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias=True is not supported"),
        ({"layer_types": [FULL]}, "for each of 4 layers"),
        ({"mlp_layer_types": ["dense"]}, "for each of 4 layers"),
        ({"rope_parameters": {FULL: HALF, SLIDING: {"partial_rotary_factor": 1.0}}}, "the same in both"),
        ({"rope_parameters": {FULL: {"rope_type": "yarn", "factor": 2.0}}}, "rope_type can be default"),
    ],
)
def test_a_configuration_that_cannot_be_read(host, fields, words) -> None:
    external = {key: value for key, value in SHAPE.items() if "implementation" not in key}
    with pytest.raises(ConfigError, match=words):
        ref.family_of(host, "mimo_v2_flash").read_config({"model_type": "mimo_v2_flash", **external, **fields})
