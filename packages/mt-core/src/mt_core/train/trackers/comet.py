"""Experiments of Comet. COMET_START_ONLINE=0 writes archives, which `comet upload` sends later."""

from __future__ import annotations

from collections.abc import Mapping

from mt_core.config.schema import Config
from mt_core.train.trackers.tracker import TrackedRun, Tracker, require_package


class CometWriter:
    def __init__(self, run: TrackedRun) -> None:
        import comet_ml

        options = run.options
        self.native = comet_ml.start(
            workspace=options.comet_workspace,
            project=options.comet_project,
            experiment_key=run.run_id,
            experiment_config=comet_ml.ExperimentConfig(
                name=options.comet_experiment_name or run.name,
                # Console output, source code and the git state stay on this machine.
                auto_output_logging=False,
                log_code=False,
                log_git_metadata=False,
                log_git_patch=False,
            ),
        )
        self.native.log_parameters(dict(run.config))

    @property
    def run_id(self) -> str:
        return str(self.native.get_key())

    def write(self, values: Mapping[str, float], iteration: int, samples: int) -> None:
        self.native.log_metrics({**values, "consumed-samples": samples}, step=iteration)

    def close(self, *, finished: bool) -> None:
        self.native.end()


def build_comet(config: Config) -> Tracker:
    require_package("comet_ml", "comet")
    return Tracker("comet", CometWriter, config)
