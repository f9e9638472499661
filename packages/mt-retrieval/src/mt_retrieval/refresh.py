"""Mines hard negatives anew while training runs (REALM's asynchronous refresh; ANCE, Xiong et al., 2021).

After a checkpoint, a process embeds the evidence with it, searches it for the training questions, and writes what it
found as a file of negatives (`mt_retrieval.dpr`), which is used from a sample on that no rank has read yet.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from mt_core.config.checks import global_batch_size
from mt_core.config.schema import Config
from mt_core.errors import ConfigError, TrainingError
from mt_core.train.callbacks import Callback, Metrics, Run
from mt_core.train.state import TrainResult
from mt_retrieval.dpr import DPRDataConfig, MinedNegatives, RefreshConfig, mined_file

STEPS_AHEAD = 2
"""Steps that ranks may be ahead of the first one, beside the batches that they prefetch."""


@dataclass(frozen=True)
class Mining:
    """A process that mines from a checkpoint."""

    checkpoint: Path
    output: Path
    log: Path
    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, checkpoint: Path, refresh: RefreshConfig) -> Mining:
        folder = Path(refresh.folder)
        folder.mkdir(parents=True, exist_ok=True)
        output, log = (folder / f"{checkpoint.name}.{suffix}" for suffix in ("json", "log"))
        arguments = [checkpoint, refresh.evidence, refresh.questions, output, refresh.negatives, refresh.device]
        command = [sys.executable, "-m", "mt_retrieval.refresh_process", *map(str, arguments)]
        with log.open("wb") as file:
            return cls(checkpoint, output, log, subprocess.Popen(command, stdout=file, stderr=file))

    def wait(self) -> None:
        """Raises TrainingError when the process has failed."""
        if self.process.wait():
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
            raise TrainingError(
                f"mining hard negatives with {self.checkpoint} failed: {lines[-1] if lines else 'without a message'} "
                f"(all of it: {self.log})"
            )


class RefreshNegatives(Callback):
    """One process mines at a time; a checkpoint that is written meanwhile is left out."""

    def __init__(self, refresh: RefreshConfig, config: Config) -> None:
        self.refresh = refresh
        # Samples that a loader has read already, or may read before the file of negatives is visible to it: a sample
        # must take the same negatives on every rank, and again after a resumption.
        steps = 0 if config.data.num_workers == 0 else config.data.prefetch_batches
        self._ahead = (steps + STEPS_AHEAD) * global_batch_size(config)
        self._mining: Mining | None = None
        self._checkpoints = 0

    def on_train_start(self, run: Run) -> None:
        """Raises ConfigError for a new run in the folder of another, whose negatives its samples would have."""
        # A resumed run needs the files: its samples repeat with them.
        if run.resumed_from is None and MinedNegatives(Path(self.refresh.folder)).first_samples():
            raise ConfigError(
                f"data.refresh.folder={self.refresh.folder} has negatives that another run has mined; give another "
                "folder, or remove its mined-*.json"
            )

    def on_checkpoint(self, run: Run, path: Path) -> None:
        self._checkpoints += 1
        is_last = run.state.iteration == run.last_iteration
        # Skipped, not queued: a mining that takes longer than the interval of checkpoints would fall further and
        # further behind.
        if self._mining is not None or is_last or self._checkpoints % self.refresh.every_checkpoints:
            return
        self._mining = Mining.start(path, self.refresh)
        # The step at which the negatives begin is then the same in every run.
        if not self.refresh.in_background:
            self._use(run, self._mining)

    def on_step_end(self, run: Run, metrics: Metrics) -> None:
        # poll() does not wait.
        if self._mining is not None and self._mining.process.poll() is not None:
            self._use(run, self._mining)

    def on_train_end(self, run: Run, result: TrainResult) -> None:
        if self._mining is not None:
            run.message(f"hard negatives of {self._mining.checkpoint.name} were still being mined, and are not used")

    def close(self) -> None:
        if self._mining is not None:
            # No process is left behind; wait() reaps it.
            self._mining.process.terminate()
            self._mining.process.wait()

    def _use(self, run: Run, mining: Mining) -> None:
        mining.wait()
        self._mining = None
        # replace() makes the file appear whole, under a name that says from which sample on it is used.
        first = run.state.consumed_samples + self._ahead
        mining.output.replace(mined_file(Path(self.refresh.folder), first))
        run.message(f"hard negatives of {mining.checkpoint.name} are used from sample {first} on")


def build_refresh(config: Config) -> Callback:
    """Does nothing without data.refresh. Raises ConfigError where it could never mine."""
    data = config.data
    refresh = data.refresh if isinstance(data, DPRDataConfig) else None
    if refresh is None:
        return Callback()
    _require_sources(refresh)
    if config.checkpoint.save_interval is None:
        raise ConfigError(
            "data.refresh mines from checkpoints while training runs, and checkpoint.save_interval is null; set it to "
            "the steps between them"
        )
    if refresh.in_background and config.checkpoint.keep_last == 1:
        raise ConfigError(
            "data.refresh.in_background=true reads a checkpoint while training continues, and checkpoint.keep_last=1 "
            "removes it with the next one; set it to 2 or more"
        )
    return RefreshNegatives(refresh, config)


def _require_sources(refresh: RefreshConfig) -> None:
    files = {"questions": [refresh.questions], "evidence": [refresh.evidence, f"{refresh.evidence}.idx"]}
    for key, names in files.items():
        if not any(Path(name).is_file() for name in names):
            raise ConfigError(f"data.refresh.{key}={names[0]}: no such file")
