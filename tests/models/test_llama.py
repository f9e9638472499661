"""Llama against `transformers`, with each rope scaling, and against itself."""

from __future__ import annotations

import pytest
import torch
from tests.models import decoder_reference as ref

from mt_core.config.loading import config_from_dict
from mt_core.errors import CheckpointError, ConfigError
from mt_core.specs import MODELS
from mt_models.blocks.rotary import build_rotary
from mt_models.hugging_face import load_reference

transformers = pytest.importorskip("transformers")

VOCAB = 101
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "attn_implementation": "eager",
}
ROPES = {
    "none": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 24,
        "rope_theta": 100.0,
    },
    "llama3, one step": {  # Llama 4
        "rope_type": "llama3",
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 24,
        "rope_theta": 100.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24, "rope_theta": 100.0},
    "yarn, every parameter": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 24,
        "beta_fast": 3.0,
        "beta_slow": 0.5,
        "mscale": 0.7,
        "mscale_all_dim": 0.3,
        "truncate": False,
    },
    "yarn, attention factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 24,
        "attention_factor": 1.3,
    },
}


def llama(**keys):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SHAPE, **keys}))


@pytest.mark.parametrize("rope", ROPES)
def test_every_rope_scaling_equals_the_reference(host, randomize, rope) -> None:
    """With 24 positions for dynamic scaling to be passed; 37 tokens reach beyond all original lengths."""
    reference = llama(rope_parameters=dict(ROPES[rope]), max_position_embeddings=24)
    pair = ref.make_pair(host, reference, randomize)
    ref.assert_same_function(pair, ref.random_tokens(VOCAB, 37))
    ref.assert_decoding_equals_forward(pair.ours, ref.random_tokens(VOCAB, 28))
    ref.assert_maps_round_trip(pair)


@pytest.mark.parametrize("head_dim", [80, 96, 128])
@pytest.mark.parametrize("rope", ROPES)
def test_frequencies_are_those_of_the_reference_to_the_last_bit(host, rope, head_dim: int) -> None:
    """Angles are frequencies times positions: at position 100,000 an ulp is 0.006 of one."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    original = {name: 8192 for name in ROPES[rope] if name == "original_max_position_embeddings"}
    parameters = {**ROPES[rope], **original, "rope_theta": 500000.0}
    external = transformers.LlamaConfig(
        **{**SHAPE, "head_dim": head_dim}, rope_parameters=parameters, max_position_embeddings=8192
    )
    positions = torch.tensor([[0, 1, 7, 8191, 100_000]])
    theirs = LlamaRotaryEmbedding(external)
    cos, sin = theirs(torch.zeros(1), positions)
    keys = host[MODELS].get("llama").name_maps["hf"].load().read_config(external.to_dict())
    ours = build_rotary(config_from_dict({"model": keys}, host).model).angles(positions)
    half = head_dim // 2
    assert torch.equal(ours.cos[..., 0, :], cos[..., :half])
    assert torch.equal(ours.sin[..., 0, :], sin[..., :half])


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "keys",
    [
        {"tie_word_embeddings": True},
        {"attention_bias": True},
        {"mlp_bias": True, "attention_bias": True},
        {"num_key_value_heads": 1, "head_dim": 12},
        {"num_key_value_heads": 4, "rms_norm_eps": 1e-3},
    ],
    ids=lambda keys: ", ".join(f"{key}={value}" for key, value in keys.items()),
)
def test_every_choice_of_shape_equals_the_reference(host, randomize, backend, keys) -> None:
    pair = ref.make_pair(host, llama(**keys), randomize, backend)
    ref.assert_same_function(pair, ref.random_tokens(VOCAB, 13))
    ref.assert_maps_round_trip(pair)


def test_a_batch_padded_on_the_left_equals_the_reference(host, randomize) -> None:
    """Padding is a document of its own, which the text does not see."""
    pair = ref.make_pair(host, llama(), randomize)
    tokens = ref.random_tokens(VOCAB, 11)
    seen = torch.ones_like(tokens)
    seen[0, :4] = 0
    positions = (seen.cumsum(1) - 1).clamp(min=0)
    theirs = pair.theirs(tokens, attention_mask=seen, position_ids=positions).logits
    ours = pair.ours(tokens, position_ids=positions, segment_ids=seen)
    ref.assert_near(ours[seen.bool()], theirs[seen.bool()])


def test_dynamic_scaling_leaves_short_sequences_alone(host, randomize) -> None:
    plain = ref.make_pair(host, llama(), randomize)
    scaled = ref.make_pair(host, llama(rope_parameters={"rope_type": "dynamic", "factor": 4.0}), randomize)
    tokens = ref.random_tokens(VOCAB, 20)
    assert torch.equal(plain.ours(tokens), scaled.ours(tokens))


def test_twenty_steps_of_training_follow_the_reference(host) -> None:
    torch.manual_seed(0)
    ref.assert_same_training(ref.make_pair(host, llama(), lambda model: None))


# -- sizes -----------------------------------------------------------------------------------------


def shape(layers, hidden, heads, groups, ffn, vocab, tied=False):
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }


PUBLISHED = {
    "llama1-7b": shape(32, 4096, 32, 32, 11008, 32000),
    "llama1-13b": shape(40, 5120, 40, 40, 13824, 32000),
    "llama1-33b": shape(60, 6656, 52, 52, 17920, 32000),
    "llama1-65b": shape(80, 8192, 64, 64, 22016, 32000),
    "llama2-7b": shape(32, 4096, 32, 32, 11008, 32000),
    "llama2-13b": shape(40, 5120, 40, 40, 13824, 32000),
    "llama2-70b": shape(80, 8192, 64, 8, 28672, 32000),
    "llama3-8b": shape(32, 4096, 32, 8, 14336, 128256),
    "llama3-70b": shape(80, 8192, 64, 8, 28672, 128256),
    "llama3.1-8b": shape(32, 4096, 32, 8, 14336, 128256),
    "llama3.1-70b": shape(80, 8192, 64, 8, 28672, 128256),
    "llama3.1-405b": shape(126, 16384, 128, 8, 53248, 128256),
    "llama3.2-1b": shape(16, 2048, 32, 8, 8192, 128256, tied=True),
    "llama3.2-3b": shape(28, 3072, 24, 8, 8192, 128256, tied=True),
}


@pytest.mark.slow
def test_presets_have_the_sizes_of_the_published_models(host) -> None:
    ref.assert_presets_match(host, "llama", PUBLISHED, transformers.LlamaConfig, transformers.LlamaForCausalLM)


def test_the_8b_model_has_eight_billion_parameters(host) -> None:
    assert ref.parameter_count(ref.build_preset(host, "llama3.1-8b")) == 8_030_261_248  # as its model card says


# -- bad input -------------------------------------------------------------------------------------

SMALL = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 50}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"num_attention_heads": 5}, "hidden_size=32 is not divisible.*heads can be 1, 2, 4, 8, 16 or 32"),
        ({"num_query_groups": 3}, "num_query_groups=3 does not divide.*it can be 1, 2 or 4"),
        ({"kv_channels": 7}, "kv_channels=7 is odd"),
        ({"max_position_embeddings": 8}, "data.seq_length=16 is longer than the 8 positions.*use at most 8"),
        ({"rope_scaling_type": "su"}, "rope_scaling_type.*'none', 'linear', .*'llama3', 'yarn' or 'longrope'"),
        ({"rope_scaling_type": "longrope"}, "rope_short_factor is not set.*one for each of the 4 frequencies"),
        ({"rope_scaling_type": "ntk"}, "needs model.rope_ntk_alpha"),
        ({"rope_scaling_type": "yarn"}, "rope_scaling_type=yarn needs model.rope_scaling_factor"),
        ({"rope_scaling_factor": 2.0}, "would be ignored: it only counts when model.rope_scaling_type is linear or"),
        (
            {"rope_scaling_type": "llama3", "rope_scaling_factor": 2.0, "rope_low_freq_factor": 5.0},
            "rope_low_freq_factor=5.0 may not be above model.rope_high_freq_factor=4.0",
        ),
    ],
)
def test_impossible_configurations_name_the_legal_values(build, keys, words) -> None:
    with pytest.raises(ConfigError, match=words):
        build(family="llama", **{**SMALL, **keys})


def test_scaling_makes_room_for_longer_samples(build) -> None:
    model = build(
        family="llama", **SMALL, max_position_embeddings=8, rope_scaling_type="linear", rope_scaling_factor=2.0
    )
    assert model.max_sequence_length == 16


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden_act": "relu"}, "hidden_act='relu' is not supported; it can be 'silu' or 'swish'"),
        ({"router_aux_loss_coef": 0.1}, "fields that are not known: router_aux_loss_coef=0.1"),
        (
            {"rope_scaling": {"rope_type": "su", "factor": 2.0}},
            "rope_type='su' is not supported; it can be default, lin",
        ),
        ({"rope_scaling": {"type": "linear", "factr": 2.0}}, "parameters that are not known: factr=2.0"),
        ({"model_type": "llama4"}, "model_type='llama4' is not supported; it can be llama"),
    ],
)
def test_a_hugging_face_configuration_that_cannot_be_read(host, fields, words) -> None:
    family = ref.family_of(host, "llama")
    with pytest.raises(ConfigError, match=words):
        family.read_config({"model_type": "llama", **SHAPE, **fields})


def test_a_configuration_as_published_is_read(host) -> None:
    """Llama 3.1's config.json has rope_theta and rope_scaling; transformers 5 writes rope_parameters."""
    scaling = {k: v for k, v in ROPES["llama3"].items() if k != "rope_theta"}
    published = {
        "model_type": "llama",
        **SHAPE,
        "rope_theta": 100.0,
        "rope_scaling": scaling,
        "torch_dtype": "bfloat16",
    }
    family = ref.family_of(host, "llama")
    keys = family.read_config(published)
    assert (keys["rotary_base"], keys["rope_scaling_type"], keys["original_max_position_embeddings"]) == (
        100,
        "llama3",
        24,
    )
    parsed = transformers.LlamaConfig(**SHAPE, rope_parameters=dict(ROPES["llama3"])).to_dict()
    assert {**family.read_config(parsed), "kv_channels": None} == {**keys, "kv_channels": None}


def test_tensors_that_do_not_fit_are_named(host, randomize) -> None:
    pair = ref.make_pair(host, llama(), randomize)
    state = pair.theirs.state_dict()
    q = "model.layers.0.self_attn.q_proj.weight"
    with pytest.raises(CheckpointError, match=f"{q} is missing in the checkpoint"):
        load_reference(pair.ours, {k: v for k, v in state.items() if k != q}, pair.family)
    with pytest.raises(CheckpointError, match="extra.weight is in the checkpoint but unknown"):
        load_reference(pair.ours, {**state, "extra.weight": state[q]}, pair.family)
    with pytest.raises(CheckpointError, match=r"model.norm|final_layernorm.weight has the shape \[8\]"):
        load_reference(pair.ours, {**state, "model.norm.weight": torch.zeros(8)}, pair.family)


def test_a_tied_model_refuses_an_output_matrix_of_its_own(host, randomize) -> None:
    pair = ref.make_pair(host, llama(tie_word_embeddings=True), randomize)
    state = {**pair.theirs.state_dict(), "lm_head.weight": torch.zeros(VOCAB, 32)}
    with pytest.raises(CheckpointError, match="ties lm_head.weight to model.embed_tokens.weight.*differ"):
        load_reference(pair.ours, state, pair.family)
