"""LLaVA's two stages with `mt train`: from a CLIP or SigLIP folder and a decoder's, the projection alone, then more."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.models.test_partial_load import weights

from mt_cli import main

transformers = pytest.importorskip("transformers")

TOWER = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
OF_TEXTS = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 50
}  # fmt: skip
LLAMA = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 261,
    "max_position_embeddings": 64,
}  # fmt: skip
RECIPE = """
[model]
family = "llava"
image_token_index = 261
{selection}
[tokenizer]
tokenizer_type = "ByteLevelTokenizer"
[data]
dataset_type = "captioned_shapes"
seq_length = 48
img_h = 16
img_w = 16
image_token_index = 261
image_seq_length = 4
[train]
micro_batch_size = 2
train_iters = 2
num_threads = 1
[lr_schedule]
lr_decay_style = "constant"
[logging]
progress = "plain"
"""
TOWERS = {
    "CLIP": ("CLIPModel", "CLIPConfig", "CLIPVisionModel", ""),
    "Siglip": (
        "SiglipModel",
        "SiglipConfig",
        "SiglipVisionModel",
        'vision_feature_select_strategy = "full"\nvision_feature_layers = [-1]',
    ),
}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("decoder")
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).save_pretrained(folder)
    return folder


def train(folder: Path, name: str, selection: str, *settings: str) -> int:
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE.format(selection=selection))
    options = [part for setting in settings for part in ("--set", setting)]
    return main.run(["train", str(recipe), "--run-dir", str(folder / name), *options])


@pytest.mark.slow
@pytest.mark.parametrize("tower", TOWERS)
def test_the_projection_is_trained_alone_and_then_all(host, tower: str, decoder: Path, tmp_path: Path, capsys) -> None:
    model_class, config_class, tower_class, selection = TOWERS[tower]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(vision_config=TOWER, text_config=OF_TEXTS)
    # The whole model, as published, and the tower alone have the same weights.
    getattr(transformers, model_class)(config).save_pretrained(tmp_path / "both")
    getattr(transformers, tower_class).from_pretrained(tmp_path / "both").save_pretrained(tmp_path / "tower")
    parts = f'checkpoint.load_parts={{vision_model="{tmp_path / "both"}", language_model="{decoder}"}}'
    first = [parts, 'checkpoint.load_missing=["vision_projection.*"]', 'model.freeze=["vision_model","language_model"]']
    assert train(tmp_path, "first", selection, *first) == 0
    assert train(tmp_path, "second", selection, f"checkpoint.load={tmp_path / 'first'}", "model.freeze=[]") == 0
    assert "parameters (544 of them trained)" in capsys.readouterr().out

    published = weights(host, tmp_path / "tower")
    published |= {f"language_model.{name}": tensor for name, tensor in weights(host, decoder).items()}
    first_stage, second_stage = (weights(host, tmp_path / name) for name in ("first", "second"))
    assert {name for name in first_stage if not name.startswith("vision_projection.")} == set(published)
    assert all(torch.equal(first_stage[name], tensor) for name, tensor in published.items())
    changed = {name.partition(".")[0] for name in first_stage if not torch.equal(first_stage[name], second_stage[name])}
    assert changed == {"vision_model", "vision_projection", "language_model"}


def test_parts_that_cannot_serve_are_named(decoder: Path, tmp_path: Path, capsys) -> None:
    cases = [
        ([f"checkpoint.load={decoder}", f'checkpoint.load_parts={{language_model="{decoder}"}}'], 2, "are both set"),
        ([f'checkpoint.load_parts={{language_model="{decoder}"}}'], 2, "model.vision_model is missing"),
        ([f'checkpoint.load_parts={{language_model="{tmp_path / "none"}"}}'], 5, "no such directory"),
        ([f'checkpoint.load_parts={{vision_model="{decoder}", language_model="{decoder}"}}'], 2, "model.vision_model"),
    ]
    for settings, code, words in cases:
        assert train(tmp_path, "run", "", *settings) == code
        assert words in " ".join(capsys.readouterr().err.split())
