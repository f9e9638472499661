"""The layout of the reshaping tool for Accelerate's Megatron-LM plugin."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.ckpt.conftest import assert_same_state, tensors_of
from tests.ckpt.convert_cases import GPT2, LLAMA, MODELS

from mt_ckpt.convert import convert
from mt_ckpt.native.read import open_checkpoint
from mt_core.checkpoint_specs import CHECKPOINT_LOADERS, ConvertOptions
from mt_core.errors import CheckpointError, ConfigError

NAME = "transformers-megatron"
SHAPE = {**GPT2, "num_layers": 4}


def options(tp: int, pp: int, divisor: int = 16) -> ConvertOptions:
    return ConvertOptions(
        target_tensor_parallel_size=tp, target_pipeline_parallel_size=pp, make_vocab_size_divisible_by=divisor
    )


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 4), (4, 2)])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_any_layout_and_back(make_model, host, tmp_path: Path, tp: int, pp: int, activation: str) -> None:
    source = make_model(**{**SHAPE, "activation": activation})
    convert(source, tmp_path / "m", saver=NAME, options=options(tp, pp), host=host, verify=True)
    assert len(list((tmp_path / "m" / "release").iterdir())) == tp * pp
    for path in (tmp_path / "m", tmp_path / "m" / "release"):
        target = tmp_path / f"back-{path.name}"
        convert(path, target, loader=NAME, saver="mt", host=host)
        assert_same_state(tensors_of(open_checkpoint(source)), tensors_of(open_checkpoint(target)))
    assert open_checkpoint(target).metadata["config"]["model"]["activation"] == activation


def test_files_are_distinguished_from_megatrons_by_the_tools_argument(make_model, host, tmp_path: Path) -> None:
    """By the argument there are 101 ids, by Megatron's own 128, padding included."""
    source = make_model(**SHAPE)
    convert(source, tmp_path / "m", saver=NAME, options=options(2, 1), host=host)
    convert(tmp_path / "m", tmp_path / "back", saver="mt", host=host)
    assert_same_state(tensors_of(open_checkpoint(source)), tensors_of(open_checkpoint(tmp_path / "back")))
    assert [spec.name for spec in host[CHECKPOINT_LOADERS] if spec.detect.load()(tmp_path / "m")] == [NAME]
    for file in (tmp_path / "m").rglob("model_optim_rng.pt"):
        content = torch.load(file, weights_only=False)
        del content["args"].orig_vocab_size
        torch.save(content, file)
    assert [spec.name for spec in host[CHECKPOINT_LOADERS] if spec.detect.load()(tmp_path / "m")] == ["megatron-legacy"]


def test_files_as_the_tool_writes_them(make_model, host, tmp_path: Path) -> None:
    convert(make_model(**SHAPE), tmp_path / "m", saver=NAME, options=options(2, 2), host=host)
    convert(tmp_path / "source", tmp_path / "hf", saver="hf", host=host)
    from safetensors.torch import load_file

    hf = load_file(tmp_path / "hf" / "model.safetensors")
    assert (tmp_path / "m" / "latest_checkpointed_iteration.txt").read_text() == "release"
    ranks = {
        (rank, stage): torch.load(
            tmp_path / "m" / "release" / f"mp_rank_{rank:02d}_{stage:03d}" / "model_optim_rng.pt", weights_only=False
        )
        for rank in range(2)
        for stage in range(2)
    }
    for content in ranks.values():
        assert isinstance(content["args"], SimpleNamespace)
        assert (content["args"].padded_vocab_size, content["args"].orig_vocab_size) == (128, 101)
        assert content["args"].params_dtype is torch.float32
        assert content["checkpoint_version"] == 3.0
        assert content["optimizer"]["optimizer"]["step"] == 0
    words = torch.cat(
        [ranks[r, 0]["model"]["language_model"]["embedding"]["word_embeddings"]["weight"] for r in (0, 1)]
    )
    assert torch.equal(words[:101], hf["transformer.wte.weight"])
    assert torch.equal(words[101:], hf["transformer.wte.weight"][-1:].expand(27, -1))
    encoder = ranks[1, 1]["model"]["language_model"]["encoder"]
    # Layer 3 is layer 1 of stage 1; its second rank has heads 2 and 3, each as query, key, value.
    by_kind = hf["transformer.h.3.attn.c_attn.weight"].T.unflatten(0, (3, 4, 8))
    expected = by_kind.transpose(0, 1)[2:].flatten(0, 2)
    assert torch.equal(encoder["layers.1.self_attention.query_key_value.weight"], expected)
    columns = hf["transformer.h.3.mlp.c_proj.weight"].T[:, 64:]
    assert torch.equal(encoder["layers.1.mlp.dense_4h_to_h.weight"], columns)
    assert torch.equal(encoder["final_layernorm.weight"], hf["transformer.ln_f.weight"])
    head = torch.cat([ranks[r, 1]["model"]["word_embeddings_for_head"]["weight"] for r in (0, 1)])
    assert torch.equal(head, words)


@pytest.mark.parametrize("version", [0.0, 1.0, 2.0])
def test_older_orders_and_names(make_model, host, tmp_path: Path, version: float) -> None:
    """Version 0: kind, head, channel. 1: head, channel, kind. `transformer` and `attention` as first names."""
    source = make_model(**GPT2)
    convert(source, tmp_path / "m", saver=NAME, options=options(1, 1), host=host)
    file = tmp_path / "m" / "release" / "mp_rank_00" / "model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    model = content["model"]["language_model"]
    encoder = {}
    for name, tensor in model.pop("encoder").items():
        if "query_key_value" in name:
            split = tensor.unflatten(0, (4, 3, 8))
            order = {0.0: split.transpose(0, 1), 1.0: split.movedim(1, 2), 2.0: split}[version]
            tensor = order.flatten(0, 2).contiguous()
        encoder[name.replace("self_attention.", "attention.")] = tensor
    model["transformer"] = encoder
    content["args"] = argparse.Namespace(**vars(content["args"]))
    torch.save({**content, "checkpoint_version": version}, file)
    convert(tmp_path / "m", tmp_path / "back", loader=NAME, saver="mt", host=host)
    assert_same_state(tensors_of(open_checkpoint(source)), tensors_of(open_checkpoint(tmp_path / "back")))


def test_refusals(make_model, host, tmp_path: Path) -> None:
    def refusal(model, wanted: ConvertOptions) -> str:
        with pytest.raises(ConfigError) as caught:
            convert(
                make_model(f"s{len(list(tmp_path.iterdir()))}", **model),
                tmp_path / "x",
                saver=NAME,
                options=wanted,
                host=host,
            )
        return str(caught.value)

    assert "holds GPT-2 only" in refusal(LLAMA, options(1, 1))
    assert "holds GPT-2 only" in refusal(MODELS["gpt_bigcode"], options(1, 1))
    assert "--target-tensor-parallel-size 3 does not divide model.num_attention_heads=4" in refusal(
        SHAPE, options(3, 1)
    )
    assert "--target-tensor-parallel-size 4 does not divide model.ffn_hidden_size=18" in refusal(
        {**SHAPE, "ffn_hidden_size": 18}, options(4, 1)
    )
    assert "--target-pipeline-parallel-size 3 does not divide model.num_layers=4" in refusal(SHAPE, options(1, 3))


def test_files_that_do_not_belong_together(make_model, host, tmp_path: Path) -> None:
    convert(make_model(**SHAPE), tmp_path / "m", saver=NAME, options=options(2, 1), host=host)
    file = tmp_path / "m" / "release" / "mp_rank_01" / "model_optim_rng.pt"

    def refusal(change) -> str:
        content = torch.load(file, weights_only=False)
        change(content["model"]["language_model"]["encoder"])
        torch.save(content, file)
        with pytest.raises(CheckpointError) as caught:
            convert(tmp_path / "m", tmp_path / "x", loader=NAME, saver="mt", host=host)
        return str(caught.value)

    assert "layers.1.input_layernorm.weight: the ranks' copies of this tensor differ" in refusal(
        lambda encoder: encoder["layers.1.input_layernorm.weight"].add_(1)
    )
    assert "encoder.layers.2.mlp.dense_h_to_4h.bias is missing in the checkpoint, on one rank" in refusal(
        lambda encoder: encoder.pop("layers.2.mlp.dense_h_to_4h.bias")
    )
    file.parent.rename(file.parent.with_name("mp_rank_02"))
    with pytest.raises(CheckpointError, match="has 2 folders mp_rank_TT"):
        convert(tmp_path / "m", tmp_path / "x", loader=NAME, saver="mt", host=host)
