"""Folders that transformers' class without a head wrote: weights and hidden states are what it computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from mt_ckpt.convert import convert
from mt_ckpt.hugging_face.reader import read_module
from mt_core.plugins import load_plugins

SIZES: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 36, "intermediate_size": 50, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 64,
}  # fmt: skip
MODELS: dict[str, tuple[Any, Any]] = {
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3Model),
    "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3TextModel),
}


def base_model(name: str, *, is_tied: bool) -> Any:
    config, model = MODELS[name]
    torch.manual_seed(0)
    return model(config(**SIZES, tie_word_embeddings=is_tied)).eval()


def with_pictures() -> Any:
    vision = {
        "depth": 2, "hidden_size": 24, "num_heads": 3, "intermediate_size": 40, "out_hidden_size": 36, "patch_size": 4,
        "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
    }  # fmt: skip
    rope = {"rope_type": "default", "mrope_section": [1, 1, 1], "mrope_interleaved": True, "rope_theta": 1e4}
    text = {**SIZES, "rope_parameters": rope}
    return transformers.Qwen3VLModel(transformers.Qwen3VLConfig(vision_config=vision, text_config=text)).eval()


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("name", list(MODELS))
def test_hidden_states_are_kept(name: str, is_tied: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = base_model(name, is_tied=is_tied)
    model.save_pretrained(tmp_path / "base")
    convert(tmp_path / "base", tmp_path / "back", saver="hf", host=load_plugins())
    # An LM head that the folder lacks is no silent matter.
    assert ("texts that it continues mean nothing" in caplog.text) is not is_tied
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    ids = torch.randint(131, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(back.base_model(ids).last_hidden_state, model(ids).last_hidden_state)


def test_a_module_in_memory_is_read_too() -> None:
    reader = read_module(base_model("qwen3", is_tied=False), load_plugins())
    assert reader.metadata["config"]["model"].get("untie_embeddings_and_output_weights", False) is False


def test_of_pictures_and_text(tmp_path: Path) -> None:
    model = with_pictures()
    model.save_pretrained(tmp_path / "base")
    convert(tmp_path / "base", tmp_path / "back", saver="hf", host=load_plugins())
    back = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "back", dtype=torch.float32)
    theirs, ours = model.state_dict(), back.base_model.state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
