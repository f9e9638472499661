"""Event files of TensorBoard; every series also over consumed samples (`lm loss vs samples`), as in Megatron."""

from __future__ import annotations

import json
from collections.abc import Mapping

from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_core.train.trackers.tracker import TrackedRun, Tracker, require_package

FOLDER = "tensorboard"


class TensorBoardWriter:
    run_id = None

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.native = SummaryWriter(_folder(run), max_queue=run.options.tensorboard_queue_size)
        self.native.add_text("config", f"```\n{json.dumps(run.config, indent=2)}\n```", run.iteration)

    def write(self, values: Mapping[str, float], iteration: int, samples: int) -> None:
        for name, value in values.items():
            self.native.add_scalar(name, value, iteration)
            self.native.add_scalar(f"{name} vs samples", value, samples)

    def close(self, *, finished: bool) -> None:
        self.native.close()


def _folder(run: TrackedRun) -> str:
    if run.options.tensorboard_dir is not None:
        return run.options.tensorboard_dir
    if run.folder is None:
        raise ConfigError("logging.trackers: tensorboard needs a run directory, or logging.tensorboard_dir")
    return str(run.folder / FOLDER)


def build_tensorboard(config: Config) -> Tracker:
    require_package("tensorboard", "tensorboard")
    return Tracker("tensorboard", TensorBoardWriter, config)
