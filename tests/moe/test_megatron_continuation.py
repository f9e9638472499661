"""An MoE model that Megatron began to train goes on here, in one process or with its experts over two: the losses,
gradient norms and weights that Megatron printed for three more steps, from each of its formats and layouts.

Megatron's files of this model hold no optimizer, so the steps are those that it made with a new one.
"""

from __future__ import annotations

import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mt_core.checkpoint_specs import CHECKPOINT_LOADERS, CHECKPOINT_SAVERS, ConvertOptions
from mt_core.config.loading import load_config
from mt_core.nn.layout import parameter_layouts
from mt_core.plugins import load_plugins
from mt_core.testing import run_ranks
from mt_core.train import Callback, Trainer

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif("MT_GOLDEN" not in os.environ, reason="MT_GOLDEN does not name the folder of golden files"),
]
pytest.importorskip("mt_ckpt")

FOLDERS = ["legacy_tp1_pp1", "legacy_tp1_pp1_ep2", "dist_tp1_pp1", "dist_tp1_pp1_ep2"]
PADDED = 128
"""Megatron's loss is over the padded vocabulary."""
RUN = [
    "data.seq_length=32",
    "tokenizer.tokenizer_type=NullTokenizer",
    "tokenizer.vocab_size=100",
    "train.micro_batch_size=2",
    "train.global_batch_size=4",
    "train.train_iters=3",
    "train.eval_interval=null",
    "train.num_threads=1",
    "optimizer.lr=1e-3",
    "optimizer.min_lr=1e-4",
    "optimizer.weight_decay=0.1",
    "optimizer.adam_beta2=0.95",
    "lr_schedule.lr_decay_style=constant",
    "checkpoint.save_interval=null",
    "logging.progress=none",
]


class Rows:
    """The rows of the batches of three steps, [3, 4, 33]."""

    def __init__(self, batches: np.ndarray) -> None:
        self.rows = batches.reshape(-1, 33).astype(np.int64)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        row = self.rows[index]
        mask = np.ones(32, np.float32)
        return {"tokens": row[:-1], "labels": row[1:], "loss_mask": mask, "position_ids": np.arange(32)}


class Steps(Callback):
    def __init__(self) -> None:
        self.metrics: list[tuple[float, float]] = []

    def on_step_end(self, run: Trainer, metrics: Any) -> None:
        self.metrics.append((float(metrics["loss"]), float(metrics["grad_norm"])))


@cache
def golden() -> Path:
    return Path(os.environ["MT_GOLDEN"]) / "ckpt/moe"


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folder of Megatron's -> the same checkpoint in mt's format."""
    host, found = load_plugins(), {}
    for folder in FOLDERS:
        (loader,) = [spec for spec in host[CHECKPOINT_LOADERS] if spec.detect.load()(golden() / folder)]
        reader = loader.open.load()(golden() / folder, host, PADDED)
        found[folder] = tmp_path_factory.mktemp("mt") / folder
        host[CHECKPOINT_SAVERS].get("mt").convert.load()(found[folder], reader, ConvertOptions(), host)
    return found


def goes_on(rank: int, world: int, path: Path, ep: int, data: Path) -> tuple[list[tuple[float, float]], dict[str, Any]]:
    """Loss and gradient norm of each step; the sum of magnitudes of each canonical weight after the last."""
    host = load_plugins()
    stored = json.loads((path / "metadata.json").read_text())["config"]["model"]
    model = [f"model.{key}={json.dumps(value)}" for key, value in _flat(stored).items() if value is not None]
    layout = [f"parallel.expert_model_parallel_size={ep}", f"checkpoint.load={path}"]
    steps = Steps()
    batches = np.load(data)["batches_3_to_5"]
    trainer = Trainer(
        load_config(overrides=[*model, *RUN, *layout], host=host),
        host=host,
        train_data=Rows(batches),
        valid_data={},
        callbacks=[steps],
    )
    trainer.train()
    layouts = parameter_layouts(trainer.model)
    weights = {
        name: layouts[name].to_canonical(parameter.detach(), trainer.ctx).double().abs()
        for name, parameter in trainer.model.named_parameters()
    }
    sums = {
        name: w.flatten(1).sum(1).tolist() if ".experts." in name else w.sum().item() for name, w in weights.items()
    }
    return steps.metrics, sums


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Keys of tables joined by points."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def assert_megatrons(metrics: list[tuple[float, float]], sums: dict[str, Any]) -> None:
    expected = json.loads((golden() / "expected.json").read_text())
    for (loss, norm), theirs in zip(metrics, expected["steps_3_to_5_fresh_optimizer_constant_lr"], strict=True):
        assert loss == pytest.approx(theirs["loss"], rel=1e-5)
        assert norm == pytest.approx(theirs["grad_norm"], rel=1e-4)
    for stored, (_, magnitude) in expected["param_sums_after_step_5_fresh"].items():
        expert = re.fullmatch(r"(.*\.experts)\.local_experts\.(\d+)(\..*)", stored)
        mine = sums[expert[1] + expert[3]][int(expert[2])] if expert else sums[stored]
        assert mine == pytest.approx(magnitude, rel=1e-4), stored


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS)
def test_one_process_makes_megatrons_steps(converted, folder) -> None:
    ((metrics, sums),) = run_ranks(1, goes_on, converted[folder], 1, golden() / "logits.npz")
    assert_megatrons(metrics, sums)


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["legacy_tp1_pp1", "dist_tp1_pp1_ep2"])
def test_two_processes_with_sharded_experts_make_megatrons_steps(converted, folder) -> None:
    for metrics, sums in run_ranks(2, goes_on, converted[folder], 2, golden() / "logits.npz"):
        assert_megatrons(metrics, sums)


def test_every_folder_holds_the_same_weights(converted) -> None:
    from mt_core.checkpoint_lookup import open_checkpoint

    first, *others = (open_checkpoint(converted[folder], load_plugins()) for folder in FOLDERS)
    assert sum(".mlp.experts." in name for name in first.shapes()) == 4 * 2
    for other in others:
        assert other.shapes() == first.shapes()
        assert all(torch.equal(other.read(name), first.read(name)) for name in first.shapes())
