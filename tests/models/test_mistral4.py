"""Mistral 4 against `transformers`."""

from __future__ import annotations

import pytest
import torch
from tests.infer.decoding import cached_logits
from tests.models import decoder_reference as dense
from tests.models import moe_reference as ref
from tests.models.published_configs import MISTRAL_LARGE_3_TEXT
from torch import nn

from mt_core.errors import ConfigError
from mt_models.hugging_face import load_reference
from mt_models.mistral4.hugging_face import HUGGING_FACE

transformers = pytest.importorskip("transformers")

VOCAB = 89
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 6,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "intermediate_size": 40,
    "moe_intermediate_size": 12,
    "n_routed_experts": 5,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 14,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 9,
    "max_position_embeddings": 64,
    "rope_parameters": ROPE,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}


def reference_of(**keys) -> nn.Module:
    # The class writes into the table.
    shape = {**SHAPE, **keys, "rope_parameters": {**ROPE, **keys.get("rope_parameters", {})}}
    return transformers.Mistral4ForCausalLM(transformers.Mistral4Config(**shape))


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"norm_topk_prob": False, "routed_scaling_factor": 1.5, "q_lora_rank": None, "tie_word_embeddings": True},
        {"rms_norm_eps": 1e-5, "rope_parameters": {"mscale_all_dim": 0.0, "beta_slow": 2.0}},
    ],
)
def test_logits_and_gradients_equal_the_reference(host, randomize, keys) -> None:
    pair = ref.make_pair(host, reference_of(**keys), randomize)
    ref.assert_same_function(pair, dense.random_tokens(VOCAB, 23))
    dense.assert_decoding_equals_forward(pair.ours, dense.random_tokens(VOCAB, 15))
    ref.assert_maps_round_trip(pair)


def test_greedy_continuations_with_a_cache_are_those_of_the_reference(host, randomize) -> None:
    pair = ref.make_pair(host, reference_of(), randomize)
    prompt = dense.random_tokens(VOCAB, 9, batch=1)
    theirs = pair.theirs.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    logits = cached_logits(pair.ours, theirs, [9, *range(10, 22)])
    assert logits[0, 8:-1].argmax(-1).tolist() == theirs[0, 9:].tolist()


def test_experts_one_by_one_are_read_too(host, randomize) -> None:
    pair = ref.make_pair(host, reference_of(), randomize)
    tensors = {}
    for name, tensor in pair.theirs.state_dict().items():
        stem, _, packed = name.rpartition(".experts.")
        if not stem:
            tensors[name] = tensor
            continue
        for number, expert in enumerate(tensor):
            halves = expert.chunk(2) if packed == "gate_up_proj" else (expert,)
            parts = ("gate_proj", "up_proj") if packed == "gate_up_proj" else ("down_proj",)
            tensors |= {f"{stem}.experts.{number}.{part}.weight": x for part, x in zip(parts, halves, strict=True)}
    model = ref.build_from(host, HUGGING_FACE.read_config(pair.theirs.config.to_dict())).eval()
    load_reference(model, tensors, HUGGING_FACE)
    for own, other in zip(model.parameters(), pair.ours.parameters(), strict=True):
        assert torch.equal(own, other)


def test_the_decoder_is_read_beside_an_image_tower(host, randomize) -> None:
    pair = ref.make_pair(host, reference_of(), randomize)
    state = pair.theirs.state_dict()
    inner = {name: f"model.language_model.{name.removeprefix('model.')}" for name in state if name.startswith("model.")}
    tensors = {inner.get(name, name): x for name, x in state.items()} | {"model.vision_tower.norm": torch.zeros(3)}
    model = ref.build_from(host, HUGGING_FACE.read_config(pair.theirs.config.to_dict())).eval()
    load_reference(model, tensors, HUGGING_FACE)
    for own, other in zip(model.parameters(), pair.ours.parameters(), strict=True):
        assert torch.equal(own, other)


@pytest.mark.slow
def test_presets_have_the_sizes_of_the_published_models(host) -> None:
    classes = transformers.Mistral4Config, transformers.Mistral4ForCausalLM
    large = {key: value for key, value in MISTRAL_LARGE_3_TEXT.items() if key != "model_type"}
    shapes = {"mistral-small-4-119b": (*classes, {}), "mistral-large-3-675b": (*classes, large)}
    ref.assert_presets_match(host, "mistral4", shapes)
    assert dense.parameter_count(dense.build_preset(host, "mistral-small-4-119b")) / 1e9 == pytest.approx(119, abs=0.6)
    # The image tower of 2.5 billion is left out.
    large = dense.parameter_count(dense.build_preset(host, "mistral-large-3-675b"))
    assert large / 1e9 == pytest.approx(675 - 2.5, abs=1)


def test_the_preset_of_mistral_large_3_is_what_its_configuration_says(host) -> None:
    read = HUGGING_FACE.read_config(MISTRAL_LARGE_3_TEXT)
    preset = dense.build_preset(host, "mistral-large-3-675b").config
    assert preset.model_dump() == type(preset).model_validate(read).model_dump()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_key_value_heads": 1}, "num_key_value_heads=1 is not supported"),
        ({"head_dim": 8}, r"head_dim=8 is not supported; it can be qk_nope_head_dim \+ qk_rope_head_dim = 16"),
        ({"n_group": 5}, "n_group=5 is not supported"),
        ({"rope_interleave": False}, "rope_interleave=False is not supported"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "the class needs rope_type yarn"),
        ({"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5 does not fit"),
    ],
)
def test_a_configuration_that_cannot_be_read(fields, words) -> None:
    external = {key: value for key, value in SHAPE.items() if "implementation" not in key}
    with pytest.raises(ConfigError, match=words):
        HUGGING_FACE.read_config({"model_type": "mistral4", **external, **fields})


def test_what_a_file_cannot_say_is_not_written(host) -> None:
    config = ref.build_from(host, HUGGING_FACE.read_config(reference_of().config.to_dict())).config
    plain = config.model_copy(update={"rope_scaling_type": "none"})
    with pytest.raises(ConfigError, match="rope_scaling_type=none cannot be written"):
        HUGGING_FACE.write_config(plain)
