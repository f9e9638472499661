"""The result file of an evaluation: metrics of each task, and what produced them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mt_core.errors import DataError
from mt_core.paths import write_whole, writing
from mt_eval.tasks import Sample, Task

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
    """tasks: by name. provenance: see mt_eval.provenance."""

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
        found = content["format"], content["version"]
        tasks = {name: TaskResult(**result) for name, result in content["tasks"].items()}
        evaluation = Evaluation(tasks, content["provenance"])
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}; mt eval writes it with --output") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is no result of mt eval, which writes one with --output") from error
    if found != (FORMAT, VERSION):
        raise DataError(f"{path} has format {found[0]!r}, version {found[1]!r}; read is {FORMAT!r}, {VERSION}")
    return evaluation


def samples_path(results: Path) -> Path:
    """Of the samples that belong to a result file."""
    return results.with_suffix(".samples.jsonl")
