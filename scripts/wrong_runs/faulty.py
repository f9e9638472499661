"""Runs that go wrong by what happens to them: a slow rank, slow data, a leak, a bug of a layout."""

from __future__ import annotations

import mmap
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scripts.wrong_runs.cases import BASE, CORPUS, case, good, train

import mt_core
from mt_core.config import load_config
from mt_core.interfaces import Dataset
from mt_core.testing import run_ranks
from mt_core.train import Trainer
from mt_core.train.callbacks import Callback, Metrics, Run

SHORT = {"train.train_iters": 60, "train.micro_batch_size": 4}
SLOW_SECONDS = 0.05


def train_on_rank(rank: int, world: int, folder: str, name: str, slow: int | None) -> None:
    """slow: rank whose forward passes take longer."""
    run = trainer(Path(folder), name)
    if rank == slow:
        run.model.register_forward_pre_hook(lambda module, inputs: time.sleep(SLOW_SECONDS))
    run.train()


def trainer(folder: Path, name: str, **options: Any) -> Trainer:
    values = [f"{key}={value}" for key, value in {**BASE, **CORPUS, **SHORT}.items()]
    return Trainer(load_config(preset="gpt-tiny", overrides=values), run_dir=folder / name, **options)


@case(
    "slow-rank",
    plot=["even", "slow-rank", "--metric", "iteration_time"],
    command=["watch", "slow-rank", "--once"],
    words=["rank 1 on ", "waits least for others: they wait for it"],
)
def slow_rank(folder: Path) -> None:
    """One of two data-parallel ranks takes 50 ms longer for each forward pass."""
    for name, slow in (("even", None), ("slow-rank", 1)):
        if not (folder / name).exists():
            run_ranks(2, train_on_rank, str(folder), name, slow)


class SlowData:
    """A data set on a slow disk."""

    def __init__(self, data: Dataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        time.sleep(SLOW_SECONDS)
        return self.data[index]

    def describe(self, index: int) -> str:
        return self.data.describe(index)


@case(
    "slow-data",
    plot=["slow-data", "--metric", "parts/data_wait"],
    command=["watch", "slow-data", "--once"],
    words=["time of the last lines: data wait "],
)
def slow_data(folder: Path) -> None:
    """Each sample takes 50 ms."""
    if not (folder / "slow-data").exists():
        data = trainer(folder, "unused").train_data
        trainer(folder, "slow-data", train_data=SlowData(data)).train()


LEAKED = 4 * 2**20
"""Bytes of each step."""


class Leak(Callback):
    """Keeps 4 MiB of each step."""

    def __init__(self) -> None:
        self.kept: list[mmap.mmap] = []

    def on_step_end(self, run: Run, metrics: Metrics) -> None:
        # Pages of their own: an array could lie in memory that the allocator has kept from before the run.
        pages = mmap.mmap(-1, LEAKED)
        pages.write(b"x" * LEAKED)
        self.kept.append(pages)


@case(
    "memory-leak",
    plot=["leak", "--metric", "host_memory_gb"],
    command=["watch", "leak", "--once"],
    words=["host memory grows by 4", "MiB a step"],
)
def memory_leak(folder: Path) -> None:
    if (folder / "leak").exists():
        return
    values = {**BASE, **CORPUS, **SHORT, "train.callbacks": '["host_memory"]'}
    config = load_config(preset="gpt-tiny", overrides=[f"{key}={value}" for key, value in values.items()])
    Trainer(config, run_dir=folder / "leak", callbacks=[Leak()]).train()


# -- a bug of a layout --------------------------------------------------------------------------------

SUMS = "for axis, parts in partial.items():"
NO_SUMS = "for axis, parts in list(partial.items())[:0]:"
FILES = ["good/config.json", "layout-bug/config.json"]
LAYOUT = {"parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": "true"}


@case(
    "layout-bug",
    plot=["good", "layout-bug", "--smooth", "10"],
    command=["compare", "--deep", *FILES, "--steps", "1", "--python-b", "./python"],
    words=["the first that differ:", "gradient of decoder.layers.1.pre_mlp_layernorm.weight"],
)
def layout_bug(folder: Path) -> None:
    """Sequence parallelism without the sum of the norms' gradients over ranks, in a copy of mt."""
    good(folder)
    python = changed_python(folder)
    train(folder, "layout-bug", LAYOUT, "--nproc", "2", python=str(python))


def changed_python(folder: Path) -> Path:
    """An interpreter whose mt_core has the bug."""
    copy = folder / "changed/mt_core"
    if not copy.exists():
        shutil.copytree(Path(mt_core.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
        file = copy / "optim/finalize_grads.py"
        file.write_text(file.read_text().replace(SUMS, NO_SUMS))
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{copy.parent}:$PYTHONPATH" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return python
