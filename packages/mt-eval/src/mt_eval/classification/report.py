"""Runs with several seeds as one result file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mt_core.config.schema import Config
from mt_eval.classification.seeds import SeedScores, summary
from mt_eval.provenance import describe_run
from mt_eval.results import Evaluation, TaskResult


def seeds_evaluation(runs: Sequence[SeedScores], folder: Path, config: Config) -> Evaluation:
    """A task `seed-N` for each run, and `all` with means and standard deviations."""
    tasks = {f"seed-{run.seed}": TaskResult(run.values, 1, settings={"iteration": run.iteration}) for run in runs}
    seeds = {"seeds": [run.seed for run in runs]}
    tasks["all"] = TaskResult(summary(runs), len(runs), settings=seeds)
    provenance = {"runs": str(folder), "config": config.to_dict(), **describe_run(config.train.device)}
    return Evaluation(tasks, provenance)
