"""`mt compare --deep` of two configurations: their small versions trained on CPU ranks, each in its layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mt_core.config.loading import LoadedConfig, config_from_dict, load_config_anywhere
from mt_core.config.schema import Config
from mt_core.errors import ConfigError, MtError
from mt_core.plugins import PluginHost, load_plugins
from mt_core.testing import run_ranks
from mt_core.train.trainer import Trainer
from mt_ops.deep.comparison import DeepComparison
from mt_ops.deep.differences import TensorDifference, compared_tensors, first_of_each_part
from mt_ops.deep.recording import moved_by_one_unit
from mt_tools.verify.run_record import TIMEOUT, RunRecord, record_run
from mt_tools.verify.small_config import shrink
from mt_tools.verify.small_layout import processes

EMBEDDING = "embedding"


def compare_configurations(a: Path, b: Path, steps: int) -> DeepComparison:
    """Raises ConfigError where the small versions have other models: then nothing has a counterpart."""
    host = load_plugins()
    mine, theirs = (_small(path, host, steps) for path in (a, b))
    if mine.model != theirs.model:
        raise ConfigError(f"{a} and {b} have other models; deep comparison is of layouts and options of one model")
    first, second, twin = _record(mine, steps), _record(theirs, steps), _record(mine, steps, moved=True)
    compared = list(_differences(first, second, twin))
    return DeepComparison(steps, compared, first_of_each_part(compared))


def _small(path: Path, host: PluginHost, steps: int) -> Config:
    return shrink(load_config_anywhere(path, host=host).config, host, steps=steps)


def _record(config: Config, steps: int, *, moved: bool = False) -> RunRecord:
    records = run_ranks(processes(config.parallel), _on_rank, config.to_dict(), steps, moved, timeout=TIMEOUT)
    refused = next((result for result in records if isinstance(result, MtError)), None)
    if refused is not None:
        raise refused
    result: RunRecord = records[0]
    return result


def _on_rank(
    rank: int, world: int, tree: Mapping[str, Mapping[str, Any]], steps: int, moved: bool
) -> RunRecord | MtError | None:
    host = load_plugins()
    loaded = LoadedConfig(config_from_dict(tree, host), {}, None)
    try:
        run = record_run(
            loaded, steps, host=host, adverse=True, prepare=_move_embeddings if moved else lambda run: None
        )
    except MtError as error:
        return error
    return run if rank == 0 else None


def _move_embeddings(run: Trainer) -> None:
    """The inputs of the first layer, by one unit in the last place."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in run.model.named_parameters():
            if name.startswith(EMBEDDING):
                parameter.copy_(moved_by_one_unit(parameter, generator))


def _differences(a: RunRecord, b: RunRecord, twin: RunRecord) -> Iterator[TensorDifference]:
    """Losses step by step, gradients of the first step in the order of the backward pass, weights after the last."""
    yield from compared_tensors("loss of", _numbered(a.losses), *map(_numbered, (b.losses, twin.losses)))
    yield from compared_tensors("gradient of", _backward(a.gradients), b.gradients, twin.gradients)
    yield from compared_tensors("weights, after the last step, of", a.weights, b.weights, twin.weights)


def _numbered(losses: Sequence[float]) -> dict[str, Tensor]:
    return {f"step {number}": torch.tensor([loss]) for number, loss in enumerate(losses, start=1)}


def _backward(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return dict(reversed(list(gradients.items())))
