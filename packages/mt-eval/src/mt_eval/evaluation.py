"""Evaluation of tasks on a model, and its result file: metrics of each task, and what produced them."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mt_ckpt.contents import checkpoint_fingerprint
from mt_core.checkpoint_lookup import find_checkpoint
from mt_core.config.schema import Config
from mt_core.errors import DataError
from mt_core.paths import write_whole, writing
from mt_core.versions import installed_versions
from mt_eval.tasks import Journal, Sample, Task
from mt_infer.config import InferenceConfig
from mt_infer.text import TextGenerator

FORMAT, VERSION = "mt-eval", 1
NAMED = 20
"""Samples without a score that are named; the rest are counted."""


@dataclass(frozen=True)
class TaskResult:
    """metrics: by name. samples: how many were scored. truncated: how many of them were cut to the model's length.
    not_scored: number of samples without a score, of which `reasons` names the first ones."""

    metrics: Mapping[str, float]
    samples: int
    truncated: int = 0
    not_scored: int = 0
    reasons: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation:
    """tasks: by name. provenance: see mt_eval.evaluation."""

    tasks: Mapping[str, TaskResult]
    provenance: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        tasks = {name: asdict(result) for name, result in self.tasks.items()}
        return {"format": FORMAT, "version": VERSION, "tasks": tasks, "provenance": dict(self.provenance)}

    def write(self, path: Path) -> None:
        with writing(path, "--output"):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, (json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n").encode())


def result_of(task: Task, samples: Sequence[Sample]) -> TaskResult:
    """Raises DataError when no sample has a score."""
    scored = [sample for sample in samples if sample.error is None]
    failed = [sample for sample in samples if sample.error is not None]
    if not scored:
        why = f"the first, {failed[0].name}: {failed[0].error}" if failed else "it has none"
        raise DataError(f"task {task.name}: no sample could be scored; {why}")
    return TaskResult(
        # Samples that failed are in no metric, and their number is in the result: a mean over fewer samples is seen.
        task.metrics(scored),
        len(scored),
        sum(sample.truncated for sample in scored),
        len(failed),
        {sample.name: str(sample.error) for sample in failed[:NAMED]},
        task.settings,
    )


def read_evaluation(path: Path) -> Evaluation:
    """Raises DataError for a file that is no result of mt eval."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        header = content["format"], content["version"]
        tasks = {name: TaskResult(**result) for name, result in content["tasks"].items()}
        evaluation = Evaluation(tasks, content["provenance"])
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}; mt eval writes it with --output") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is no result of mt eval, which writes one with --output") from error
    if header != (FORMAT, VERSION):
        raise DataError(f"{path} has format {header[0]!r}, version {header[1]!r}; read is {FORMAT!r}, {VERSION}")
    return evaluation


def samples_path(results: Path) -> Path:
    """Path of the samples that belong to a result file."""
    return results.with_suffix(".samples.jsonl")


# -- origin of a result: checkpoint, versions, layout ------------------------------------------------

PACKAGES = ("mt-core", "mt-models", "mt-data", "mt-ckpt", "mt-infer", "mt-eval", "torch", "transformers", "lm-eval")


def describe_model(path: str | Path, config: Config) -> dict[str, Any]:
    """What decides the numbers: the checkpoint by its content, the tokenizer, layout and precision."""
    # A run directory means its newest checkpoint, which may be another one tomorrow: the path and the hash of that one
    # are kept.
    checkpoint = find_checkpoint(path)
    return {
        "checkpoint": str(checkpoint),
        "checkpoint_hash": checkpoint_fingerprint(checkpoint),
        "family": config.model.family,
        "tokenizer": config.tokenizer.tokenizer_type,
        "layout": config.parallel.model_dump(mode="json", exclude_defaults=True),
        "precision": config.precision.dtype,
        "inference": config.section(InferenceConfig).model_dump(mode="json", exclude_defaults=True),
    }


def describe_run(device: str) -> dict[str, Any]:
    """Versions of packages, the machine, the time."""
    return {
        "versions": installed_versions(PACKAGES),
        "python": platform.python_version(),
        "device": device,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


# -- running tasks; a killed run is resumed ----------------------------------------------------------

OnSample = Callable[[Task, int], None]
"""(task, number of its samples that are done)."""


def evaluate(
    generator: TextGenerator,
    tasks: Sequence[Task],
    checkpoint: str | Path,
    *,
    output: Path | None = None,
    on_sample: OnSample = lambda task, done: None,
) -> Evaluation:
    """On rank 0, while other ranks `follow`. checkpoint: what the generator was loaded from.

    output: the result file; samples are written beside it, and those of a killed run are not measured again. Raises
    DataError when a task has no sample that can be scored, and for an output of another evaluation.
    """
    model = describe_model(checkpoint, generator.config)
    described = {"model": model, "tasks": {task.name: dict(task.settings) for task in tasks}}
    with Journal(None if output is None else samples_path(output), described) as journal:
        for task in tasks:
            measure(generator, task, journal, on_sample)
        # From the journal, so that a resumed run gives the same numbers as an uninterrupted one.
        results = {task.name: result_of(task, journal.samples(task.name)) for task in tasks}
    run = describe_run(str(generator.ctx.device))
    evaluation = Evaluation(results, {**model, **run})
    if output is not None:
        evaluation.write(output)
    return evaluation


def measure(generator: TextGenerator, task: Task, journal: Journal, on_sample: OnSample) -> None:
    """The samples of a task that are not in the journal."""
    done = len(journal.samples(task.name))
    on_sample(task, done)
    for sample in task.samples(generator, done):
        journal.add(task.name, sample)
        done += 1
        on_sample(task, done)
