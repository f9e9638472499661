"""Every kind of sample that a family trains on can be planned."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cases import GPT_OSS, LLAMA, MODEL, MOE, PAIRS, T5, TP, planned, tree
from fake import host

from mt_core.train.build import count_flops

WORDS = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 261}
IMAGES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "img_h": 16, "img_w": 16, "patch_dim": 8}
MAMBA = {"hidden_size": 32, "vocab_size": 261, "mamba_head_dim": 16, "mamba_state_dim": 16, "mamba_num_groups": 2}
DELTA_NET = {"linear_attention_freq": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_chunk_size": 8}
DELTA_NET |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 8}
INDEXER = {"dsa_indexer_n_heads": 2, "dsa_indexer_head_dim": 8, "dsa_indexer_topk": 8, "dsa_indexer_loss_coeff": 1.0}
COMPRESSED = {"kv_channels": 8, "qk_pos_emb_head_dim": 4, "q_lora_rank": 8, "o_groups": 2, "o_lora_rank": 8}
COMPRESSED |= {"compress_ratios": [4, 8], "sliding_window": 8}
TASK = {"data_path": ["none"], "seq_length": 32}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "t5": (T5, PAIRS, "cross_entropy"),
    "bert": ({**WORDS, "max_position_embeddings": 32}, {"dataset_type": "bert", **TASK}, "bert"),
    "modernbert": (
        {**WORDS, "max_position_embeddings": 32, "local_attention": 64},
        {"dataset_type": "bert", "bert_binary_head": False, **TASK},
        "bert",
    ),
    "biencoder": ({**WORDS, "max_position_embeddings": 32}, {"dataset_type": "ict", **TASK}, "retrieval"),
    "vision": (
        {"num_classes": 6, **IMAGES},
        {"dataset_type": "shapes", "img_h": 16, "img_w": 16},
        "classification",
    ),
    "llava": (
        {
            "vocab_size": 261,
            "image_token_index": 261,
            "vision_feature_layers": [-1],
            "vision_model": {**IMAGES, "add_pooler": False},
            "language_model": {"family": "llama", **WORDS, "max_position_embeddings": 64},
        },
        {
            "dataset_type": "captioned_shapes",
            "seq_length": 32,
            "img_h": 16,
            "img_w": 16,
            "image_token_index": 261,
            "image_seq_length": 4,
        },
        "cross_entropy",
    ),
    "retro": (
        {**WORDS, "retro_chunk_length": 8, "retro_cross_attention_layers": [2], "position_embedding_type": "rope"},
        {"dataset_type": "builtin_retro", "seq_length": 32, "retro_chunk_length": 8},
        "cross_entropy",
    ),
    "mamba": ({"num_layers": 2, "mamba_chunk_size": 8, **MAMBA}, {"dataset_type": "mock"}, "cross_entropy"),
    "rwkv7": (
        {**{key: WORDS[key] for key in ("num_layers", "hidden_size", "vocab_size")}, "head_size": 8},
        {"dataset_type": "mock"},
        "cross_entropy",
    ),
    "hybrid": (
        {"hybrid_layer_pattern": "M-M-*-M-", "num_attention_heads": 4, "mamba_chunk_size": 8, **MAMBA},
        {"dataset_type": "mock"},
        "cross_entropy",
    ),
    "qwen_next": (
        {**WORDS, **DELTA_NET, "ffn_hidden_size": 64, "max_position_embeddings": 32, "mtp_num_layers": 1},
        {"dataset_type": "mock", "seq_length": 32},
        "cross_entropy",
    ),
    "llama_classification": (
        {**WORDS, "num_classes": 3},
        {"dataset_type": "mnli", "seq_length": 32},
        "classification",
    ),
    "bert_multiple_choice": (
        {**WORDS, "max_position_embeddings": 32},
        {"dataset_type": "race", "seq_length": 32},
        "classification",
    ),
    "deepseek_v32": (
        {**WORDS, **LATENT, **INDEXER, "ffn_hidden_size": 64, "max_position_embeddings": 32, "mtp_num_layers": 1},
        {"dataset_type": "mock", "seq_length": 32},
        "cross_entropy",
    ),
    "deepseek_v4": (
        {**WORDS, **COMPRESSED, **INDEXER, "mtp_num_layers": 1, "moe": {"num_experts": 4, "moe_router_hash_layers": 1}},
        {"dataset_type": "mock", "seq_length": 32},
        "cross_entropy",
    ),
    "kimi_linear": (
        {**WORDS, **LATENT, **DELTA_NET, "linear_num_value_heads": 2, "ffn_hidden_size": 64},
        {"dataset_type": "mock", "seq_length": 32},
        "cross_entropy",
    ),
    "glm5_next": (
        {**WORDS, **LATENT, **DELTA_NET, "linear_num_value_heads": 2, "ffn_hidden_size": 64, "qk_pos_emb_head_dim": 0}
        | {"dsa_indexer_n_heads": 2, "dsa_indexer_head_dim": 8, "dsa_indexer_topk": 8},
        {"dataset_type": "mock", "seq_length": 32},
        "cross_entropy",
    ),
    "kimi_k3": (
        {**WORDS, **LATENT, **DELTA_NET, "linear_num_value_heads": 2, "ffn_hidden_size": 64, "residual_block_size": 1},
        {"dataset_type": "mock", "seq_length": 32},
        "cross_entropy",
    ),
    "bailing_hybrid": (
        {**WORDS, **LATENT, **DELTA_NET, "linear_num_value_heads": 2, "ffn_hidden_size": 64},
        {"dataset_type": "mock", "seq_length": 32},
        "cross_entropy",
    ),
    "deepseek": (
        {**WORDS, **LATENT, "ffn_hidden_size": 64, "max_position_embeddings": 32, "mtp_num_layers": 1},
        {"dataset_type": "mock", "seq_length": 32},
        "cross_entropy",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", CASES)
def test_a_family_is_planned_alone_and_on_two_ranks(family: str) -> None:
    model, data, loss = CASES[family]
    rows = []
    for world, parallel in ((1, {}), (2, {TP: 2})):
        values = tree({"family": family, **model}, parallel=parallel, data=data)
        values["train"]["loss"] = loss
        plan = planned(values, world)
        rows.append(plan.largest)
        assert plan.flops_per_step > 0
    alone, shared = rows
    assert alone.weights.parameters > shared.weights.parameters > alone.weights.parameters / 2
    assert 0 < shared.activation_bytes < alone.activation_bytes
    assert any(axis == "tp" for axis, _ in shared.flow.bytes)


def test_a_tower_of_images_needs_the_flops_of_its_patches() -> None:
    """4 patches and a class token: 12 h^2 weights in each of 2 layers and all scores, patches of 3 x 8 x 8 numbers, and
    6 classes of the first position."""
    model, data, loss = CASES["vision"]
    values = tree({"family": "vision", **model}, data=data)
    values["train"].update(loss=loss, micro_batch_size=1, global_batch_size=1)
    h, patches = 32, 4
    tokens = patches + 1
    layers = 2 * (2 * tokens * 12 * h * h + 4 * tokens * tokens * h)
    forward = layers + 2 * patches * 3 * 64 * h + 2 * 6 * h
    assert planned(values, 1).flops_per_step == pytest.approx(3 * forward)


DECODERS = {"gpt": MODEL, "llama with experts": MOE, "gemma": {**LLAMA, "family": "gemma"}}
DECODERS |= {family: {**MOE, "family": family} for family in ("qwen_moe", "granite_moe", "olmoe")}
# Scores that are written out are counted whole, and in a window.
DECODERS["gpt_oss"] = {**GPT_OSS, "attention_backend": "flex", "sliding_window": 128}
COUNTED = ("bert", "modernbert", "t5", "vision", "retro", "mamba", "hybrid", "deepseek", "qwen_next")


@pytest.mark.parametrize("family", [*DECODERS, *COUNTED])
def test_families_count_the_flops_that_are_run(family: str) -> None:
    """The formulas count keys that are seen one by one, and the run half of all. The run alone has padding of the
    vocabulary."""
    model, data, loss = CASES.get(family, (DECODERS.get(family, {}), {"dataset_type": "mock"}, "cross_entropy"))
    values = tree({"family": family, **model, "make_vocab_size_divisible_by": 1}, data=data)
    values["train"].update(loss=loss, micro_batch_size=1, global_batch_size=1)
    plan = planned(values, 1)
    assert count_flops(plan.config, host()) == pytest.approx(plan.flops_per_step, rel=0.03)
