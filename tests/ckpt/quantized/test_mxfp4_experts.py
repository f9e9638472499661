"""GPT-OSS with experts in MXFP4, written and read again; its reader judges values that nobody here rounded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.ckpt.convert_cases import LLAMA
from tests.ckpt.megatron.conftest import MODELS

from mt_ckpt.convert import convert
from mt_core.checkpoint_lookup import open_checkpoint
from mt_core.checkpoint_specs import ConvertOptions
from mt_core.errors import ConfigError

MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
OPTIONS = ConvertOptions(quantize="mxfp4-experts")


def decoded(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[E, out, in / 32, 16] -> [E, out, in], number by number."""
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).long()
    numbers = MAGNITUDES[codes & 7] * torch.where(codes & 8 > 0, -1.0, 1.0)
    return (numbers * 2.0 ** (scales.float() - 127.0)[..., None]).flatten(-2)


@pytest.fixture
def model(make_model, host, tmp_path: Path) -> Path:
    return make_model(**{**MODELS["gpt_oss"], "hidden_size": 64, "ffn_hidden_size": 32})


def test_experts_are_the_nearest_numbers_of_the_format(model, host, tmp_path: Path) -> None:
    convert(model, tmp_path / "plain", saver="hf", host=host)
    convert(model, tmp_path / "packed", saver="hf", options=OPTIONS, host=host)
    plain, packed = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "packed"))
    experts = [name for name in plain if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert len(experts) >= 4
    assert set(packed) == (set(plain) - set(experts)) | {
        f"{n}_{kind}" for n in experts for kind in ("blocks", "scales")
    }
    for name in experts:
        values = decoded(packed[f"{name}_blocks"], packed[f"{name}_scales"])
        groups = plain[name].float().transpose(1, 2).unflatten(-1, (-1, 32))
        off = (values.unflatten(-1, (-1, 32)) - groups).abs()
        # Half of the widest step, 2 of 6; a number above 1.75 powers of two counts as the next.
        assert bool((off <= groups.abs().amax(-1, keepdim=True) / 3.5).all())
        assert off.mean() < 0.12 * groups.abs().mean()
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "mxfp4"


def test_what_was_in_mxfp4_is_so_again(model, host, tmp_path: Path) -> None:
    """Files written from a packed folder have its values to the last bit, and the second time its bytes."""
    for source, target in ((model, "one"), (tmp_path / "one", "two")):
        convert(source, tmp_path / target, saver="hf", options=OPTIONS, host=host)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    readers = [open_checkpoint(tmp_path / name, host) for name in ("one", "two")]
    for name in readers[0].shapes():
        assert torch.equal(readers[0].read(name).float(), readers[1].read(name).float()), name
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_other_models_are_refused(make_model, host, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mxfp4-experts is for models whose experts are in one tensor"):
        convert(make_model(**LLAMA), tmp_path / "out", saver="hf", options=OPTIONS, host=host)
