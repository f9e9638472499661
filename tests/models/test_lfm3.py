"""LFM3: the published size, FLOPs, and what is refused. Values and gradients are in test_dense_families.py."""

from __future__ import annotations

import pytest
from tests.models import decoder_reference as ref

from mt_core.errors import ConfigError
from mt_models.lfm3.flops import flops_per_token

transformers = pytest.importorskip("transformers")

OURS = {
    "num_layers": 3,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 10,
    "ffn_hidden_size": 40,
    "layer_pattern": "CWG",
    "sliding_window": 2,
    "conv_kernel": 4,
    "vocab_size": 50,
}


def test_the_preset_has_the_size_of_the_published_model(host) -> None:
    ref.assert_presets_match(host, "lfm3", {"lfm3-1.7b": {}}, transformers.Lfm3Config, transformers.Lfm3ForCausalLM)


def test_flops_of_parts(build) -> None:
    """By hand, 2 operations a multiply-add."""
    flops = flops_per_token(build(family="lfm3", **OURS).config, 4)
    # Queries, keys, values and output of 12 heads of 10 channels, and 4 gates, in two layers.
    assert flops.attention_projections == 2 * 2 * 24 * (12 * 10 + 4)
    # 1, 2, 2, 2 keys in the window and 1, 2, 3, 4 without one; scores and values of 4 heads.
    assert flops.attention_core == 2 * 2 * 4 * 10 * (7 / 4 + 10 / 4)
    assert flops.convolutions == 2 * (24 * 72 + 24 * 24 + 4 * 24)
    assert flops.feed_forward == 3 * 2 * 3 * 24 * 40
    assert flops.output == 2 * 24 * 50


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"layer_pattern": "CW"}, "layer_pattern='CW' has to be one of the letters"),
        ({"layer_pattern": "CWX"}, "layer_pattern='CWX' has to be one of the letters"),
        ({"rotary_percent": 0.1}, "rotary_percent=0.1 of 10 channels leaves none to rotate"),
        ({"rope_scaling_type": "dynamic", "rope_scaling_factor": 2.0}, "it can be none or linear"),
    ],
)
def test_impossible_shapes_are_refused(build, keys, words) -> None:
    with pytest.raises(ConfigError, match=words):
        build(family="lfm3", **{**OURS, **keys})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"layer_types": ["conv"]}, "for each of 24 layers"),
        ({"sliding_window": None}, "sliding_window=None is not supported"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0}}}, "default or proportional"),
        ({"block_multiple_of": 256}, "block_multiple_of"),
    ],
)
def test_a_configuration_that_cannot_be_read(host, fields, words) -> None:
    with pytest.raises(ConfigError, match=words):
        ref.family_of(host, "lfm3").read_config({"model_type": "lfm3", **fields})
