"""Runs small configurations on CPU ranks of this machine, and returns what they computed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mt_core.config.loading import LoadedConfig, config_from_dict
from mt_core.config.loss import configured_loss
from mt_core.config.schema import Config
from mt_core.errors import MtError
from mt_core.plugins import PluginHost, load_plugins
from mt_core.testing import run_ranks
from mt_tools.verify.axes import copies, processes
from mt_tools.verify.run_record import RunRecord, record_run
from mt_tools.verify.small_config import has_global_loss
from mt_tools.verify.small_training import STEPS

TIMEOUT = 600.0


def record(config: Config, *, world: int | None = None, steps: int = STEPS, run_dir: Path | None = None) -> RunRecord:
    """Train `steps` steps on `world` ranks; default: as many as the layout needs, two at least.

    Raises the MtError of a rank, and RankFailureError with the traceback of any other.
    """
    world = world or processes(config.parallel)
    records = run_ranks(world, record_on_rank, config.to_dict(), steps, run_dir, timeout=TIMEOUT)
    # Returned by the rank, not raised: an MtError is a sentence for the user, without a traceback of a worker.
    refused = next((found for found in records if isinstance(found, MtError)), None)
    if refused is not None:
        raise refused
    return records[0]


def in_the_same_rounds(config: Config, world: int | None, other: Config, host: PluginHost) -> Config:
    """With micro-batches of as many samples over all ranks as `other` has, for a loss that compares samples, and for
    routers whose balance loss counts rounds of micro-batches."""
    if not (configured_loss(config, host).compares_samples or has_global_loss(config.model.model_dump())):
        return config
    own = copies(config.parallel, world or processes(config.parallel))
    size = max(1, copies(other.parallel, processes(other.parallel)) // own)
    return config.model_copy(update={"train": config.train.model_copy(update={"micro_batch_size": size})})


def record_resumed(first: Config, then: Config, *, steps: int) -> RunRecord:
    """Train `steps` steps under one layout, and the same number in new processes under the other."""
    with TemporaryDirectory(prefix="mt-verify-") as folder:
        record(first, steps=steps, run_dir=Path(folder))
        tree = then.to_dict()
        # Resuming under another layout is what is checked.
        tree["checkpoint"]["accept_changes"] = [f"parallel.{key}" for key in tree["parallel"]]
        return record(config_from_dict(tree, load_plugins()), steps=2 * steps, run_dir=Path(folder))


def record_on_rank(
    rank: int, world: int, tree: Mapping[str, Mapping[str, Any]], steps: int, run_dir: Path | None
) -> RunRecord | MtError | None:
    """The first rank's record, of which the other ranks have only parts; or why this rank refuses the configuration."""
    host = load_plugins()
    loaded = LoadedConfig(config_from_dict(tree, host), {}, None)
    try:
        found = record_run(loaded, steps, host=host, run_dir=run_dir, adverse=True)
    except MtError as error:
        return error
    return found if rank == 0 else None
