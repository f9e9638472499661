"""GPT-OSS through `mt convert`: Hugging Face's files to mt's and back, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.models.test_gpt_oss import SHAPE, gpt_oss
from torch import Tensor, nn

from mt_core.checkpoint_specs import ConvertOptions

convert = pytest.importorskip("mt_ckpt.convert").convert
transformers = pytest.importorskip("transformers")


@pytest.fixture
def saved(randomize, tmp_path: Path) -> tuple[nn.Module, Path]:
    """A model of transformers in bf16, and the folder that it saved itself to."""
    model = gpt_oss().eval()
    randomize(model)
    model = model.bfloat16()
    model.save_pretrained(tmp_path / "hf")
    return model, tmp_path / "hf"


def tensors_of(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_there_and_back_changes_no_bit(host, saved, tmp_path) -> None:
    _, source = saved
    convert(source, tmp_path / "mt", saver="mt", options=ConvertOptions(), host=host)
    convert(tmp_path / "mt", tmp_path / "again", saver="hf", options=ConvertOptions(), host=host)
    before, after = tensors_of(source), tensors_of(tmp_path / "again")
    assert after.keys() == before.keys()
    assert sum(".mlp.experts." in name for name in after) == 4 * SHAPE["num_hidden_layers"]
    assert all(torch.equal(after[name], before[name]) and after[name].dtype == before[name].dtype for name in before)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "again", attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    )
    original = transformers.AutoModelForCausalLM.from_pretrained(
        source, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    )
    tokens = torch.arange(12).view(1, 12)
    assert torch.equal(loaded(tokens).logits, original(tokens).logits)
