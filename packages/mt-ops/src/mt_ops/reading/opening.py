"""The run that a path means: which reader it needs, among them that of trainer_state.json, which the Trainer of
transformers writes into its checkpoints; and reading several at once."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from mt_core.errors import DataError
from mt_ops.reading.columns import Columns
from mt_ops.reading.event_files import PATTERN, read_event_files
from mt_ops.reading.json_lines import read_json
from mt_ops.reading.mt_run import METRICS, MtRunReader, is_mt_run
from mt_ops.reading.run import Run
from mt_ops.reading.text_logs import plain_lines, read_text_log, source_of

FILE = "trainer_state.json"
IGNORED = ("step", "train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos", "train_loss")


def read_trainer_state(path: Path, state: Any) -> Run:
    """state: the content of the file. Raises DataError without a history."""
    history = state.get("log_history") if isinstance(state, Mapping) else None
    if not isinstance(history, list):
        raise DataError(f"{path} has no log_history; a trainer_state.json of transformers has one")
    columns = Columns()
    for entry in history:
        if "step" in entry:
            values = {_name(key): value for key, value in entry.items() if key not in IGNORED}
            columns.add({"iteration": entry["step"], **values})
    config = {f"trainer.{key}": value for key, value in state.items() if isinstance(value, (int, float, str))}
    return Run(
        name=path.parent.name,
        path=path,
        source="transformers",
        series=columns.series(),
        config=config,
        missing=["samples, tokens and times of steps, which trainer_state.json does not have"],
    )


def _name(key: str) -> str:
    return f"valid_{key.removeprefix('eval_')}" if key.startswith("eval_") else key


READ_BY_SEVERAL = 100_000_000
"""Bytes of metrics from which several processes read."""
ACCEPTED = (
    "a run directory of mt, a log of Megatron-LM or torchtitan, a trainer_state.json of transformers or a folder with "
    "one, and event files of TensorBoard or a folder with some"
)


def open_run(path: Path) -> Run:
    """Raises DataError for a path that is missing or that no reader knows."""
    if not path.exists():
        raise DataError(f"{path} does not exist; it can be {ACCEPTED}")
    if is_mt_run(path):
        return MtRunReader(path).read()
    return _open_folder(path) if path.is_dir() else _open_file(path)


def open_runs(paths: Sequence[Path]) -> list[Run]:
    """In the order of the paths; names that several have are completed with their folders."""
    sizes = [(path / METRICS).stat().st_size if (path / METRICS).exists() else 0 for path in paths]
    workers = min(len(paths), os.cpu_count() or 1)
    if sum(sizes) > READ_BY_SEVERAL and workers > 1:
        with ProcessPoolExecutor(workers) as pool:
            runs = list(pool.map(open_run, paths))
    else:
        runs = [open_run(path) for path in paths]
    return _with_distinct_names(runs)


def _open_folder(path: Path) -> Run:
    states = sorted(path.glob(f"checkpoint-*/{FILE}"), key=lambda file: int(file.parent.name.rpartition("-")[2]))
    newest = path / FILE if (path / FILE).exists() else states[-1] if states else None
    if newest is not None:
        run = _open_file(newest)
        run.name = path.resolve().name
        return run
    if next(path.rglob(PATTERN), None) is not None:
        return read_event_files(path)
    raise DataError(f"{path} is no run that can be read; it can be {ACCEPTED}")


def _open_file(path: Path) -> Run:
    if path.suffix == ".json":
        return read_trainer_state(path, read_json(path))
    if ".tfevents." in path.name:
        return read_event_files(path)
    lines = plain_lines(path)
    source = source_of(lines)
    if source is None:
        raise DataError(f"{path} has no line of a step that Megatron-LM or torchtitan writes; it can be {ACCEPTED}")
    return read_text_log(path, lines, source)


def _with_distinct_names(runs: list[Run]) -> list[Run]:
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = f"{run.path.resolve().parent.name}/{run.name}"
    taken: set[str] = set()
    for run in runs:
        number, plain = 2, run.name
        while run.name in taken:
            run.name, number = f"{plain} ({number})", number + 1
        taken.add(run.name)
    return runs
