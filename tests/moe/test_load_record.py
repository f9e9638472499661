"""expert-load.jsonl: the load of every expert at lines of the log. 2 s: a training of 6 steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mt_core.config import load_config
from mt_core.train import Trainer
from mt_moe.load_record import percent_of_mean


def test_percent_of_the_mean() -> None:
    assert percent_of_mean([3.0, 1.0, 0.0, 4.0]) == [150, 50, 0, 200]
    assert percent_of_mean([0.0, 0.0]) == [0, 0]


@pytest.mark.slow
def test_a_run_records_every_layer_and_expert(tmp_path: Path) -> None:
    model = ("num_layers=2", "hidden_size=32", "num_attention_heads=2", "num_query_groups=1", "moe.num_experts=4")
    keys = ["data.seq_length=16", "data.corpus_bytes=100000", "train.eval_iters=0", "logging.log_interval=2"]
    steps = ["train.train_iters=6", "lr_schedule.lr_warmup_iters=1", "train.global_batch_size=4"]
    config = load_config("examples/mixtral-tiny.toml", overrides=[*(f"model.{key}" for key in model), *keys, *steps])
    Trainer(config, run_dir=tmp_path).train()
    lines = [json.loads(line) for line in (tmp_path / "expert-load.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [1, 2, 4, 6]
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    logged = [line for line in metrics if line["kind"] == "train"]
    for line, of_log in zip(lines, logged, strict=True):
        assert sorted(line["layers"]) == ["0", "1"]
        for layer, loads in line["layers"].items():
            # The router's own measure of the same step, computed from counts.
            assert max(loads) == pytest.approx(100 * of_log[f"moe/layer_{layer}/load_max_over_mean"], abs=0.5)
            assert sum(loads) == pytest.approx(400, abs=2)
