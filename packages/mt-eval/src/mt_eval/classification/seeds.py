"""The same finetuning with several seeds: mean and deviation of the scores."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mt_core.checkpoint_lookup import BestRecord
from mt_core.config.loading import LoadedConfig
from mt_core.errors import TrainingError
from mt_core.plugins import PluginHost
from mt_core.train.checkpoint.run_directory import METRICS_FILE
from mt_core.train.trainer import Trainer

LoadForSeed = Callable[[int], LoadedConfig]


@dataclass(frozen=True)
class SeedScores:
    """Of one run: the evaluation at `iteration`, the best by checkpoint.best_metric, else the last."""

    seed: int
    iteration: int
    values: Mapping[str, float]


def finetune_seeds(load: LoadForSeed, seeds: Sequence[int], folder: Path, host: PluginHost) -> list[SeedScores]:
    """One run after another, in `folder/seed-N`; a killed one goes on, and a complete one is only read. Collective."""
    return [_finetune(load(seed), seed, folder / f"seed-{seed}", host) for seed in seeds]


def _finetune(loaded: LoadedConfig, seed: int, run_dir: Path, host: PluginHost) -> SeedScores:
    """Raises TrainingError for a run that a signal or train.exit_iteration stops, so that no other one is begun."""
    # The Trainer resumes what is in run_dir, and returns at once where the run is complete.
    trainer = Trainer(loaded, run_dir=run_dir, host=host)
    stopped = trainer.train().stopped
    if stopped is not None:
        raise TrainingError(
            f"the run of seed {seed} was stopped by {stopped} after step {trainer.state.iteration}; the same command "
            "goes on from there"
        )
    record = None if trainer.best is None else trainer.best.record
    if record is None or record.iteration == trainer.state.iteration:
        return SeedScores(seed, trainer.state.iteration, trainer.last_evaluation)
    # The best evaluation is an earlier one, whose values the trainer does not hold; they are in the log.
    return SeedScores(seed, record.iteration, _evaluation_of(record, run_dir / METRICS_FILE))


def _evaluation_of(best: BestRecord, metrics: Path) -> dict[str, float]:
    """The last one of its step in metrics.jsonl that has its metric; lines of evaluators have others."""
    lines = (json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines())
    found = [line for line in lines if line["iteration"] == best.iteration and best.metric in line]
    return {name: value for name, value in found[-1].items() if name not in ("kind", "iteration")}


def summary(runs: Sequence[SeedScores]) -> dict[str, float]:
    """By metric the mean over the runs, and as `<metric>_stdev` the sample standard deviation (0 of one run)."""
    values: dict[str, float] = {}
    for name in runs[0].values:
        column = [run.values[name] for run in runs]
        values[name] = statistics.fmean(column)
        values[f"{name}_stdev"] = statistics.stdev(column) if len(column) > 1 else 0.0
    return values
