"""GLM-4.7-Flash against `transformers`: logits, gradients, cached decoding, maps."""

from __future__ import annotations

import pytest
from tests.models import decoder_reference as dense
from tests.models import moe_reference as ref
from tests.models.test_deepseek_v32 import NO_GRADIENT, SHAPE, VOCAB, reference_of

from mt_core.errors import ConfigError

transformers = pytest.importorskip("transformers")

LITE = {key: value for key, value in SHAPE.items() if not key.startswith(("index", "first_k", "n_group", "topk"))}
KINDS = ["dense", "dense", "sparse"]


@pytest.mark.parametrize("keys", [{}, {"mlp_layer_types": KINDS, "q_lora_rank": None}])
def test_logits_and_gradients_equal_the_reference(host, randomize, keys) -> None:
    reference = reference_of("Glm4MoeLite", shape=LITE, **keys)
    pair = ref.make_pair(host, reference, randomize, "eager")
    ref.assert_same_function(pair, dense.random_tokens(VOCAB, 23), NO_GRADIENT)
    dense.assert_decoding_equals_forward(pair.ours, dense.random_tokens(VOCAB, 15))
    ref.assert_maps_round_trip(pair)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"first_k_dense_replace": 2}, "first_k_dense_replace=2 without mlp_layer_types is not supported"),
        ({"mlp_layer_types": ["dense", "sparse", "moe"]}, "it needs dense or sparse for each of num_hidden_layers=3"),
        ({"mlp_layer_types": ["dense", "sparse"]}, "it needs dense or sparse for each of num_hidden_layers=3"),
        (
            {"mlp_layer_types": KINDS, "first_k_dense_replace": 1},
            "first_k_dense_replace=1 contradict",
        ),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"rope_interleave": False}, "rope_interleave=False is not supported"),
    ],
)
def test_a_configuration_that_cannot_be_read(host, fields, words) -> None:
    external = {key: value for key, value in LITE.items() if "implementation" not in key}
    with pytest.raises(ConfigError, match=words):
        ref.family_of(host, "glm4_moe_lite").read_config({"model_type": "glm4_moe_lite", **external, **fields})


@pytest.mark.slow
def test_the_preset_has_the_size_of_the_published_model(host) -> None:
    shapes = {"glm-4.7-flash": (transformers.Glm4MoeLiteConfig, transformers.Glm4MoeLiteForCausalLM, {})}
    ref.assert_presets_match(host, "glm4_moe_lite", shapes, "model.mtp_num_layers=0")
