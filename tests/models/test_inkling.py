"""Inkling's decoder against `transformers`, and its published names."""

from __future__ import annotations

import pytest
import torch
from tests.infer.decoding import cached_logits
from tests.models import decoder_reference as dense
from tests.models import moe_reference as ref
from torch import nn

from mt_core.errors import ConfigError
from mt_models.hugging_face import load_reference, to_reference
from mt_models.inkling.flops import flops_per_token

transformers = pytest.importorskip("transformers")

VOCAB = 89
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 12,
    "sliding_window_size": 7,
    "d_rel": 5,
    "rel_extent": 11,
    "log_scaling_n_floor": 6,
    "log_scaling_alpha": 0.5,
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "intermediate_size": 44,
    "moe_intermediate_size": 14,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "n_shared_experts": 3,
    "route_scale": 1.5,
    "logits_mup_width_multiplier": 2.0,
    "experts_implementation": "eager",
    "attn_implementation": "eager",
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}


def reference_of(**keys) -> nn.Module:
    model = transformers.InklingForCausalLM(transformers.InklingTextConfig(**{**SHAPE, **keys}))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.3, 0.3)
    return model


def test_logits_gradients_and_continuations_equal_the_reference(host, randomize) -> None:
    pair = ref.make_pair(host, reference_of(), randomize)
    ref.assert_same_function(pair, dense.random_tokens(VOCAB, 23), ("expert_bias",))
    ref.assert_maps_round_trip(pair)
    prompt = dense.random_tokens(VOCAB, 9, batch=1)
    theirs = pair.theirs.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    logits = cached_logits(pair.ours, theirs, [9, *range(10, 22)])
    assert logits[0, 8:-1].argmax(-1).tolist() == theirs[0, 9:].tolist()


def test_tokens_beyond_the_unpadded_vocabulary_are_not_predicted(host, randomize) -> None:
    pair = ref.make_pair(host, reference_of(unpadded_vocab_size=80), randomize)
    tokens = dense.random_tokens(80, 9)
    logits = pair.ours(tokens)
    dense.assert_near(logits[..., :80], pair.theirs(tokens).logits)
    assert torch.isneginf(logits[..., 80:]).all()


PUBLISHED = {
    "embed_tokens.embed_norm.weight": "embed_norm.weight",
    "embed_tokens.weight": "embed.weight",
    "self_attn.q_proj": "attn.wq_du",
    "self_attn.k_proj": "attn.wk_dv",
    "self_attn.v_proj": "attn.wv_dv",
    "self_attn.r_proj": "attn.wr_du",
    "self_attn.o_proj": "attn.wo_ud",
    "self_attn.k_sconv.conv1d": "attn.k_sconv",
    "self_attn.v_sconv.conv1d": "attn.v_sconv",
    "self_attn.": "attn.",
    "sconv.conv1d": "sconv",
    "post_attention_layernorm": "mlp_norm",
    "input_layernorm": "attn_norm",
    "gate.e_score_correction_bias": "gate.bias",
    "experts.gate_up_proj": "experts.w13_weight",
    "shared_experts.down_proj": "shared_experts.shared_w2_weight",
    "mlp.experts.down_proj": "mlp.experts.w2_weight",
    "mlp.down_proj": "mlp.w2_md",
}
"""Names of transformers' class -> those of published files."""


def published(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Under published names, with rows of gate and up in turn."""
    found = dict(tensors)
    for name in [name for name in tensors if name.endswith((".mlp.gate_proj.weight", "shared_experts.gate_proj"))]:
        gate, up = found.pop(name), found.pop(name.replace("gate_proj", "up_proj"))
        joined = name.replace("gate_proj", "w13_dn" if name.endswith("weight") else "shared_w13_weight")
        found[joined] = torch.stack([gate, up], -2).flatten(-3, -2)
    for name in [name for name in found if name.endswith("experts.gate_up_proj")]:
        found[name] = torch.stack(found[name].chunk(2, -2), -2).flatten(-3, -2)
    return {published_name(name): tensor for name, tensor in found.items()}


def published_name(name: str) -> str:
    if name == "lm_head.weight":
        return "model.llm.unembed.weight"
    for theirs, in_files in PUBLISHED.items():
        name = name.replace(theirs, in_files)
    return name.replace("model.", "model.llm.", 1)


def test_published_files_are_read(host, randomize) -> None:
    pair = ref.make_pair(host, reference_of(), randomize)
    held = to_reference(pair.ours, pair.family)
    with torch.no_grad():
        for parameter in pair.ours.parameters():
            parameter.zero_()
    towers = {"model.visual.layers.norm_0.weight": torch.ones(2), "model.mtp.layers.0.norm.weight": torch.ones(2)}
    load_reference(pair.ours, {**published(held), **towers}, pair.family)
    again = to_reference(pair.ours, pair.family)
    assert all(torch.equal(again[name], tensor) for name, tensor in held.items())


OURS = {
    "family": "inkling",
    "num_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "window_query_groups": 4,
    "window_attn_skip_freq": 2,
    "ffn_hidden_size": 48,
    "vocab_size": 128,
    "moe": {
        "num_experts": 4,
        "moe_router_topk": 2,
        "moe_router_score_function": "sigmoid",
        "moe_layer_freq": "[0]+[1]*2",
        "moe_ffn_hidden_size": 12,
        "moe_shared_expert_intermediate_size": 24,
    },
}


def test_the_flops_are_those_that_torch_counts(build) -> None:
    plain = {key: value for key, value in OURS.items() if key != "moe"}
    model = build(*ref.settings({"moe": OURS["moe"]}), **plain, attention_backend="eager")
    flops = flops_per_token(model.config, 16, convention="full")
    projections = (".linear_qkv", ".linear_proj")
    ref.assert_active_flops(model, flops, {"attention_projections": projections, "feed_forward": (".mlp",)})


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"moe_shared_expert_intermediate_size": 18}, "moe_shared_expert_intermediate_size=18 has to be a multiple"),
        ({"moe_router_score_function": "softmax"}, "moe_router_score_function=softmax is not possible"),
    ],
)
def test_experts_that_the_model_cannot_have(host, keys, words) -> None:
    with pytest.raises(ConfigError, match=words):
        ref.build_from(host, {**OURS, "moe": {**OURS["moe"], **keys}})


@pytest.mark.slow
def test_the_preset_has_the_size_of_the_published_decoder(host) -> None:
    shapes = {"inkling": (transformers.InklingTextConfig, transformers.InklingForCausalLM, {})}
    ref.assert_presets_match(host, "inkling", shapes)


def test_a_file_that_calls_the_width_of_experts_intermediate_size(host) -> None:
    family = ref.family_of(host, "inkling_text")
    keys = {key: value for key, value in SHAPE.items() if "implementation" not in key}
    both = {**keys, "dense_intermediate_size": 44, "intermediate_size": 14}
    del both["moe_intermediate_size"]
    assert family.read_config({"model_type": "inkling_text", **both}) == family.read_config(
        {"model_type": "inkling_text", **keys}
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"layer_types": ["hybrid", "full_attention", "hybrid", "hybrid"]}, "layer_types=.* is not supported"),
        ({"n_shared_experts": 0}, "n_shared_experts=0 is not supported"),
        ({"shared_expert_sink": False}, "shared_expert_sink=False is not supported"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True is not supported"),
    ],
)
def test_a_configuration_that_cannot_be_read(host, fields, words) -> None:
    external = {key: value for key, value in SHAPE.items() if "implementation" not in key}
    with pytest.raises(ConfigError, match=words):
        ref.family_of(host, "inkling_text").read_config({"model_type": "inkling_text", **external, **fields})
