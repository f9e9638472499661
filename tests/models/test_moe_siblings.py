"""Families with experts beside their dense sizes, against `transformers` on shapes that are no powers of two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.infer.decoding import cached_logits
from tests.models import decoder_reference as dense
from tests.models import moe_reference as ref
from tests.models.prediction_reference import LENGTH, assert_same_prediction, causal
from tests.models.published_dense import PUBLISHED_DENSE as PUBLISHED
from torch import nn

from mt_core.errors import ConfigError

transformers = pytest.importorskip("transformers")

VOCAB = 97
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 44,
    "max_position_embeddings": 64,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
ERNIE = {"moe_num_experts": 7, "moe_k": 3, "moe_intermediate_size": 10}
HUNYUAN = {"num_experts": 7, "moe_topk": 3, "head_dim": 10}
LFM2 = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 10, "num_dense_layers": 1}
LFM2 |= {"layer_types": ["conv", "conv", "full_attention"]}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ernie4_5_moe": ("Ernie4_5_Moe", ERNIE),
    "ernie4_5_moe, some layers, no shared expert": (
        "Ernie4_5_Moe",
        {**ERNIE, "num_hidden_layers": 4, "moe_layer_start_index": 0, "moe_layer_interval": 2}
        | {"moe_num_shared_experts": 0, "tie_word_embeddings": False},
    ),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1",
        {**HUNYUAN, "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}},
    ),
    "hunyuan_v1_moe, biased, by lists": (
        "HunYuanMoEV1",
        {**HUNYUAN, "moe_topk": [2] * 3, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "lfm2_moe": ("Lfm2Moe", LFM2),
    "lfm2_moe, no bias of experts": (
        "Lfm2Moe",
        {**LFM2, "use_expert_bias": False, "routed_scaling_factor": 1.5, "conv_bias": True, "num_dense_layers": 0}
        | {"tie_word_embeddings": False},
    ),
}
V3 = {"num_experts_per_tok": 3, "moe_intermediate_size": 10, "n_group": 1, "topk_group": 1}
CASES |= {
    "dots1": (
        "Dots1",
        {**V3, "n_routed_experts": 7, "n_shared_experts": 2, "norm_topk_prob": True, "first_k_dense_replace": 1}
        | {"routed_scaling_factor": 2.5, "head_dim": 10},
    ),
    "solar_open": (
        "SolarOpen",
        {**V3, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "head_dim": 10, "tie_word_embeddings": True}
        | {"rope_parameters": {**YARN, "rope_theta": 5000.0}},
    ),
    "exaone_moe": (
        "ExaoneMoe",
        {**V3, "num_experts": 7, "num_shared_experts": 2, "sliding_window": 5, "head_dim": 10, "num_hidden_layers": 4}
        | {"sliding_window_pattern": 2, "mlp_layer_types": ["dense", "sparse", "dense", "sparse"]},
    ),
}
GREEDY = ("ernie4_5_moe", "hunyuan_v1_moe", "lfm2_moe", "dots1", "exaone_moe")


def reference_of(name: str) -> nn.Module:
    stem, keys = CASES[name]
    model = getattr(transformers, f"{stem}ForCausalLM")(getattr(transformers, f"{stem}Config")(**{**SHAPE, **keys}))
    generator = torch.Generator().manual_seed(5)
    for ending, buffer in model.named_buffers():
        if ending.endswith("bias"):
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    return model


@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_equal_the_reference(host, randomize, name) -> None:
    pair = ref.make_pair(host, reference_of(name), randomize)
    ref.assert_same_function(pair, dense.random_tokens(VOCAB, 17), unused=("expert_bias",))
    dense.assert_decoding_equals_forward(pair.ours, dense.random_tokens(VOCAB, 13))
    ref.assert_maps_round_trip(pair)


@pytest.mark.parametrize("name", GREEDY)
def test_greedy_continuations_with_a_cache_are_those_of_the_reference(host, randomize, name) -> None:
    pair = ref.make_pair(host, reference_of(name), randomize)
    prompt = dense.random_tokens(VOCAB, 7, batch=1)
    theirs = pair.theirs.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    logits = cached_logits(pair.ours, theirs, [7, *range(8, 16)])
    assert logits[0, 6:-1].argmax(-1).tolist() == theirs[0, 7:].tolist()


EXAONE_PREDICTION = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "post_norm": "norm",
}


def published_prediction(state):
    """Under the names of K-EXAONE's files."""
    found = {}
    for name, tensor in state.items():
        part, rest = name.split(".", 1)
        found[f"mtp.layers.0.{rest}" if part == "mtp_block" else f"mtp.{EXAONE_PREDICTION[part]}.{rest}"] = tensor
    return found


def test_prediction_of_k_exaone_is_dense_without_positions(host, randomize) -> None:
    from transformers.modeling_layers import MtpLayer

    theirs = reference_of("exaone_moe")
    # Layer 1 of the reference has no window; layer 3 with a dense feed-forward would be the same.
    config = type(theirs.config)(**{**theirs.config.to_dict(), "mlp_layer_types": ["dense"] * 4})
    config._attn_implementation = "eager"
    decoder = theirs.model.layers[1]
    layer = MtpLayer(config, type(decoder), type(decoder.input_layernorm), 1)
    randomize(theirs)
    randomize(layer, seed=1)
    places = torch.arange(LENGTH)[None]
    rotary = theirs.model.rotary_emb(torch.zeros(1), places)
    model = assert_same_prediction(
        host,
        theirs,
        layer,
        published_prediction,
        lambda embedded, hidden: layer(embedded, hidden, rotary, causal(), places, None),
        ("expert_bias",),
        mtp_layer_types=["full_attention"],
        mtp_sliding_windows=[0],
    )
    assert model.mtp.layers[0].mtp_model_layer.self_attention.window is None


TEXT = {key: value for key, value in SHAPE.items() if "implementation" not in key}
UNREADABLE = [
    ("ernie4_5_moe", {"use_bias": True}, "use_bias=True is not supported"),
    ("ernie4_5_moe", {"moe_norm_min": 1e-6}, "moe_norm_min=1e-06 is not supported"),
    ("hunyuan_v1_moe", {"moe_topk": [2, 3, 2]}, "moe_topk=.* one number for all layers"),
    ("hunyuan_v1_moe", {"moe_intermediate_size": [40] * 3}, "moe_intermediate_size=40 .* it can be 44"),
    ("hunyuan_v1_moe", {"num_shared_expert": 2}, "num_shared_expert=2 is not supported"),
    ("lfm2_moe", {"layer_types": None}, "layer_types is not set"),
    ("lfm2_moe", {"norm_topk_prob": False}, "norm_topk_prob=False is not supported"),
    ("dots1", {"max_window_layers": 2}, "max_window_layers=2 with sliding_window=4096 is not supported"),
    ("dots1", {"layer_types": ["sliding_attention"] * 3}, "layer_types has sliding_attention"),
    ("dots1", {"attention_bias": True}, "attention_bias=True is not supported"),
    ("solar_open", {"first_k_dense_replace": 1}, "first_k_dense_replace=1 is not supported"),
    ("exaone_moe", {"is_moe_layer": [False] + [True] * 3}, "is_moe_layer=.* contradicts"),
    ("exaone_moe", {"mlp_layer_types": ["dense"] * 4}, "leave no layer with experts"),
]


@pytest.mark.parametrize(("kind", "fields", "words"), UNREADABLE)
def test_a_configuration_that_cannot_be_read(host, kind, fields, words) -> None:
    with pytest.raises(ConfigError, match=words):
        ref.family_of(host, kind).read_config({"model_type": kind, **TEXT, **CASES[kind][1], **fields})


@pytest.mark.parametrize(
    ("kind", "moe", "words"),
    [
        ("ernie4_5_moe", {"moe_layer_freq": "[1,1,0,1]"}, "between a first and a last one"),
        ("ernie4_5_moe", {"moe_router_enable_expert_bias": False}, "moe_router_enable_expert_bias=False cannot be"),
        ("hunyuan_v1_moe", {"moe_shared_expert_intermediate_size": 88}, "intermediate_size=88 cannot be written"),
        ("lfm2_moe", {"moe_router_weight_epsilon": 1e-20}, "moe_router_weight_epsilon=1e-20 cannot be written"),
        ("solar_open", {"moe_layer_freq": "[0]+[1]*3"}, "which has no dense layers"),
        ("dots1", {"moe_layer_freq": "[1]*3+[0]"}, "whose dense layers come first"),
    ],
)
def test_what_a_file_cannot_say_is_not_written(host, kind, moe, words) -> None:
    external = {"model_type": kind, **TEXT, **CASES[kind][1], "num_hidden_layers": 4}
    external |= {"layer_types": ["conv", "full_attention"] * 2} if kind == "lfm2_moe" else {}
    family = ref.family_of(host, kind)
    config = ref.build_from(host, family.read_config(external)).config
    with pytest.raises(ConfigError, match=words):
        family.write_config(config.model_copy(update={"moe": {**config.moe, **moe}}))


def published_shape(name: str, **changes: Any) -> tuple[Any, Any, dict[str, Any]]:
    _, external = PUBLISHED[name]
    stem, _ = CASES[external["model_type"]]
    fields = {key: value for key, value in external.items() if key not in ("architectures", "model_type")}
    return getattr(transformers, f"{stem}Config"), getattr(transformers, f"{stem}ForCausalLM"), {**fields, **changes}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_presets_have_the_sizes_of_the_published_models(host) -> None:
    """9 CPU seconds."""
    layers = ["full_attention" if layer % 4 == 2 else "conv" for layer in range(40)]
    large = {"num_hidden_layers": 54, "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8}
    large |= {"intermediate_size": 28672, "moe_intermediate_size": 3584, "moe_k": 8, "moe_layer_start_index": 3}
    large |= {"moe_layer_end_index": 53, "moe_num_shared_experts": 0, "tie_word_embeddings": False}
    wide = {"num_hidden_layers": 40, "num_experts": 64, "moe_intermediate_size": 1536, "intermediate_size": 11776}
    shapes = {
        "ernie-4.5-21b-a3b": (21.8, published_shape("ernie-4.5-21b-a3b")),
        "ernie-4.5-300b-a47b": (299.5, published_shape("ernie-4.5-21b-a3b", **large)),
        "hunyuan-a13b": (80.4, published_shape("hunyuan-a13b")),
        "lfm2-8b-a1b": (8.3, published_shape("lfm2-8b-a1b")),
        "lfm2-24b-a2b": (23.8, published_shape("lfm2-8b-a1b", **wide, layer_types=layers)),
        "lfm2.5-8b-a1b": (8.5, published_shape("lfm2-8b-a1b", vocab_size=128000)),
        "dots.llm1-142b-a14b": (142.8, published_shape("dots.llm1")),
        "solar-open-100b": (102.6, published_shape("solar-open-100b")),
        "k-exaone-236b-a23b": (236.6, published_shape("k-exaone-236b-a23b")),
    }
    for preset, (billions, (config_type, model_type, shape)) in shapes.items():
        reference = dense.without_values(model_type, config_type(**shape))
        endings = ("expert_bias", "e_score_correction_bias")
        biases = sum(buffer.numel() for name, buffer in reference.named_buffers() if name.endswith(endings))
        # The classes leave out the layer of multi-token prediction.
        settings = ["model.mtp_num_layers=0"] if "exaone" in preset else []
        ours = dense.parameter_count(dense.build_preset(host, preset, *settings))
        assert ours == reference.num_parameters() + biases, preset
        assert ours / 1e9 == pytest.approx(billions, abs=0.06), preset
