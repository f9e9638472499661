"""TensorRT-LLM checkpoints: put together again by the rules of its own loaders, and computed with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.ckpt.convert_cases import GPT2, LLAMA, MODELS

from mt_ckpt.convert import convert
from mt_core.checkpoint_specs import ConvertOptions
from mt_core.errors import ConfigError


def options(tp: int = 1, pp: int = 1, **more) -> ConvertOptions:
    return ConvertOptions(target_tensor_parallel_size=tp, target_pipeline_parallel_size=pp, **more)


def write(make_model, host, tmp_path: Path, tp: int, pp: int, **keys) -> list[list[dict[str, torch.Tensor]]]:
    """[stage][rank] -> tensors; Hugging Face's names beside it in `hf`."""
    source = make_model(**keys)
    convert(source, tmp_path / "trt", saver="trtllm", options=options(tp, pp), host=host)
    convert(source, tmp_path / "hf", saver="hf", host=host)
    config = json.loads((tmp_path / "trt" / "config.json").read_text())
    assert config["mapping"] == {"world_size": tp * pp, "tp_size": tp, "pp_size": pp}
    return [[load_file(tmp_path / "trt" / f"rank{s * tp + r}.safetensors") for r in range(tp)] for s in range(pp)]


def layers_of_stages(num_layers: int, pp: int) -> list[list[int]]:
    return [part.tolist() for part in torch.arange(num_layers).tensor_split(pp)]


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 3)])
def test_llama(make_model, host, tmp_path: Path, tp: int, pp: int) -> None:
    """4 query heads, 2 key-value heads: with 4 ranks each key-value head is on two of them."""
    stages = write(make_model, host, tmp_path, tp, pp, **LLAMA)
    hf = load_file(tmp_path / "hf" / "model.safetensors")
    size = 8
    for stage, layers in enumerate(layers_of_stages(3, pp)):
        for local, layer in enumerate(layers):
            theirs = f"model.layers.{layer}."
            for rank in range(tp):
                ours = {
                    name.removeprefix(f"transformer.layers.{local}."): tensor
                    for name, tensor in stages[stage][rank].items()
                    if name.startswith(f"transformer.layers.{local}.")
                }
                heads = range(rank * 4 // tp, (rank + 1) * 4 // tp)
                groups = sorted({head // 2 for head in heads})
                q, k, v = (hf[f"{theirs}self_attn.{x}_proj.weight"].unflatten(0, (-1, size)) for x in "qkv")
                rows = [q[list(heads)], k[groups], v[groups]]
                assert torch.equal(ours["attention.qkv.weight"], torch.cat([x.flatten(0, 1) for x in rows]))
                columns = slice(rank * 32 // tp, (rank + 1) * 32 // tp)
                assert torch.equal(ours["attention.dense.weight"], hf[f"{theirs}self_attn.o_proj.weight"][:, columns])
                inner = slice(rank * 48 // tp, (rank + 1) * 48 // tp)
                assert torch.equal(ours["mlp.fc.weight"], hf[f"{theirs}mlp.gate_proj.weight"][inner])
                assert torch.equal(ours["mlp.gate.weight"], hf[f"{theirs}mlp.up_proj.weight"][inner])
                assert torch.equal(ours["mlp.proj.weight"], hf[f"{theirs}mlp.down_proj.weight"][:, inner])
                assert torch.equal(ours["input_layernorm.weight"], hf[f"{theirs}input_layernorm.weight"])
                assert torch.equal(ours["post_layernorm.weight"], hf[f"{theirs}post_attention_layernorm.weight"])
                assert len(ours) == 7
    assert_ends(stages, hf["model.embed_tokens.weight"], hf["lm_head.weight"], hf["model.norm.weight"])


def assert_ends(stages, embedding, output, norm) -> None:
    """The embedding is whole and on the first stage only; rows of the output are shared, padded with zeros."""
    tp, rows = len(stages[0]), -(-len(output) // len(stages[0]))
    for number, stage in enumerate(stages):
        first, last = number == 0, number == len(stages) - 1
        for rank in stage:
            assert ("transformer.vocab_embedding.weight" in rank) == first
            assert ("lm_head.weight" in rank) == ("transformer.ln_f.weight" in rank) == last
            assert not first or torch.equal(rank["transformer.vocab_embedding.weight"], embedding)
            assert not last or torch.equal(rank["transformer.ln_f.weight"], norm)
    whole = torch.cat([rank["lm_head.weight"] for rank in stages[-1]])
    assert whole.shape[0] == tp * rows
    assert torch.equal(whole[: len(output)], output)
    assert not whole[len(output) :].any()


def test_tied_output_is_written_on_every_stage_that_needs_it(make_model, host, tmp_path: Path) -> None:
    keys = {**LLAMA, "untie_embeddings_and_output_weights": False}
    stages = write(make_model, host, tmp_path, 2, 2, **keys)
    hf = load_file(tmp_path / "hf" / "model.safetensors")
    assert_ends(stages, hf["model.embed_tokens.weight"], hf["model.embed_tokens.weight"], hf["model.norm.weight"])


@pytest.mark.parametrize("tp", [1, 2])
def test_gpt(make_model, host, tmp_path: Path, tp: int) -> None:
    """Biases: cut with the rows, whole where columns are cut. GPT-2's query, key and value go head by head."""
    (ranks,) = write(make_model, host, tmp_path, tp, 1, **GPT2)
    hf = load_file(tmp_path / "hf" / "model.safetensors")
    prefix = "transformer.layers.1."
    for number, rank in enumerate(ranks):
        part = slice(number * 32 // tp, (number + 1) * 32 // tp)
        qkv = hf["transformer.h.1.attn.c_attn.weight"].T.unflatten(0, (3, 32))[:, part].flatten(0, 1)
        assert torch.equal(rank[f"{prefix}attention.qkv.weight"], qkv)
        bias = hf["transformer.h.1.attn.c_attn.bias"].unflatten(0, (3, 32))[:, part].flatten(0, 1)
        assert torch.equal(rank[f"{prefix}attention.qkv.bias"], bias)
        assert torch.equal(rank[f"{prefix}attention.dense.weight"], hf["transformer.h.1.attn.c_proj.weight"].T[:, part])
        assert torch.equal(rank[f"{prefix}attention.dense.bias"], hf["transformer.h.1.attn.c_proj.bias"])
        inner = slice(number * 128 // tp, (number + 1) * 128 // tp)
        assert torch.equal(rank[f"{prefix}mlp.fc.weight"], hf["transformer.h.1.mlp.c_fc.weight"].T[inner])
        assert torch.equal(rank[f"{prefix}mlp.fc.bias"], hf["transformer.h.1.mlp.c_fc.bias"][inner])
        assert torch.equal(rank[f"{prefix}mlp.proj.bias"], hf["transformer.h.1.mlp.c_proj.bias"])
        assert torch.equal(rank["transformer.position_embedding.weight"], hf["transformer.wpe.weight"])
        assert f"{prefix}mlp.gate.weight" not in rank


def test_config(make_model, host, tmp_path: Path) -> None:
    convert(
        make_model("a", **MODELS["llama_tied_biased"]),
        tmp_path / "x",
        saver="trtllm",
        options=options(dtype="bf16"),
        host=host,
    )
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    assert config["architecture"] == "LlamaForCausalLM"
    assert (config["dtype"], config["head_size"], config["num_key_value_heads"]) == ("bfloat16", 12, 2)
    assert (config["attn_bias"], config["mlp_bias"], config["tie_word_embeddings"]) == (True, True, True)
    assert config["rotary_scaling"]["rope_type"] == "llama3"
    assert config["rotary_scaling"]["original_max_position_embeddings"] == 32
    convert(make_model("b", **GPT2), tmp_path / "y", saver="trtllm", host=host)
    config = json.loads((tmp_path / "y" / "config.json").read_text())
    assert config["architecture"] == "GPTForCausalLM"
    assert (config["position_embedding_type"], config["hidden_act"], config["bias"]) == (
        "learned_absolute",
        "gelu",
        True,
    )


@pytest.mark.parametrize(
    ("model", "wanted", "words"),
    [
        ("llama", options(3), "--target-tensor-parallel-size 3 does not divide model.num_attention_heads=4"),
        ("llama", options(1, 4), "--target-pipeline-parallel-size 4 is more than the model's 3 layers"),
        ("llama", options(1, 1, max_shard_size=9), "--max-shard-size 9 means nothing to the format trtllm"),
        ("bloom", options(), "model.embedding_layernorm=True cannot be written for TensorRT-LLM"),
        ("gpt_neox", options(), "model.parallel_residual=True cannot be written for TensorRT-LLM"),
        ("bert", options(), "model.family=bert cannot be written for TensorRT-LLM; it can be gpt, llama, mistral"),
    ],
)
def test_refusals(make_model, host, tmp_path: Path, model: str, wanted: ConvertOptions, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        convert(make_model(**MODELS[model]), tmp_path / "x", saver="trtllm", options=wanted, host=host)
    assert words in str(caught.value)
    assert not (tmp_path / "x").exists()
