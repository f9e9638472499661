"""`mt compare --deep` of two configurations: their small versions trained on CPU ranks, each in its layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from mt_core.config.loading import LoadedConfig, config_from_dict, load_config_anywhere
from mt_core.config.schema import Config
from mt_core.errors import ConfigError, MtError
from mt_core.nn.layout import parameter_layouts
from mt_core.plugins import PluginHost, load_plugins
from mt_core.testing import run_ranks
from mt_core.train.trainer import Trainer
from mt_ops.deep.comparison import DeepComparison
from mt_ops.deep.differences import Part, compared_parts, first_of_each_part
from mt_ops.deep.layer_outputs import LayerOutputs
from mt_ops.deep.noise import other_rounding
from mt_ops.deep.other_process import layout_of
from mt_ops.deep.tolerance import TWINS
from mt_tools.verify.run_record import TIMEOUT, RunRecord, record_run
from mt_tools.verify.small_config import shrink
from mt_tools.verify.small_layout import processes

REPLACED = ("attention_backend", "make_vocab_size_divisible_by")
"""Keys of [model] in which two configurations of one model may differ: both get the same."""


@dataclass(frozen=True)
class LayoutRecord:
    """outputs: of the first step's modules, in the order of the forward pass, [samples, sequence, features]."""

    run: RunRecord
    outputs: dict[str, Tensor]


def compare_configurations(a: Path, b: Path, steps: int, python_b: Path | None = None) -> DeepComparison:
    """python_b: interpreter of an environment whose mt runs B.

    Raises ConfigError where the small versions have other models: then nothing has a counterpart.
    """
    host = load_plugins()
    mine = small_configuration(a, b, host, steps)
    if python_b is not None:
        second = _recorded_elsewhere(python_b, a, b, steps, mine)
    else:
        _require_one_model(a, b, *(_sizes(path, host) for path in (a, b)))
        theirs = small_configuration(b, a, host, steps)
        _require_one_model(a, b, mine.model.model_dump(mode="json"), theirs.model.model_dump(mode="json"))
        (second,) = record_layout(theirs, steps, 0)
    first, *twins = record_layout(mine, steps, TWINS)
    compared = compared_parts(list(_parts(first, second, twins)))
    return DeepComparison(steps, compared, first_of_each_part(compared))


def _recorded_elsewhere(python: Path, a: Path, b: Path, steps: int, mine: Config) -> LayoutRecord:
    groups, answer = layout_of(python, b, a, steps)
    _require_one_model(Path("A"), b, mine.model.model_dump(mode="json"), answer["model"])
    run = RunRecord(losses=answer["losses"], gradients=groups["gradients"], weights=groups["weights"])
    return LayoutRecord(run, groups["outputs"])


def _require_one_model(a: Path, b: Path, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Keys that one version of mt alone has do not count."""
    other = [key for key in mine if key in theirs and mine[key] != theirs[key]]
    if other:
        raise ConfigError(
            f"{a} and {b} have other models ({', '.join(other)}); deep comparison is of layouts and options of one"
        )


def _sizes(path: Path, host: PluginHost) -> dict[str, Any]:
    """[model] as configured, without what the small version replaces."""
    model = load_config_anywhere(path, host=host).config.model.model_dump(mode="json")
    return {key: value for key, value in model.items() if key not in REPLACED}


def small_configuration(path: Path, beside: Path, host: PluginHost, steps: int) -> Config:
    """beside: the other side of the comparison, whose small version has the same model."""
    config, other = (load_config_anywhere(each, host=host).config for each in (path, beside))
    # An older version of mt, which computes B, makes each configuration small by itself.
    together: dict[str, Any] = {"beside": other} if "beside" in signature(shrink).parameters else {}
    return shrink(config, host, steps=steps, **together)


def record_layout(config: Config, steps: int, twins: int) -> list[LayoutRecord]:
    """The run as it is, and with other rounding so many times."""
    world = processes(config.parallel)
    records = run_ranks(world, _on_rank, config.to_dict(), steps, twins, timeout=TIMEOUT * (1 + twins))
    refused = next((result for result in records if isinstance(result, MtError)), None)
    if refused is not None:
        raise refused
    results: list[LayoutRecord] = records[0]
    return results


def _on_rank(
    rank: int, world: int, tree: Mapping[str, Mapping[str, Any]], steps: int, twins: int
) -> list[LayoutRecord] | MtError | None:
    """In one process, whose start costs more than a run."""
    host = load_plugins()
    loaded = LoadedConfig(config_from_dict(tree, host), {}, None)
    try:
        records = [_record_once(loaded, steps, host, twin) for twin in (None, *range(twins))]
    except MtError as error:
        return error
    return records if rank == 0 else None


def _record_once(loaded: LoadedConfig, steps: int, host: PluginHost, twin: int | None) -> LayoutRecord:
    recorders: list[LayerOutputs] = []

    def prepare(run: Trainer) -> None:
        _move_vectors(run)
        if twin is not None:
            _train_as_twin(run, twin)
        recorders.append(LayerOutputs(run))

    run = record_run(loaded, steps, host=host, adverse=True, prepare=prepare)
    return LayoutRecord(run, recorders[0].gather())


SPREAD = 0.1
"""Spread of what is added to biases and factors: enough to show, and less than a factor of 1."""


def _move_vectors(run: Trainer) -> None:
    """Give biases, and factors of norms, other values than the 0 and 1 that they begin with, the same in every layout:
    a bias that is added twice shows nothing while it is 0."""
    layouts = parameter_layouts(run.model)
    with torch.no_grad():
        for name, parameter in run.model.named_parameters():
            layout = layouts[name]
            if len(layout.shape) == 1 and layout.trained and parameter.shape == layout.local_shape(run.ctx):
                generator = torch.Generator().manual_seed(crc32(name.encode()))
                whole = SPREAD * torch.randn(layout.shape, generator=generator)
                parameter.add_(layout.to_local(whole, run.ctx).to(parameter))


def _train_as_twin(run: Trainer, twin: int) -> None:
    """Each step with other rounding; evaluations are as they are."""
    launch, number = run.engine.launch_step, 0

    def step(*args: Any, **kwargs: Any) -> Any:
        nonlocal number
        number += 1
        with other_rounding(run.model, 1000 * twin + number):
            return launch(*args, **kwargs)

    run.engine.launch_step = step  # type: ignore[method-assign]


def _parts(a: LayoutRecord, b: LayoutRecord, twins: Sequence[LayoutRecord]) -> Iterator[Part]:
    """Outputs of the first step, losses step by step, gradients of the first step in the order of the backward pass,
    weights after the last."""
    copies = [name for name in b.outputs if name not in a.outputs and _original(name) in a.outputs]
    yield Part(
        "output of",
        _with_copies(a.outputs, copies),
        b.outputs,
        [_with_copies(twin.outputs, copies) for twin in twins],
    )
    losses = [_numbered(twin.run.losses) for twin in twins]
    yield Part("loss of", _numbered(a.run.losses), _numbered(b.run.losses), losses)
    gradients = [twin.run.gradients for twin in twins]
    yield Part("gradient of", _backward(a.run.gradients), b.run.gradients, gradients)
    weights = [twin.run.weights for twin in twins]
    yield Part("weights, after the last step, of", a.run.weights, b.run.weights, weights)


def _original(name: str) -> str:
    return name.partition(" (copy")[0]


def _with_copies(outputs: Mapping[str, Tensor], copies: Sequence[str]) -> dict[str, Tensor]:
    """With what copies of tensor-parallel ranks that differ are to be compared with, each behind its original."""
    behind: dict[str, list[str]] = {}
    for name in copies:
        behind.setdefault(_original(name), []).append(name)
    return {key: value for name, value in outputs.items() for key in (name, *behind.get(name, []))}


def _numbered(losses: Sequence[float]) -> dict[str, Tensor]:
    return {f"step {number}": torch.tensor([loss]) for number, loss in enumerate(losses, start=1)}


def _backward(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return dict(reversed(list(gradients.items())))
