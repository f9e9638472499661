"""Runs of Weights & Biases. WANDB_MODE=offline writes files that `wandb sync` sends later."""

from __future__ import annotations

from collections.abc import Mapping

from mt_core.config.schema import Config
from mt_core.train.trackers.tracker import TrackedRun, Tracker, require_package


class WandbWriter:
    def __init__(self, run: TrackedRun) -> None:
        import wandb

        options = run.options
        self.native = wandb.init(
            project=options.wandb_project,
            entity=options.wandb_entity,
            name=options.wandb_exp_name or run.name,
            dir=options.wandb_save_dir or (str(run.folder) if run.folder is not None else None),
            config=dict(run.config),
            id=run.run_id,
            resume="allow" if run.run_id is not None else None,
        )

    @property
    def run_id(self) -> str:
        return str(self.native.id)

    def write(self, values: Mapping[str, float], iteration: int, samples: int) -> None:
        self.native.log({**values, "consumed-samples": samples}, step=iteration)

    def close(self, *, finished: bool) -> None:
        self.native.finish(exit_code=0 if finished else 1)


def build_wandb(config: Config) -> Tracker:
    require_package("wandb", "wandb")
    return Tracker("wandb", WandbWriter, config)
