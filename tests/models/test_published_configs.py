"""The config.json files of well-known checkpoints open, and mean the same after a round trip."""

from __future__ import annotations

import pytest
from tests.models.published_configs import BAMBA_9B, PUBLISHED, PYTHIA_160M, SMOLLM2_135M

from mt_ckpt.hugging_face.family import family_named, read_config
from mt_core.errors import ConfigError
from mt_core.plugins import load_plugins
from mt_core.specs import MODELS

WRITTEN_OTHERWISE = {"rope_scaling", "time_step_limit", "text_config", "vision_config", "hidden_act", "rope_parameters"}
"""Keys whose values have several spellings."""
WITHOUT_EFFECT = {
    "qwen2-7b": {"sliding_window"},
    "qwen2.5-0.5b": {"sliding_window"},
    "qwen2.5-vl-7b": {"sliding_window"},
    "deepseek-v2-lite": {"n_group", "topk_group"},
    "kimi-k2 (without FP8)": {"model_type"},
    "kimi-k2.5 (text)": {"model_type", "architectures"},
    "minimax-m3 (text)": {"model_type", "architectures"},
    "smolvlm2-500m": {"model_type", "architectures"},
    "k-exaone-236b-a23b": {"sliding_window_pattern"},
    # The talker is left out; the parts of the thinker have several spellings.
    "qwen3-omni-30b-a3b": {"enable_audio_output", "thinker_config"},
    "lfm2-1.2b": {"block_auto_adjust_ff_dim"},
    "ernie-4.5-21b-a3b": {"num_nextn_predict_layers"},
    "hunyuan-a13b": {"moe_topk", "moe_intermediate_size", "num_shared_expert", "attention_dropout"},
    "exaone-4.0-32b": {"sliding_window_pattern"},
    "mt5-small": {"model_type", "architectures"},
    "bart-base": {"architectures", "forced_eos_token_id"},
    "blenderbot-3b": {"encoder_no_repeat_ngram_size"},
    "olmo-hybrid-7b": {"pad_token_id"},
    "kimi-linear-48b-a3b": {"pad_token_id"},
    "qwen4-exp": {"model_type", "architectures"},
    "muse-glimmer-30b": {"out_hidden_size", "projector_hidden_size"},
    "inkling (text)": {"model_type", "architectures"},
    "muse-spark-816b-a42b": {"out_hidden_size", "projector_hidden_size", "audio_config"},
    "mimo-v2-flash (without FP8)": {"sliding_window"},
    "hy4-preview": {"pad_token_id"},
    "ling-3.0-tiny": {"pad_token_id", "architectures"},
    "glm-5.3-flash (text)": {"model_type", "architectures"},
    "ling-3.0-flash": {"pad_token_id", "architectures", "num_nextn_predict_layers"},
    "granite-4.0-h-tiny": {"position_embedding_type"},
}
"""Keys that other keys of the same file switch off, that only generation reads or that name a token of the tokenizer,
and types that compute the same as the one that is written."""
KEPT = {"max_position_embeddings", "decoder_start_token_id"}
"""Keys that no written file may lack where the published one has them."""


@pytest.fixture(scope="module")
def host():
    return load_plugins()


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_opens_and_survives_the_way_back(name, host) -> None:
    family_name, published = PUBLISHED[name]
    family = family_named(family_name, host)
    written = family.write_config(read_config(family, published, host).model)
    assert family.write_config(read_config(family, written, host).model) == written
    other = WRITTEN_OTHERWISE | WITHOUT_EFFECT.get(name, set())
    shared = {key for key, value in published.items() if key in written and value is not None} - other
    assert {key: written[key] for key in shared} == {key: published[key] for key in shared}
    assert {key for key in KEPT if published.get(key) is not None} <= set(written)


def test_every_family_of_hugging_face_has_a_published_file(host) -> None:
    have = {spec.name for spec in host[MODELS] if "hf" in spec.name_maps}
    heads = {name for name in have if name.endswith(("_classification", "_multiple_choice"))}
    assert {family for family, _ in PUBLISHED.values()} == have - heads


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("smollm2-135m-instruct", {"rope_interleaved": True}),
        ("gpt-neox-20b", {"hidden_dropout_prob": 0.1}),
        ("qwen3-coder-30b-a3b", {"use_qk_norm": False}),
        ("qwen3-coder-30b-a3b", {"shared_expert_intermediate_size": 512}),
        ("nemotron-nano", {"norm_eps": 1e-6}),
        ("bert-base-chinese", {"pooler_type": "attention"}),
        ("bert-base-chinese", {"directionality": "unidi"}),
        ("clip-vit-large-patch14 (vision)", {"dropout": 0.1}),
    ],
)
def test_a_key_that_would_change_what_is_computed_is_refused(name, change, host) -> None:
    family, published = PUBLISHED[name]
    with pytest.raises(ConfigError, match=next(iter(change))):
        read_config(family_named(family, host), {**published, **change}, host)


def test_a_bamba_that_rotates_an_odd_number_of_channels_is_refused(host) -> None:
    with pytest.raises(ConfigError, match=r"hidden_size / num_attention_heads = 6: .* multiple of 4"):
        read_config(
            family_named("hybrid", host),
            {**BAMBA_9B, "num_attention_heads": 32, "hidden_size": 192, "mamba_n_heads": 6},
            host,
        )


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 10000.0}},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25, "rope_theta": 50000.0}},
        {"rope_theta": 50000.0},
        {"partial_rotary_factor": 1.0},
    ],
)
def test_a_gpt_neox_with_contradicting_rotary_fields_is_refused(change, host) -> None:
    with pytest.raises(ConfigError, match="contradict each other"):
        read_config(family_named("gpt", host), {**PYTHIA_160M, **change}, host)


def test_a_gpt_neox_may_say_the_same_twice(host) -> None:
    rope = {"rope_type": "default", "partial_rotary_factor": 0.25, "rope_theta": 10000.0}
    family = family_named("gpt", host)
    assert read_config(family, {**PYTHIA_160M, "rope_parameters": rope}, host) == read_config(family, PYTHIA_160M, host)


def test_an_unknown_key_is_refused(host) -> None:
    with pytest.raises(ConfigError, match="attention_sink_size=4"):
        read_config(family_named("llama", host), {**SMOLLM2_135M, "attention_sink_size": 4}, host)
