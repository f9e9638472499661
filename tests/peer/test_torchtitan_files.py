"""Models that torchtitan's package has, each by a configuration that names it: they import with torchtitan's sizes, and
a sample of them trains when made small.

The package has no configuration files; MT_TORCHTITAN_FILES names folders with those of its repository (*.toml),
separated by colons, all of which are imported.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.peer.environment import installed_alone
from tests.peer.test_megatron_scripts import GOAL, imported, train_small

from mt_core.plugins import PluginHost
from mt_import.readers.torchtitan_models import WITHIN_DOCUMENTS

PACKAGE = "torchtitan==0.2.2"
MODELS = ("llama3", "llama4", "deepseek_v3", "qwen3", "gpt_oss")
"""Language models; flux draws images."""
SIZES: Mapping[str, str] = {
    "dim": "hidden_size",
    "n_layers": "num_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_query_groups",
    "vocab_size": "vocab_size",
    "inter_dim": "ffn_hidden_size",
    "rope_theta": "rotary_base",
    "kv_lora_rank": "kv_lora_rank",
}
"""Name there -> key of [model]."""
TRAINED = ("llama3 debugmodel_varlen_attn", "deepseek_v3 16B", "qwen3 debugmodel_moe", "llama4 17bx16e_irope")
"""The sample: a dense model and one with experts of other kinds, masks of documents, and one without positions."""


@cache
def flavors() -> Mapping[tuple[str, str], Mapping[str, Any]]:
    """(model, flavor) -> the numbers that its arguments are given there, from the syntax tree."""
    return {(model, flavor): sizes for model in MODELS for flavor, sizes in _flavors_of(model)}


def _flavors_of(model: str) -> Iterator[tuple[str, dict[str, Any]]]:
    path = installed_alone(PACKAGE) / "torchtitan" / "models" / model / "__init__.py"
    tables = [node.value for node in ast.parse(path.read_text()).body if isinstance(node, ast.Assign)]
    for table in (value for value in tables if isinstance(value, ast.Dict)):
        for name, call in zip(table.keys, table.values, strict=True):
            assert isinstance(name, ast.Constant)
            assert isinstance(call, ast.Call)
            yield (
                str(name.value),
                {
                    keyword.arg: keyword.value.value
                    for keyword in call.keywords
                    if keyword.arg is not None and isinstance(keyword.value, ast.Constant)
                },
            )


def configuration(folder: Path, model: str, flavor: str) -> Path:
    path = folder / f"{model}-{flavor}.toml"
    path.write_text(
        f'[model]\nname = "{model}"\nflavor = "{flavor}"\n[optimizer]\nlr = 3e-4\n[training]\nseq_len = 2048\n'
        "steps = 1000\n[lr_scheduler]\nwarmup_steps = 10\n[parallelism]\ndata_parallel_shard_degree = -1\n"
    )
    return path


def test_each_model_has_the_sizes_that_it_has_there(host: PluginHost, tmp_path: Path) -> None:
    wrong: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for (model, flavor), there in flavors().items():
        result, why = imported(configuration(tmp_path, model, flavor), host)
        if result is None:
            failed[f"{model} {flavor}"] = why
            continue
        section = result.sections["model"]
        ours = {key: section[key] for key in SIZES.values() if key in section}
        differ = {name: (there[name], ours[key]) for name, key in SIZES.items() if name in there and key in ours}
        wrong |= {f"{model} {flavor} {name}": both for name, both in differ.items() if both[0] != both[1]}
        within = there.get("attn_mask_type") == "block_causal"
        assert ((model, flavor) in WITHIN_DOCUMENTS) is within, (model, flavor)
        assert result.sections["data"].get("reset_attention_mask", False) is within
    assert len(flavors()) > 30
    assert wrong == {}
    assert 1 - len(failed) / len(flavors()) >= GOAL, failed


@pytest.mark.parametrize("name", TRAINED)
def test_a_model_trains(name: str, host: PluginHost, tmp_path: Path) -> None:
    model, flavor = name.split()
    assert (model, flavor) in flavors()
    result, why = imported(configuration(tmp_path, model, flavor), host)
    assert result is not None, why
    with_data(result.sections)
    train_small(result, host, set(), tmp_path)


def with_data(sections: Any) -> None:
    """In place of the data set and the tokenizer that the file names."""
    sections["data"] = {"seq_length": sections["data"]["seq_length"], "dataset_type": "mock"}
    size = sections["model"].get("vocab_size", 1000) - 1
    sections["tokenizer"] = {"tokenizer_type": "NullTokenizer", "vocab_size": size}


def test_files_of_the_repository_import(host: PluginHost) -> None:
    folders = [Path(folder) for folder in os.environ.get("MT_TORCHTITAN_FILES", "").split(":") if folder]
    if not folders:
        pytest.skip("MT_TORCHTITAN_FILES names no folder with torchtitan's files, which its package does not have")
    paths = [path for folder in folders for path in sorted(folder.rglob("*.toml"))]
    failed = {path.stem: why for path in paths for result, why in [imported(path, host)] if result is None}
    assert len(paths) > 10
    assert 1 - len(failed) / len(paths) >= GOAL, failed
