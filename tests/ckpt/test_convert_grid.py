"""From every readable format into every writable one, cut over ranks in one way before and in another after."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ckpt.conftest import State, assert_same_state, tensors_of
from tests.ckpt.convert_cases import LLAMA
from tests.ckpt.megatron.conftest import MODELS, RandomCheckpoint
from tests.ckpt.test_convert_gguf import to_gguf
from tests.ckpt.test_convert_meta import write

from mt_ckpt.convert import convert
from mt_ckpt.native import read as native
from mt_core.errors import CheckpointError, ConfigError
from mt_core.plugins import PluginHost
from mt_core.specs import CheckpointReader, ConvertOptions
from mt_core.train.checkpointing import open_with

GPT2 = {**MODELS["gpt"], "ffn_hidden_size": 128, "activation": "gelu_tanh"}
CASES: dict[str, dict[str, Any]] = {
    "gpt": GPT2,
    "gpt_untied_odd": MODELS["gpt_untied_odd"],
    "llama": MODELS["llama"],
    "llama_tied_biased": {**MODELS["llama_tied"], "attention_bias": True, "mlp_bias": True},
    "qwen3": MODELS["qwen3"],
    "bert": MODELS["bert"],
    "moe": {**MODELS["llama"], "family": "mixtral", "moe": {"num_experts": 4}},
    "moe_shared": {**MODELS["qwen2_moe"], "moe": {**MODELS["qwen2_moe"]["moe"], "moe_layer_freq": "([0]*1+[1]*3)"}},
    "deepseek_v3": {
        **MODELS["deepseek_v3"],
        "moe": {**MODELS["deepseek_v3"]["moe"], "moe_shared_expert_intermediate_size": 24},
    },
    "mamba": MODELS["mamba"],
    "hybrid": {
        **MODELS["hybrid"],
        "hybrid_layer_pattern": "M-*-M-*-",
        "mamba_num_heads": 8,
        "position_embedding_type": "rope",
        "rotary_percent": 0.5,
        "activation": "swiglu",
    },
}
UNABLE = {
    "megatron-legacy": {"qwen3", "moe", "moe_shared", "deepseek_v3", "mamba", "hybrid"},
    "transformers-megatron": set(CASES) - {"gpt"},
}
"""Format -> models that it has no words for."""
IN_TURN = ("gpt_untied_odd", "llama", "qwen3", "bert", "moe", "mamba", "hybrid")
"""Models that go from each format into the next one only; the others from each into each."""
WHOLE = ("mt", "hf")
BEFORE, AFTER = {"tp": 4, "pp": 1}, {"tp": 2, "pp": 2}
"""Four ranks are more than the two groups of queries that most of the models have."""


def options(name: str, model: str, tp: int, pp: int) -> ConvertOptions:
    """The layout, as far as the format has one: experts are divided where there are any."""
    if name in WHOLE:
        return ConvertOptions(max_shard_size=20_000)
    if name == "megatron-dist":  # is read under any layout
        return ConvertOptions(target_tensor_parallel_size=tp)
    experts = 2 if name == "megatron" and "moe" in CASES[model] else 1
    return ConvertOptions(
        target_tensor_parallel_size=tp, target_pipeline_parallel_size=pp, target_expert_parallel_size=experts
    )


def formats(host: PluginHost) -> list[str]:
    """What can be both read and written."""
    readable = {spec.name for spec in host.checkpoint_loaders}
    return [spec.name for spec in host.checkpoint_savers if spec.convert is not None and spec.name in readable]


def pairs(model: str, names: list[str]) -> Iterable[tuple[str, str]]:
    return zip(names, [*names[1:], names[0]], strict=True) if model in IN_TURN else product(names, names)


def opened(path: Path, name: str, host: PluginHost) -> CheckpointReader:
    return open_with(host.checkpoint_loaders.get(name), path, host)


def model_of(reader: CheckpointReader) -> State:
    return {name: tensor for name, tensor in tensors_of(reader).items() if name.startswith("model.")}


@pytest.mark.parametrize("model", CASES)
def test_every_pair_of_formats_and_layouts(model: str, host, tmp_path: Path) -> None:
    source = RandomCheckpoint(CASES[model], host)
    written: dict[str, Path] = {}
    for name in formats(host):
        path, asked = tmp_path / name, options(name, model, **BEFORE)
        write = host.checkpoint_savers.get(name).convert.load()
        if model in UNABLE.get(name, ()):
            with pytest.raises((ConfigError, CheckpointError)):
                write(path, source, asked, host)
        else:
            write(path, source, asked, host)
            written[name] = path
    assert {"mt", "hf", "megatron", "megatron-dist"} <= set(written)
    for first, second in pairs(model, list(written)):
        path, asked = tmp_path / f"{first}-{second}", options(second, model, **AFTER)
        convert(written[first], path, loader=first, saver=second, options=asked, host=host)
        assert_same_state(model_of(opened(path, second, host)), source.tensors)


@pytest.mark.parametrize("first", ["meta", "gguf"])
def test_from_formats_that_are_read_only(first: str, make_model, host, tmp_path: Path) -> None:
    keys = {**LLAMA, "num_layers": 2, "norm_epsilon": 1e-5}
    original = tensors_of(native.open_checkpoint(make_model(**keys)))
    convert(tmp_path / "source", tmp_path / "plain", saver="hf", host=host)
    if first == "gguf":
        to_gguf(tmp_path / "plain", tmp_path / "given" / "m.gguf", "llama", keys)
    else:
        write_meta(tmp_path / "given", original)
    for second in formats(host):
        if second == "transformers-megatron":
            continue
        path = tmp_path / second
        asked = options(second, "llama", **AFTER)
        convert(tmp_path / "given", path, loader=first, saver=second, options=asked, host=host)
        assert_same_state(model_of(opened(path, second, host)), original)


def write_meta(folder: Path, tensors: State) -> None:
    """The same Llama under Meta's names, queries and keys in Meta's order of channels, two ranks."""
    shape = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 101, "multiple_of": 16}
    words, last, head = "embedding.word_embeddings", "decoder.final_layernorm", "output_layer"
    state = {
        "tok_embeddings.weight": tensors[f"model.{words}.weight"],
        "norm.weight": tensors[f"model.{last}.weight"],
        "output.weight": tensors[f"model.{head}.weight"],
    }
    for i in range(2):
        ours, theirs = f"model.decoder.layers.{i}.", f"layers.{i}."
        q, k, v = tensors[f"{ours}self_attention.linear_qkv.weight"].unflatten(0, (2, 4, 8)).split([2, 1, 1], dim=1)
        gate, up = tensors[f"{ours}mlp.linear_fc1.weight"].chunk(2)
        state |= {
            f"{theirs}attention.wq.weight": metas_order(q.reshape(32, 32)),
            f"{theirs}attention.wk.weight": metas_order(k.reshape(16, 32)),
            f"{theirs}attention.wv.weight": v.reshape(16, 32),
            f"{theirs}attention.wo.weight": tensors[f"{ours}self_attention.linear_proj.weight"],
            f"{theirs}feed_forward.w1.weight": gate,
            f"{theirs}feed_forward.w3.weight": up,
            f"{theirs}feed_forward.w2.weight": tensors[f"{ours}mlp.linear_fc2.weight"],
            f"{theirs}attention_norm.weight": tensors[f"{ours}input_layernorm.weight"],
            f"{theirs}ffn_norm.weight": tensors[f"{ours}pre_mlp_layernorm.weight"],
        }
    write(folder, state, {**shape, "norm_eps": 1e-5, "rope_theta": 10000.0}, ranks=2, embedding_dim=1)


def metas_order(rows: torch.Tensor) -> torch.Tensor:
    """Channel i of the first half of a head of 8, and of the second, beside one another."""
    return rows.unflatten(0, (-1, 2, 4)).transpose(1, 2).flatten(0, 2)
