"""Scores on named development sets of a task, files of predictions, and the same over several seeds."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from mt_core.checkpoint_lookup import BestRecord
from mt_core.config.loading import LoadedConfig
from mt_core.config.metrics import OVERALL
from mt_core.config.schema import Config
from mt_core.errors import DataError, TrainingError
from mt_core.parallel.context import is_writer
from mt_core.paths import writing
from mt_core.plugins import PluginHost
from mt_core.train.checkpoint.run_directory import METRICS_FILE
from mt_core.train.predictions import Predictions
from mt_core.train.trainer import Trainer
from mt_core.train.validation import together
from mt_eval.classification.model import TrainedClassifier, of_set, scores_of
from mt_eval.classification.predictions import SetPredictions, write_predictions
from mt_eval.evaluation import NAMED, Evaluation, TaskResult, describe_model, describe_run, samples_path
from mt_eval.tasks import Journal, Sample

OnSamples = Callable[[str, int, int], None]
"""(set, number of its samples, number of those that are done)."""


def evaluate_sets(
    classifier: TrainedClassifier,
    sets: Mapping[str, str],
    *,
    predictions: Path | None = None,
    output: Path | None = None,
    on_samples: OnSamples = lambda name, count, done: None,
) -> Evaluation:
    """Collective over the ranks of the model; the first one writes.

    sets: name -> file (folder of RACE). predictions: a folder for `NAME.jsonl` of each set. output: the result file;
    samples are written beside it. Raises DataError for a file without samples, and without labels if no predictions
    are requested.
    """
    # All files are opened before the first is predicted: an error in the last one shows at once.
    datasets = {name: classifier.dataset(file) for name, file in sets.items()}
    # Collective: every rank predicts every set in this order.
    predicted = {
        name: classifier.predict(dataset, partial(on_samples, name, len(dataset))) for name, dataset in datasets.items()
    }
    results = {
        name: _result(classifier, sets[name], name, set_predictions, predictions)
        for name, set_predictions in predicted.items()
    }
    if len(predicted) > 1:
        # The scores of all samples together, not the mean of the sets' scores.
        whole = together(list(predicted.values()))
        results[OVERALL] = _result(classifier, next(iter(sets.values())), OVERALL, whole, predictions)
    model = describe_model(classifier.trained.checkpoint, classifier.trained.config)
    provenance = {**model, **describe_run(str(classifier.ctx.device))}
    evaluation = Evaluation(results, provenance)
    # Every rank has all predictions; one of them writes.
    if is_writer():
        _write(predicted, evaluation, predictions, output)
    return evaluation


def _result(
    classifier: TrainedClassifier, file: str, name: str, predictions: Predictions, folder: Path | None
) -> TaskResult:
    of = of_set(predictions)
    scored, unlabelled = int(of.labelled.sum()), of.uids[~of.labelled].tolist()
    if not scored and folder is None:
        raise DataError(f"{name}: no sample of {file} has a label, so that nothing can be scored; give --predictions")
    return TaskResult(
        scores_of(predictions, classifier.metrics),
        scored,
        int(of.truncated.sum()),
        len(unlabelled),
        {str(uid): "it has no label" for uid in unlabelled[:NAMED]},
        _settings(classifier, file, of),
    )


def _settings(classifier: TrainedClassifier, file: str, of: SetPredictions) -> dict[str, Any]:
    data = classifier.config.data
    # uids and labels are what `mt eval compare` needs to be equal; outputs differ between models.
    digest = sha256(of.uids.tobytes() + of.labels.tobytes()).hexdigest()
    return {"task": data.dataset_type, "data": file, "data_hash": digest, "seq_length": data.seq_length}


def _write(
    predicted: Mapping[str, Predictions], evaluation: Evaluation, predictions: Path | None, output: Path | None
) -> None:
    if predictions is not None:
        with writing(predictions, "--predictions"):
            for name, set_predictions in predicted.items():
                write_predictions(predictions / f"{name}.jsonl", of_set(set_predictions))
    if output is not None:
        _write_samples(samples_path(output), predicted, evaluation)
        evaluation.write(output)


def _write_samples(path: Path, predicted: Mapping[str, Predictions], evaluation: Evaluation) -> None:
    # A journal of an earlier run would be continued; predictions are computed anew each time.
    path.unlink(missing_ok=True)
    described = {"tasks": {name: dict(evaluation.tasks[name].settings) for name in predicted}}
    with Journal(path, described) as journal:
        for name, set_predictions in predicted.items():
            for sample in _samples(set_predictions):
                journal.add(name, sample)


def _samples(predictions: Predictions) -> list[Sample]:
    """Values of the samples with a label: the loss, and of classes whether the likeliest is the right one."""
    # labelled() leaves out the samples without a label, as the mask below does.
    outputs, losses, labels = predictions.labelled()
    uids = predictions.fields["uid"][predictions.fields["loss_mask"] > 0].tolist()
    samples = [Sample(str(uid), {"loss": float(loss)}) for uid, loss in zip(uids, losses, strict=True)]
    # One output is a regression, in which nothing is right or wrong.
    if outputs.shape[-1] == 1:
        return samples
    right = (outputs.argmax(-1) == labels).tolist()
    return [
        replace(sample, values={**sample.values, "accuracy": float(hit)})
        for sample, hit in zip(samples, right, strict=True)
    ]


# -- several seeds: mean and deviation of the scores -------------------------------------------------

LoadForSeed = Callable[[int], LoadedConfig]


@dataclass(frozen=True)
class SeedScores:
    """Scores of one run: the evaluation at `iteration`, the best by checkpoint.best_metric, else the last."""

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
    evaluations = [line for line in lines if line["iteration"] == best.iteration and best.metric in line]
    return {
        name: value for name, value in evaluations[-1].items() if name not in ("kind", "iteration", "time", "elapsed")
    }


def summary(runs: Sequence[SeedScores]) -> dict[str, float]:
    """By metric the mean over the runs, and as `<metric>_stdev` the sample standard deviation (0 of one run)."""
    values: dict[str, float] = {}
    for name in runs[0].values:
        column = [run.values[name] for run in runs]
        values[name] = statistics.fmean(column)
        values[f"{name}_stdev"] = statistics.stdev(column) if len(column) > 1 else 0.0
    return values


# -- result file of several seeds --------------------------------------------------------------------


def seeds_evaluation(runs: Sequence[SeedScores], folder: Path, config: Config) -> Evaluation:
    """A task `seed-N` for each run, and `all` with means and standard deviations."""
    tasks = {f"seed-{run.seed}": TaskResult(run.values, 1, settings={"iteration": run.iteration}) for run in runs}
    seeds = {"seeds": [run.seed for run in runs]}
    tasks["all"] = TaskResult(summary(runs), len(runs), settings=seeds)
    provenance = {"runs": str(folder), "config": config.to_dict(), **describe_run(config.train.device)}
    return Evaluation(tasks, provenance)
