"""Runs tasks on a model, resumed where a killed run was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from mt_eval.journal import Journal
from mt_eval.provenance import describe_model, describe_run
from mt_eval.results import Evaluation, result_of, samples_path
from mt_eval.tasks import Task
from mt_infer.text import TextGenerator

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
    run = describe_run(str(generator.engine.engine.ctx.device))
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
