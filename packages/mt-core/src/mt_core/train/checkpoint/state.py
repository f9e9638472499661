"""The state dict of a run: the tensors in a checkpoint, their names, and how they are restored.

Tensors: `model.<parameter>`, `optimizer.<state>.<parameter>` (canonical shapes, without padding),
`optimizer.main.<parameter>` (fp32 weights of 16-bit training); `random_streams` adds `rng.*`. The rest is JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mt_core.checkpoint_specs import CheckpointReader, Fragment
from mt_core.config.checks import global_batch_size
from mt_core.config.schema import Config
from mt_core.errors import CheckpointError
from mt_core.nn.layout import ParameterLayout, parameter_layouts, stream_seed
from mt_core.nn.plain_module import persistent_buffers
from mt_core.optim.base import Optimizer
from mt_core.optim.loss_scale import LossScaler
from mt_core.optim.master_weights import MasterWeights
from mt_core.parallel.context import AxisName, ParallelContext
from mt_core.train.checkpoint.local_shards import LocalShard, fill, identity, whole_fragment
from mt_core.train.state import TrainState

# -- states of torch's default generators: one stream per part of the work ---------------------------
#
# Modules from outside mt draw from them. Dropout of `mt_core.nn.dropout` seeds them anew for each sample.

RNG = "rng."
PART_OF: dict[AxisName, str] = {
    "dp": "data-parallel rank",
    "cp": "context-parallel rank",
    "pp": "pipeline rank",
    "tp": "tensor-parallel rank",
}


def dropout_stream(ctx: ParallelContext) -> str:
    """The name of this rank's stream. Ranks with other samples, positions or layers draw from other streams.

    Outside of tensor-parallel regions the tensor-parallel ranks hold the same activations and have to drop the same
    elements; with sequence parallelism they hold different positions and have different streams.
    """
    axes: tuple[AxisName, ...] = ("dp", "cp", "pp", "tp") if ctx.sequence_parallel else ("dp", "cp", "pp")
    # Rank 0 of an axis is left out, so the stream of the first rank has the same name in every layout.
    places = [f"{PART_OF[name]} {ctx.axis(name).rank}" for name in axes if ctx.axis(name).rank]
    return " of ".join(["dropout", *places])


def fragments(ctx: ParallelContext) -> Iterator[Fragment]:
    """`rng.<device>.<rank>`: the RNG states of this rank."""
    rank = ctx.world.rank
    yield whole_fragment(f"{RNG}cpu.{rank}", torch.get_rng_state())
    if ctx.device.type == "cuda":
        yield whole_fragment(f"{RNG}cuda.{rank}", torch.cuda.get_rng_state(ctx.device))


def restore_rng(reader: CheckpointReader, ctx: ParallelContext) -> None:
    """Restore this rank's RNG states. A rank that the checkpoint does not have starts a new stream."""
    names, rank = reader.shapes(), ctx.world.rank
    if f"{RNG}cpu.{rank}" in names:
        torch.set_rng_state(reader.read(f"{RNG}cpu.{rank}"))
    else:
        # A layout with more ranks than the run had. The iteration in the seed keeps it from repeating the masks of the
        # first steps.
        torch.manual_seed(stream_seed(int(reader.metadata["iteration"]), dropout_stream(ctx)))
    if ctx.device.type == "cuda" and f"{RNG}cuda.{rank}" in names:
        torch.cuda.set_rng_state(reader.read(f"{RNG}cuda.{rank}"), ctx.device)


MODEL, OPTIMIZER = "model.", "optimizer."
BUFFERS = "buffers."
"""Persistent buffers, such as the statistics of BatchNorm, as the first rank has them."""
MAIN = "main"
REMAINDER = "remainder"
"""Optimizer state with the low 16 bits of fp32 weights. A checkpoint stores the fp32 weight, not the two halves."""
GLOBAL_BATCH = "global_batch_size"
LOSS_SCALER = "loss_scaler"
"""Entry of the metadata, which checkpoints of other programs lack."""
WITHOUT_OPTIMIZER = "without_optimizer"
"""Entry of the metadata: true in a checkpoint that was saved without the optimizer's state."""
T = TypeVar("T")


@runtime_checkable
class CompletesWeights(Protocol):
    """An optimizer that may store the low 16 bits of the fp32 weights in its state."""

    def main(self, parameter: Tensor) -> Tensor: ...

    def set_main(self, parameter: Tensor, main: Tensor) -> None: ...


@dataclass(frozen=True)
class RunState:
    """The whole state of a run that a checkpoint holds."""

    model: nn.Module
    weights: MasterWeights
    optimizer: Optimizer
    scaler: LossScaler
    state: TrainState
    ctx: ParallelContext

    def fragments(self) -> list[Fragment]:
        """This rank's shards of the whole state. Replicas hold equal fragments."""
        # An all-gather that is under way would still write to the weights.
        self.weights.finish_gather()
        return list(self._fragments())

    def _fragments(self) -> Iterator[Fragment]:
        layouts = parameter_layouts(self.model)
        for name, parameter in self.model.named_parameters():
            yield from self._weight(name, layouts[name], parameter.dtype).fragments(self.ctx)
        for name, buffer in persistent_buffers(self.model):
            yield whole_fragment(BUFFERS + name, buffer)
        parameters = dict(self.weights.named_parameters())
        if self._has_copies:
            for name, parameter in parameters.items():
                main = self._state(MAIN, name, layouts[name], torch.float32, partial(self._main, parameter))
                yield from main.fragments(self.ctx)
        for name, parameter in parameters.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if key == REMAINDER:
                    continue  # a part of the master weight
                # Such as Adam's step counter.
                if not isinstance(value, Tensor) or value.shape != parameter.shape:
                    yield whole_fragment(f"{OPTIMIZER}{key}.{name}", torch.as_tensor(value))
                else:
                    state = self._state(key, name, layouts[name], value.dtype, partial(identity, value))
                    yield from state.fragments(self.ctx)
        yield from fragments(self.ctx)

    def _weight(self, name: str, layout: ParameterLayout, dtype: torch.dtype) -> LocalShard:
        slices, weight = self.weights.owned_weight(name)
        return LocalShard(MODEL + name, layout, dtype, slices, partial(identity, weight))

    def _state(
        self, key: str, name: str, layout: ParameterLayout, dtype: torch.dtype, part: Callable[[], Tensor]
    ) -> LocalShard:
        return LocalShard(f"{OPTIMIZER}{key}.{name}", layout, dtype, self.weights.owned_slices(name), part)

    @property
    def _has_copies(self) -> bool:
        """Whether the optimizer works on fp32 copies of the model's weights."""
        # Of the whole model: the optimizer then has fp32 copies of all weights, also of those that are in fp32
        # themselves.
        return any(parameter.dtype != torch.float32 for parameter in self.model.parameters())

    def metadata(self, config: Config) -> dict[str, Any]:
        return {
            **asdict(self.state),
            "config": config.to_dict(),
            # Without train.global_batch_size it follows from the number of ranks, which is not in the configuration.
            GLOBAL_BATCH: global_batch_size(config),
            LOSS_SCALER: self.scaler.state(),
            "environment": environment(),
        }

    def restore(self, reader: CheckpointReader) -> None:
        """Restore a complete checkpoint. Raises CheckpointError for missing or extra tensors, or other shapes."""
        if reader.metadata.get(WITHOUT_OPTIMIZER, False):
            raise CheckpointError(
                "the checkpoint was saved without the optimizer's state (checkpoint.save_optimizer=false), so that "
                "training cannot continue from it unchanged; start another run directory (--run-dir) from its "
                "weights: checkpoint.load, or load_state(..., with_optimizer=False)"
            )
        layouts = parameter_layouts(self.model)
        # Of all stages, since the checkpoint holds the whole model: a tensor of another stage is not an unexpected one.
        shapes = shapes_of_all_stages(layouts, self.ctx)
        self.weights.finish_gather()
        require_fit(reader, shapes, MODEL)
        self.load_model(reader, layouts)
        untrained = untrained_of_all_stages(layouts, self.ctx)
        trained = {name: shape for name, shape in shapes.items() if name not in untrained}
        parameters = dict(self.weights.named_parameters())
        if self._has_copies:
            require_fit(reader, trained, f"{OPTIMIZER}{MAIN}.")
            for name, parameter in parameters.items():
                self._set_main(parameter, self._read_state(reader, MAIN, name, layouts[name], parameter))
            # No copy_from_model() here: the fp32 weights have been read, and their lower bits would be lost.
            if isinstance(self.optimizer, CompletesWeights):
                # It rounds ties of bf16 away from zero; another optimizer, which may have saved the model's weights,
                # to even. Ranks that hold each other's shards have to have the same bits.
                self.weights.copy_to_model()
                self.weights.finish_gather()
        self._restore_optimizer(reader, layouts, parameters, trained)
        if LOSS_SCALER in reader.metadata:
            self.scaler.load_state(dict(reader.metadata[LOSS_SCALER]))
        self._restore_progress(reader)

    def restore_without_optimizer(self, reader: CheckpointReader) -> None:
        """Restore as `restore` does, but leave the optimizer's state and the loss scale unchanged."""
        layouts = parameter_layouts(self.model)
        self.weights.finish_gather()
        require_fit(reader, shapes_of_all_stages(layouts, self.ctx), MODEL)
        self.load_model(reader, layouts)
        self.copy_from_model()
        self._restore_progress(reader)

    def copy_from_model(self) -> None:
        """The optimizer's fp32 weights become the model's own, after these were set directly."""
        self.weights.copy_from_model()
        for state in self.optimizer.state.values():
            # The low 16 bits of the weights before.
            if REMAINDER in state:
                state[REMAINDER].zero_()

    def _restore_progress(self, reader: CheckpointReader) -> None:
        restore_rng(reader, self.ctx)
        # Last of all, so that an error before leaves the counters as they were.
        self.state.restore(reader.metadata)

    def load_model(self, reader: CheckpointReader, layouts: Mapping[str, ParameterLayout]) -> None:
        """Load the model weights. Raises CheckpointError unless names and shapes match."""
        for name, layout in layouts.items():
            weight = self._weight(name, layout, torch.float32)
            # Padding is not in the checkpoint.
            if layout.padded:
                weight.part().zero_()
            fill(weight, reader, self.ctx)
        for name, buffer in persistent_buffers(self.model):
            # Absent where the weights come from another format.
            if BUFFERS + name in reader.shapes():
                buffer.copy_(reader.read(BUFFERS + name))

    def _read_state(
        self, reader: CheckpointReader, key: str, name: str, layout: ParameterLayout, parameter: Tensor
    ) -> Tensor:
        """This rank's part of a state, in the stored dtype; padding is zero."""
        dtype = reader.dtypes()[f"{OPTIMIZER}{key}.{name}"]
        # Contiguous like the weight: fused optimizers index both by the same offsets.
        part = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
        fill(self._state(key, name, layout, dtype, partial(identity, part)), reader, self.ctx)
        return part

    def _main(self, parameter: nn.Parameter) -> Tensor:
        """The fp32 weight that the optimizer updates."""
        return self.optimizer.main(parameter) if isinstance(self.optimizer, CompletesWeights) else parameter.detach()

    @torch.no_grad()
    def _set_main(self, parameter: nn.Parameter, part: Tensor) -> None:
        if isinstance(self.optimizer, CompletesWeights):
            self.optimizer.set_main(parameter, part)
        else:
            parameter.copy_(part)

    def _restore_optimizer(
        self,
        reader: CheckpointReader,
        layouts: Mapping[str, ParameterLayout],
        parameters: Mapping[str, nn.Parameter],
        trained: Mapping[str, tuple[int, ...]],
    ) -> None:
        for full_name, shape in reader.shapes().items():
            if not full_name.startswith(OPTIMIZER):
                continue
            key, _, name = full_name.removeprefix(OPTIMIZER).partition(".")
            if key == MAIN:
                continue
            if name not in trained:
                raise CheckpointError(f"the checkpoint has optimizer state for {name}, which the model does not have")
            if name not in parameters:
                continue  # of another pipeline stage
            layout, parameter = layouts[name], parameters[name]
            # () is excluded, as it is the shape of step counters and of scalar parameters alike.
            is_like_weight = bool(shape) and tuple(shape) == layout.shape
            state = self._read_state(reader, key, name, layout, parameter) if is_like_weight else reader.read(full_name)
            self.optimizer.state[parameter][key] = state


def shapes_of_all_stages(layouts: Mapping[str, ParameterLayout], ctx: ParallelContext) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape, of the whole model. Collective over pipeline stages."""
    return merged_over_stages({name: layout.shape for name, layout in layouts.items()}, ctx)


def untrained_of_all_stages(layouts: Mapping[str, ParameterLayout], ctx: ParallelContext) -> dict[str, bool]:
    return merged_over_stages({name: True for name, layout in layouts.items() if not layout.trained}, ctx)


def merged_over_stages(entries: dict[str, T], ctx: ParallelContext) -> dict[str, T]:
    """The union of the stages' dictionaries, in the order of stages. Collective over pipeline stages."""
    if ctx.pp.size == 1:
        return entries
    everyone: list[dict[str, T] | None] = [None] * ctx.pp.size
    dist.all_gather_object(everyone, entries, group=ctx.pp.group)
    return {name: value for of_stage in everyone for name, value in (of_stage or {}).items()}


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
    """The software and hardware versions that bitwise reproducibility depends on beside the configuration."""
    return {"torch": torch.__version__, "num_threads": torch.get_num_threads()}
