"""trainer_state.json, which the Trainer of transformers writes into its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mt_core.errors import DataError
from mt_ops.reading.columns import Columns
from mt_ops.reading.run import Run

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
