"""Rotary positions that a run changes: transformers reads them from the exported folder, and keys that change nothing
are refused. Costs about a CPU second."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.tune.sft.test_command import write_data, write_folder

from mt_cli.main import run
from mt_core.config import load_config
from mt_core.errors import ConfigError
from mt_core.train import Trainer
from mt_core.train.callbacks import Callback

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

KEYS = {
    "theta": ("model.rotary_base=500000.0", "model.max_position_embeddings=256"),
    "yarn": (
        "model.rope_scaling_type=yarn",
        "model.rope_scaling_factor=4.0",
        "model.original_max_position_embeddings=128",
        "model.max_position_embeddings=512",
    ),
    "llama3": (
        "model.rope_scaling_type=llama3",
        "model.rope_scaling_factor=8.0",
        "model.original_max_position_embeddings=128",
        "model.max_position_embeddings=1024",
    ),
}
"""Ways to lengthen a model of 128 positions."""
WRITTEN = {
    "theta": {"rope_type": "default", "rope_theta": 500000.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 128},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    write_data(place / "chats.jsonl")
    return write_folder(place / "small")


class Messages(Callback):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_message(self, run: object, text: str) -> None:
        self.texts.append(text)


def trained(folder: Path, run_dir: Path, *keys: str) -> tuple[Trainer, list[str]]:
    settings = [
        f"checkpoint.load={json.dumps(str(folder))}",
        "data.dataset_type=sft",
        f"data.data_path=[{json.dumps(str(folder.parent / 'chats.jsonl'))}]",
        'data.split="1,0,0"',
        "train.micro_batch_size=2",
        "train.global_batch_size=2",
        "train.train_iters=2",
        "train.eval_interval=null",
        "train.sample_prompt=null",
        "optimizer.lr=0.001",
        "logging.progress=none",
        *keys,
    ]
    messages = Messages()
    trainer = Trainer(load_config(overrides=settings), run_dir=run_dir, callbacks=[messages])
    trainer.train()
    return trainer, [text for text in messages.texts if text.startswith("positions: ")]


@pytest.mark.parametrize("name", KEYS)
def test_transformers_reads_the_changed_positions(folder: Path, tmp_path: Path, name: str) -> None:
    trainer, messages = trained(folder, tmp_path / "run", "data.seq_length=256", *KEYS[name])
    assert len(messages) == 1
    assert "frequencies differ from those of the checkpoint" in messages[0]
    words = ["--loader", "auto", "--load-dir", str(tmp_path / "run"), "--saver", "hf", "--save-dir"]
    assert run(["convert", *words, str(tmp_path / "out")]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.rope_parameters.items() >= WRITTEN[name].items()
    # Behind the 128 positions that the model had.
    tokens = torch.randint(0, 256, (1, 200), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        ours, theirs = trainer.engine.model(tokens), model(tokens).logits
    assert torch.allclose(ours[..., : theirs.shape[-1]], theirs, atol=2e-5)


@pytest.mark.parametrize(
    "keys",
    [
        ("model.rope_scaling_type=linear", "model.rope_scaling_factor=1.0"),
        # By the length of a text, and no sample is longer than the positions that the model had.
        ("model.rope_scaling_type=dynamic", "model.rope_scaling_factor=4.0"),
    ],
)
def test_keys_that_change_no_position_are_refused(folder: Path, tmp_path: Path, keys: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"(?s)model\.ro.* so that nothing has changed"):
        trained(folder, tmp_path / "run", "data.seq_length=64", *keys)


def test_positions_that_nobody_changed_are_passed_over(folder: Path, tmp_path: Path) -> None:
    """Also by a run's own configuration, which has every key."""
    trainer, messages = trained(folder, tmp_path / "run", "data.seq_length=64")
    assert messages == []
    assert trainer.directory is not None
    again = load_config(tmp_path / "run" / "config.json")
    Trainer(again, run_dir=tmp_path / "again").train()
