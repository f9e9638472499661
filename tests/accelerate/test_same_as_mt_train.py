"""A script's losses are those of `mt train` on the same data and layout; `mt launch` starts such a script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.accelerate import programs
from tests.accelerate.programs import STEPS, build, samples, start

from mt_accelerate import Accelerator, MegatronLMPlugin
from mt_accelerate.utils import MegatronLMDummyDataLoader, MegatronLMDummyScheduler
from mt_core.config.loading import LoadedConfig
from mt_core.train import Callback, Trainer


class Losses(Callback):
    def __init__(self) -> None:
        self.found: list[float] = []

    def on_step_end(self, run: Any, metrics: Any) -> None:
        self.found.append(metrics["loss"])


class ShiftedSamples:
    """The script's samples, again and again, as mt's data sets have them."""

    def __init__(self) -> None:
        self.rows = samples("gpt2")

    def __len__(self) -> int:
        return programs.TOTAL * programs.GLOBAL_BATCH

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        row = self.rows[index % len(self.rows)]
        labels = np.append(row["labels"].numpy()[1:], -100)
        tokens = row["input_ids"].numpy()
        return {"tokens": tokens, "labels": labels, "loss_mask": (labels != -100).astype(np.float32)}


def losses_of_mt_train(config: Any, folder: Path, data: Any = None) -> list[float]:
    build("gpt2").save_pretrained(folder)
    checkpoint = config.checkpoint.model_copy(update={"load": str(folder)})
    train = config.train.model_copy(update={"exit_iteration": STEPS, "eval_interval": None, "eval_iters": 0})
    losses = Losses()
    loaded = LoadedConfig(config.model_copy(update={"checkpoint": checkpoint, "train": train}), {}, None)
    Trainer(loaded, train_data=data, valid_data={}, callbacks=[losses]).train()
    return losses.found


@pytest.mark.slow
def test_a_script_has_the_losses_of_mt_train(tmp_path: Path) -> None:
    _, model, _, loader, _ = start("gpt2", {}, 1)
    found = [model(**batch).loss.item() for batch, _ in zip(loader, range(STEPS), strict=False)]
    assert found == pytest.approx(losses_of_mt_train(model.config, tmp_path, ShiftedSamples()), rel=1e-7)


@pytest.mark.slow
def test_data_sets_of_mt_come_as_three_iterators(tmp_path: Path) -> None:
    data = MegatronLMDummyDataLoader(dataset_type="mock", seq_length=16, micro_batch_size=2)
    accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin(num_micro_batches=2, eval_iters=1), cpu=True)
    model = build("gpt2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = MegatronLMDummyScheduler(optimizer, total_num_steps=10)
    model, _, _, train, valid, _ = accelerator.prepare(model, optimizer, scheduler, data, data, data)
    found = [model(**next(train)).loss.item() for _ in range(STEPS)]
    assert model.consumed_samples == 4 * STEPS
    model.eval()
    first, again = (model(**next(valid)).loss.item() for _ in range(2))
    assert first == again
    assert found == pytest.approx(losses_of_mt_train(model.config, tmp_path), rel=1e-7)


SCRIPT = """
import sys
from tests.accelerate import programs
found = programs.train("gpt2", {}, 2, sys.argv[sys.argv.index("--folder") + 1])
if found["main"]:
    print("losses", *found["losses"])
"""
YAML = """
distributed_type: MEGATRON_LM
num_processes: 2
mixed_precision: 'no'
use_cpu: true
megatron_lm_config: {megatron_lm_use_distributed_optimizer: true, megatron_lm_gradient_clipping: 1.0}
"""


@pytest.mark.dist
@pytest.mark.slow
def test_mt_launch_runs_a_script_with_the_files_layout(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "megatron.yaml").write_text(YAML)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    command = [sys.executable, "-m", "mt_cli", "launch", "--config_file", str(tmp_path / "megatron.yaml")]
    command += [str(tmp_path / "script.py"), "--", "--folder", str(tmp_path / "state")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("losses")]
    alone = programs.train("gpt2", {}, 1, str(tmp_path / "alone"))
    assert [float(word) for word in line.split()[1:]] == pytest.approx(alone["losses"], rel=1e-4)
    assert (tmp_path / "state" / "checkpoints" / "latest").is_file()
