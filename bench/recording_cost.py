"""What default recording costs: the parts of the time, a line of metrics.jsonl, and the status file.

`python bench/recording_cost.py`: processor time of each by itself, and their share of a step of gpt-tiny with 2
micro-batches, a line of the log each 10 steps and a status each second. Measured by themselves, as the difference of
two runs is below their noise.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mt_core.config import load_config
from mt_core.launch.phases import Phases
from mt_core.train import Callback, Trainer
from mt_core.train.reporting.event_log import StatusFile
from mt_core.train.reporting.log_files import MetricsJsonl

STEPS, LINES = 40, 2000
PARTS_OF_A_STEP = 9
"""Waiting for the batch, two passes of two micro-batches, the reduction, the results twice, the optimizer."""


class Steps(Callback):
    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.metrics: Mapping[str, Any] = {}

    def on_step_end(self, run: Any, metrics: Mapping[str, Any]) -> None:
        self.seconds.append(float(metrics["iteration_time"]))
        self.metrics = dict(metrics)


def cost(call: Callable[[], object], count: int) -> float:
    """Seconds of processor time of a call."""
    began = time.process_time()
    for _ in range(count):
        call()
    return (time.process_time() - began) / count


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        overrides = [f"train.train_iters={STEPS}", "train.eval_interval=null", "train.sample_prompt=null"]
        steps = Steps()
        loaded = load_config(preset="gpt-tiny", overrides=[*overrides, "train.micro_batch_size=8"])
        trainer = Trainer(loaded, run_dir=folder, callbacks=[steps])
        trainer.train()
        parts = trainer.time

        def enter_and_leave() -> None:
            with parts("forward"):
                pass

        lines = MetricsJsonl()
        lines.on_train_start(trainer)
        status = StatusFile(Path(folder), Phases(), trainer, 1.0)
        each = {
            "parts of a step": PARTS_OF_A_STEP * cost(enter_and_leave, 100_000),
            "a line of metrics.jsonl, each 10 steps": cost(lambda: lines.on_log(trainer, steps.metrics), LINES) / 10,
            "the status, each second": cost(status._write, LINES) * statistics.median(steps.seconds),
        }
        lines.close()
    step = statistics.median(steps.seconds)
    shares = {name: seconds / step for name, seconds in each.items()}
    print(
        json.dumps(
            {"step_ms": 1000 * step, "share_percent": {n: round(100 * s, 4) for n, s in shares.items()}}, indent=2
        )
    )
    print(f"together {100 * sum(shares.values()):.3f} % of a step; the bound is 0.5 %")


if __name__ == "__main__":
    main()
