"""A trained model with bytes as tokens, for all tests of evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mt_cli.main import run
from mt_infer.text import TextGenerator

KEYS = {
    "model.num_layers": 2,
    "model.hidden_size": 16,
    "model.num_attention_heads": 2,
    "data.seq_length": 32,
    "data.corpus_bytes": 1000000,
    "train.micro_batch_size": 2,
    "train.train_iters": 2,
    "train.eval_interval": 2,
    "train.eval_iters": 1,
    "train.sample_tokens": 2,
    "train.num_threads": 1,
    "lr_schedule.lr_warmup_iters": 1,
}


def train(folder: Path, **keys: object) -> Path:
    """keys: in place of KEYS; None leaves one out."""
    settings = {key: value for key, value in {**KEYS, **keys}.items() if value is not None}
    options = [option for key, value in settings.items() for option in ("--set", f"{key}={value}")]
    assert run(["train", "--run-dir", str(folder), *options]) == 0
    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("evaluated") / "run")


@pytest.fixture(scope="session")
def generator(model: Path) -> Iterator[TextGenerator]:
    loaded = TextGenerator.load(model, device="cpu", settings={"inference": {"cache_memory_gb": 0.05}})
    yield loaded
    loaded.close()
