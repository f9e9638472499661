"""Every recipe in examples/ is a configuration that holds together, and trains where its data needs no preparing."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from mt_cli.main import run

RECIPES = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))


def test_there_are_recipes() -> None:
    assert len(RECIPES) >= 5


NEEDS_CHECKPOINT = {"facts-retro", "facts-sft"}
"""Their models are those of runs; tests/eval/test_qa.py trains from them."""


@pytest.mark.parametrize(
    "recipe", [path for path in RECIPES if path.stem not in NEEDS_CHECKPOINT], ids=lambda path: path.stem
)
def test_a_recipe_is_valid(recipe: Path, capsys) -> None:
    assert run(["config", "validate", str(recipe)]) == 0


FAMILIES = {
    *("gpt", "llama", "mistral", "qwen", "gemma", "mamba", "hybrid", "retro"),
    *("bert", "t5", "biencoder", "vision", "llava", "smolvlm", "internvl", "qwen_vl", "qwen3_vl", "qwen_next_vl"),
    *("gemma4_vl", "mistral3", "kimi_k25", "minimax_m3_vl", "qwen3_omni"),
}
NEEDS_FILES = {"bert", "t5", "ict", "retriever-ict", "retriever-dpr", "shapes"}
NEEDS_FILES |= {"facts-gpt", "facts-retro", "facts-sft"}
"""Trained in tests/models/test_bert_training.py, tests/retrieval and tests/eval, on data made by the commands of their
pages."""
NEEDS_RANKS = {"gpt-3d", "gpt3-175b"}
TRAINED = [recipe for recipe in RECIPES if recipe.stem not in NEEDS_FILES | NEEDS_RANKS]
QUICK = [
    "train.train_iters=3",
    "train.micro_batch_size=2",
    "train.eval_iters=1",
    "train.sample_tokens=2",
    "train.num_threads=1",
    "lr_schedule.lr_warmup_iters=1",
    "logging.log_interval=1",
    "logging.progress=none",
]


def test_every_dense_and_state_space_family_has_a_recipe() -> None:
    families = {tomllib.loads(recipe.read_text()).get("model", {}).get("family", "gpt") for recipe in RECIPES}
    assert families >= FAMILIES


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("recipe", TRAINED, ids=lambda path: path.stem)
def test_a_recipe_trains(recipe: Path, tmp_path: Path, capsys) -> None:
    """Three steps of two samples: finite losses near each other, an evaluation, a checkpoint."""
    data = tomllib.loads(recipe.read_text()).get("data", {}).get("dataset_type", "builtin")
    settings = [*QUICK, *(["data.corpus_bytes=1000000"] if data.startswith("builtin") else [])]
    options = [part for setting in settings for part in ("--set", setting)]
    assert run(["train", str(recipe), *options, "--run-dir", str(tmp_path / "run")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert len(losses) == 3
    assert losses[-1] < losses[0] + 0.5
    assert [line for line in lines if line["kind"] == "valid"]
    assert (tmp_path / "run" / "checkpoints" / "latest").exists()
