"""Runs small configurations on CPU ranks of this machine, and brings back what they computed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mt_core.config.loading import LoadedConfig, config_from_dict
from mt_core.config.schema import Config
from mt_core.plugins import load_plugins
from mt_core.testing import run_ranks
from mt_core.verify.record import RunRecord, record_run
from mt_core.verify.shrink import STEPS, processes

TIMEOUT = 600.0


def record(config: Config, *, steps: int = STEPS, run_dir: Path | None = None) -> RunRecord:
    """Train `steps` steps on as many ranks as the layout needs. Raises RankFailureError with a rank's traceback."""
    world = processes(config.parallel)
    records = run_ranks(world, record_on_rank, config.to_dict(), steps, run_dir, timeout=TIMEOUT)
    return records[0]


def record_resumed(first: Config, then: Config, *, steps: int) -> RunRecord:
    """Train `steps` steps under one layout, and in new processes as many again under the other."""
    with TemporaryDirectory(prefix="mt-verify-") as folder:
        record(first, steps=steps, run_dir=Path(folder))
        tree = then.to_dict()
        tree["checkpoint"]["accept_changes"] = [f"parallel.{key}" for key in tree["parallel"]]
        return record(config_from_dict(tree, load_plugins()), steps=2 * steps, run_dir=Path(folder))


def record_on_rank(
    rank: int, world: int, tree: Mapping[str, Mapping[str, Any]], steps: int, run_dir: Path | None
) -> RunRecord | None:
    """The first rank's record; the others have parts of it."""
    host = load_plugins()
    loaded = LoadedConfig(config_from_dict(tree, host), {}, None)
    found = record_run(loaded, steps, host=host, run_dir=run_dir)
    return found if rank == 0 else None
