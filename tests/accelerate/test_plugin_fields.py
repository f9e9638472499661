"""Every field of MegatronLMPlugin has its effect, or is refused by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.accelerate.programs import build, samples, torch_batch
from torch.utils.data import DataLoader

from mt_accelerate import Accelerator, MegatronLMPlugin
from mt_accelerate.utils import GPTTrainStep, MegatronLMDummyDataLoader, MegatronLMDummyScheduler
from mt_core.errors import CheckpointError, ConfigError

ROWS, END = 4, 95

KEYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tp_degree": ({"tp_degree": 2}, {"parallel.tensor_model_parallel_size": 2}),
    "pp_degree": ({"pp_degree": 2}, {"parallel.pipeline_model_parallel_size": 2}),
    "gradient_clipping": ({"gradient_clipping": 0.5}, {"optimizer.clip_grad": 0.5}),
    "sequence_parallelism": ({"sequence_parallelism": True, "tp_degree": 2}, {"parallel.sequence_parallel": True}),
    "recompute_activations": ({"recompute_activations": True}, {"recompute.recompute_granularity": "selective"}),
    "recompute_granularity": ({"recompute_granularity": "full"}, {"recompute.recompute_granularity": "full"}),
    "recompute_method": (
        {"recompute_granularity": "full", "recompute_method": "block"},
        {"recompute.recompute_method": "block"},
    ),
    "recompute_num_layers": (
        {"recompute_granularity": "full", "recompute_num_layers": 2},
        {"recompute.recompute_num_layers": 2},
    ),
    "use_distributed_optimizer": ({"use_distributed_optimizer": True}, {"parallel.use_distributed_optimizer": True}),
    "context_parallel_size": ({"context_parallel_size": 2}, {"parallel.context_parallel_size": 2}),
    "expert_model_parallel_size": ({"expert_model_parallel_size": 2}, {"parallel.expert_model_parallel_size": 2}),
    "expert_tensor_parallel_size": ({"expert_tensor_parallel_size": 2}, {"parallel.expert_tensor_parallel_size": 2}),
    "decoder_last_pipeline_num_layers": (
        {"decoder_last_pipeline_num_layers": 3},
        {"parallel.num_layers_in_last_pipeline_stage": 3},
    ),
    "use_custom_fsdp": ({"use_custom_fsdp": True}, {"parallel.use_torch_fsdp2": True}),
    "attention_softmax_in_fp32": (
        {"attention_softmax_in_fp32": False},
        {"precision.attention_softmax_in_fp32": False},
    ),
    "eval_iters": ({"eval_iters": 7}, {"train.eval_iters": 7}),
    "eval_interval": ({"eval_interval": 9}, {"train.eval_interval": 9}),
}
"""Field -> the plugin's fields, and keys that follow from them whatever model and data are."""
PREPARED: dict[str, tuple[Any, str, Any]] = {
    "num_micro_batches": (2, "train.global_batch_size", 2 * ROWS),
    "attention_dropout": (0.1, "model.attention_dropout", 0.1),
    "hidden_dropout": (0.2, "model.hidden_dropout", 0.2),
    "use_rotary_position_embeddings": (False, "model.position_embedding_type", "learned_absolute"),
    "train_iters": (30, "train.train_iters", 30),
    "lr_warmup_iters": (3, "lr_schedule.lr_warmup_iters", 3),
    "lr_decay_style": ("cosine", "lr_schedule.lr_decay_style", "cosine"),
    "lr_decay_iters": (20, "lr_schedule.lr_decay_iters", 20),
    "min_lr": (1e-4, "optimizer.min_lr", 1e-4),
    "weight_decay_incr_style": ("linear", "optimizer.weight_decay_incr_style", "linear"),
    "start_weight_decay": (0.0, "optimizer.start_weight_decay", 0.0),
    "end_weight_decay": (0.1, "optimizer.end_weight_decay", 0.1),
    "seq_length": (8, "data.seq_length", 8),
    "use_precision_aware_optimizer": (True, "optimizer.exp_avg_dtype", "bf16"),
    "other_megatron_args": ({"exp_avg_dtype": "bf16"}, "optimizer.exp_avg_dtype", "bf16"),
}
"""Field -> its value, a key of the prepared model, and what that is; all fields at once."""
OTHER_PREPARED: dict[str, tuple[Any, str, Any]] = {
    "train_samples": (400, "train.train_samples", 400),
    "lr_warmup_samples": (40, "lr_schedule.lr_warmup_samples", 40),
    "lr_decay_samples": (200, "lr_schedule.lr_decay_samples", 200),
    "encoder_seq_length": (8, "data.seq_length", 8),
    "is_train_batch_min": (False, "train.micro_batch_size", ROWS),
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "optimizer_cpu_offload": ({"optimizer_cpu_offload": True}, "use_distributed_optimizer shards it"),
    "overlap_cpu_optimizer_d2h_h2d": ({"overlap_cpu_optimizer_d2h_h2d": True}, "optimizer_cpu_offload"),
    "pipeline_model_parallel_split_rank": ({"pipeline_model_parallel_split_rank": 1}, "encoder and decoder together"),
    "attention_backend": ({"attention_backend": False}, "names no kernel"),
    "no_wd_decay_cond": ({"no_wd_decay_cond": len}, "biases and norms never"),
    "scale_lr_cond": ({"scale_lr_cond": len}, "decoupled_lr"),
    "lr_mult": ({"lr_mult": 2.0}, "scale_lr_cond"),
}
CONTRADICTIONS: dict[str, dict[str, Any]] = {
    "counts only with recompute_granularity='full'": {"recompute_method": "uniform"},
    "counts only with tensorboard_dir": {"set_all_logging_options": True},
    "counts only with custom_train_step_class": {"custom_train_step_kwargs": {"alpha": 1}},
    "counts only with custom_model_provider_function": {"custom_prepare_model_function": len},
    "other_megatron_args={'exp_avg_dtype': ...}": {"use_precision_aware_optimizer": True},
    "has train_iters and train_samples": {"train_iters": 1, "train_samples": 1},
    "two lengths of the same input": {"seq_length": 8, "encoder_seq_length": 16},
    "those of validation and test to 0": {"consumed_samples": [8, 4]},
}
SHOWN = {
    "num_layers_per_virtual_pipeline_stage": "test_layers_of_a_virtual_stage_are_an_interleaved_schedule",
    "lr_warmup_fraction": "test_layers_of_a_virtual_stage_are_an_interleaved_schedule",
    "no_load_optim": "test_states_without_the_optimizer",
    "no_save_optim": "test_states_without_the_optimizer",
    "eod_mask_loss": "test_losses_of_other_means",
    "calculate_per_token_loss": "test_losses_of_other_means",
    "consumed_samples": "test_training_goes_on_from_consumed_samples",
    "megatron_dataset_flag": "test_functions_of_the_program_are_called",
    "custom_train_step_class": "test_functions_of_the_program_are_called",
    "custom_train_step_kwargs": "test_functions_of_the_program_are_called",
    "custom_get_batch_function": "test_functions_of_the_program_are_called",
    "custom_loss_function": "test_functions_of_the_program_are_called",
    "custom_prepare_model_function": "test_functions_of_the_program_are_called",
    "custom_model_provider_function": "test_functions_of_the_program_are_called",
    "custom_megatron_datasets_provider_function": "test_data_sets_of_the_program",
    "decoder_seq_length": "test_data_sets_of_the_program",
    "tensorboard_dir": "test_event_files_have_the_steps",
    "set_all_logging_options": "test_event_files_have_the_steps",
    "return_logits": "test_event_files_have_the_steps",
}


def prepared(scheduler: bool = True, family: str = "gpt2", **fields: Any) -> tuple[Any, ...]:
    """accelerator, model"""
    accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin(**fields), cpu=True)
    model = build(family)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    more = [MegatronLMDummyScheduler(optimizer, total_num_steps=40)] if scheduler else []
    loaders = [DataLoader(samples(family), batch_size=size) for size in (ROWS // 2, ROWS)]
    return accelerator, accelerator.prepare(model, optimizer, *more, *loaders[fields.get("is_train_batch_min", 1) :])[0]


def value_of(config: Any, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def test_every_field_is_looked_at() -> None:
    tables = (KEYS, PREPARED, OTHER_PREPARED, REFUSED, SHOWN)
    assert sorted(name for table in tables for name in table) == sorted(MegatronLMPlugin.model_fields)
    assert {test for test in SHOWN.values() if test not in globals()} == set()
    page = (Path(__file__).parents[2] / "docs" / "from-accelerate.md").read_text(encoding="utf-8")
    assert [name for name in MegatronLMPlugin.model_fields if f"`{name}`" not in page] == []


@pytest.mark.parametrize("field", KEYS)
def test_a_field_is_a_key(field: str) -> None:
    given, expected = KEYS[field]
    sections = MegatronLMPlugin(**given).sections("no")
    for key, value in expected.items():
        section, name = key.split(".")
        assert sections[section][name] == value


@pytest.mark.parametrize("table", [PREPARED, OTHER_PREPARED], ids=["steps", "samples"])
def test_a_field_is_a_key_of_the_prepared_model(table: dict[str, tuple[Any, str, Any]]) -> None:
    _, model = prepared(**{name: value for name, (value, _, _) in table.items()})
    assert {key: value_of(model.config, key) for _, key, _ in table.values()} == {
        key: value for _, key, value in table.values()
    }


@pytest.mark.parametrize("field", REFUSED)
def test_a_field_is_refused(field: str) -> None:
    given, words = REFUSED[field]
    with pytest.raises(ConfigError) as caught:
        MegatronLMPlugin(**given)
    assert field in str(caught.value) and words in str(caught.value)


@pytest.mark.parametrize("words", CONTRADICTIONS)
def test_a_field_without_another_is_refused(words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        MegatronLMPlugin(**CONTRADICTIONS[words])
    assert words in str(caught.value)
