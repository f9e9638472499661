"""What a rank holds for its weights, and what it sends for them once a step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from mt_core.config.schema import Config
from mt_core.nn.layout import ParameterLayout, parameter_layouts
from mt_core.nn.stage import NumberedLayers
from mt_core.optim.buckets import Bucket
from mt_core.optim.buffered_weights import SHARDS, BufferedWeights
from mt_core.optim.gradients import GradientSums
from mt_core.optim.main_weights import MainWeights, trained_parameters
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.pipeline.schedules import splits_backward
from mt_core.parallel.stage_copies import StageCopies
from mt_core.plan.ledger import Flow, Ledger
from mt_core.plugins import PluginHost
from mt_core.train.build import DTYPES, build_weights, divides_state

FP32 = 4


@dataclass(frozen=True)
class WeightCost:
    """Bytes of one rank. parameters: elements that the model has here, without padding of buckets."""

    parameters: int = 0
    weights: float = 0.0
    gradients: float = 0.0
    main_weights: float = 0.0
    optimizer_state: float = 0.0
    buffers: float = 0.0
    updated: float = 0.0
    """Elements that this rank's optimizer updates."""
    step: Flow = field(default_factory=Flow)
    """Messages of a step that do not depend on the number of micro-batches."""
    micro_batch: Flow = field(default_factory=Flow)
    """Messages of each micro-batch: weights that are collected as they are used."""

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.main_weights + self.optimizer_state


@dataclass(frozen=True)
class StateBytes:
    """Bytes of optimizer state: for each element, and once for each parameter. For tensors of 2 and more dimensions
    (matrices) and for vectors."""

    of_element: Mapping[bool, float]
    of_parameter: Mapping[bool, float]

    def of(self, is_matrix: bool, elements: int) -> float:
        return self.of_element[is_matrix] * elements + self.of_parameter[is_matrix]


def probe_state(config: Config, host: PluginHost) -> StateBytes:
    """Let the configured optimizer update a small matrix and a small vector, and look at what it keeps."""
    elements, of_element, of_parameter = 64, {}, {}
    build = host.optimizers.get(config.optimizer.optimizer, key="optimizer.optimizer").build.load()
    for is_matrix, shape in ((True, (8, 8)), (False, (elements,))):
        parameter = nn.Parameter(torch.ones(shape))
        parameter.grad = torch.ones(shape)
        name = "decoder.layers.0.mlp.linear_fc1.weight" if is_matrix else "decoder.final_layernorm.weight"
        optimizer = build(config.optimizer, [{"params": [parameter], "names": [name], "weight_decay": 0.0}])
        optimizer.step()
        kept = [value for value in optimizer.state[parameter].values() if isinstance(value, Tensor)]
        like = [value for value in kept if value.numel() >= elements]
        of_element[is_matrix] = sum(value.numel() * value.element_size() for value in like) / elements
        of_parameter[is_matrix] = sum(
            value.numel() * value.element_size() for value in kept if value.numel() < elements
        )
    return StateBytes(of_element, of_parameter)


def weight_cost(
    config: Config,
    model: nn.Module,
    ctx: ParallelContext,
    ledger: Ledger,
    copies: StageCopies,
    state: StateBytes,
    passes: int,
) -> WeightCost:
    """Of a model on the meta device. copies: weights that other pipeline ranks hold too. passes: micro-batches."""
    if config.parallel.use_torch_fsdp2:
        return _fully_sharded_cost(config, model, ctx, copies, state, passes)
    weights = build_weights(config, model, ctx, copies)
    layouts = parameter_layouts(model)
    named = dict(weights.named_parameters())
    ledger.take()
    _exchange(config, weights, layouts, ctx, copies)
    held, gradients, main, buffers = held_bytes(weights, model)
    return WeightCost(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        weights=held,
        gradients=gradients,
        main_weights=main,
        optimizer_state=sum(
            state.of(len(layouts[name].shape) > 1, parameter.numel()) for name, parameter in named.items()
        ),
        buffers=buffers,
        updated=sum(parameter.numel() for parameter in named.values()),
        step=ledger.take(),
    )


def parameter_storages(model: nn.Module) -> dict[StorageWeakRef, int]:
    return storage_bytes(model.parameters())


def storage_bytes(tensors: Iterable[Tensor]) -> dict[StorageWeakRef, int]:
    """Storage -> bytes, each once."""
    return {StorageWeakRef(tensor.untyped_storage()): tensor.untyped_storage().nbytes() for tensor in tensors}


def _exchange(
    config: Config,
    weights: MainWeights,
    layouts: Mapping[str, ParameterLayout],
    ctx: ParallelContext,
    copies: StageCopies,
) -> None:
    """What the end of a step sends: gradients are summed, updated weights collected."""
    named = dict(weights.named_parameters())
    if not isinstance(weights, BufferedWeights):
        for parameter in named.values():
            parameter.grad = torch.empty_like(parameter)
    weights.reduce()
    GradientSums(layouts, ctx, copies, divided=divides_state(config)).complete(named.items())
    weights.publish()
    weights.finish_gather()


def held_bytes(weights: MainWeights, model: nn.Module) -> tuple[float, float, float, float]:
    """(weights, gradients, main weights, buffers) after `_exchange`."""
    named = dict(weights.named_parameters())
    buckets = weights.buckets if isinstance(weights, BufferedWeights) else []
    own = parameter_storages(model)
    main = {key: size for key, size in storage_bytes(named.values()).items() if key not in own}
    gradients = storage_bytes(
        [bucket.gradients for bucket in buckets] + [one.grad for one in named.values() if one.grad is not None]
    )
    sent = sum(bucket.size * bucket.reduce_dtype.itemsize for bucket in buckets if _is_copied(bucket))
    return float(sum(own.values())), float(sum(gradients.values())), float(sum(main.values())), float(sent)


def _is_copied(bucket: Bucket) -> bool:
    """Whether its gradients are sent in another number format than they are added up in."""
    return bucket.reduce_dtype != bucket.gradients.dtype


def _fully_sharded_cost(
    config: Config, model: nn.Module, ctx: ParallelContext, copies: StageCopies, state: StateBytes, passes: int
) -> WeightCost:
    """FSDP2 divides the rows of every parameter over the shard axis, each rank's share rounded up.

    Weights, gradients and state are fp32; what is collected is in the number format of training. Gradients of all but
    the last micro-batch wait whole, in fp32.
    """
    compute, reduced = DTYPES[config.precision.dtype].itemsize, 2 if config.precision.grad_reduce_in_bf16 else FP32
    layouts, ledger = parameter_layouts(model), Ledger()
    again = Ledger()
    # A backward pass in two halves finds its weights whole: they are collected once a step.
    gathers = ledger if splits_backward(config.parallel) else again
    own = whole = waiting = 0
    optimizer_state = 0.0
    units = fsdp_units(model)
    for names in units:
        gathered = 0
        for name in names:
            shape = model.get_parameter(name).shape
            size = ctx.axis(SHARDS[layouts[name].replicas][0]).size
            share = -(-shape[0] // size) * math.prod(shape[1:])
            own, whole, gathered = own + share, whole + math.prod(shape), gathered + share * size
            optimizer_state += state.of(len(layouts[name].shape) > 1, share)
        shard, instances = (ctx.axis(axis) for axis in SHARDS[layouts[names[0]].replicas])
        waiting = max(waiting, gathered)
        if shard.size > 1:
            gathers.sent("dp", "all_gather", gathered * compute)
            if config.parallel.fsdp_reshard_after_forward:
                again.sent("dp", "all_gather", gathered * compute)
            ledger.sent("dp", "reduce_scatter", gathered * reduced)
        if instances.size > 1:
            ledger.sent("dp", "all_reduce", gathered / shard.size * reduced)
    collected = whole if not config.parallel.fsdp_reshard_after_forward else 2 * waiting
    return WeightCost(
        parameters=whole,
        weights=float(own * FP32),
        gradients=float(own * FP32),
        optimizer_state=optimizer_state,
        buffers=float(collected * compute + (whole * FP32 if passes > 1 else 0)),
        updated=own,
        step=ledger.take() + _sums_of_copies(model, layouts, ctx, copies, own_share=whole / own),
        micro_batch=again.take(),
    )


def _sums_of_copies(
    model: nn.Module,
    layouts: Mapping[str, ParameterLayout],
    ctx: ParallelContext,
    copies: StageCopies,
    own_share: float,
) -> Flow:
    """Gradients that several tensor-parallel ranks or stages computed parts of, of this rank's share of them."""
    ledger = Ledger()
    for name, parameter in trained_parameters(model):
        size = parameter.numel() / own_share * FP32
        for axis in layouts[name].partial_gradient:
            if ctx.axis(axis).size > 1:
                ledger.sent(axis, "all_reduce", size)
        if name in copies.axes:
            ledger.sent("stage_copies", "all_reduce", size)
    return ledger.take()


def fsdp_units(model: nn.Module) -> list[list[str]]:
    """Names of the parameters that are collected together: those of each numbered layer, and all others."""
    layers = [
        {id(parameter) for parameter in layer.parameters()}
        for stack in model.modules()
        if isinstance(stack, NumberedLayers)
        for layer in stack
    ]
    inside = set().union(*layers) if layers else set()
    named = list(trained_parameters(model))
    units = [[name for name, parameter in named if id(parameter) in layer] for layer in layers]
    units.append([name for name, parameter in named if id(parameter) not in inside])
    return [unit for unit in units if unit]
