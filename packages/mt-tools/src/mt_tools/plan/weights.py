"""Memory of a rank's weights and optimizer state, and their communication once per step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from mt_core.config.schema import Config
from mt_core.nn.layout import ParameterLayout, parameter_layouts
from mt_core.nn.model import NumberedLayers
from mt_core.optim.base import StateBytes
from mt_core.optim.buckets import Bucket
from mt_core.optim.configs import MuonConfig
from mt_core.optim.finalize_grads import GradFinalizer, TiedWeights
from mt_core.optim.master_weights import Fp32RemainderWeights, Fp32Weights, MasterWeights, trained_parameters
from mt_core.optim.muon import is_matrix
from mt_core.optim.param_and_grad_buffer import SHARDS, ParamAndGradBuffer
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.pipeline.schedules import splits_backward
from mt_core.plugins import PluginHost
from mt_core.train.build import DTYPES, build_weights, shards_over_instances, shards_state
from mt_tools.plan.ledger import Flow, Ledger

FP32 = 4
GradientMemory = Literal["allocated", "accumulated", "main"]
"""Gradients that autograd allocates in each backward pass, that it adds to, or that products add to (in fp32)."""


@dataclass(frozen=True)
class WeightCost:
    """Bytes on one rank. parameters: elements of the model on this rank, without padding of buckets."""

    parameters: int = 0
    weights: float = 0.0
    gradients: float = 0.0
    main_weights: float = 0.0
    optimizer_state: float = 0.0
    gradient_memory: GradientMemory = "accumulated"
    late_gradients: float = 0.0
    """The part of the gradients that is allocated in the backward pass, or as fp32 copies for the update."""
    buffers: float = 0.0
    updated: float = 0.0
    """Elements that this rank's optimizer updates."""
    update: float = 0.0
    """Bytes that the optimizer's update needs besides, when no activations are kept."""
    step: Flow = field(default_factory=Flow)
    """Messages of a step that do not depend on the number of micro-batches."""
    collected_first: float = 1.0
    """Fraction of the all-gathered weights that has to arrive before the first layer."""
    micro_batch: Flow = field(default_factory=Flow)
    """Messages of each micro-batch: weights that are all-gathered when they are used."""

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.main_weights + self.optimizer_state


def newton_schulz_bytes(rows: int, columns: int) -> int:
    """What Muon holds while it orthogonalizes a matrix in fp32: the matrix and up to four of its size, and products of
    its shorter side."""
    matrix, gram = rows * columns, min(rows, columns) ** 2
    return FP32 * max(5 * matrix + gram, 3 * matrix + 4 * gram)


def update_bytes(config: Config, model: nn.Module) -> float:
    """Bytes of the update of the largest matrix that Muon orthogonalizes on one rank, unsharded in every layout, or of
    the experts of a rank together; 0 for other optimizers."""
    if not isinstance(config.optimizer, MuonConfig):
        return 0.0
    matrices = {name: layout for name, layout in parameter_layouts(model).items() if is_matrix(name, layout)}
    return max(
        (
            model.get_parameter(name).shape[:-2].numel() * newton_schulz_bytes(*layout.shape[-2:])
            for name, layout in matrices.items()
        ),
        default=0.0,
    )


def weight_cost(
    config: Config,
    host: PluginHost,
    model: nn.Module,
    ctx: ParallelContext,
    ledger: Ledger,
    copies: TiedWeights,
    state: StateBytes,
    passes: int,
) -> WeightCost:
    """For a model on the meta device. copies: weights that other pipeline ranks hold too. passes: micro-batches."""
    if config.parallel.use_torch_fsdp2:
        return _fully_sharded_cost(config, host, model, ctx, copies, state, passes)
    # The runtime's own master weights and buckets, on the meta device, so that padding and dtypes are its own.
    weights = build_weights(config, model, ctx, copies, host)
    layouts = parameter_layouts(model)
    named = dict(weights.named_parameters())
    ledger.take()
    _exchange(config, weights, layouts, ctx, copies)
    resident, gradients, main, buffers = resident_bytes(weights, model)
    memory = gradient_memory(weights, model, passes)
    return WeightCost(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        weights=resident,
        gradients=gradients,
        main_weights=main,
        optimizer_state=sum(
            state.of(is_matrix(name, layouts[name]), parameter.numel()) for name, parameter in named.items()
        ),
        gradient_memory=memory,
        late_gradients=gradients if memory == "allocated" else _copied_gradients(weights),
        buffers=buffers,
        updated=sum(parameter.numel() for parameter in named.values()),
        update=update_bytes(config, model),
        step=ledger.take(),
        collected_first=_share_waited_for(weights),
    )


def gradient_memory(weights: MasterWeights, model: nn.Module, passes: int) -> GradientMemory:
    """passes: micro-batches."""
    if isinstance(weights, Fp32Weights):
        # The first micro-batch leaves its gradients to the others.
        return "allocated" if passes == 1 else "accumulated"
    in_products = any(hasattr(parameter, "main_grad") for parameter in model.parameters())
    return "main" if in_products else "accumulated"


def hold_gradients(model: nn.Module, memory: GradientMemory) -> None:
    """Give parameters what gradients are added to."""
    if memory == "main":
        Fp32RemainderWeights(model)  # its hooks and main gradients stay with the parameters
    elif memory == "accumulated":
        for _, parameter in trained_parameters(model):
            parameter.grad = torch.empty_like(parameter)


def _share_waited_for(weights: MasterWeights) -> float:
    if not isinstance(weights, ParamAndGradBuffer):
        return 1.0
    return sum(bucket.weights.nbytes for bucket in weights.waited_for) / sum(b.weights.nbytes for b in weights.buckets)


def parameter_storages(model: nn.Module) -> dict[StorageWeakRef, int]:
    return storage_bytes(model.parameters())


def storage_bytes(tensors: Iterable[Tensor]) -> dict[StorageWeakRef, int]:
    """Storage -> bytes, each once."""
    return {StorageWeakRef(tensor.untyped_storage()): tensor.untyped_storage().nbytes() for tensor in tensors}


def _exchange(
    config: Config,
    weights: MasterWeights,
    layouts: Mapping[str, ParameterLayout],
    ctx: ParallelContext,
    copies: TiedWeights,
) -> None:
    """Communication at the end of a step: gradient reduction, and the all-gather of updated weights."""
    named = dict(weights.named_parameters())
    if not isinstance(weights, ParamAndGradBuffer):
        for parameter in named.values():
            # Without buckets gradients are those of autograd, which has not run.
            parameter.grad = torch.empty_like(parameter, dtype=parameter.grad_dtype)
    weights.reduce()
    GradFinalizer(layouts, ctx, copies, sharded=shards_state(config)).finalize_model_grads(named.items())
    weights.copy_to_model()
    weights.finish_gather()


def resident_bytes(weights: MasterWeights, model: nn.Module) -> tuple[float, float, float, float]:
    """(weights, gradients, master weights, buffers) after `_exchange`."""
    named = dict(weights.named_parameters())
    buckets = weights.buckets if isinstance(weights, ParamAndGradBuffer) else []
    storages = parameter_storages(model)
    # In fp32 training the master weights are the model's own storage.
    main = {key: size for key, size in storage_bytes(named.values()).items() if key not in storages}
    gradients = storage_bytes(
        [bucket.gradients for bucket in buckets]
        + [parameter.grad for parameter in named.values() if parameter.grad is not None]
    )
    # The copy in the dtype of the reduction.
    sent = sum(bucket.size * bucket.reduce_dtype.itemsize for bucket in buckets if _is_copied(bucket))
    return (
        float(sum(storages.values())),
        float(sum(gradients.values())),
        float(sum(main.values())),
        float(sent),
    )


def _copied_gradients(weights: MasterWeights) -> float:
    """Bytes of the fp32 gradients of an update that are not in buckets."""
    if not isinstance(weights, ParamAndGradBuffer):
        return 0.0
    in_buckets = storage_bytes(bucket.gradients for bucket in weights.buckets)
    of_update = storage_bytes(
        parameter.grad for _, parameter in weights.named_parameters() if parameter.grad is not None
    )
    return float(sum(size for key, size in of_update.items() if key not in in_buckets))


def _is_copied(bucket: Bucket) -> bool:
    """Whether gradients are reduced in another dtype than they are accumulated in."""
    return bucket.reduce_dtype != bucket.gradients.dtype


def _fully_sharded_cost(
    config: Config,
    host: PluginHost,
    model: nn.Module,
    ctx: ParallelContext,
    copies: TiedWeights,
    state: StateBytes,
    passes: int,
) -> WeightCost:
    """FSDP2 shards every parameter along its rows over the shard axis, each rank's shard rounded up.

    Weights, gradients and state are fp32; the all-gather is in the dtype of training. Unless they are reduced in each,
    the gradients of all but the last micro-batch are kept unsharded, in fp32.
    """
    compute, reduced = DTYPES[config.precision.dtype].itemsize, 2 if config.precision.grad_reduce_in_bf16 else FP32
    layouts, ledger = parameter_layouts(model), Ledger()
    again = Ledger()
    # With a split backward pass the weights stay unsharded: they are all-gathered once per step.
    gathers = ledger if splits_backward(config.parallel, host) else again
    in_each = config.parallel.fsdp_reduce_each_micro_batch
    reductions = again if in_each else ledger
    sharded = whole = waiting = 0
    optimizer_state = 0.0
    units = fsdp_units(model)
    for names in units:
        gathered = 0
        for name in names:
            shape = model.get_parameter(name).shape
            size = ctx.axis(SHARDS[layouts[name].replicas][0]).size
            share = -(-shape[0] // size) * math.prod(shape[1:])  # rows of the largest shard
            sharded, whole, gathered = sharded + share, whole + math.prod(shape), gathered + share * size
            optimizer_state += state.of(is_matrix(name, layouts[name]), _updated(shape, layouts[name], ctx, config))
        shard, replicate = (ctx.axis(axis) for axis in SHARDS[layouts[names[0]].replicas])
        waiting = max(waiting, gathered)
        if shard.size > 1:
            gathers.sent("dp", "all_gather", gathered * compute)
            if config.parallel.fsdp_reshard_after_forward:
                # Resharded behind the forward pass: gathered once more for the backward pass.
                again.sent("dp", "all_gather", gathered * compute)
            reductions.sent("dp", "reduce_scatter", gathered * reduced)
        if replicate.size > 1:
            reductions.sent("dp", "all_reduce", gathered / shard.size * reduced)
            if shards_over_instances(config):
                ledger.sent("dp", "all_gather", gathered / shard.size * FP32)
    # Resharded: the layer at hand and the next one, which is prefetched.
    collected = whole if not config.parallel.fsdp_reshard_after_forward else 2 * waiting
    return WeightCost(
        parameters=whole,
        weights=float(sharded * FP32),
        gradients=float(sharded * FP32),
        optimizer_state=optimizer_state,
        buffers=float(collected * compute + (whole * FP32 if passes > 1 and not in_each else 0)),
        updated=sharded,
        update=update_bytes(config, model),
        step=ledger.take() + _sums_of_copies(model, layouts, ctx, copies, own_share=whole / sharded),
        micro_batch=again.take(),
    )


def _sums_of_copies(
    model: nn.Module,
    layouts: Mapping[str, ParameterLayout],
    ctx: ParallelContext,
    copies: TiedWeights,
    own_share: float,
) -> Flow:
    """All-reduces of this rank's gradients that are partial over tensor-parallel ranks or stages."""
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
    """Names of the parameters that are all-gathered together: one group per numbered layer, and one for all others."""
    layers = [
        {id(parameter) for parameter in layer.parameters()}
        for stack in model.modules()
        if isinstance(stack, NumberedLayers)
        for layer in stack
    ]
    inside = set().union(*layers) if layers else set()
    named = list(trained_parameters(model))
    # fully_shard is applied to each layer.
    units = [[name for name, parameter in named if id(parameter) in layer] for layer in layers]
    # Shared parameters are among these or in one layer: by identity, each once.
    units.append([name for name, parameter in named if id(parameter) not in inside])
    return [unit for unit in units if unit]


def _updated(shape: torch.Size, layout: ParameterLayout, ctx: ParallelContext, config: Config) -> int:
    """Elements of a parameter that a rank updates: the rows of the largest shard, or its part of them."""
    shard, replicate = (ctx.axis(name) for name in SHARDS[layout.replicas])
    rows = -(-shape[0] // shard.size)
    return (-(-rows // replicate.size) if shards_over_instances(config) else rows) * math.prod(shape[1:])
