"""Mistral Large 4 against `transformers`: logits, gradients, cached decoding, files; and what is refused."""

from __future__ import annotations

import pytest
import torch
from tests.infer.decoding import cached_logits
from tests.models import decoder_reference as dense
from tests.models import moe_reference as ref
from torch import nn

from mt_core.errors import ConfigError
from mt_core.parallel.pipeline.stage import Stage
from mt_models.hugging_face import to_reference
from mt_models.mistral_large4.config import MistralLarge4Config
from mt_models.mistral_large4.flops import flops_per_token
from mt_models.mistral_large4.hugging_face import HUGGING_FACE
from mt_models.mistral_large4.model import check_sources

transformers = pytest.importorskip("transformers")

VOCAB, TOPK = 89, 7
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "attention_factor": 1.0,
}
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "num_hidden_layers": 5,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "intermediate_size": 40,
    "moe_intermediate_size": 12,
    "n_routed_experts": 5,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 6,
    "v_head_dim": 9,
    "index_topk": TOPK,
    "index_head_dim": 10,
    "index_n_heads": 13,
    "max_position_embeddings": 128,
    "rope_parameters": ROPE,
    "experts_implementation": "eager",
}
VISION = {
    "model_type": "pixtral",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "patch_size": 2,
    "image_size": 8,
}
SHARING = {
    "num_hidden_layers": 6,
    "no_rope_layers": [1, 0, 1, 0, 1, 1],
    "kv_source_layers": [0, 1, 0, 1, 4, 4],
    "indexer_types": ["full", "full", "shared", "full", "shared", "full"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "dense", "sparse", "sparse"],
}
CASES = {
    "as published": {},
    "latents that layers share": SHARING,
    "other scalings": {
        "rope_parameters": {**ROPE, "attention_factor": None, "mscale_all_dim": 1.0, "mscale": 0.7},
        "routed_scaling_factor": 1.5,
        "rms_norm_eps": 1e-3,
        "final_logit_softcapping": 5.0,
    },
}
NO_GRADIENT = (
    "rotary.alpha",
    *(f"indexer.{name}.weight" for name in ("linear_wq_b", "linear_wk", "linear_weights_proj")),
    *(f"indexer.{name}.{part}" for name in ("k_norm", "q_input_norm") for part in ("weight", "bias")),
    *(f"indexer.query_factors.{part}" for part in ("scale", "bias")),
)


def reference_of(*, tied: bool = False, **keys) -> nn.Module:
    text = {**TEXT, **keys, "rope_parameters": dict(keys.get("rope_parameters", ROPE))}
    config = transformers.MistralLarge4Config(
        text_config=transformers.MistralLarge4TextConfig(**text),
        vision_config=transformers.PixtralVisionConfig(**{k: v for k, v in VISION.items() if k != "model_type"}),
        tie_word_embeddings=tied,
    )
    config._attn_implementation = "eager"
    model = transformers.MistralLarge4ForConditionalGeneration(config)
    with torch.no_grad():
        model.model.language_model.rotary_emb.alpha.copy_(torch.tensor([0.3, -0.5, 0.2]))
    return model


def make_pair(host, randomize, **keys):
    return ref.make_pair(host, reference_of(**keys), randomize)


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_equal_the_reference(host, randomize, case) -> None:
    pair = make_pair(host, randomize, **CASES[case])
    ref.assert_same_function(pair, dense.random_tokens(VOCAB, 23), NO_GRADIENT)
    dense.assert_decoding_equals_forward(pair.ours, dense.random_tokens(VOCAB, 15))


@pytest.mark.parametrize("tied", [False, True])
def test_files_hold_the_same_bits_in_both_directions(host, randomize, tmp_path, tied) -> None:
    """The names that transformers writes are ours, and it reads a decoder alone that has them."""
    pair = make_pair(host, randomize, tied=tied, **SHARING)
    state = pair.theirs.state_dict()
    theirs = ref.spelled(pair, ref.published(pair.theirs, state))
    back = to_reference(pair.ours, pair.family)
    assert set(back) <= set(theirs)
    for name, tensor in back.items():
        assert torch.equal(tensor, theirs[name]), name
    external = pair.family.write_config(pair.ours.config)
    config = transformers.MistralLarge4Config.from_dict(external)
    config._attn_implementation = config.text_config._attn_implementation = "eager"
    again = type(pair.theirs)(config).float().eval()
    decoder = {name: value for name, value in state.items() if "vision_tower" not in name and "projector" not in name}
    missing, unexpected = again.load_state_dict(decoder, strict=False)
    assert not unexpected
    assert all("vision_tower" in name or "projector" in name for name in missing)
    assert dense.computed_keys(pair.family, external) == dense.computed_keys(pair.family, again.config.to_dict())
    tokens = dense.random_tokens(VOCAB, 9)
    assert torch.equal(again(tokens).logits, pair.theirs(tokens).logits)


@pytest.mark.parametrize("case", ["as published", "latents that layers share"])
def test_greedy_continuations_with_a_cache_are_those_of_the_reference(host, randomize, case) -> None:
    """With few heads many keys have a score of exactly 0, and which of these are chosen is a matter of ties."""
    pair = make_pair(host, randomize, **{**CASES[case], "index_n_heads": 2})
    prompt = dense.random_tokens(VOCAB, 9, batch=1)
    theirs = pair.theirs.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    logits = cached_logits(pair.ours, theirs, [9, *range(10, 22)])
    assert logits[0, 8:-1].argmax(-1).tolist() == theirs[0, 9:].tolist()


OURS = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 3,
    "ffn_hidden_size": 40,
    "kv_lora_rank": 10,
    "qk_head_dim": 12,
    "qk_pos_emb_head_dim": 6,
    "v_head_dim": 9,
    "no_rope_freq": 2,
    "dsa_indexer_n_heads": 5,
    "dsa_indexer_head_dim": 10,
    "dsa_indexer_topk": 5,
    "vocab_size": 50,
}


@pytest.mark.slow
def test_the_preset_has_the_size_of_the_published_model(host) -> None:
    ours = dense.parameter_count(dense.build_preset(host, "mistral-large-4-1t"))
    reference = dense.without_values(
        transformers.MistralLarge4TextModel, transformers.MistralLarge4TextConfig()
    ).num_parameters()
    # The LM head, and the factors of frequencies, which are a buffer there.
    assert ours == reference + 204800 * 6144 + 32
    assert ours / 1e12 == pytest.approx(1.05, abs=0.01)


def test_flops_are_those_that_torch_counts(build) -> None:
    sizes = {**OURS, "vocab_size": 384, "kv_source_layers": [0, 1, 0, 1]}
    model = build("data.seq_length=16", family="mistral_large4", **sizes, attention_backend="eager")
    flops = flops_per_token(model.config, 16, convention="full")
    projections = ("linear_q_proj", "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj")
    ref.assert_active_flops(model, flops, {"attention_projections": projections})


# -- bad input -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"q_lora_rank": 8}, "model.q_lora_rank=8 is not supported by model.family=mistral_large4; it can be null"),
        ({"mtp_num_layers": 1}, "model.mtp_num_layers=1 is not supported by model.family=mistral_large4; it can be 0"),
        ({"rope_scaling_type": "linear", "rope_scaling_factor": 2.0}, "rope_scaling_type=linear is not defined"),
        ({"no_rope_freq": "[0]*3"}, "has 3 entries; it needs one for each of the model.num_layers=4"),
        ({"kv_source_layers": [0, 1]}, "model.kv_source_layers has 2 entries"),
        ({"kv_source_layers": [0, 1, 3, 3]}, "layer 2 reads the latents of layer 3"),
        ({"kv_source_layers": [0, 1, 0, 2]}, "layer 3 reads the latents of layer 2"),
        ({"kv_source_layers": [0, 0, 2, 3]}, "of layers 0 and 1 one has rotary positions and the other has none"),
        ({"dsa_indexer_head_dim": 4}, "dsa_indexer_head_dim=4 is below the channels that positions rotate"),
    ],
)
def test_impossible_models_are_refused(build, keys, words) -> None:
    with pytest.raises(ConfigError, match=words):
        build(family="mistral_large4", **{**OURS, **keys})


def test_layouts_that_divide_what_layers_share_are_refused(monkeypatch, build) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="chooses among the keys of the whole sequence, which other ranks hold"):
        build("parallel.context_parallel_size=2", family="mistral_large4", **OURS)
    with pytest.raises(ConfigError, match="use_torch_fsdp2=true casts parameters to precision.dtype=bf16"):
        build("parallel.use_torch_fsdp2=true", "precision.dtype=bf16", family="mistral_large4", **OURS)
    config = MistralLarge4Config(family="mistral_large4", **OURS, kv_source_layers=[0, 1, 0, 1])
    with pytest.raises(ConfigError, match="layer 2 reads the latents of layer 0"):
        check_sources(config, [Stage(range(2), last=False), Stage(range(2, 4), first=False)])
    check_sources(config, [Stage(range(4))])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_key_value_heads": 1}, "num_key_value_heads=1 is not supported"),
        ({"n_group": 5}, "n_group=5 is not supported"),
        ({"layer_types": ["full_attention"] * 5}, "every layer can be indexed_attention alone"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_type can be yarn or default"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers=.* is not supported"),
        ({"mlp_layer_types": ["dense"] * 4}, "mlp_layer_types=.* is not supported"),
        ({"kv_source_layers": [0, 1, 1, 3, 0]}, "layer 4 names layer 0, and transformers gives"),
        ({"kv_source_layers": [0, 1]}, "it needs a layer for each of 5 layers"),
        ({"index_topk_pattern": "SFFFF"}, "indexer_types=.* is not supported"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
    ],
)
def test_a_configuration_that_cannot_be_read(fields, words) -> None:
    text = {key: value for key, value in TEXT.items() if "implementation" not in key}
    with pytest.raises(ConfigError, match=words):
        HUGGING_FACE.read_config({"model_type": "mistral_large4", "text_config": {**text, **fields}})


def test_what_a_file_cannot_say_is_not_written() -> None:
    config = MistralLarge4Config(family="mistral_large4", **OURS, final_logit_softcapping=None)
    with pytest.raises(ConfigError, match="final_logit_softcapping=null cannot be written"):
        HUGGING_FACE.write_config(config)
    other = MistralLarge4Config(family="mistral_large4", **{**OURS, "num_layers": 5}, kv_source_layers=[0, 1, 2, 1, 0])
    with pytest.raises(ConfigError, match="kv_source_layers"):
        HUGGING_FACE.write_config(other.model_copy(update={"kv_source_layers": [0, 1, 2, 1, 0], "no_rope_freq": None}))
