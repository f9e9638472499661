"""FLOPs from the configuration against torch's count of what the forward computes."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mt_core.config.loading import load_config
from mt_core.errors import ConfigError
from mt_core.nn.attention import AttentionPattern
from mt_models.bert import config as bert_flops
from mt_models.biencoder import config as biencoder_flops
from mt_models.flops import flops_per_token
from mt_models.gpt.flops import training_flops
from mt_models.heads import config as heads_flops
from mt_models.retro import config as retro_flops
from mt_models.t5 import config as t5_flops

# Products have the padding of a vocabulary, which is not among the model's FLOPs.
UNPADDED = {"vocab_size": 301, "make_vocab_size_divisible_by": 1}
SMALL = {"num_layers": 3, "hidden_size": 64, "num_attention_heads": 4, **UNPADDED}
MODELS = {
    "gpt": {"max_position_embeddings": 16},
    "llama": {"num_query_groups": 2, "ffn_hidden_size": 96},
    "mistral": {"num_query_groups": 1, "sliding_window": 5},
    "qwen": {"num_query_groups": 2, "kv_channels": 24},
    "gemma": {"num_query_groups": 2, "kv_channels": 32, "sliding_window": 5, "sliding_window_pattern": 2},
}
PARTS = {
    "attention_projections": ("linear_qkv", "linear_proj"),
    "feed_forward": ("linear_fc1", "linear_fc2"),
}


@pytest.mark.parametrize("family", MODELS)
def test_each_part_equals_what_torch_counts(build, family) -> None:
    model = build(family=family, **SMALL, **MODELS[family], attention_backend="eager")
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens)
    flops = flops_per_token(model.config, 16, convention="full")
    assert flops.forward * tokens.numel() == pytest.approx(counter.get_total_flops(), rel=0.01)
    counts = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    for part, names in PARTS.items():
        counted = sum(n for name, n in counts.items() if name.endswith(names))
        assert getattr(flops, part) * tokens.numel() == pytest.approx(counted, rel=0.01), part


def test_a_depth_of_prediction_is_a_layer_a_projection_and_logits(host) -> None:
    settings = ["model.position_embedding_type=rope", "model.mtp_num_layers=2", "model.vocab_size=300"]
    config = load_config(preset="gpt-tiny", overrides=[*settings, "train.train_iters=60"], host=host).config
    plain = flops_per_token(config.model, config.data.seq_length)
    hidden, output = config.model.hidden_size, plain.output
    layer = (plain.forward - output) / config.model.num_layers
    expected = plain.forward + 2 * (layer + 2 * hidden * 2 * hidden + output)
    assert training_flops(config) == pytest.approx(3 * config.data.seq_length * expected)


@pytest.mark.parametrize("window", [None, 1, 5, 16, 40])
def test_seen_keys_are_those_that_the_mask_leaves(build, window) -> None:
    keys = {} if window is None else {"sliding_window": window}
    model = build(family="mistral", **SMALL, **keys)
    mask = AttentionPattern(window=window).additive_mask(16, 16, torch.float32, torch.device("cpu"))
    seen = (mask == 0).sum().item() / 16
    assert flops_per_token(model.config, 16).attention_core == pytest.approx(3 * 4 * 64 * seen)


def test_llama_3_8b_at_8192_is_the_number_that_others_publish(host) -> None:
    """6 x 7.505e9 weights in products + 6 x 32 layers x 8192 x 4096 causal, per token of training."""
    from tests.models.decoder_reference import build_preset

    flops = flops_per_token(build_preset(host, "llama3-8b").config, 8192)
    assert flops.training / 1e9 == pytest.approx(51.47, rel=1e-3)


def test_an_moe_model_needs_its_own_count(build) -> None:
    config = build(family="llama", **SMALL).config.model_copy(update={"moe": {"num_experts": 8}})
    with pytest.raises(ConfigError, match='the feed-forward "moe" is counted by the plugin that brings it'):
        flops_per_token(config, 16)
    dense = flops_per_token(config.model_copy(update={"moe": None}), 16)
    assert flops_per_token(config, 16, feed_forward=7.0).feed_forward == 21.0
    assert flops_per_token(config, 16, feed_forward=7.0).output == dense.output


# -- families that are no decoders --------------------------------------------------------------------


BERT = SMALL | {"max_position_embeddings": 16}


def count(model: torch.nn.Module, **inputs: torch.Tensor) -> tuple[float, Callable[..., float]]:
    """All FLOPs of a forward, and a function that adds up those of the modules whose names end in one of its words."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(**inputs)
    counts = {name: sum(operations.values()) for name, operations in counter.get_flop_counts().items()}

    def within(*endings: str, under: str = "") -> float:
        return sum(n for name, n in counts.items() if name.endswith(endings) and under in name)

    return counter.get_total_flops(), within


def approx(value: float) -> object:
    return pytest.approx(value, rel=0.01)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


@pytest.mark.parametrize("heads", [True, False])
@pytest.mark.parametrize("placement", ["pre", "post"])
def test_bert_by_part(build, placement, heads) -> None:
    keys = {"layernorm_placement": placement, "bert_binary_head": heads, "add_lm_head": heads}
    model = build(family="bert", **BERT, **keys, attention_backend="eager")
    total, within = count(model, tokens=zeros(2, 16))
    flops = bert_flops.flops_per_token(model.config, 16)
    assert flops.forward * 32 == approx(total)
    assert flops.attention_projections * 32 == approx(within("linear_qkv", "linear_proj"))
    inside = within("self_attention") - within("linear_qkv", "linear_proj")
    assert flops.attention_core * 32 == approx(inside)
    assert flops.feed_forward * 32 == approx(within("mlp"))
    assert (flops.lm_head + flops.output) * 32 == approx(within("lm_head", "output_layer"))
    assert flops.pooler * 32 == approx(within("pooler"))
    assert flops.binary_head * 32 == approx(within("binary_head"))


@pytest.mark.parametrize("projection", [0, 24])
def test_a_pair_of_the_biencoder_by_part(build, projection) -> None:
    model = build(
        "train.loss=retrieval",
        family="biencoder",
        **BERT,
        biencoder_projection_dim=projection,
        attention_backend="eager",
    )
    names = [name for name in model.inputs if name.endswith("_tokens")]
    batch = {name: zeros(3, 16) for name in names}
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        vectors = model(**batch)
        _ = vectors.query @ vectors.context.T
    flops = biencoder_flops.flops_per_question(model.config, 16, compared=3)
    assert flops.forward * 3 == approx(counter.get_total_flops())
    _, within = count(model, **batch)
    assert 2 * 16 * flops.tower.feed_forward * 3 == approx(within("mlp"))
    assert flops.projection * 3 == approx(within("projection_enc"))


@pytest.mark.parametrize("activation", ["relu", "geglu_tanh"])
def test_t5_by_part(build, activation) -> None:
    keys = {"num_layers": 2, "decoder_num_layers": 3, "kv_channels": 24, "activation": activation}
    model = build(family="t5", **(BERT | keys | {"max_position_embeddings": "null"}), attention_backend="eager")
    total, within = count(model, encoder_tokens=zeros(2, 16), decoder_tokens=zeros(2, 10))
    flops = t5_flops.flops_per_sample(model.config, 16, 10, convention="full")
    assert flops.forward * 2 == approx(total)
    for side in ("encoder", "decoder"):
        projections = within("self_attention.linear_qkv", "self_attention.linear_proj", under=f"{side}.")
        assert getattr(flops, f"{side}_attention_projections") * 2 == approx(projections)
        core = within("self_attention", under=f"{side}.") - projections
        assert getattr(flops, f"{side}_attention_core") * 2 == approx(core)
        assert getattr(flops, f"{side}_feed_forward") * 2 == approx(within("mlp", under=f"{side}."))
    projections = within("linear_q", "linear_kv", "cross_attention.linear_proj")
    assert flops.cross_attention_projections * 2 == approx(projections)
    assert flops.cross_attention_core * 2 == approx(within("cross_attention") - projections)


HEADS = [(family, task) for family in ("bert", "gpt", "llama") for task in ("classification", "multiple_choice")]
HEADS.append(("modernbert", "classification"))
FURTHER = {"llama": {"num_query_groups": 2}, "modernbert": {"global_attn_every_n_layers": 1}}


@pytest.mark.parametrize(("family", "task"), HEADS)
def test_heads_by_part(build, family, task) -> None:
    keys = BERT | FURTHER.get(family, {})
    classes = {"num_classes": 5} if task == "classification" else {}
    options = ["train.loss=classification"]
    model = build(*options, family=f"{family}_{task}", **keys, **classes, attention_backend="eager")
    texts = (3,) if task == "classification" else (3, 4)
    total, within = count(model, tokens=zeros(*texts, 16))
    tokens = 16 * math.prod(texts)
    flops = heads_flops.flops_per_token(model.config, 16, convention="full")
    assert flops.forward * tokens == approx(total)
    assert flops.feed_forward * tokens == approx(within("mlp"))
    assert flops.head * tokens == approx(within("classification_head", "multichoice_head"))
    assert flops.pooler * tokens == approx(within("pooler", "lm_head"))


@pytest.mark.parametrize("groups", [4, 2])
def test_retro_by_part(build, groups) -> None:
    sizes = {"retro_chunk_length": 4, "retro_num_neighbors": 3}
    data = ["data.dataset_type=builtin_retro", *(f"data.{key}={value}" for key, value in sizes.items())]
    keys = {"retro_cross_attention_layers": "[2, 3]", "num_query_groups": groups, "retro_encoder_num_layers": 3}
    model = build(*data, family="retro", **BERT, **keys, **sizes, attention_backend="eager")
    total, within = count(model, tokens=zeros(2, 16), neighbor_tokens=zeros(2, 4, 3, 8))
    flops = retro_flops.flops_per_token(model.config, 16, convention="full")
    assert flops.forward * 32 == approx(total)
    for side, prefix in (("decoder.", ""), ("encoder.", "encoder_")):
        projections = within("self_attention.linear_qkv", "self_attention.linear_proj", under=side)
        assert getattr(flops, f"{prefix}attention_projections") * 32 == approx(projections)
        core = within("self_attention", under=side) - projections
        assert getattr(flops, f"{prefix}attention_core") * 32 == approx(core)
        assert getattr(flops, f"{prefix}feed_forward") * 32 == approx(within("mlp", under=side))
        crossing = within("linear_q", "linear_kv", "cross_attention.linear_proj", under=side)
        assert getattr(flops, f"{prefix}cross_attention_projections") * 32 == approx(crossing)
        core = within("cross_attention", under=side) - crossing
        assert getattr(flops, f"{prefix}cross_attention_core") * 32 == approx(core)


def test_tokens_before_the_first_neighbours_attend_to_none(build) -> None:
    data = ["data.dataset_type=builtin_retro", "data.retro_chunk_length=4"]
    keys = {"retro_chunk_length": 4, "retro_cross_attention_layers": "[2]"}
    config = build(*data, family="retro", **BERT, **keys).config
    full, seen = (retro_flops.flops_per_token(config, 16, convention=c) for c in ("full", "seen"))
    assert seen.cross_attention_core == pytest.approx(full.cross_attention_core * 13 / 16)
