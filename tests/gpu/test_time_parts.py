"""On a GPU: the parts of a step's time, which the host measures while it runs ahead of the device."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from mt_core.config.loading import load_config
from mt_core.plugins import load_plugins
from mt_core.train import Callback, Trainer
from mt_core.train.time_parts import TimeParts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PARTS = ("forward", "backward", "optimizer")
WARM_UP, STEPS = 5, 20


def settings() -> list[str]:
    """Steps whose kernels take longer than the host takes to launch them."""
    return [
        "model.num_layers=8",
        "model.hidden_size=1024",
        "model.num_attention_heads=8",
        "data.seq_length=1024",
        "data.num_workers=0",
        "model.max_position_embeddings=1024",
        "train.micro_batch_size=16",
        "train.global_batch_size=16",
        f"train.train_iters={STEPS}",
        "train.eval_iters=0",
        "train.eval_interval=null",
        "train.sample_prompt=null",
        "checkpoint.save_interval=null",
        "logging.progress=none",
        "logging.log_interval=1",
        "precision.dtype=bf16",
    ]


class Measured(Callback):
    """Seconds by part, and of the host's clock, after the warm-up."""

    def on_step_end(self, run, metrics) -> None:
        if run.state.iteration in (WARM_UP, STEPS):
            torch.cuda.synchronize()
            totals, now = run.engine.time.totals(), time.perf_counter()
            if run.state.iteration == WARM_UP:
                self.before, self.began = totals, now
            else:
                self.parts = {part: seconds - self.before.get(part, 0.0) for part, seconds in totals.items()}
                self.wall = now - self.began


def measured(folder: Path) -> Measured:
    callback = Measured()
    loaded = load_config(preset="gpt-tiny", overrides=settings(), host=load_plugins())
    Trainer(loaded, callbacks=[callback], run_dir=folder).train()
    return callback


def test_parts_of_a_step_are_those_of_a_run_that_waits_at_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """About 20 s on a GPU."""
    ahead = measured(tmp_path / "ahead")
    enter = TimeParts.enter

    def enter_when_idle(self: TimeParts, part: str) -> str:
        """The host's clock alone, read when the device has nothing left to do."""
        torch.cuda.synchronize()
        self.device = torch.device("cpu")
        return enter(self, part)

    monkeypatch.setattr(TimeParts, "enter", enter_when_idle)
    waiting = measured(tmp_path / "waiting")
    assert sum(ahead.parts.values()) == pytest.approx(ahead.wall, rel=0.02)
    of_device = {part: ahead.parts[part] / sum(ahead.parts[p] for p in PARTS) for part in PARTS}
    expected = {part: waiting.parts[part] / sum(waiting.parts[p] for p in PARTS) for part in PARTS}
    print(f"wall {ahead.wall:.3f} s, waiting {waiting.wall:.3f} s; shares {of_device}; when waiting {expected}")
    assert of_device == pytest.approx(expected, abs=0.05)
