"""The decoder of Step-3.5 and Step-3.7 against `transformers`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.models import decoder_reference as dense
from tests.models import moe_reference as ref
from torch import nn

from mt_core.errors import ConfigError
from mt_models.step3p7.flops import flops_per_token

transformers = pytest.importorskip("transformers")

VOCAB = 97
SLIDING, FULL = "sliding_attention", "full_attention"
LLAMA3 = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 32.0}
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_sliding_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 44,
    "moe_intermediate_size": 12,
    "share_expert_dim": 20,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_router_scaling_factor": 1.5,
    "layer_types": [FULL, SLIDING, SLIDING, FULL],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "sliding_window": 5,
    "rope_parameters": {
        FULL: {"rope_theta": 5e3, "partial_rotary_factor": 0.5, **LLAMA3, "original_max_position_embeddings": 16},
        SLIDING: {"rope_type": "default", "rope_theta": 1e2},
    },
    "swiglu_limits": [0.0, None, 0.1, 0.2],
    "swiglu_limits_shared": [0.3, 0.0, 0.2, None],
    # The row of this token has no gradient in the class.
    "pad_token_id": VOCAB - 1,
}
TOWER = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}


def reference_of(**keys) -> nn.Module:
    text = transformers.Step3p7TextConfig(**{**TEXT, **keys})
    vision = transformers.Step3p7VisionConfig(**TOWER, mlp_ratio=1.0)
    tied = keys.get("tie_word_embeddings", False)
    config = transformers.Step3p7Config(text_config=text, vision_config=vision, tie_word_embeddings=tied)
    config._attn_implementation = config._experts_implementation = "eager"
    model = transformers.Step3p7ForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    return model


OTHERWISE = {
    "num_sliding_attention_heads": None,
    "attention_bias": True,
    "layer_types": [SLIDING, FULL, SLIDING, SLIDING],
    "mlp_layer_types": ["sparse", "dense", "sparse", "dense"],
    "rope_parameters": {
        FULL: {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16},
        SLIDING: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "swiglu_limits": None,
    "swiglu_limits_shared": None,
}


@pytest.mark.parametrize("keys", [{}, OTHERWISE], ids=["as published", "biased, without limits"])
def test_logits_gradients_and_continuations_equal_the_reference(host, randomize, keys) -> None:
    pair = ref.make_pair(host, reference_of(**keys), randomize)
    tokens = dense.random_tokens(VOCAB - 1, 21)
    ref.assert_same_function(pair, tokens, unused=("expert_bias",))
    dense.assert_decoding_equals_forward(pair.ours, tokens[:, :15])
    external = pair.family.write_config(pair.ours.config)
    again = transformers.Step3p7Config.from_dict(external).to_dict()
    assert dense.computed_keys(pair.family, external) == dense.computed_keys(pair.family, again)


PUBLISHED_KEYS: dict[str, Any] = {
    "num_nextn_predict_layers": 2,
    "layer_types": [FULL, SLIDING, SLIDING, FULL, SLIDING, SLIDING],
    "moe_layers_enum": "1,2,3",
    "rope_theta": [5e6, 1e4, 1e4, 5e6, 1e4, 1e4],
    "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 1.0, 1.0],
    "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 16},
    "attention_other_setting": {"attention_type": SLIDING, "num_attention_heads": 6, "num_attention_groups": 2},
    "swiglu_limits": [0.0, 0.0, 0.0, 7.0, 0.0, 0.0],
    "swiglu_limits_shared": [0.0, 0.0, 0.0, 16.0, 0.0, 0.0],
}


def test_lists_of_published_files_are_those_of_the_class(host) -> None:
    """With entries for layers of multi-token prediction, also where the decoder is a file of its own."""
    others = ("mlp_layer_types", "rope_parameters", "num_sliding_attention_heads")
    published = {**{key: value for key, value in TEXT.items() if key not in others}, **PUBLISHED_KEYS}
    family = ref.family_of(host, "step3p7")
    outer = {"model_type": "step3p7", "text_config": {"model_type": "step3p5", **published}}
    found = dense.computed_keys(family, outer)
    assert dense.computed_keys(family, {"model_type": "step3p5", **published}) == found
    theirs = transformers.Step3p7Config(text_config=dict(published), vision_config=dict(TOWER)).to_dict()
    assert dense.computed_keys(family, theirs) == found
    assert (found["num_window_attention_heads"], found["rotary_percent_local"]) == (6, 1.0)
    assert found["shared_expert_swiglu_limits"] == [0.0, 0.0, 0.0, 16.0]


@pytest.mark.slow
def test_the_preset_has_the_size_of_the_published_decoder(host) -> None:
    shape = {
        "vocab_size": 128896,
        "num_sliding_attention_heads": 96,
        "layer_types": [SLIDING if layer % 4 else FULL for layer in range(45)],
        "sliding_window": 512,
    }
    model = dense.without_values(transformers.Step3p7TextModel, transformers.Step3p7TextConfig(**shape))
    head, biases = 128896 * 4096, 42 * 288
    expected = model.num_parameters() + head + biases
    assert dense.parameter_count(dense.build_preset(host, "step-3.5-flash")) == expected


OURS: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_window_attention_heads": 6,
    "num_query_groups": 2,
    "kv_channels": 8,
    "ffn_hidden_size": 40,
    "sliding_window": 2,
    "vocab_size": 50,
}


def test_flops_of_parts(build) -> None:
    """By hand, 2 operations a multiply-add, of 4 positions."""
    flops = flops_per_token(build(family="step3p7", **OURS).config, 4)
    # Queries and outputs, keys and values, gates.
    assert flops.attention_projections == 2 * 24 * (8 * (8 + 4) + 4) + 2 * 24 * (8 * (12 + 4) + 6)
    # 1, 2, 3, 4 keys without a window and 1, 2, 2, 2 in it.
    assert flops.attention_core == 2 * 2 * 8 * (4 * 10 / 4 + 6 * 7 / 4)
    assert flops.feed_forward == 2 * 2 * 3 * 24 * 40


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"num_window_attention_heads": 5}, "num_window_attention_heads"),
        ({"rotary_percent_local": 0.4}, "rotary_percent_local=0.4 of 8 channels rotates 3"),
        ({"rope_scaling_type": "dynamic", "rope_scaling_factor": 2.0}, "it can be none, linear, llama3, yarn"),
        ({"shared_expert_swiglu_limits": [1.0]}, "shared_expert_swiglu_limits has 1 values"),
        ({"expert_swiglu_limits": [1.0, 0.0]}, r"limits layers \[0\], which have no experts"),
        ({"window_attn_skip_freq": "([0]*1+[1]*2)"}, "has 3 entries"),
    ],
)
def test_impossible_shapes_are_refused(build, keys, words) -> None:
    with pytest.raises(ConfigError, match=words):
        build(family="step3p7", **{**OURS, **keys})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"layer_types": [FULL]}, "layer_types=.* has 1 entries"),
        ({"swiglu_limits": [7.0]}, "swiglu_limits=.* has 1 entries"),
        ({"mlp_layer_types": ["dense", "hash", "dense", "dense"]}, "dense or sparse"),
        ({"sliding_window": None}, "sliding_window=None is not supported"),
        ({"query_pre_attn_scalar": 16}, "query_pre_attn_scalar=16 is not supported"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok=1 is not supported"),
        ({"rope_parameters": {FULL: {"rope_theta": 1e4}}}, "a table for each of"),
        ({"rope_parameters": {FULL: {}, SLIDING: LLAMA3}}, "rope_type can be default"),
        ({"rope_parameters": None, "rope_theta": [1e4, 1e4, 1e5, 1e4]}, "the same in all layers of sliding_attention"),
        ({"per_layer_config": {"0": {"num_attention_heads": 6}}}, "per_layer_config=.* is not supported"),
        ({"per_layer_config": {"1": {"head_dim": 6}}}, "per_layer_config=.* is not supported"),
        (
            {"num_sliding_attention_heads": None, "attention_other_setting": {"num_attention_groups": 4}},
            "attention_other_setting=.* is not supported",
        ),
        ({"zero_centered": False}, "zero_centered=False is not supported"),
    ],
)
def test_a_configuration_that_cannot_be_read(host, fields, words) -> None:
    with pytest.raises(ConfigError, match=words):
        ref.family_of(host, "step3p7").read_config({"model_type": "step3p7", "text_config": {**TEXT, **fields}})
