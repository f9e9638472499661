"""Configurations of TRL, axolotl and LLaMA-Factory: each field is translated, or refused by its name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mt_core.config.loading import load_config
from mt_core.errors import ConfigError
from mt_core.plugins import load_plugins
from mt_import.result import ImportResult
from mt_import.sources import import_file

TRL = """
model_name_or_path: Qwen3-0.6B
dataset_name: chats.jsonl
learning_rate: 2.0e-4
num_train_epochs: 2
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
packing: true
max_length: 512
bf16: true
gradient_checkpointing: true
lr_scheduler_type: cosine
warmup_ratio: 0.1
loss_type: dft
use_peft: true
lora_r: 32
lora_alpha: 16
lora_target_modules: [q_proj, v_proj]
logging_steps: 5
output_dir: out
report_to: [tensorboard]
"""
AXOLOTL = """
base_model: Llama-3.2-1B
datasets:
  - path: chats.jsonl
    type: chat_template
    field_messages: conversation
    roles_to_train: [assistant]
    train_on_eos: turn
adapter: lora
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_target_linear: true
sequence_len: 4096
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 3
optimizer: adamw_torch_fused
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
val_set_size: 0.05
warmup_steps: 10
chat_template: chatml
flash_attention: true
"""
FACTORY = """
stage: sft
do_train: true
model_name_or_path: Qwen2.5-1.5B
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: identity
dataset_dir: DIR
template: qwen
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
mask_history: true
neat_packing: true
"""


def imported(tmp_path: Path, text: str) -> ImportResult:
    path = tmp_path / "config.yaml"
    path.write_text(text.replace("DIR", str(tmp_path)))
    return import_file(path, load_plugins())


def flat(result: ImportResult) -> Mapping[str, Any]:
    return {f"{name}.{key}": value for name, keys in result.sections.items() for key, value in keys.items()}


def require_legal(result: ImportResult) -> None:
    """The sections are accepted, with a model of a preset in the place of the folder that is not here."""
    sections = {name: dict(keys) for name, keys in result.sections.items()}
    sections["checkpoint"].pop("load")
    sections["data"]["chat_template"] = "plain"
    # A preset states its length and its rates.
    sections["train"] = {"train_iters": None, **sections["train"]}
    sections["optimizer"] = {"min_lr": 0.0, **sections["optimizer"]}
    sections["lr_schedule"] = {"lr_warmup_iters": None, **sections["lr_schedule"]}
    load_config(preset="gpt-tiny", sections=sections, host=load_plugins())


def test_trl(tmp_path: Path) -> None:
    result = imported(tmp_path, TRL)
    assert not result.of_status("refused")
    keys = flat(result)
    assert keys["checkpoint.load"] == "Qwen3-0.6B"
    assert keys["data.data_path"] == ["chats.jsonl"]
    assert (keys["train.micro_batch_size"], keys["train.global_batch_size"]) == (2, 16)
    assert (keys["adapter.rank"], keys["adapter.alpha"], keys["adapter.dropout"]) == (32, 16.0, 0.05)
    assert (keys["train.loss"], keys["train.train_epochs"], keys["precision.dtype"]) == ("dft", 2, "bf16")
    assert keys["lr_schedule.lr_warmup_fraction"] == 0.1
    assert any("--run-dir out" in note for note in result.notes)
    require_legal(result)


def test_defaults_of_trl_are_written_out(tmp_path: Path) -> None:
    keys = flat(imported(tmp_path, "model_name_or_path: m\ndataset_name: a.jsonl\n"))
    assert (keys["data.seq_length"], keys["data.packing"], keys["optimizer.lr"]) == (1024, False, 2e-5)
    assert (keys["train.micro_batch_size"], keys["train.train_epochs"]) == (8, 3)


def test_axolotl(tmp_path: Path) -> None:
    result = imported(tmp_path, AXOLOTL)
    assert not result.of_status("refused")
    keys = flat(result)
    assert (keys["data.messages_key"], keys["data.split"], keys["data.chat_template"]) == (
        "conversation",
        "95,5,0",
        "chatml",
    )
    assert (keys["adapter.type"], keys["adapter.targets"]) == ("lora", ["all-linear"])
    assert (keys["train.global_batch_size"], keys["data.seq_length"], keys["data.packing"]) == (8, 4096, True)
    require_legal(result)


def test_llama_factory(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text(json.dumps({"identity": {"file_name": "identity.json"}}))
    result = imported(tmp_path, FACTORY)
    assert not result.of_status("refused")
    keys = flat(result)
    assert keys["data.data_path"] == [str(tmp_path / "identity.json")]
    assert (keys["adapter.rank"], keys["adapter.alpha"], keys["data.train_on"]) == (8, 16.0, "last_answer")
    assert keys["data.packing"] is True
    require_legal(result)


@pytest.mark.parametrize(
    ("text", "field", "reason"),
    [
        ("model_name_or_path: m\ndataset_name: trl-lib/Capybara\n", "dataset_name", "a hub"),
        ("model_name_or_path: m\nload_in_4bit: true\n", "load_in_4bit", "quantized"),
        ("model_name_or_path: m\nfrobnicate: 3\n", "frobnicate", "no key of mt"),
        ("model_name_or_path: m\nlr_scheduler_type: polynomial\n", "lr_scheduler_type", "schedule"),
        ("model_name_or_path: m\nnum_train_epochs: 0.5\n", "num_train_epochs", "parts of an epoch"),
        ("base_model: m\nadapter: qlora\n", "adapter", "16 bits"),
        (
            "base_model: m\ndatasets: [{path: a.jsonl, type: chat_template, roles_to_train: [user]}]\n",
            "datasets",
            "roles",
        ),
        ("stage: sft\ndataset: nowhere\nmodel_name_or_path: m\n", "dataset", "is not in"),
        ("stage: sft\nfinetuning_type: freeze\nmodel_name_or_path: m\n", "finetuning_type", "full and lora"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(text: str, field: str, reason: str, tmp_path: Path) -> None:
    refused = imported(tmp_path, text).of_status("refused")
    assert [account.words.split()[0] for account in refused] == [field]
    assert reason in refused[0].reason


@pytest.mark.parametrize(
    "text", ["stage: dpo\nmodel_name_or_path: m\n", "base_model: m\nrl: dpo\n", "model_name_or_path: m\nbeta: 0.1\n"]
)
def test_other_trainers_are_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="which alone is read|which is not read"):
        imported(tmp_path, text)
