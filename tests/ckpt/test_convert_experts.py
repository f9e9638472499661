"""The experts in the files are those of the configuration: one too few or too many is an error that names it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.ckpt.conftest import tensors_of
from tests.ckpt.convert_cases import MODELS

from mt_ckpt.convert import convert
from mt_ckpt.native.read import open_checkpoint
from mt_ckpt.native.save import save_checkpoint
from mt_core.errors import CheckpointError

Tensors = dict[str, torch.Tensor]
EXPERT = "model.layers.1.block_sparse_moe.experts"


@pytest.fixture
def mixtral(make_model, host, tmp_path: Path) -> Path:
    """Three layers of three experts."""
    convert(make_model(**MODELS["mixtral"]), tmp_path / "hf", saver="hf", host=host)
    (tmp_path / "hf" / "mt-checksums.json").unlink()  # tests change the files
    return tmp_path / "hf"


def changed(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def refused(source: Path, host, saver: str = "mt") -> str:
    with pytest.raises(CheckpointError) as raised:
        convert(source, source.parent / "out", saver=saver, host=host)
    assert not (source.parent / "out").exists()
    return str(raised.value)


def test_a_missing_expert(mixtral: Path, host) -> None:
    changed(mixtral, lambda tensors: [tensors.pop(f"{EXPERT}.2.{part}.weight") for part in ("w1", "w2", "w3")])
    message = refused(mixtral, host)
    assert all(f"{EXPERT}.2.{part}.weight is missing in the checkpoint" in message for part in ("w1", "w2", "w3"))


def test_half_an_expert(mixtral: Path, host) -> None:
    changed(mixtral, lambda tensors: tensors.pop(f"{EXPERT}.0.w3.weight"))
    assert f"{EXPERT}.0.w3.weight is missing in the checkpoint" in refused(mixtral, host)


def test_an_expert_too_many(mixtral: Path, host) -> None:
    changed(mixtral, lambda tensors: tensors.update({f"{EXPERT}.3.w1.weight": torch.zeros(48, 32)}))
    assert f"{EXPERT}.3.w1.weight is in the checkpoint but unknown" in refused(mixtral, host)


@pytest.mark.parametrize(("experts", "words"), [(2, "experts.2.w1.weight is in the"), (4, "experts.3.w1.weight is mi")])
def test_a_configuration_with_another_number(mixtral: Path, host, experts: int, words: str) -> None:
    config = json.loads((mixtral / "config.json").read_text())
    (mixtral / "config.json").write_text(json.dumps({**config, "num_local_experts": experts}))
    assert words in refused(mixtral, host)


BIASED = {**MODELS["gpt2"], "moe": {"num_experts": 3, "moe_router_topk": 2}}
BIAS = "model.decoder.layers.2.mlp.experts.linear_fc1.bias"


@pytest.mark.parametrize(
    ("keys", "change", "words"),
    [
        (BIASED, lambda tensors: tensors.pop(BIAS), "is missing"),
        (
            MODELS["mixtral"],
            lambda tensors: tensors.update({BIAS: torch.zeros(3, 96)}),
            "is in the checkpoint but not in the model",
        ),
    ],
    ids=["missing", "added"],
)
def test_a_bias_of_experts_that_is_missing_or_added(
    make_model, host, tmp_path: Path, keys: dict[str, Any], change: Callable[[Tensors], object], words: str
) -> None:
    reader = open_checkpoint(make_model(**keys))
    tensors = tensors_of(reader)
    change(tensors)
    save_checkpoint(tmp_path / "changed", tensors.items(), dict(reader.metadata), {})
    message = refused(tmp_path / "changed", host)
    assert f"{BIAS.removeprefix('model.')} {words}" in message


def test_an_expert_of_another_width(mixtral: Path, host) -> None:
    changed(mixtral, lambda tensors: tensors.update({f"{EXPERT}.1.w1.weight": torch.zeros(47, 32)}))
    message = refused(mixtral, host)
    assert f"{EXPERT}.1.w1.weight [47, 32]" in message
    assert "model.decoder.layers.1.mlp.experts.linear_fc1.weight" in message


def test_a_stack_with_an_expert_too_few(make_model, host, tmp_path: Path) -> None:
    """Granite's files hold the experts of a layer in one tensor."""
    convert(make_model(**MODELS["granite_moe"]), tmp_path / "hf", saver="hf", host=host)
    (tmp_path / "hf" / "mt-checksums.json").unlink()  # tests change the files
    name = "model.layers.2.block_sparse_moe.output_linear.weight"
    changed(tmp_path / "hf", lambda tensors: tensors.update({name: tensors[name][:4].contiguous()}))
    message = refused(tmp_path / "hf", host)
    assert "decoder.layers.2.mlp.experts.linear_fc2.weight has shape [4, 32, 48]" in message
    assert "[5, 32, 48] in the model" in message


@pytest.mark.parametrize("rows", [0, 1])
def test_shared_experts_of_no_width_are_those_of_a_model_without_them(
    make_model, host, tmp_path: Path, rows: int
) -> None:
    """transformers writes tensors without elements for `n_shared_experts = 0`; others are of another model."""
    convert(make_model(**MODELS["deepseek"]), tmp_path / "hf", saver="hf", host=host)
    (tmp_path / "hf" / "mt-checksums.json").unlink()  # tests change the files
    config = tmp_path / "hf" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"n_shared_experts": 0}))
    changed(tmp_path / "hf", lambda tensors: tensors.update(narrowed(tensors, "shared_experts", rows)))
    if rows:
        assert "shared_experts.gate_proj.weight is in the checkpoint but unknown" in refused(tmp_path / "hf", host)
    else:
        convert(tmp_path / "hf", tmp_path / "ours", saver="mt", host=host)
        assert not [name for name in tensors_of(open_checkpoint(tmp_path / "ours")) if "shared_experts" in name]


def narrowed(tensors: Tensors, part: str, rows: int) -> Tensors:
    """The matrices of the feed-forwards `part` with so many channels between them."""
    of_part = {name: tensor for name, tensor in tensors.items() if part in name}
    return {
        name: (tensor[:, :rows] if "down_proj" in name else tensor[:rows]).contiguous()
        for name, tensor in of_part.items()
    }


def test_ours_with_an_expert_too_few_is_not_written(make_model, host, tmp_path: Path) -> None:
    reader = open_checkpoint(make_model(**MODELS["mixtral"]))
    tensors = tensors_of(reader)
    name = "model.decoder.layers.0.mlp.experts.linear_fc1.weight"
    tensors[name] = tensors[name][:2].contiguous()
    save_checkpoint(tmp_path / "short", tensors.items(), dict(reader.metadata), {})
    message = refused(tmp_path / "short", host, "hf")
    assert "decoder.layers.0.mlp.experts.linear_fc1.weight has shape [2, 96, 32]" in message


@pytest.mark.slow
def test_stacking_experts_imports_no_compiler(mixtral: Path) -> None:
    """torch imports it, seconds and 200 MB, to join tensors without values."""
    code = (
        "import sys; from mt_ckpt.convert import convert; convert(*sys.argv[1:], saver='mt'); "
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, mixtral, mixtral.parent / "mt"], check=True)
