"""`examples/mixtral-tiny.toml` over processes, experts sharded over two: the curve of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.command_on_ranks import fork_ranks

from mt_cli import main
from mt_core.config.loading import load_config
from mt_core.testing import run_ranks
from mt_tools.verify.comparison import compare
from mt_tools.verify.run_record import RunRecord, record_run

pytestmark = [pytest.mark.dist, pytest.mark.slow]

RECIPE = Path(__file__).parents[2] / "examples" / "mixtral-tiny.toml"
EP2 = "parallel.expert_model_parallel_size=2"
SHORT = (
    "model.num_layers=2",
    "data.seq_length=32",
    "data.corpus_bytes=1000000",
    "train.train_iters=4",
    "train.num_threads=1",
    "train.eval_interval=null",
    "train.eval_iters=1",
    "train.sample_tokens=2",
    "lr_schedule.lr_warmup_iters=1",
    "checkpoint.save_interval=null",
    "logging.log_interval=1",
    "logging.progress=none",
)


def run(rank: int, world: int, layout: tuple[str, ...]) -> RunRecord | None:
    torch.set_num_threads(1)
    record = record_run(load_config(RECIPE, overrides=[*SHORT, *layout]), steps=3)
    return record if rank == 0 else None


def test_losses_gradients_and_weights_are_those_of_one_process(monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (alone,), (found, *_) = run_ranks(1, run, ()), run_ranks(4, run, (EP2,))
    assert alone.losses[-1] < alone.losses[0]
    differences = compare(found, alone)
    assert any("mlp.experts.linear_fc1.weight" in difference.name for difference in differences)
    assert not [str(difference) for difference in differences if difference.too_large]


def losses(run_dir: Path) -> list[float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


def test_the_command_gives_the_curve_of_one_process(tmp_path, monkeypatch) -> None:
    fork_ranks(monkeypatch)
    command = ["train", str(RECIPE), *(part for setting in SHORT for part in ("--set", setting))]
    assert main.run([*command, "--run-dir", str(tmp_path / "alone")]) == 0
    assert main.run([*command, "--nproc", "2", "--set", EP2, "--run-dir", str(tmp_path / "sharded")]) == 0
    alone = losses(tmp_path / "alone")
    assert len(alone) == 4
    assert losses(tmp_path / "sharded") == pytest.approx(alone, rel=1e-4)
