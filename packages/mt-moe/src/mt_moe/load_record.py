"""expert-load.jsonl of a run directory: the load of every expert of every layer, at some lines of the log.

A line is {"iteration": n, "layers": {"0": [load of each expert in percent of the mean], ...}}. The steps between two
lines grow by a thirtieth of the iteration, so that a run of a million steps has some 400 of them.
"""

from __future__ import annotations

import json
from typing import TextIO

from mt_core.config.schema import Config
from mt_core.parallel.context import is_writer
from mt_core.train.callbacks import Callback, Metrics, Run
from mt_core.train.checkpoint.state import merged_over_stages
from mt_moe.routing.router import Router

LOAD_FILE = "expert-load.jsonl"
SPACING = 30
"""An iteration over the steps until the next line."""


class ExpertLoadFile(Callback):
    """Appends to expert-load.jsonl. On all ranks, since the layers of a pipeline are on several."""

    def __init__(self) -> None:
        self._next = 0
        self._file: TextIO | None = None

    def on_train_start(self, run: Run) -> None:
        if run.directory is not None and is_writer():
            self._file = (run.directory.path / LOAD_FILE).open("a", encoding="utf-8")

    def on_log(self, run: Run, metrics: Metrics) -> None:
        iteration = int(metrics["iteration"])
        if run.directory is None or iteration < self._next:
            return
        self._next = iteration + iteration // SPACING
        # Every rank comes here at the same lines, as all count them alike.
        layers = merged_over_stages(_loads(run), run.ctx)
        if self._file is not None and layers:
            self._file.write(json.dumps({"iteration": iteration, "layers": layers}, separators=(",", ":")) + "\n")
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _loads(run: Run) -> dict[str, list[int]]:
    """Layer -> load of each expert in percent of the mean, of the last step, of the layers of this rank's stages."""
    routers = [module for module in run.model.modules() if isinstance(module, Router)]
    loads = {str(router.layer): router.load for router in routers}
    return {layer: percent_of_mean(load.tokens.tolist()) for layer, load in loads.items() if load is not None}


def percent_of_mean(tokens: list[float]) -> list[int]:
    """[E] -> [E]; zeros for a step without tokens."""
    total = sum(tokens)
    return [round(100 * count * len(tokens) / total) if total else 0 for count in tokens]


def build_load_file(config: Config) -> ExpertLoadFile | None:
    return ExpertLoadFile() if getattr(config.model, "moe", None) is not None else None
