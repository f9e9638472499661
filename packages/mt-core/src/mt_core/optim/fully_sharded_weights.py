"""Master weights under torch's FSDP2 (`fully_shard`): weights, gradients and state sharded over data-parallel ranks.

ZeRO-3, or ZeRO-2 when weights stay unsharded between forward and backward; with replicated shards, HSDP. Its instances
may share the optimizer's state: each updates some rows of its shards, and collects the others.
16-bit training casts the sharded fp32 weights to 16 bits before each all-gather.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mt_core.nn.layout import ParameterLayout, parameter_layouts
from mt_core.nn.model import NumberedLayers, is_pipelined
from mt_core.optim.finalize_grads import SHARDS
from mt_core.optim.master_weights import UnshardedWeights, trained_parameters
from mt_core.parallel.collectives import all_gather
from mt_core.parallel.context import SINGLE, Axis, AxisName, ParallelContext
from mt_core.tensor_slice import TensorSlice


@dataclass(frozen=True)
class ShardOptions:
    """compute_dtype: of weights and activations. reshard_after_forward: ZeRO-3, else ZeRO-2. split_backward: input and
    weight gradients are computed apart, so that weights stay unsharded until the last pass of a step. user_buffers:
    what is sent is in memory that NCCL registers. reduce_each_pass: gradients are accumulated sharded, and sent in each
    pass of a step; else unsharded, and sent in the last one. over_instances: instances with the same shards share the
    optimizer's state."""

    compute_dtype: torch.dtype = torch.float32
    reshard_after_forward: bool = True
    reduce_in_bf16: bool = False
    split_backward: bool = False
    user_buffers: bool = False
    reduce_each_pass: bool = False
    over_instances: bool = False


@dataclass(frozen=True)
class UpdatedRows:
    """The rows of a shard that this rank updates: as many as each instance has, or fewer at the end."""

    instances: Axis
    rows: int

    @property
    def each(self) -> int:
        return -(-self.rows // self.instances.size)

    def of(self, shard: Tensor) -> Tensor:
        """A view."""
        return shard[self.first : self.first + self.each]

    @property
    def first(self) -> int:
        return min(self.each * self.instances.rank, self.rows)

    def collect(self, own: Tensor) -> Tensor:
        """The whole shard from the rows of all instances. Collective over them."""
        missing = own.new_zeros((self.each - own.shape[0], *own.shape[1:]))
        return all_gather(torch.cat((own, missing)), 0, self.instances)[: self.rows]


class FullyShardedWeights(UnshardedWeights):
    """Shards a model with fp32 weights in place. Collective. The named parameters are this rank's rows of each."""

    def __init__(self, model: nn.Module, ctx: ParallelContext, options: ShardOptions) -> None:
        super().__init__(model)
        # Layouts are read before: afterwards the parameters are DTensors.
        layouts = parameter_layouts(model)
        fully_shard_model(model, layouts, ctx, options)
        self._parameters: dict[str, Any] = dict(model.named_parameters())  # DTensors
        # Views of FSDP's shards. The optimizer works on plain tensors, since kernels on DTensors dispatch several times
        # slower.
        shards = {name: p.to_local().detach() for name, p in self._trained()}
        self._updated = {
            name: UpdatedRows(ctx.axis(SHARDS[layouts[name].replicas][1]) if options.over_instances else SINGLE, len(x))
            for name, x in shards.items()
        }
        self._own = {name: nn.Parameter(self._updated[name].of(x)) for name, x in shards.items()}
        self._passes = 0
        self._split_backward, self._reduces_each_pass = options.split_backward, options.reduce_each_pass
        # The passes of several stages interleave, so FSDP's own end-of-backward callback would come too early.
        self._ends_with_step = is_pipelined(model) and ctx.pp.size > 1 and ends_when_told()
        if self._ends_with_step:
            model.set_manual_backward_finalization(True)  # type: ignore[operator]

    def _trained(self) -> Iterator[tuple[str, Any]]:
        return trained_parameters(self.model)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self._own.items())

    def zero_grad(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def expect(self, passes: int) -> None:
        self._passes = passes
        if self._ends_with_step:
            self._end_passes(False)

    def _end_passes(self, end: bool) -> None:
        """Whether backward passes reduce-scatter gradients and reshard weights at their end."""
        # Without sync FSDP accumulates unsharded gradients, so that a step has one reduce-scatter and not one for each
        # micro-batch.
        self.model.set_requires_gradient_sync(end)  # type: ignore[operator]
        # The weight part of a backward pass still reads the weights after the input part has ended.
        if self._split_backward:
            self.model.set_reshard_after_backward(end)  # type: ignore[operator]

    def begin_pass(self, number: int) -> None:
        """Gradients are reduced in the last pass, or in each."""
        self.model.set_requires_gradient_sync(self._reduces_each_pass or number == self._passes - 1)  # type: ignore[operator]

    def reduce(self) -> None:
        if self._ends_with_step:
            self._end_passes(True)
            self.model.finalize_backward()  # type: ignore[operator]
        for name, parameter in self._trained():
            gradient = parameter.grad
            # The optimizer skips a parameter without a gradient. With zeros it steps every shard on every rank, as it
            # does with ParamAndGradBuffer.
            rows = None if gradient is None else self._updated[name].of(gradient.to_local())
            self._own[name].grad = torch.zeros_like(self._own[name]) if rows is None else rows

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Collect the rows that other instances have updated."""
        for name, updated in self._updated.items():
            if updated.instances.size > 1:
                self._parameters[name].to_local().copy_(updated.collect(self._own[name].detach()))

    def copy_from_model(self) -> None: ...

    def unshard(self, name: str, part: Tensor | None) -> Tensor:
        from torch.distributed.tensor import DTensor

        assert part is not None
        of, updated = self._parameters[name], self._updated.get(name)
        if updated is not None and updated.instances.size > 1:
            part = updated.collect(part)
        # shape and stride are given because from_local otherwise assumes equal shards, and the last ones may be shorter
        # or empty.
        return DTensor.from_local(
            part, of.device_mesh, of.placements, run_check=False, shape=of.shape, stride=of.stride()
        ).full_tensor()

    def shard(self, name: str, local: Tensor) -> Tensor:
        from torch.distributed.tensor import distribute_tensor

        of = self._parameters[name]
        # src_data_rank=None: every rank has the same local tensor and cuts its shard without a broadcast.
        shard = distribute_tensor(local, of.device_mesh, of.placements, src_data_rank=None).to_local()
        return self._updated[name].of(shard) if name in self._updated else shard

    def owned_slices(self, name: str) -> list[TensorSlice]:
        """The rows that this rank updates."""
        (shard,) = self._shard_slices(name)
        if (updated := self._updated.get(name)) is None:
            return [shard]
        first, shape = shard.start[0] + updated.first, tuple(self._own[name].shape)
        return [TensorSlice((first, *shard.start[1:]), shape)]

    def _shard_slices(self, name: str) -> list[TensorSlice]:
        """This rank's rows, as torch.chunk divides them over the `shard` axis."""
        whole = self._parameters[name]
        mesh = whole.device_mesh
        # The last mesh dimension is the shard axis; with HSDP the one before it replicates.
        number, ranks = mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
        # 5 rows on 4 ranks: 2, 2, 1 and 0 rows, as ceil(5 / 4) = 2; the last rank starts at row 5, not 6.
        first = min(-(-whole.shape[0] // ranks) * number, whole.shape[0])
        shape = tuple(whole.to_local().shape)
        return [TensorSlice((first,) + (0,) * (len(shape) - 1), shape)]

    def owned_weight(self, name: str) -> tuple[list[TensorSlice], Tensor]:
        return self._shard_slices(name), self._parameters[name].to_local().detach()


def ends_when_told() -> bool:
    """Whether this torch (2.15 and later) lets the caller finalize the backward pass."""
    from torch.distributed.fsdp import FSDPModule

    return hasattr(FSDPModule, "finalize_backward")


def fully_shard_model(
    model: nn.Module, layouts: Mapping[str, ParameterLayout], ctx: ParallelContext, options: ShardOptions
) -> None:
    """Each numbered layer is an FSDP unit, gathered and resharded as a whole; the rest of the model is one more."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    reduce_dtype = torch.bfloat16 if options.reduce_in_bf16 else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=options.compute_dtype, reduce_dtype=reduce_dtype)

    def shard(module: nn.Module, replicas: AxisName) -> None:
        fully_shard(
            module,
            mesh=shard_mesh(ctx, replicas),
            reshard_after_forward=options.reshard_after_forward,
            mp_policy=policy,
        )
        # Losses are divided by the count of all tokens, so gradients are summed, not averaged.
        module.set_gradient_divide_factor(1.0)  # type: ignore[operator]
        module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
        if options.user_buffers:
            module.set_allocate_memory_from_process_group_for_comm(True)  # type: ignore[operator]

    # Experts first: fully_shard leaves out parameters that an inner unit manages. Experts are replicated over other
    # ranks than the rest of their layer, so they need a unit with a mesh of its own.
    # A module inside of one, such as an adapter, belongs to its unit: only that one's forward pass has hooks.
    units: list[str] = []
    for path, module in model.named_modules():
        names = [name for name, _ in module.named_parameters(prefix=path, recurse=False)]
        # layouts has a parameter that two modules share once.
        is_of_experts = names and all(name in layouts and layouts[name].replicas == "edp" for name in names)
        if is_of_experts and not any(path.startswith(f"{unit}.") for unit in units):
            shard(module, "edp")
            units.append(path)
    for layer in _layers(model):
        shard(layer, "dp_cp")
    shard(model, "dp_cp")
    # Stages are run by run_stage() and not by __call__, whose hooks gather the weights; this puts the hooks around
    # run_stage().
    if is_pipelined(model) and ctx.pp.size > 1:
        register_fsdp_forward_method(model, "run_stage")


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """The numbered layers; of a module without them, such as a plain one, the members of its lists."""
    modules = list(model.modules())
    numbered = [module for module in modules if isinstance(module, NumberedLayers)]
    lists = [module for module in modules if isinstance(module, nn.ModuleList)]
    for stack in numbered or lists:
        yield from (layer for layer in stack if any(True for _ in layer.parameters()))


def shard_mesh(ctx: ParallelContext, replicas: AxisName) -> Any:
    """The mesh over ranks with the same weights: 1-D, or (replicate, shard) for hybrid sharding."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    shard, replicate = (ctx.axis(name) for name in SHARDS[replicas])
    kind = ctx.device.type
    if ctx.world.size == 1:
        # A context of one process has no group to build a mesh on.
        return init_device_mesh(kind, (1,))
    if replicate.size == 1:
        return DeviceMesh.from_group(_group(shard), kind, mesh=torch.tensor(shard.ranks))
    # [replicate, shard] global ranks. This rank's row is shard.ranks; other rows are the same, shifted by the distance
    # to the other replica (see _hsdp_axes).
    places = torch.tensor(
        [[rank + other - replicate.ranks[replicate.rank] for rank in shard.ranks] for other in replicate.ranks]
    )
    groups = [_group(replicate), _group(shard)]
    return DeviceMesh.from_group(groups, kind, mesh=places, mesh_dim_names=("replicate", "shard"))


def _group(axis: Any) -> Any:
    """The group of an axis; a new group of one rank where the axis has none, as a DeviceMesh requires one."""
    import torch.distributed as dist

    return axis.group if axis.group is not None else dist.new_group([dist.get_rank()], use_local_synchronization=True)
