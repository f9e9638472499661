"""What of a run goes into a checkpoint, under which names, and how it comes back.

Tensors: `model.<parameter>`, `optimizer.<state>.<parameter>` (canonical shapes, without padding),
`optimizer.main.<parameter>` (fp32 weights of 16-bit training); `random_streams` adds `rng.*`. The rest is JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mt_core.config.schema import Config
from mt_core.errors import CheckpointError
from mt_core.nn.layout import ParameterLayout, parameter_layouts
from mt_core.optim.loss_scale import LossScaler
from mt_core.optim.main_weights import MainWeights
from mt_core.optim.optimizers import Optimizer
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import PluginHost
from mt_core.specs import CheckpointLoaderSpec, CheckpointReader
from mt_core.train import random_streams
from mt_core.train.state import TrainState

MODEL, OPTIMIZER = "model.", "optimizer."
MAIN = "main"
REMAINDER = "remainder"
"""State of an optimizer that completes 16-bit weights; a checkpoint holds the fp32 weight that the two make up."""
T = TypeVar("T")


@runtime_checkable
class CompletesWeights(Protocol):
    """An optimizer that may keep a part of an fp32 weight itself."""

    def main(self, parameter: Tensor) -> Tensor: ...

    def set_main(self, parameter: Tensor, main: Tensor) -> None: ...


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
        """(name, canonical tensor), one at a time, on rank 0. Collective: every rank goes through it to the end."""
        self.weights.finish_gather()
        yield from over_stages(list(self._parts()), self.ctx)

    def _parts(self) -> Iterator[Part]:
        """What this rank's stage holds, in an order that its ranks share."""
        layouts = parameter_layouts(self.model)
        for name, parameter in self.model.named_parameters():
            yield Part(MODEL + name, layouts[name], parameter.dtype, self.ctx, partial(self.weights.read, name))
        pieces = dict(self.weights.named_parameters())
        if self._has_copies:
            for name, piece in pieces.items():
                whole = partial(self.weights.whole, name, self._main(piece))
                yield Part(f"{OPTIMIZER}{MAIN}.{name}", layouts[name], torch.float32, self.ctx, whole)
        for name, piece in pieces.items():
            for key, value in self.optimizer.state.get(piece, {}).items():
                if key == REMAINDER:
                    continue  # a part of the main weight
                full_name = f"{OPTIMIZER}{key}.{name}"
                if not isinstance(value, Tensor) or value.shape != piece.shape:
                    scalar = torch.as_tensor(value)
                    yield Part(full_name, None, scalar.dtype, self.ctx, partial(torch.clone, scalar))
                else:
                    whole = partial(self.weights.whole, name, value)
                    yield Part(full_name, layouts[name], value.dtype, self.ctx, whole)

    @property
    def _has_copies(self) -> bool:
        """Whether the optimizer works on fp32 copies of the model's weights."""
        return any(parameter.dtype != torch.float32 for parameter in self.model.parameters())

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
        shapes = shapes_of_all_stages(layouts, self.ctx)
        self.weights.finish_gather()
        require_fit(reader, shapes, MODEL)
        self.load_model(reader, layouts)
        untrained = untrained_of_all_stages(layouts, self.ctx)
        trained = {name: shape for name, shape in shapes.items() if name not in untrained}
        pieces = dict(self.weights.named_parameters())
        if self._has_copies:
            prefix = f"{OPTIMIZER}{MAIN}."
            require_fit(reader, trained, prefix)
            for name, piece in pieces.items():
                self._copy_part(piece, name, layouts[name].to_local(reader.read(prefix + name), self.ctx))
        self._restore_optimizer(reader, layouts, pieces, trained)
        random_streams.restore_rng(reader, self.ctx)
        self.scaler.load_state(dict(reader.metadata["loss_scaler"]))
        for key in asdict(self.state):
            setattr(self.state, key, int(reader.metadata[key]))

    def load_model(self, reader: CheckpointReader, layouts: Mapping[str, ParameterLayout]) -> None:
        """The model's own weights, which have to fit."""
        for name in layouts:
            self.weights.write(name, layouts[name].to_local(reader.read(MODEL + name), self.ctx))

    def _main(self, piece: nn.Parameter) -> Tensor:
        """The fp32 weight that the optimizer updates."""
        return self.optimizer.main(piece) if isinstance(self.optimizer, CompletesWeights) else piece.detach()

    @torch.no_grad()
    def _copy_part(self, piece: nn.Parameter, name: str, local: Tensor) -> None:
        part = self.weights.part(name, local)
        if isinstance(self.optimizer, CompletesWeights):
            self.optimizer.set_main(piece, part)
        else:
            piece.copy_(part)

    def _restore_optimizer(
        self,
        reader: CheckpointReader,
        layouts: Mapping[str, ParameterLayout],
        pieces: Mapping[str, nn.Parameter],
        trained: Mapping[str, tuple[int, ...]],
    ) -> None:
        for full_name in reader.shapes():
            if not full_name.startswith(OPTIMIZER):
                continue
            key, _, name = full_name.removeprefix(OPTIMIZER).partition(".")
            if key == MAIN:
                continue
            if name not in trained:
                raise CheckpointError(f"the checkpoint has optimizer state for {name}, which the model does not have")
            if name not in pieces:
                continue  # of another pipeline stage
            value = reader.read(full_name)
            if value.shape == layouts[name].shape and value.ndim:
                local = layouts[name].to_local(value, self.ctx).to(pieces[name].device)
                # In order, as the weight is: fused optimizers go through both by the same offsets.
                value = self.weights.part(name, local).contiguous()
            self.optimizer.state[pieces[name]][key] = value


@dataclass(frozen=True)
class Part:
    """A tensor that a stage contributes. layout: of tensors with a parameter's shape; None: alike on all ranks."""

    name: str
    layout: ParameterLayout | None
    dtype: torch.dtype
    ctx: ParallelContext
    local: Callable[[], Tensor]
    """Its local tensor; collective over the ranks that divide it further."""

    @property
    def shape(self) -> tuple[int, ...]:
        return () if self.layout is None else self.layout.shape

    def canonical(self) -> Tensor:
        local = self.local()
        return local if self.layout is None else self.layout.to_canonical(local, self.ctx)


def over_stages(parts: list[Part], ctx: ParallelContext) -> Iterator[tuple[str, Tensor]]:
    """The canonical tensors of all pipeline stages, on the ranks of the first one. Collective."""
    if ctx.pp.size == 1:
        yield from ((part.name, part.canonical()) for part in parts)
        return
    everyone: list[list[tuple[str, tuple[int, ...], torch.dtype]] | None] = [None] * ctx.pp.size
    dist.all_gather_object(everyone, [(part.name, part.shape, part.dtype) for part in parts], group=ctx.pp.group)
    own, seen = {part.name: part for part in parts}, set()
    for stage, held in enumerate(everyone):
        for name, shape, dtype in held or []:
            if name in seen:
                continue
            seen.add(name)
            yield name, _from_stage(stage, own.get(name), shape, dtype, ctx)


def _from_stage(
    stage: int, part: Part | None, shape: tuple[int, ...], dtype: torch.dtype, ctx: ParallelContext
) -> Tensor:
    if stage == ctx.pp.rank:
        assert part is not None
        tensor = part.canonical().contiguous()
        if stage > 0:
            dist.send(tensor.to(ctx.device), dst=ctx.pp.ranks[0], group=ctx.pp.group)
        return tensor
    tensor = torch.empty(shape, dtype=dtype, device=ctx.device)
    if ctx.pp.rank == 0:
        dist.recv(tensor, src=ctx.pp.ranks[stage], group=ctx.pp.group)
    return tensor


def shapes_of_all_stages(layouts: Mapping[str, ParameterLayout], ctx: ParallelContext) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape, of the whole model. Collective over pipeline stages."""
    return merged_over_stages({name: layout.shape for name, layout in layouts.items()}, ctx)


def untrained_of_all_stages(layouts: Mapping[str, ParameterLayout], ctx: ParallelContext) -> dict[str, bool]:
    return merged_over_stages({name: True for name, layout in layouts.items() if not layout.trained}, ctx)


def merged_over_stages(own: dict[str, T], ctx: ParallelContext) -> dict[str, T]:
    """The union of the stages' dictionaries, in the order of stages. Collective over pipeline stages."""
    if ctx.pp.size == 1:
        return own
    everyone: list[dict[str, T] | None] = [None] * ctx.pp.size
    dist.all_gather_object(everyone, own, group=ctx.pp.group)
    return {name: value for held in everyone for name, value in (held or {}).items()}


def require_fit(reader: CheckpointReader, shapes: Mapping[str, tuple[int, ...]], prefix: str) -> None:
    """Raise CheckpointError unless the checkpoint's tensors under `prefix` are exactly the model's."""
    stored = {name.removeprefix(prefix): shape for name, shape in reader.shapes().items() if name.startswith(prefix)}
    problems = [f"{name} is missing" for name in shapes if name not in stored]
    problems += [f"{name} is in the checkpoint but not in the model" for name in stored if name not in shapes]
    problems += [
        f"{name} has shape {list(stored[name])} in the checkpoint, {list(shape)} in the model"
        for name, shape in shapes.items()
        if name in stored and tuple(stored[name]) != shape
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
