"""Runs of trackio, in its local database (TRACKIO_DIR)."""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from mt_core.config.schema import Config
from mt_core.train.trackers.tracker import TrackedRun, Tracker, require_package


class TrackioWriter:
    """trackio identifies a run by its name."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        wanted = run.options.trackio_name or run.name or "mt"
        # Random digits keep the runs of equally named directories apart.
        self.run_id = run.run_id or f"{wanted}-{uuid.uuid4().hex[:6]}"
        self.native = trackio.init(
            project=run.options.trackio_project,
            name=self.run_id,
            config=dict(run.config),
            resume="allow" if run.run_id is not None else "never",
            embed=False,
        )

    def write(self, values: Mapping[str, float], iteration: int, samples: int) -> None:
        self.native.log({**values, "consumed-samples": samples}, step=iteration)

    def close(self, *, finished: bool) -> None:
        self.native.finish()


def build_trackio(config: Config) -> Tracker:
    require_package("trackio", "trackio")
    return Tracker("trackio", TrackioWriter, config)
