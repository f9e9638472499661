"""What of a run goes into a checkpoint, under which names, and how it comes back.

Tensors: `model.<parameter>`, `optimizer.<state>.<parameter>` (canonical shapes, without padding),
`optimizer.main.<parameter>` (fp32 weights of 16-bit training); `random_streams` adds `rng.*`. The rest is JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mt_core.config.schema import Config
from mt_core.errors import CheckpointError
from mt_core.nn.layout import ParameterLayout, parameter_layouts
from mt_core.optim.loss_scale import LossScaler
from mt_core.optim.main_weights import CopiedWeights, MainWeights
from mt_core.optim.optimizers import Optimizer
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import PluginHost
from mt_core.specs import CheckpointLoaderSpec, CheckpointReader
from mt_core.train import random_streams
from mt_core.train.state import TrainState

MODEL, OPTIMIZER = "model.", "optimizer."
MAIN = "main"


@dataclass(frozen=True)
class Checkpointed:
    """Everything of a run that a checkpoint holds."""

    model: nn.Module
    weights: MainWeights
    optimizer: Optimizer
    scaler: LossScaler
    state: TrainState
    ctx: ParallelContext

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, canonical tensor), one at a time."""
        layouts = parameter_layouts(self.model)
        for name, parameter in self.model.named_parameters():
            yield MODEL + name, layouts[name].to_canonical(parameter.detach())
        if isinstance(self.weights, CopiedWeights):
            for name, parameter in self.weights.named_parameters():
                yield f"{OPTIMIZER}{MAIN}.{name}", layouts[name].to_canonical(parameter.detach())
        for name, parameter in self.weights.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                yield f"{OPTIMIZER}{key}.{name}", _canonical_state(value, parameter, layouts[name])

    def metadata(self, config: Config) -> dict[str, Any]:
        return {
            **asdict(self.state),
            "config": config.to_dict(),
            "loss_scaler": self.scaler.state(),
            "environment": environment(),
        }

    def restore(self, reader: CheckpointReader) -> None:
        """Take up a checkpoint whole. Raises CheckpointError for any missing, extra or misshapen tensor."""
        layouts = parameter_layouts(self.model)
        require_fit(reader, layouts, MODEL)
        load_parameters(self.model.named_parameters(), reader, layouts, MODEL, self.ctx)
        if isinstance(self.weights, CopiedWeights):
            prefix = f"{OPTIMIZER}{MAIN}."
            require_fit(reader, layouts, prefix)
            load_parameters(self.weights.named_parameters(), reader, layouts, prefix, self.ctx)
        self._restore_optimizer(reader, layouts)
        random_streams.restore_rng(reader, self.ctx)
        self.scaler.load_state(dict(reader.metadata["loss_scaler"]))
        for key in asdict(self.state):
            setattr(self.state, key, int(reader.metadata[key]))

    def _restore_optimizer(self, reader: CheckpointReader, layouts: Mapping[str, ParameterLayout]) -> None:
        parameters = dict(self.weights.named_parameters())
        for full_name in reader.shapes():
            if not full_name.startswith(OPTIMIZER):
                continue
            key, _, name = full_name.removeprefix(OPTIMIZER).partition(".")
            if key == MAIN:
                continue
            if name not in parameters:
                raise CheckpointError(f"the checkpoint has optimizer state for {name}, which the model does not have")
            value = reader.read(full_name)
            if value.shape == layouts[name].shape and value.ndim:
                value = layouts[name].to_local(value, self.ctx).to(parameters[name].device)
            self.optimizer.state[parameters[name]][key] = value


def _canonical_state(value: object, parameter: Tensor, layout: ParameterLayout) -> Tensor:
    if not isinstance(value, Tensor):
        return torch.tensor(value)
    return layout.to_canonical(value) if value.shape == parameter.shape else value


def require_fit(reader: CheckpointReader, layouts: Mapping[str, ParameterLayout], prefix: str) -> None:
    """Raise CheckpointError unless the checkpoint's tensors under `prefix` are exactly the model's."""
    stored = {name.removeprefix(prefix): shape for name, shape in reader.shapes().items() if name.startswith(prefix)}
    problems = [f"{name} is missing" for name in layouts if name not in stored]
    problems += [f"{name} is in the checkpoint but not in the model" for name in stored if name not in layouts]
    problems += [
        f"{name} has shape {list(stored[name])} in the checkpoint, {list(layout.shape)} in the model"
        for name, layout in layouts.items()
        if name in stored and tuple(stored[name]) != layout.shape
    ]
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise CheckpointError(f"the checkpoint does not fit the model: {shown}")


@torch.no_grad()
def load_parameters(
    named_parameters: Iterator[tuple[str, nn.Parameter]],
    reader: CheckpointReader,
    layouts: Mapping[str, ParameterLayout],
    prefix: str,
    ctx: ParallelContext,
) -> None:
    for name, parameter in named_parameters:
        parameter.copy_(layouts[name].to_local(reader.read(prefix + name), ctx))


def environment() -> dict[str, Any]:
    """What bitwise repetition depends on beside the configuration."""
    return {"torch": torch.__version__, "num_threads": torch.get_num_threads()}


def open_with(spec: CheckpointLoaderSpec, path: Path, host: PluginHost) -> CheckpointReader:
    """Open a checkpoint with the given loader."""
    opener = spec.open.load()
    return opener(path, host) if spec.takes_host else opener(path)


def open_checkpoint(path: Path, host: PluginHost) -> CheckpointReader:
    """Open a checkpoint of whatever format recognizes it.

    Raises CheckpointError when no loader, or more than one, does.
    """
    loaders = [spec for spec in host.checkpoint_loaders if spec.detect.load()(path)]
    if len(loaders) == 1:
        return open_with(loaders[0], path, host)
    names = ", ".join(host.checkpoint_loaders.names()) or "none (pip install mt-ckpt)"
    if loaders:
        both = " and ".join(spec.name for spec in loaders)
        raise CheckpointError(f"{path}: the loaders {both} both take it for theirs")
    raise CheckpointError(f"{path} is no complete checkpoint of a known format; loaders are {names}")
