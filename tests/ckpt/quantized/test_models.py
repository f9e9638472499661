"""Quantized folders as users have them: converted, trained from, generated from, and refused when they are damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.ckpt.quantized.test_written import LLAMA
from torch import Tensor

from mt_ckpt.convert import convert
from mt_ckpt.files.checksum_file import CHECKSUMS
from mt_ckpt.hugging_face.reader import open_checkpoint
from mt_core.checkpoint_specs import ConvertOptions
from mt_core.errors import CheckpointError, ConfigError
from mt_core.plugins import PluginHost
from mt_core.train.trained_model import load_trained_model

LATENT = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LATENT |= {"num_key_value_heads": 4, "moe_intermediate_size": 40, "n_routed_experts": 4, "num_experts_per_tok": 2}
LATENT |= {"n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 40, "q_lora_rank": 40, "n_group": 2}
LATENT |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "topk_group": 1}
LATENT |= {"max_position_embeddings": 64}
Edit = Callable[[dict[str, Tensor]], None]


@pytest.fixture
def quantized(make_model, host: PluginHost, tmp_path: Path, without_waiting_for_the_disk: None) -> Path:
    options = ConvertOptions(quantize="fp8-blocks")
    convert(make_model(dtype=torch.bfloat16, **LLAMA), tmp_path / "fp8", saver="hf", options=options, host=host)
    (tmp_path / "fp8" / CHECKSUMS).unlink()  # as others write it
    return tmp_path / "fp8"


def edit(folder: Path, change: Edit) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def deepseek_in_blocks(folder: Path, block: int) -> dict[str, Tensor]:
    """A DeepSeek-V3 of transformers, its linear layers in FP8 blocks that do not divide them; returns the values."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(1)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**LATENT)).to(torch.bfloat16)
    model.save_pretrained(folder)
    file, values = folder / "model.safetensors", {}
    tensors = load_file(file)
    for name, weight in list(tensors.items()):
        if "_proj" not in name or weight.ndim != 2:
            continue
        rows, columns = weight.shape
        scale = torch.rand(-(-rows // block), -(-columns // block)) * 0.01 + 0.001
        wide = scale.repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]
        codes = (weight.float() / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors |= {name: codes, f"{name}_scale_inv": scale}
        values[name] = (codes.float() * wide).to(torch.bfloat16)
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [block, block]}
    config["quantization_config"]["activation_scheme"] = "dynamic"
    (folder / "config.json").write_text(json.dumps(config))
    return values


@pytest.mark.slow
def test_deepseek_in_fp8_blocks_becomes_the_model_of_its_values(tmp_path: Path, host: PluginHost) -> None:
    """0.5 s: a model of transformers."""
    values = deepseek_in_blocks(tmp_path / "fp8", 48)
    convert(tmp_path / "fp8", tmp_path / "bf16", saver="hf", host=host)
    written = load_file(tmp_path / "bf16" / "model.safetensors")
    assert len(values) > 20
    assert not any(name.endswith("_scale_inv") for name in written)
    for name, value in values.items():
        assert torch.equal(written[name], value), name
    assert "quantization_config" not in json.loads((tmp_path / "bf16" / "config.json").read_text())


def test_a_quantized_folder_is_loaded_as_a_model(quantized: Path, host: PluginHost) -> None:
    """As mt generate, mt serve and checkpoint.load of mt train do."""
    trained = load_trained_model(quantized, host, device="cpu", settings={"precision": {"dtype": "fp32"}})
    reader = open_checkpoint(quantized, host)
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    assert torch.equal(dict(trained.model.named_parameters())[name], reader.read(f"model.{name}").float())


def test_quantized_again_it_keeps_its_values(quantized: Path, host: PluginHost, tmp_path: Path) -> None:
    """The largest of each block is 448 x scale, so that the same codes come out, if for the rounding to bf16."""
    convert(quantized, tmp_path / "again", saver="hf", options=ConvertOptions(quantize="fp8-blocks"), host=host)
    first, second = load_file(quantized / "model.safetensors"), load_file(tmp_path / "again" / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    same = (first[name].view(torch.uint8) == second[name].view(torch.uint8)).float().mean()
    assert same > 0.9


DAMAGE: list[tuple[Edit, str]] = [
    (lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.weight_scale_inv"), "up_proj.weight_scale_inv is missing"),
    (lambda tensors: tensors["model.layers.1.mlp.up_proj.weight_scale_inv"].fill_(float("nan")), "not finite"),
    (
        lambda tensors: tensors["model.layers.1.mlp.up_proj.weight_scale_inv"].neg_(),
        "scales of this format are positive",
    ),
    (
        lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.mystery": torch.ones(1)}),
        "mystery is in the checkpoint",
    ),
]


@pytest.mark.parametrize(("change", "message"), DAMAGE)
def test_damage_is_named_before_anything_is_written(
    quantized: Path, host: PluginHost, tmp_path: Path, change: Edit, message: str
) -> None:
    edit(quantized, change)
    for dry_run in (True, False):
        with pytest.raises(CheckpointError, match=message):
            convert(quantized, tmp_path / "out", saver="hf", dry_run=dry_run, host=host)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fp8", "source"]


def test_an_unknown_kind_is_named(quantized: Path, host: PluginHost) -> None:
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "aqlm"
    (quantized / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="quant_method='aqlm' is not supported"):
        open_checkpoint(quantized, host)
