"""`mt estimate`: sizes against transformers' models on the meta device, and plans against `mt plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

GPT2 = {"n_embd": 48, "n_layer": 3, "n_head": 4, "vocab_size": 301, "n_positions": 64}
LLAMA = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA |= {"intermediate_size": 80, "vocab_size": 301, "max_position_embeddings": 64}
BERT = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 80, "vocab_size": 301}
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "gpt2": ("GPT2Config", GPT2, "GPT2LMHeadModel"),
    "llama": ("LlamaConfig", LLAMA, "LlamaForCausalLM"),
    "tied llama": ("LlamaConfig", {**LLAMA, "tie_word_embeddings": True}, "LlamaForCausalLM"),
    "wide vocabulary": ("LlamaConfig", {**LLAMA, "vocab_size": 5001}, "LlamaForCausalLM"),
    "mixtral": ("MixtralConfig", {**LLAMA, "num_local_experts": 4}, "MixtralForCausalLM"),
    "qwen3": ("Qwen3Config", {**LLAMA, "head_dim": 16}, "Qwen3ForCausalLM"),
    "bert": ("BertConfig", BERT, "BertForPreTraining"),
}
"""Name of transformers' configuration, its values, name of its model."""
BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "int8": 8, "int4": 4}


def counted(config: Any, kind: Any) -> tuple[int, int]:
    """Parameters of transformers' model, and those of its largest layer: a block of a stack, or a module outside."""
    with torch.device("meta"):
        model = kind(config)
    inside: set[int] = set()
    sizes = []
    for stack in (module for module in model.modules() if isinstance(module, nn.ModuleList)):
        if id(stack) in inside:
            continue  # experts, in a layer
        inside |= {id(module) for module in stack.modules()}
        sizes += [sum(p.numel() for p in block.parameters()) for block in stack]
    sizes += [
        sum(p.numel() for p in module.parameters(recurse=False))
        for module in model.modules()
        if id(module) not in inside
    ]
    return sum(p.numel() for p in model.parameters()), max(sizes)


def written(folder: Path, name: str) -> tuple[Any, Any]:
    import transformers

    config_name, values, model_name = MODELS[name]
    config = getattr(transformers, config_name)(**values, architectures=[model_name])
    config.save_pretrained(folder)
    return config, getattr(transformers, model_name)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_sizes_are_those_of_transformers_models(mt, tmp_path: Path, name: str) -> None:
    total, largest = counted(*written(tmp_path, name))
    outcome = mt("estimate", tmp_path, "--dtypes", ",".join(BITS), "--json")
    assert outcome.code == 0, outcome.err
    found = json.loads(outcome.out)
    assert found["parameters"] == total
    assert found["largest_layer"]["parameters"] == largest
    for row in found["dtypes"]:
        bits = BITS[row["dtype"]]
        assert row["total_bytes"] == -(-total * bits // 8)
        assert row["largest_layer_bytes"] == -(-largest * bits // 8)
        # 4 + 4 + 8 bytes of a parameter in fp32; 2, an fp32 gradient, the other 16 bits and moments in bf16; of fp16
        # an fp32 copy.
        bytes_of_one = {"float32": 16, "bfloat16": 16, "float16": 18}.get(row["dtype"])
        assert row["training_bytes"] == (bytes_of_one and bytes_of_one * total)


def test_a_rank_of_a_layout_is_that_of_mt_plan(mt, tmp_path: Path) -> None:
    layout = ["--set", "parallel.tensor_model_parallel_size=2", "--set", "parallel.pipeline_model_parallel_size=2"]
    batch = ["--set", "train.global_batch_size=8"]
    ours = mt("estimate", "gpt-tiny", "--dtypes", "bfloat16", "--world-size", 8, *layout, *batch, "--json")
    usual = ["--set", "train.train_iters=1", "--set", "train.micro_batch_size=1", "--set", "precision.dtype=bf16"]
    theirs = mt("plan", "--preset", "gpt-tiny", "--world-size", 8, *usual, *layout, *batch, "--json")
    plan = json.loads(ours.out)["dtypes"][0]["plan"]
    assert plan == {key: value for key, value in json.loads(theirs.out).items() if key in plan}
    assert len(plan["ranks"]) == 2
    weights = plan["ranks"][0]["bytes"]
    assert weights["main_weights"] == 0
    assert weights["gradients"] == 2 * weights["weights"] == 4 * plan["ranks"][0]["parameters"]


def test_the_table_is_the_one_that_accelerate_prints(mt, tmp_path: Path) -> None:
    written(tmp_path, "gpt2")
    outcome = mt("estimate", tmp_path)
    assert ["dtype", "Largest", "Layer", "Total", "Size", "Training", "using", "Adam"] in outcome.lines
    assert [line[0] for line in outcome.lines if line and line[0] in BITS][:4] == [
        "float32",
        "bfloat16",
        "int8",
        "int4",
    ]
    assert "one process, micro-batches of 1 x 64 tokens" in outcome.out
    assert "machine h100 is assumed; --machine takes this (this computer)" in outcome.out


def test_a_model_whose_samples_are_unknown_has_its_sizes(mt, tmp_path: Path) -> None:
    written(tmp_path, "bert")
    outcome = mt("estimate", tmp_path, "--dtypes", "float32")
    assert outcome.code == 0
    assert "data.dataset_type=builtin gives no tokentype_ids and padding_mask" in outcome.out
    assert "which model.family=bert takes; bert, cola, mnli, mrpc, " in outcome.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing"], "preset nothing is unknown"),
        (["gpt-tiny", "--dtypes", "flaot32"], 'did you mean "float32"'),
        (["gpt-tiny", "--world-size", "3", "--set", "parallel.tensor_model_parallel_size=2"], "it can be 1 or 3"),
        (["gpt-tiny", "--machine", "h1000"], "h100"),
        (["FOLDER"], "cannot be read as the config.json of a model"),
        (["FILE"], "has no model_type"),
        (["OTHER"], "model_type='rwkv' is of no installed model family; known are"),
    ],
)
def test_bad_arguments(mt, tmp_path: Path, arguments: list[str], words: str) -> None:
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "b.json").write_text('{"model_type": "rwkv"}')
    places = {"FOLDER": tmp_path, "FILE": tmp_path / "a.json", "OTHER": tmp_path / "b.json"}
    outcome = mt("estimate", *(places.get(argument, argument) for argument in arguments))
    assert outcome.code == 2
    assert words in " ".join(outcome.err.split())
