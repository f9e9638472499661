"""YAML of Accelerate, Megatron-Bridge, NeMo and Megatron's tests, and the arguments in Megatron's checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mt_core.checkpoint_lookup import open_checkpoint
from mt_core.config.loading import load_config
from mt_core.errors import ConfigError
from mt_core.plugins import PluginHost
from mt_import.megatron_arguments.translation import dotted
from mt_import.readers.accelerate import import_environment
from mt_import.result import ImportResult, check_configuration
from mt_import.sources import import_file

FILES = Path(__file__).parent / "files"


def test_accelerate_says_how_work_is_shared(host: PluginHost) -> None:
    result = import_file(FILES / "accelerate.yaml", host)
    assert result.sections == {
        "parallel": {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "sequence_parallel": True,
            "use_distributed_optimizer": True,
        },
        "optimizer": {"clip_grad": 1.0},
        "recompute": {"recompute_granularity": "selective"},  # what the question asks for
        "precision": {"dtype": "bf16"},
    }
    assert not result.complete
    assert (result.processes.nproc, result.processes.nnodes) == (4, 1)
    [batches] = result.of_status("no effect")
    assert batches.words == "megatron_lm_num_micro_batches 2"
    assert "train.global_batch_size" in batches.reason
    config = load_config(
        preset="gpt-tiny",
        overrides=[f"{key}={str(value).lower()}" for key, value in dotted(result.sections).items() if "size" not in key]
        + ["parallel.sequence_parallel=false"],
        host=host,
    ).config
    assert config.precision.dtype == "bf16"


def test_the_launchers_variables_say_the_same() -> None:
    variables = {
        "ACCELERATE_MIXED_PRECISION": "fp16",
        "MEGATRON_LM_TP_DEGREE": "2",
        "MEGATRON_LM_PP_DEGREE": "1",
        "MEGATRON_LM_SEQUENCE_PARALLELISM": "true",
        "MEGATRON_LM_GRADIENT_CLIPPING": "None",
        "MEGATRON_LM_USE_CUSTOM_FSDP": "false",
        "MEGATRON_LM_OPTIMIZER_CPU_OFFLOAD": "True",
        "WORLD_SIZE": "8",
    }
    result = import_environment(variables)
    found = dotted(result.sections)
    assert found["parallel.tensor_model_parallel_size"] == 2
    assert found["parallel.sequence_parallel"] is True
    assert found["parallel.use_torch_fsdp2"] is False
    assert found["precision.dtype"] == "fp16"
    assert "optimizer.clip_grad" not in found
    assert [one.words for one in result.of_status("refused")] == ["megatron_lm_optimizer_cpu_offload True"]
    assert result.processes.world_size == 8


YAML: dict[str, tuple[int, dict[str, Any]]] = {
    "nemo_gpt.yaml": (
        16,
        {
            "model.family": "gpt",
            "model.ffn_hidden_size": 3072,
            "model.max_position_embeddings": 1024,
            "model.init_method_std": 0.023,
            "data.seq_length": 1024,
            "data.data_path": [
                {"prefix": "a_text_document", "weight": 0.5},
                {"prefix": "b_text_document", "weight": 0.5},
            ],
            "data.split": "900,50,50",
            "train.train_iters": 100000,
            "train.seed": 99,
            "train.eval_interval": 500,
            "optimizer.lr": 2e-4,
            "optimizer.adam_beta2": 0.98,
            "optimizer.clip_grad": 0.5,
            "lr_schedule.lr_warmup_iters": 500,
            "recompute.recompute_granularity": "full",
            "recompute.recompute_method": "uniform",
            "precision.dtype": "bf16",
            "tokenizer.merge_file": "gpt2-merges.txt",
        },
    ),
    "bridge_llama.yaml": (
        8,
        {
            "model.family": "llama",
            "model.num_query_groups": 8,
            "model.rotary_base": 500000.0,
            "model.untie_embeddings_and_output_weights": None,  # our default
            "data.data_path": [
                {"prefix": "a_text_document", "weight": 0.3},
                {"prefix": "b_text_document", "weight": 0.7},
            ],
            "parallel.pipeline_model_parallel_size": 2,
            "parallel.overlap_param_gather": True,
            "train.seed": 5,
            "lr_schedule.lr_decay_style": "cosine",
            "checkpoint.save": "/ckpts/bridge",
            "precision.dtype": "bf16",
        },
    ),
    "functional_streams.yaml": (
        2,
        {
            "model.family": "hybrid",
            "model.enable_mhc_connections": True,
            "model.mhc_num_residual_streams": 3,
            "model.mhc_sinkhorn_iterations": 5,
            "model.mhc_init_gating_factor": None,
            "recompute.recompute_modules": ["mhc"],
        },
    ),
    "functional_streams_ahead.yaml": (
        2,
        {
            "model.family": "hybrid",
            "model.hybrid_layer_pattern": "M*ME",
            "model.mtp_num_layers": 2,
            "model.mtp_hybrid_override_pattern": "*-",
            "model.mtp_loss_scaling_factor": 0.3,
            "model.enable_mhc_connections": True,
        },
    ),
    "functional_test.yaml": (1, {"data.dataset_type": "mock", "model.num_layers": 2, "precision.dtype": None}),
}


@pytest.mark.parametrize("name", YAML)
def test_yaml_of_others_becomes_a_configuration(name: str, host: PluginHost) -> None:
    world, wanted = YAML[name]
    result = import_file(FILES / name, host)
    found = dotted(result.sections)
    assert {key: found.get(key) for key in wanted} == wanted
    assert result.of_status("refused") == []
    check_configuration(result.sections, world, host)


def with_options(tmp_path: Path, host: PluginHost, **options: str) -> ImportResult:
    """The functional test with further options."""
    text = (FILES / "functional_test.yaml").read_text()
    lines = "".join(f"  --{name.replace('_', '-')}: {value}\n" for name, value in options.items())
    (tmp_path / "model_config.yaml").write_text(text + lines)
    return import_file(tmp_path / "model_config.yaml", host)


OFFLOADING = {"fine_grained_activation_offloading": "true", "offload_modules": '"[core_attn attn_proj]"'}


def test_activations_of_single_modules_in_host_memory(tmp_path: Path, host: PluginHost) -> None:
    options = {**OFFLOADING, "min_offloaded_tensor_size": "1024", "activation_offload_fraction": "1.0"}
    result = with_options(tmp_path, host, **options)
    assert result.of_status("refused") == []
    assert result.sections["recompute"] == {
        "offload_modules": ["core_attn", "attn_proj"],
        "min_offloaded_tensor_size": 1024,
    }
    check_configuration(result.sections, 1, host)
    (refusal,) = with_options(tmp_path, host, **{**OFFLOADING, "offload_modules": "mlp"}).of_status("refused")
    assert "activations of mlp in host memory" in refusal.reason
    # Without the first option the others count for nothing.
    assert "recompute" not in with_options(tmp_path, host, offload_modules="core_attn").sections


FSDP = {"use_megatron_fsdp": "true", "num_distributed_optimizer_instances": "2"}


def test_a_second_sharding_over_instances(tmp_path: Path, host: PluginHost) -> None:
    result = with_options(tmp_path, host, **FSDP, outer_dp_sharding_strategy="optim")
    assert result.of_status("refused") == []
    assert result.sections["parallel"] == {
        "use_torch_fsdp2": True,
        "num_distributed_optimizer_instances": 2,
        "outer_dp_sharding_strategy": "optim",
        "overlap_grad_reduce": False,
    }
    check_configuration(result.sections, 4, host)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"outer_dp_sharding_strategy": "optim"}, "without FSDP, which has it"),
        ({**FSDP, "expert_outer_dp_sharding_strategy": "optim"}, "both are sharded alike"),
        ({**FSDP, "enable_full_sharding_in_hsdp": "true"}, "write --outer-dp-sharding-strategy optim"),
    ],
)
def test_second_shardings_that_are_refused(options, words, tmp_path: Path, host: PluginHost) -> None:
    (refusal,) = with_options(tmp_path, host, **options).of_status("refused")
    assert words in refusal.reason


def bridge(tmp_path: Path, host: PluginHost, *, model: str = "", scheduler: str = "", top: str = "") -> ImportResult:
    """The file of a Bridge model with further keys of [model] and of the scheduler, and sections."""
    text = (FILES / "bridge_llama.yaml").read_text()
    text = text.replace("model:\n", f"model:\n{model}", 1).replace("scheduler:\n", f"scheduler:\n{scheduler}", 1)
    (tmp_path / "bridge.yaml").write_text(f"{text}\n{top}")
    return import_file(tmp_path / "bridge.yaml", host)


def test_bridges_scheduler_says_the_weight_decay(tmp_path: Path, host: PluginHost) -> None:
    """Its constant schedule sets that of all steps; weight_decay of the optimizer, 0.1 here, is never used."""
    ends = "  start_weight_decay: 0.033\n  end_weight_decay: 0.033\n  weight_decay_incr_style: constant\n"
    assert bridge(tmp_path, host, scheduler=ends).sections["optimizer"]["weight_decay"] == 0.033
    with pytest.raises(ConfigError, match=r"start_weight_decay=0.0 and .*end_weight_decay=0.033 with .*=constant"):
        bridge(tmp_path, host, scheduler=ends.replace("0.033", "0.0", 1))


def test_keys_that_bridges_models_have_by_other_names(tmp_path: Path, host: PluginHost) -> None:
    model = "  scale_factor: 8.0\n  low_freq_factor: 1.0\n  high_freq_factor: 4.0\n  old_context_len: 8192\n"
    found = dotted(bridge(tmp_path, host, model=model, top="mixed_precision: fp16_mixed").sections)
    assert (found["model.rope_scaling_type"], found["model.rope_scaling_factor"]) == ("llama3", 8.0)
    with pytest.raises(ConfigError, match=r"model.low_freq_factor=2.0 is not read; with model.scale_factor it is 1.0"):
        bridge(tmp_path, host, model=model.replace("1.0", "2.0", 1))


def test_stages_of_a_rank_in_bridges_words(tmp_path: Path, host: PluginHost) -> None:
    text = (
        (FILES / "bridge_llama.yaml")
        .read_text()
        .replace("virtual_pipeline_model_parallel_size: null", "virtual_pipeline_model_parallel_size: 4")
    )
    (tmp_path / "bridge.yaml").write_text(text)
    parallel = import_file(tmp_path / "bridge.yaml", host).sections["parallel"]
    assert parallel["virtual_pipeline_model_parallel_size"] == 4
    assert parallel["pipeline_schedule"] == "interleaved_1f1b"


def test_what_changes_a_model_of_bridges_is_not_dropped(tmp_path: Path, host: PluginHost) -> None:
    refused = bridge(tmp_path, host, model="  attention_chunk_size: 8192\n").of_status("refused")
    assert [one.reason for one in refused] == ["attention within chunks of the sequence"]
    text = (FILES / "bridge_llama.yaml").read_text().replace("torch.nn.functional.silu", "torch.nn.functional.mish")
    (tmp_path / "bridge.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"the activation torch.nn.functional.mish \(gated mish\) is not read"):
        import_file(tmp_path / "bridge.yaml", host)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt", "moe", "bert"])
@pytest.mark.parametrize("layout", ["legacy_tp1_pp1", "dist_tp1_pp1"])
def test_arguments_in_megatrons_checkpoints(model: str, layout: str, golden: Path, host: PluginHost) -> None:
    """The model is the one that the checkpoint is read as; the run is the one of the golden files' description."""
    folder = golden / model / layout
    result = import_file(folder, host)
    stored = open_checkpoint(folder, host).metadata["config"]["model"]
    loaded = check_configuration(result.sections, 1, host).config
    read = loaded.model.model_dump()
    assert {key: read[key] for key in stored if key not in ("vocab_size", "moe")} == {
        key: value for key, value in stored.items() if key not in ("vocab_size", "moe")
    }
    assert (loaded.optimizer.lr, loaded.optimizer.min_lr, loaded.lr_schedule.lr_decay_style) == (1e-3, 1e-4, "cosine")
    assert (loaded.train.micro_batch_size, loaded.train.global_batch_size, loaded.train.train_iters) == (2, 4, 10)
    assert loaded.optimizer.weight_decay == 0.1
    assert result.of_status("refused") == []


# -- keys of Bridge that Megatron-LM does not have ------------------------------------------------------


def changed_bridge(tmp_path: Path, host: PluginHost, *changes: tuple[str, str]) -> ImportResult:
    text = (FILES / "bridge_llama.yaml").read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    (tmp_path / "bridge.yaml").write_text(text)
    return import_file(tmp_path / "bridge.yaml", host)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("  residual_gate: 0.5", "model.residual_gate 0.5"),
        ("  num_layer: 3", 'did you mean "num_layers"'),
        # A name of Megatron's in another place is another thing.
        ("  vision: {hidden_size: 1024}", "model.vision.hidden_size 1024"),
        ("  transformer_layer_spec: mine.layers.spec", "model.transformer_layer_spec mine.layers.spec"),
        ("  nope_layer_interval: 4", "layers without positions"),
    ],
)
def test_a_key_that_nobody_knows_is_refused(line: str, words: str, tmp_path: Path, host: PluginHost) -> None:
    plain = changed_bridge(tmp_path, host)
    result = changed_bridge(tmp_path, host, ("model:\n", f"model:\n{line}\n"))
    [refused] = result.of_status("refused")
    assert words in f"{refused.words}: {refused.reason}"
    assert result.sections == plain.sections
    assert plain.of_status("refused") == []


@pytest.mark.parametrize(
    "line",
    [
        "  batch_p2p_comm: true",
        "  init_method: {std: 0.02}",
        "  transformer_layer_spec: {_target_: megatron.core.models.gpt.spec, _call_: false}",
    ],
)
def test_a_key_that_changes_nothing_is_named_with_the_reason(line: str, tmp_path: Path, host: PluginHost) -> None:
    result = changed_bridge(tmp_path, host, ("model:\n", f"model:\n{line}\n"))
    assert result.of_status("refused") == []
    assert all(one.reason for one in result.of_status("no effect"))
    assert any(line.split(":")[0].strip() in one.words for one in result.of_status("no effect"))


def test_of_two_lengths_that_of_the_model_counts_and_the_other_is_named(tmp_path: Path, host: PluginHost) -> None:
    result = changed_bridge(tmp_path, host, ("sequence_length: 8192", "sequence_length: 2048"))
    assert result.sections["data"]["seq_length"] == 8192
    [other] = [one for one in result.of_status("no effect") if "sequence_length" in one.words]
    assert (other.words, other.reason) == ("dataset.sequence_length 2048", "model.seq_length=8192 counts")


def test_two_paths_of_one_setting_that_differ_are_refused(tmp_path: Path, host: PluginHost) -> None:
    with pytest.raises(ConfigError, match="model.micro_batch_size=4 and train.micro_batch_size=2 are one setting"):
        changed_bridge(
            tmp_path,
            host,
            ("micro_batch_size: 1", "micro_batch_size: 2"),
            ("model:\n", "model:\n  micro_batch_size: 4\n"),
        )
