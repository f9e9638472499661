"""Configurations of torchtitan: what its 0.2.0 does with each key, worked out by hand."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from mt_cli.presets import count_parameters
from mt_core.config.files import to_toml
from mt_core.config.loading import config_from_dict
from mt_core.errors import ConfigError
from mt_core.plugins import PluginHost
from mt_import.result import ImportResult, check_configuration
from mt_import.sources import import_file

FILE: dict[str, dict[str, Any]] = {
    "job": {"dump_folder": "out"},
    "model": {"name": "llama3", "flavor": "8B"},
    "optimizer": {"name": "AdamW", "lr": 4e-4, "eps": 1e-9},
    "lr_scheduler": {"warmup_steps": 20, "min_lr_factor": 0.25},
    "training": {"local_batch_size": 2, "seq_len": 64, "steps": 100, "max_norm": 0.5},
    "parallelism": {"data_parallel_shard_degree": 1},
}


def imported(tmp_path: Path, host: PluginHost, **changes: Any) -> ImportResult:
    """changes: section__key=value"""
    values = copy.deepcopy(FILE)
    for name, value in changes.items():
        section, _, key = name.partition("__")
        values.setdefault(section, {})[key] = value
    lines = [
        f"[{section}]\n" + "".join(f"{k} = {to_toml(v)}\n" for k, v in keys.items()) for section, keys in values.items()
    ]
    path = tmp_path / "train.toml"
    path.write_text("\n".join(lines))
    return import_file(path, host)


@pytest.mark.parametrize(("flavor", "without_positions"), [("debugmodel", []), ("debugmodel_irope", [0, 4])])
def test_llama4_has_the_layers_of_its_flavor(tmp_path: Path, host: PluginHost, flavor, without_positions) -> None:
    """Those whose number `every_n_layers_nope` divides have no positions (models/llama4/model/model.py)."""
    result = imported(tmp_path, host, model__name="llama4", model__flavor=flavor)
    sections = {**result.sections, "data": {**result.sections["data"], "dataset_type": "mock"}}
    sections["tokenizer"] = {"tokenizer_type": "NullTokenizer", "vocab_size": 2048}
    check_configuration(sections, 1, host)
    model = config_from_dict(sections, host).model
    assert [layer for layer, alone in enumerate(model.layers_without_rope) if alone] == without_positions
    assert model.chunk_of(1) == (256 if without_positions else 10485760)
    # 6 layers of 4 x 256 x 256; dense feed-forwards of 768 in three, else a shared expert and 8 of 512 with a router.
    dense, experts = 3 * 256 * 768, 9 * 3 * 256 * 512 + 8 * 256
    size = 2 * 2048 * 256 + 6 * (4 * 256 * 256 + 2 * 256) + 3 * (dense + experts) + 256
    assert count_parameters(config_from_dict(sections, host), host).total == size


def test_a_file_becomes_a_configuration_that_training_takes(tmp_path: Path, host: PluginHost) -> None:
    result = imported(tmp_path, host)
    optimizer = result.sections["optimizer"]
    assert (optimizer["lr"], optimizer["min_lr"], optimizer["clip_grad"]) == (4e-4, 1e-4, 0.5)
    assert (optimizer["adam_beta2"], optimizer["weight_decay"]) == (0.95, 0.1)  # torchtitan's defaults
    assert result.sections["lr_schedule"] == {"lr_warmup_iters": 20, "lr_decay_style": "linear"}
    assert result.sections["model"]["num_query_groups"] == 8
    assert result.sections["precision"] == {"dtype": "bf16"}
    assert not result.complete
    sections = {**result.sections, "data": {**result.sections["data"], "dataset_type": "mock"}}
    sections["tokenizer"] = {"tokenizer_type": "NullTokenizer", "vocab_size": 128256}
    check_configuration(sections, 1, host)


@pytest.mark.parametrize(
    ("changes", "section", "keys"),
    [
        (
            {"lr_scheduler__decay_ratio": 0.9, "lr_scheduler__decay_type": "sqrt"},
            "lr_schedule",
            # 20 steps of warm-up leave 80 of the 90
            {"lr_decay_style": "WSD", "lr_wsd_decay_style": "minus_sqrt", "lr_wsd_decay_iters": 80},
        ),
        ({"lr_scheduler__decay_type": "cosine"}, "lr_schedule", {"lr_decay_style": "cosine"}),
        ({"training__batch_size": 3, "training__local_batch_size": 3}, "train", {"micro_batch_size": 3}),
        ({"training__global_batch_size": 64}, "train", {"global_batch_size": 64}),
        ({"compile__enable": True}, "train", {"compile": "blocks"}),
        (
            {"parallelism__data_parallel_shard_degree": -1},
            "parallel",
            {"use_torch_fsdp2": True, "fsdp_reshard_after_forward": True},
        ),
        (
            {"parallelism__data_parallel_shard_degree": 4, "parallelism__pipeline_parallel_degree": 2},
            "parallel",
            {"fsdp_reshard_after_forward": False, "pipeline_schedule": "1f1b", "pipeline_model_parallel_size": 2},
        ),
        ({"parallelism__tensor_parallel_degree": 2}, "parallel", {"sequence_parallel": True}),
        ({"activation_checkpoint__mode": "full"}, "recompute", {"recompute_num_layers": 1}),
        ({"checkpoint__enable": True, "checkpoint__interval": 7}, "checkpoint", {"save_interval": 7, "keep_last": 10}),
        ({"model__converters": ["float8"]}, "precision", {"fp8_format": "hybrid"}),
        ({"model__name": "qwen3", "model__flavor": "0.6B"}, "model", {"family": "qwen", "num_layers": 28}),
        ({"model__name": "deepseek_v3", "model__flavor": "671B"}, "model", {"family": "deepseek", "num_layers": 61}),
        ({"model__name": "llama2", "model__flavor": "7B"}, "model", {"num_query_groups": 32, "ffn_hidden_size": 11008}),
        (
            {"parallelism__pipeline_parallel_degree": 2, "parallelism__pipeline_parallel_schedule": "DualPipeV"},
            "parallel",
            {"pipeline_schedule": "dualpipe_v", "virtual_pipeline_model_parallel_size": 2},
        ),
        # Where the first files had them, and where the last ones have them.
        ({"training__tensor_parallel_degree": 2}, "parallel", {"tensor_model_parallel_size": 2}),
        ({"experimental__pipeline_parallel_degree": 2}, "parallel", {"pipeline_model_parallel_size": 2}),
        ({"debug__seed": 7, "debug__deterministic": True}, "train", {"seed": 7, "deterministic": True}),
    ],
)
def test_a_key_decides(changes: dict[str, Any], section: str, keys: dict[str, Any], tmp_path: Path, host: Any) -> None:
    found = imported(tmp_path, host, **changes).sections[section]
    assert {key: found.get(key) for key in keys} == keys


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__flavor": "9B"}, "it can be llama3 8B"),
        ({"optimizer__name": "Muon"}, "it can be AdamW"),
        ({"parallelism__data_parallel_replicate_degree": 2, "parallelism__data_parallel_shard_degree": 2}, "HSDP"),
        (
            {"parallelism__pipeline_parallel_degree": 2, "parallelism__pipeline_parallel_schedule": "LoopedBFS"},
            "DualPipeV",
        ),
        ({"optimiser__lr": 1.0}, 'did you mean "optimizer"'),
        ({"model__converters": ["mx"]}, "float8 can"),
    ],
)
def test_what_cannot_be_done_is_named(changes: dict[str, Any], message: str, tmp_path: Path, host: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        imported(tmp_path, host, **changes)


def test_what_is_on_and_not_done_is_refused(tmp_path: Path, host: PluginHost) -> None:
    result = imported(tmp_path, host, training__enable_cpu_offload=True)
    assert [one.words for one in result.of_status("refused")] == ["training.enable_cpu_offload True"]


@pytest.mark.parametrize(
    ("name", "flavor", "parameters"),
    [
        # Embedding and output, and in each layer four projections, three of the feed-forward and two norms.
        ("llama3", "debugmodel", 2 * 2048 * 256 + 6 * (4 * 256**2 + 3 * 256 * 768 + 2 * 256) + 256),
        # One embedding; heads of 128, 8 for keys and values, a norm of queries and one of keys.
        (
            "qwen3",
            "debugmodel",
            2048 * 256 + 8 * (2 * 256 * 2048 + 2 * 256 * 1024 + 2 * 128 + 3 * 256 * 3072 + 2 * 256) + 256,
        ),
        (
            "qwen3",
            "debugmodel_moe",
            2 * 2048 * 256
            + 8 * (2 * 256 * 2048 + 2 * 256 * 1024 + 2 * 128 + 64 * 3 * 256 * 768 + 64 * 256 + 2 * 256)
            + 256,
        ),
        # 16 heads of 192 for queries, latent keys and values of 512 with 64 for positions; one dense layer of six.
        (
            "deepseek_v3",
            "debugmodel",
            2 * 2048 * 256
            + 6 * (256 * 16 * 192 + 256 * 576 + 512 + 512 * 16 * 256 + 16 * 128 * 256 + 2 * 256)
            + 3 * 256 * 1024
            + 5 * (8 * 3 * 256 * 256 + 3 * 256 * 512 + 8 * 256)
            + 256,
        ),
    ],
)
def test_debug_models_have_torchtitans_sizes(
    name: str, flavor: str, parameters: int, tmp_path: Path, host: PluginHost
) -> None:
    result = imported(tmp_path, host, model__name=name, model__flavor=flavor)
    sections = {**result.sections, "data": {**result.sections["data"], "dataset_type": "mock"}}
    sections["tokenizer"] = {"tokenizer_type": "NullTokenizer", "vocab_size": 2048}
    loaded = check_configuration(sections, 1, host)
    assert count_parameters(loaded.config, host).total == parameters


def test_every_key_is_accounted_for_once(tmp_path: Path, host: PluginHost) -> None:
    result = imported(tmp_path, host, checkpoint__enable_checkpoint=True, training__compile=True)
    words = [one.words.partition(" ")[0] for one in result.accounts]
    assert sorted(words) == sorted({*words})
    assert {"training.local_batch_size", "checkpoint.enable_checkpoint", "training.compile"} <= {*words}


@pytest.mark.parametrize(
    ("changes", "micro", "batch"),
    [
        ({"parallelism__data_parallel_shard_degree": 3}, 1, 24),
        ({"parallelism__data_parallel_shard_degree": 1, "parallelism__data_parallel_replicate_degree": 2}, 1, 16),
        ({"parallelism__data_parallel_shard_degree": 3, "parallelism__pipeline_parallel_microbatch_size": 4}, 4, 24),
        ({"parallelism__data_parallel_shard_degree": -1, "training__global_batch_size": 64}, 1, 64),
        ({"parallelism__data_parallel_shard_degree": -1}, 8, None),
        ({"parallelism__pipeline_parallel_degree": 1}, 8, None),
    ],
)
def test_a_pipeline_cuts_the_batch_of_a_rank(
    changes: dict[str, int], micro: int, batch: int | None, tmp_path: Path, host: PluginHost
) -> None:
    pipeline = {"parallelism__pipeline_parallel_degree": 2, "training__local_batch_size": 8}
    result = imported(tmp_path, host, **{**pipeline, **changes})
    found = result.sections["train"]
    assert (found["micro_batch_size"], found.get("global_batch_size")) == (micro, batch)
    told = [note for note in result.notes if "train.micro_batch_size=1 and train.global_batch_size=8 times" in note]
    assert len(told) == (micro == 8 and "parallelism__pipeline_parallel_degree" not in changes)


def test_micro_batches_of_a_pipeline_are_equal(tmp_path: Path, host: PluginHost) -> None:
    pipeline = {"parallelism__pipeline_parallel_degree": 2, "parallelism__pipeline_parallel_microbatch_size": 3}
    with pytest.raises(ConfigError, match="local_batch_size=2 is no multiple of .*microbatch_size=3"):
        imported(tmp_path, host, **pipeline)
