"""Through `mt convert`: experts in MXFP4 or in one tensor are read, published names are written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models import test_stacked_experts as stacked
from tests.models.moe_reference import published
from tests.models.test_gpt_oss import gpt_oss, packed

from mt_core.checkpoint_specs import ConvertOptions

convert = pytest.importorskip("mt_ckpt.convert").convert
pytest.importorskip("transformers")


def there_and_back(source: Path, folder: Path, host) -> dict[str, torch.Tensor]:
    convert(source, folder / "mt", saver="mt", options=ConvertOptions(), host=host)
    convert(folder / "mt", folder / "again", saver="hf", options=ConvertOptions(), host=host)
    return load_file(folder / "again" / "model.safetensors")


def test_published_files_in_mxfp4_become_bf16(host, randomize, tmp_path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model = gpt_oss(hidden_size=64, intermediate_size=32)
    randomize(model)
    model.bfloat16().save_pretrained(tmp_path / "hf")
    file, config = tmp_path / "hf" / "model.safetensors", tmp_path / "hf" / "config.json"
    tensors, expected = load_file(file), load_file(file)
    for number in range(3):
        for name, sizes in {"gate_up_proj": (6, 64, 2), "down_proj": (6, 64, 1)}.items():
            prefix = f"model.layers.{number}.mlp.experts.{name}"
            del tensors[prefix]
            blocks, scales = packed(*sizes, seed=number)
            tensors |= {f"{prefix}_blocks": blocks, f"{prefix}_scales": scales}
            expected[prefix] = convert_moe_packed_tensors(blocks, scales)
    save_file(tensors, file, metadata={"format": "pt"})
    external = json.loads(config.read_text())
    config.write_text(json.dumps({**external, "quantization_config": {"quant_method": "mxfp4"}}))
    found = there_and_back(tmp_path / "hf", tmp_path, host)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe"])
def test_stacked_experts_become_single_ones(host, tmp_path, name) -> None:
    reference = stacked.reference(name)
    folder = tmp_path / "hf"
    folder.mkdir()
    given = {key: tensor.contiguous() for key, tensor in stacked.stacked_tensors(name).items()}
    save_file(given, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(reference.config.to_dict()))
    found, expected = there_and_back(folder, tmp_path, host), published(reference, given)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in found)
