"""Hugging Face folders beside the checkpoints of a run that goes on (checkpoint.save_hf_interval).

A complete checkpoint is the snapshot: a thread of the first rank converts it as `mt convert` does, whatever the layout
that wrote it. Training waits for the checkpoint alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from mt_ckpt.hugging_face.family import FORMAT
from mt_ckpt.hugging_face.variants import family_of_config
from mt_core.checkpoint_specs import ConvertOptions
from mt_core.config.schema import Config
from mt_core.errors import MtError
from mt_core.paths import remove_tree
from mt_core.plugins import PluginHost
from mt_core.retention import iteration_of
from mt_core.train.callbacks import Callback, Run
from mt_core.train.checkpoint.run_directory import hf_folder
from mt_core.train.state import TrainResult

Outcome = tuple[Path, float]
"""The written folder, and the seconds that it took."""


class HuggingFaceExport(Callback):
    """Converts one checkpoint at a time. One that cannot be converted is reported; it is kept, and training goes on."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        # One: exports do not compete with one another for disk and memory, and end in the order in which they began.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mt-hf-export")
        self._running: deque[tuple[Path, Future[Outcome]]] = deque()
        self._newest: Path | None = None

    def on_train_start(self, run: Run) -> None:
        """Raises ConfigError for a model that the format cannot express."""
        if run.directory is None:
            return
        family_of_config(run.config, run.host).write_config(run.config.model)
        path = run.directory.latest_checkpoint() if run.resumed_from is not None else None
        if path is not None and iteration_of(path) == run.state.iteration and not hf_folder(path).is_dir():
            self._convert_if_due(run, path)  # the stopped run did not come to it

    def on_checkpoint(self, run: Run, path: Path) -> None:
        self._newest = path
        # Reported by the thread of training; the exporting thread writes no messages.
        self._report(run, self._finished())
        self._convert_if_due(run, path)

    def on_train_end(self, run: Run, result: TrainResult) -> None:
        # The last checkpoint of a run is exported even if it is between two intervals.
        if self._newest is not None and iteration_of(self._newest) % self._interval:
            self._convert(run, self._newest)
        self._report(run, self._all())

    def close(self) -> None:
        # Waits for the export that runs; after an error those behind it are not begun.
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _convert_if_due(self, run: Run, path: Path) -> None:
        if iteration_of(path) % self._interval == 0:
            self._convert(run, path)

    def _convert(self, run: Run, path: Path) -> None:
        options = ConvertOptions(dtype=run.config.precision.dtype)
        self._running.append((path, self._thread.submit(export, path, options, run.host)))

    def _finished(self) -> Iterator[tuple[Path, Future[Outcome]]]:
        # In order: an export behind an unfinished one is not done either.
        while self._running and self._running[0][1].done():
            yield self._running.popleft()

    def _all(self) -> Iterator[tuple[Path, Future[Outcome]]]:
        while self._running:
            yield self._running.popleft()

    def _report(self, run: Run, exports: Iterator[tuple[Path, Future[Outcome]]]) -> None:
        for path, future in exports:
            try:
                folder, seconds = future.result()
                run.message(f"{path.name} written for Hugging Face in {seconds:.1f} s: {folder}")
            except (MtError, OSError) as error:
                command = f"mt convert --load-dir {path} --saver {FORMAT} --save-dir {hf_folder(path)}"
                run.message(f"warning: {path.name} was not written for Hugging Face: {error}; try again: {command}")


def export(path: Path, options: ConvertOptions, host: PluginHost) -> Outcome:
    """Convert a checkpoint. A folder that an abandoned run left under the name is replaced."""
    from mt_ckpt.convert.engine import convert

    started, folder = time.perf_counter(), hf_folder(path)
    if folder.is_dir():
        remove_tree(folder)
    convert(path, folder, saver=FORMAT, options=options, host=host)
    return folder, time.perf_counter() - started


def build_export(config: Config) -> Callback:
    interval = config.checkpoint.save_hf_interval
    return HuggingFaceExport(interval) if interval is not None else Callback()
