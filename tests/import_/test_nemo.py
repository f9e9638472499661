"""Configurations of NeMo 1.x: what its 1.23 does with the keys that Megatron-LM has not, worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mt_core.errors import ConfigError
from mt_core.plugins import PluginHost
from mt_import.result import ImportResult, check_configuration
from mt_import.sources import import_file

FILE = (Path(__file__).parent / "files" / "nemo_gpt.yaml").read_text()


def imported(tmp_path: Path, host: PluginHost, *changes: tuple[str, str]) -> ImportResult:
    text = FILE
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    (tmp_path / "nemo.yaml").write_text(text)
    return import_file(tmp_path / "nemo.yaml", host)


def more(*lines: str) -> tuple[str, str]:
    return "model:\n", "model:\n" + "".join(f"  {line}\n" for line in lines)


@pytest.mark.parametrize(
    ("change", "section", "keys"),
    [
        (
            ("constant_steps: 0", "constant_steps: 40000"),
            "lr_schedule",
            # of 100000 steps the last 40000 have the least rate
            {"lr_decay_style": "cosine", "lr_decay_iters": 60000, "lr_warmup_iters": 500},
        ),
        (("constant_steps: 0", "constant_steps: null"), "lr_schedule", {"lr_decay_style": "cosine"}),
        (("name: CosineAnnealing", "name: WarmupAnnealing"), "lr_schedule", {"lr_decay_style": None}),  # our default
        (("warmup_steps: 500", "warmup_ratio: 0.02"), "lr_schedule", {"lr_warmup_iters": 2000}),
        (("name: fused_adam", "name: distributed_fused_adam"), "parallel", {"use_distributed_optimizer": True}),
        (more("normalization: rmsnorm"), "model", {"normalization": "RMSNorm"}),
        (more("normalization: layernorm1p"), "model", {"normalization": None}),  # stored otherwise, computed alike
        (more("normalization: low_precision_layernorm"), "model", {"normalization": None}),
        (more("bias: false", "qkv_bias: true"), "model", {"add_qkv_bias": True}),
        (
            (
                "  data:\n",
                "  data:\n    add_fim: true\n    fim: {rate: 0.25, extra_tokens: {prefix: <a>, eod: <|endoftext|>}}\n",
            ),
            "data",
            {"dataset_type": "fim", "fim_rate": 0.25, "fim_prefix_token": "<a>"},
        ),
        (
            ("  data:\n", "  data:\n    add_fim: false\n    fim: {rate: 0.25, extra_tokens: {prefix: <a>}}\n"),
            "data",
            {"dataset_type": "gpt", "fim_rate": None, "fim_prefix_token": None},
        ),
        (more("fsdp: false", "fsdp_sharding_strategy: full"), "parallel", {"use_torch_fsdp2": None}),
        (
            more("cpu_offloading: false", "cpu_offloading_num_layers: 11"),
            "recompute",
            {"cpu_offloading_num_layers": None},
        ),
        (more("pipeline_model_parallel_split_rank: 0"), "model", {"family": "gpt"}),
        (more("model_name: gpt", "bert_binary_head: false"), "model", {"family": "gpt"}),
        (
            (
                "name: fused_adam",
                "name: distributed_fused_adam\n    overlap_grad_sync: true\n    overlap_param_sync: true",
            ),
            "parallel",
            {"use_distributed_optimizer": True, "overlap_param_gather": True},
        ),
        (more("fp8: true", "fp8_hybrid: true"), "precision", {"fp8_format": "hybrid"}),
        (more("fp8: true", "fp8_e4m3: true"), "precision", {"fp8_format": "e4m3"}),
        (more("fp8: false", "fp8_e4m3: false", "fp8_hybrid: true"), "precision", {"fp8_format": None}),
        (more("apply_embedding_scaling: true"), "model", {"embedding_multiplier": 768**0.5}),
        (("activation: gelu", "activation: geglu\n  openai_gelu: true"), "model", {"activation": "geglu_tanh"}),
        (("activation: gelu", "activation: fast-geglu"), "model", {"activation": "geglu"}),
        (
            ("model:\n", "mcore_customization_config: {parallel_attention: true}\nmodel:\n"),
            "model",
            {"parallel_residual": True, "parallel_residual_norms": 1},
        ),
        (
            more("position_embedding_type: alibi"),
            "model",
            {"family": "gpt", "position_embedding_type": "alibi", "max_position_embeddings": None},
        ),
        (more("bert_binary_head: true"), "model", {"family": "bert", "add_pooler": True}),
    ],
)
def test_a_key_decides(
    change: tuple[str, str], section: str, keys: dict[str, Any], tmp_path: Path, host: PluginHost
) -> None:
    result = imported(tmp_path, host, change)
    assert result.of_status("refused") == []
    found = result.sections[section]
    assert {key: found.get(key) for key in keys} == keys


def test_a_mamba_without_a_pattern_has_mambas_layers_alone(tmp_path: Path, host: PluginHost) -> None:
    keys = ("hybrid_override_pattern: null", "ngroups_mamba: 4", "num_moe_experts: 16", "moe_router_topk: 2")
    model = imported(tmp_path, host, more(*keys, "normalization: RMSNorm")).sections["model"]
    assert (model["family"], model["hybrid_layer_pattern"], model["mamba_num_groups"]) == ("hybrid", "M" * 12, 4)
    assert "moe" not in model


GEMMA2 = (
    "normalization: rmsnorm",
    "apply_embedding_scaling: true",
    "sqrt_query_pre_attn_scalar: 14.9666",
    "bias: false",
    "position_embedding_type: rope",
)
CHANGED = (
    ("activation: gelu", "activation: geglu\n  openai_gelu: true"),
    ("hidden_dropout: 0.1", "hidden_dropout: 0.0"),
)


@pytest.mark.parametrize(
    ("custom", "keys"),
    [
        ("", {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4096}),
        (
            "mcore_customization_config: {attn_logit_softcapping: 20, window_size: [511, 0]}\n",
            {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 30.0, "sliding_window": 512},
        ),
    ],
)
def test_a_gemma2_has_windows_in_layers_of_even_numbers(
    custom: str, keys: dict[str, Any], tmp_path: Path, host: PluginHost
) -> None:
    result = imported(tmp_path, host, more(*GEMMA2), *CHANGED, ("model:\n", f"{custom}model:\n"))
    assert result.of_status("refused") == []
    model = result.sections["model"]
    expected = {
        "family": "gemma",
        "query_pre_attn_scalar": 224.0,
        "rotary_base_local": 10000.0,
        "qk_layernorm": False,
        **keys,
    }
    assert {key: model.get(key) for key in expected} == expected
    config = check_configuration(result.sections, None, host).config.model
    # counted from 1: 2, 4, ...
    assert [config.window_of(layer) is not None for layer in range(12)] == [False, True] * 6


def test_what_gemma2_has_otherwise_is_an_error(tmp_path: Path, host: PluginHost) -> None:
    for line in (GEMMA2[0], GEMMA2[1], GEMMA2[3]):
        with pytest.raises(ConfigError, match="makes it a Gemma 2, which has"):
            imported(tmp_path, host, more(*(other for other in GEMMA2 if other != line)), *CHANGED)


def test_what_the_command_line_gives_is_named_and_left_out(tmp_path: Path, host: PluginHost) -> None:
    given = "data_prefix: [0.5, a_text_document, 0.5, b_text_document]"
    for instead in ("data_prefix: ???", "num_samples: null"):
        result = imported(tmp_path, host, (given, instead))
        assert not result.complete
        assert "data_path" not in result.sections["data"]
        assert result.sections["data"]["dataset_type"] == "gpt"  # not mock, which Megatron has without data
        assert "gives it: model.data.data_prefix; add it" in result.notes[0]
    bert = imported(tmp_path, host, (given, "data_prefix: ???"), more("bert_binary_head: true"))
    assert bert.sections["data"]["dataset_type"] == "bert"
    with pytest.raises(ConfigError, match=r"model.num_layers is \?\?\?"):
        imported(tmp_path, host, ("num_layers: 12", "num_layers: ???"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("name: CosineAnnealing", "name: NoamAnnealing"), "it can be CosineAnnealing, WarmupAnnealing"),
        (("name: fused_adam", "name: adafactor"), "model.optim.name=adafactor is not read"),
        (more("normalization: scale_norm"), "it can be layernorm, rmsnorm, layernorm1p"),
        (("constant_steps: 0", "constant_steps: 100000"), r"leaves none of the trainer.max_steps=100000 to a decay"),
        (more("restore_from_path: gpt.nemo"), "a .nemo file"),
        (more("encoder: {num_layers: 12}"), "model.encoder.num_layers: an encoder and a decoder"),
    ],
)
def test_what_is_not_read_is_named(change: tuple[str, str], message: str, tmp_path: Path, host: PluginHost) -> None:
    with pytest.raises(ConfigError, match=message):
        imported(tmp_path, host, change)


@pytest.mark.parametrize(
    ("key", "same"),
    [
        ("transformer_block_type: normformer", "transformer_block_type: pre_ln"),
        ("normalize_attention_scores: false", "normalize_attention_scores: true"),
        ("ffn_dropout: 0.1", "ffn_dropout: 0.0"),
        ("model_name: t5", "model_name: gpt"),
    ],
)
def test_what_changes_the_model_is_refused(key: str, same: str, tmp_path: Path, host: PluginHost) -> None:
    refused = imported(tmp_path, host, more(key)).of_status("refused")
    assert [one.words.partition(" ")[0] for one in refused] == [f"model.{key.partition(':')[0]}"]
    assert imported(tmp_path, host, more(same)).of_status("refused") == []


def test_names_of_megatron_in_another_place_are_unknown(tmp_path: Path, host: PluginHost) -> None:
    plain = imported(tmp_path, host)
    result = imported(tmp_path, host, more("rampup: {hidden_size: 7}", "headz: 2"))
    assert [one.words for one in result.of_status("refused")] == ["model.rampup.hidden_size 7", "model.headz 2"]
    assert result.sections == plain.sections


def test_heads_of_another_kind_are_refused(tmp_path: Path, host: PluginHost) -> None:
    result = imported(tmp_path, host, more("attention_type: multiquery"))
    assert [one.words for one in result.of_status("refused")] == ["model.attention_type multiquery"]


def test_layers_of_selective_recomputation_are_said_to_count_for_nothing(tmp_path: Path, host: PluginHost) -> None:
    changes = (("granularity: full", "granularity: selective"), ("method: uniform", "method: block"))
    result = imported(tmp_path, host, *changes)
    assert result.sections["recompute"]["recompute_granularity"] == "selective"
    said = [one.words for one in result.of_status("no effect") if "activations_checkpoint" in one.words]
    assert said == ["model.activations_checkpoint_method block", "model.activations_checkpoint_num_layers 1"]
