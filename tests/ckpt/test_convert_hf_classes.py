"""Models that transformers holds under another name than ours: its logits and loss are what ours are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ckpt.conftest import assert_same_state, tensors_of
from tests.ckpt.convert_cases import GROUPED, LATENT, MAMBA, SHAPE

from mt_ckpt.convert import convert
from mt_ckpt.files.checksum_file import CHECKSUMS
from mt_ckpt.native.read import open_checkpoint
from mt_core.errors import CheckpointError, ConfigError
from mt_core.train.trained_model import load_trained_model

SHARED = {
    "num_experts": 6, "moe_router_topk": 2, "moe_ffn_hidden_size": 12, "moe_shared_expert_intermediate_size": 24,
    "moe_router_score_function": "sigmoid",
}  # fmt: skip
BIASED = {**SHARED, "moe_router_enable_expert_bias": True, "moe_router_topk_scaling_factor": 1.5}
LEARNED_T5 = {
    "family": "t5", **SHAPE, "decoder_num_layers": 2, "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm", "norm_epsilon": 1e-5, "activation": "gelu", "add_bias_linear": True,
    "scale_attention_scores": True, "scale_output": False, "add_output_bias": True,
}  # fmt: skip
GATED_HYBRID = {
    "family": "hybrid", "hybrid_layer_pattern": "M-*-M-", "num_attention_heads": 4, "num_query_groups": 2,
    "ffn_hidden_size": 40, "vocab_size": 101, "activation": "swiglu", **MAMBA,
}  # fmt: skip
DENSE_LATENT = {"family": "deepseek", **SHAPE, **LATENT, "ffn_hidden_size": 40}
MIXTRAL = {"family": "mixtral", **GROUPED}
QWEN = {"family": "qwen_moe", **GROUPED, "qk_layernorm": True}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "t5_learned": ("blenderbot", "t5", LEARNED_T5),
    "t5_learned_tanh": ("blenderbot", "t5", {**LEARNED_T5, "activation": "gelu_tanh", "ffn_hidden_size": 40}),
    "latent_dense": ("deepseek_v3", "deepseek", DENSE_LATENT),
    "latent_dense_yarn": (
        "deepseek_v3",
        "deepseek",
        {**DENSE_LATENT, "rope_scaling_type": "yarn", "rope_scaling_factor": 4.0, "rope_mscale": 1.0,
         "rope_mscale_all_dim": 1.0, "original_max_position_embeddings": 16},
    ),
    "latent_dense_predicting": ("deepseek_v3", "deepseek", {**DENSE_LATENT, "mtp_num_layers": 1}),
    "latent_sigmoid_without_bias": ("deepseek_v3", "deepseek", {**DENSE_LATENT, "moe": SHARED}),
    "hybrid_swiglu": ("granitemoehybrid", "hybrid", GATED_HYBRID),
    "hybrid_swiglu_rotary": (
        "granitemoehybrid", "hybrid", {**GATED_HYBRID, "position_embedding_type": "rope", "rotary_base": 5000.0},
    ),
    "mixtral_sigmoid_shared": ("glm4_moe", "qwen_moe", {**MIXTRAL, "moe": BIASED}),
    "mixtral_sigmoid_without_bias": ("glm4_moe", "qwen_moe", {**MIXTRAL, "moe": {**SHARED, "moe_router_topk": 1}}),
    "qwen_sigmoid_shared": (
        "glm4_moe",
        "qwen_moe",
        {**QWEN, "kv_channels": 12, "moe": {**BIASED, "moe_layer_freq": "[0]+[1]*2", "moe_router_num_groups": 2,
                                          "moe_router_group_topk": 1, "moe_router_group_score_topk": 2}},
    ),
    "qwen_sigmoid_qkv_bias": ("glm4_moe", "qwen_moe", {**QWEN, "qk_layernorm": False, "add_qkv_bias": True,
                                                       "moe": BIASED}),
}  # fmt: skip
"""Name -> model_type that is written, family that reads it, [model]."""


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, 101, shape, generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def ours(checkpoint: Path, host, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    model = load_trained_model(checkpoint, host, device="cpu").model
    if "decoder_input_ids" in inputs:
        return model(inputs["input_ids"], inputs["decoder_input_ids"])
    return model(inputs["input_ids"])


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_transformers_computes_the_same(make_model, host, tmp_path: Path, name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    kind, _, keys = CASES[name]
    source = make_model(**keys)
    convert(source, tmp_path / "hf", saver="hf", verify=True, host=host)
    assert AutoConfig.from_pretrained(tmp_path / "hf").model_type == kind
    encoding = kind == "blenderbot"
    make = AutoModelForSeq2SeqLM if encoding else AutoModelForCausalLM
    model, info = make.from_pretrained(
        tmp_path / "hf", attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    beyond = {key for key in info["unexpected_keys"] if not key.startswith("model.layers.3.")}  # predicting layers
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert not beyond
    inputs = {"input_ids": ids(2, 8)} | ({"decoder_input_ids": ids(2, 8).roll(1, 0)} if encoding else {})
    labels = ids(2, 8) if encoding else inputs["input_ids"]
    with torch.no_grad():
        theirs = model.eval()(**inputs, labels=labels)
    found = ours(source, host, inputs)
    torch.testing.assert_close(found, theirs.logits, atol=2e-5, rtol=2e-5)
    # Of a decoder transformers shifts the labels.
    loss = loss_of(found, labels) if encoding else loss_of(found[:, :-1], labels[:, 1:])
    torch.testing.assert_close(loss, theirs.loss)


@pytest.mark.parametrize("name", CASES)
def test_there_and_back(make_model, host, tmp_path: Path, name: str) -> None:
    """The same tensors and a model that computes the same, maybe of the family that reads the format."""
    _, family, keys = CASES[name]
    source = make_model(**keys)
    convert(source, tmp_path / "hf", saver="hf", host=host)
    report = convert(tmp_path / "hf", tmp_path / "back", saver="mt", host=host)
    assert report.family == family
    assert_same_state(tensors_of(open_checkpoint(tmp_path / "back")), tensors_of(open_checkpoint(source)))
    inputs = {"input_ids": ids(2, 8)} | ({"decoder_input_ids": ids(2, 5)} if family == "t5" else {})
    assert torch.equal(ours(tmp_path / "back", host, inputs), ours(source, host, inputs))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {**LEARNED_T5, "norm_epsilon": 1e-6},
            "model.norm_epsilon=1e-06 cannot be written as a Hugging Face blend",
        ),
        ({**LEARNED_T5, "add_output_bias": False}, "model.add_output_bias=False cannot be written"),
        ({**GATED_HYBRID, "hybrid_layer_pattern": "MM-*-"}, "with swiglu and a feed-forward behind every Mamba"),
        (
            {**MIXTRAL, "sliding_window": 5, "moe": BIASED},
            "model.sliding_window=5 cannot be written as a Hugging Face",
        ),
        (
            {**QWEN, "moe": {**BIASED, "moe_shared_expert_intermediate_size": 20}},
            "moe_shared_expert_intermediate_size=20 cannot be written as a Hugging Face glm4_moe; it can be a multiple",
        ),
        (
            {**QWEN, "moe": {**BIASED, "moe_layer_freq": "[1]+[0]+[1]"}},
            "cannot be written as a Hugging Face glm4_moe, whose dense layers come first",
        ),
        ({**DENSE_LATENT, "norm_epsilon": 1e-5}, "whose norms of latents have 1e-06"),
    ],
)
def test_refusals(make_model, host, tmp_path: Path, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        convert(make_model(**keys), tmp_path / "x", saver="hf", host=host)


def test_an_expert_bias_that_the_configuration_denies(make_model, host, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    convert(make_model(**{**QWEN, "moe": SHARED}), tmp_path / "hf", saver="hf", host=host)
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    tensors["model.layers.1.mlp.gate.e_score_correction_bias"][2] = 0.1
    save_file(tensors, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    (tmp_path / "hf" / CHECKSUMS).unlink()  # the change is meant
    with pytest.raises(CheckpointError, match="is not zero, but moe_router_enable_expert_bias in config.json is false"):
        convert(tmp_path / "hf", tmp_path / "x", saver="mt", host=host)


def test_two_tables_of_positions_are_no_t5(make_model, host, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    convert(make_model(**LEARNED_T5), tmp_path / "hf", saver="hf", host=host)
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    tensors["model.decoder.embed_positions.weight"][0, 0] += 1
    save_file(tensors, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    (tmp_path / "hf" / CHECKSUMS).unlink()  # the change is meant
    with pytest.raises(CheckpointError, match="differ; a T5 has one table of positions"):
        convert(tmp_path / "hf", tmp_path / "x", saver="mt", host=host)
