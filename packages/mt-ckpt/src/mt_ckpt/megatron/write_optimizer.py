"""The optimizer's state as Megatron writes it: in a rank's file without the distributed optimizer, in flat buffers with
it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mt_ckpt.megatron.arguments import Arguments
from mt_ckpt.megatron.flat_buffers import FlatParameter, bucketing, buckets_of, shared_matrices
from mt_ckpt.megatron.folder import OPTIMIZER_FILE
from mt_ckpt.megatron.names import EXPERTS
from mt_ckpt.megatron.optimizer import FLAT_STATES, MAIN, STEP
from mt_ckpt.megatron.rank_plan import RankEntry
from mt_ckpt.megatron.target import Plan
from mt_ckpt.pickles.encode import Call
from mt_ckpt.pickles.torch_file import TorchWriter
from mt_core.nn.layout import ParameterLayout
from mt_core.parallel.context import ParallelContext

Written = Mapping[str, Any]
"""State ("exp_avg", "main") -> the encoded tensor of an entry."""


def param_group(options: Mapping[str, Any], *, decayed: bool, of_experts: bool) -> dict[str, Any]:
    """What Megatron-Core 0.19 keeps of a group, without its parameters. options: `optimizer_options`."""
    return {
        "is_expert_parallel": of_experts,
        "default_config": True,
        "wd_mult": 1.0 if decayed else 0.0,
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
        "max_lr": options["max_lr"],
        "min_lr": options["min_lr"],
        "lr": options["lr"],
        "betas": (options["adam_beta1"], options["adam_beta2"]),
        "eps": options["adam_eps"],
        "weight_decay": options["weight_decay"] if decayed else 0.0,
        "amsgrad": False,
        "maximize": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": None,
        # AdamW: the decay is not part of the gradient.
        "decoupled_weight_decay": True,
    }


def optimizer_groups(
    layouts: Mapping[str, ParameterLayout], options: Mapping[str, Any], step: float, *, experts_apart: bool
) -> list[dict[str, Any]]:
    """The groups of a distributed optimizer, dense ones first; their parameters are not listed."""
    kinds = {
        # - of_experts: canonical experts have one dimension more than the tensor that Megatron sees.
        (len(layout.shape) - of_experts > 1 and not name.endswith(".bias"), of_experts and experts_apart)
        for name, layout in layouts.items()
        for of_experts in [EXPERTS in name]
        if layout.trained
    }
    # Dense before experts, with weight decay before without.
    ordered = sorted(kinds, key=lambda kind: (kind[1], not kind[0]))
    return [
        {**param_group(options, decayed=decayed, of_experts=of_experts), STEP: step} for decayed, of_experts in ordered
    ]


def groups_value(groups: Sequence[Mapping[str, Any]]) -> Any:
    """The value under `optimizer` beside `distrib_optim.pt`."""
    kinds = [[g for g in groups if g["is_expert_parallel"] == of_experts] for of_experts in (False, True)]
    values = [{"optimizer": {"param_groups": kind}} for kind in kinds if kind]
    return values[0] if len(values) == 1 else values


def optimizer_value(
    members: Sequence[tuple[RankEntry, int, Written]],
    options: Mapping[str, Any],
    step: Callable[[], Any],
    *,
    experts_apart: bool,
) -> Any:
    """The value under `optimizer`: a dictionary, or one for dense parameters and one for the experts'.

    members: each parameter with its number of dimensions in the file and its states. step: makes the encoded number of
    updates, a tensor for each parameter. experts_apart: as Megatron does with expert parallel ranks.
    """
    kinds = [
        [m for m in members if (experts_apart and m[0].expert is not None) == of_experts]
        for of_experts in (False, True)
    ]
    values = [_one(kind, options, step, of_experts=bool(i)) for i, kind in enumerate(kinds) if kind]
    return values[0] if len(values) == 1 else values


def _one(
    members: Sequence[tuple[RankEntry, int, Written]],
    options: Mapping[str, Any],
    step: Callable[[], Any],
    *,
    of_experts: bool,
) -> dict[str, Any]:
    groups, states, copies = [], {}, []
    count = 0
    # Megatron's order of groups: with weight decay first.
    for decayed in (True, False):
        chosen = [written for entry, dims, written in members if _decays(entry, dims) == decayed]
        if not chosen:
            continue
        numbers = list(range(count, count + len(chosen)))
        # Numbers go on from group to group, as torch's state_dict counts them.
        count += len(chosen)
        groups.append({**param_group(options, decayed=decayed, of_experts=of_experts), "params": numbers})
        for number, written in zip(numbers, chosen, strict=True):
            moments = {state: tensor for state, tensor in written.items() if state != MAIN}
            states[number] = {STEP: step(), **moments}
        # One list for each group, of its 16-bit parameters.
        copies.append([written[MAIN] for written in chosen if MAIN in written])
    inner = {"state": states, "param_groups": groups}
    return {"optimizer": inner, "fp32_from_fp16_params": copies} if any(copies) else inner


def _decays(entry: RankEntry, dims: int) -> bool:
    return dims > 1 and not entry.name.endswith(".bias")


# -- `distrib_optim.pt`, the file of the distributed optimizer ---------------------------------------
#
# For each model part, and apart for its experts, there is a flat buffer of each state, laid out as `flat_buffers` says.
# The buffers of all ranks of a stage are written together, so that a tensor is read once for all of them.


@dataclass(frozen=True)
class FlatRank:
    """A rank's file. ctx: its place."""

    writer: TorchWriter
    ctx: ParallelContext


@dataclass(frozen=True)
class Placed:
    """A parameter's elements begin at `first` of a buffer."""

    entry: RankEntry
    first: int
    numel: int


@dataclass(frozen=True)
class Layout:
    """Values of one buffer, the same on every rank of the stage."""

    placed: Sequence[Placed]
    numel: int


def write_flat(plan: Plan, ranks: Sequence[FlatRank], stage: int, parts: Sequence[Sequence[RankEntry]]) -> None:
    """Write and finish the ranks' files. parts: for each model part, its entries in order. Raises OSError."""
    optimizers: list[list[dict[Any, Any]]] = [[] for _ in ranks]
    # Dense first, as Megatron chains its optimizers.
    for of_experts in (False, True):
        members = [[entry for entry in part if belongs(plan, entry, of_experts)] for part in parts]
        if any(members):
            for optimizer, value in zip(optimizers, _buffers(plan, ranks, stage, members), strict=True):
                optimizer.append(value)
    for rank, values in zip(ranks, optimizers, strict=True):
        rank.writer.finish(values[0] if len(values) == 1 else values)


def belongs(plan: Plan, entry: RankEntry, of_experts: bool) -> bool:
    """Whether the optimizer of the experts, or the other one, has the parameter."""
    return plan.trained(entry.name) and (plan.experts_apart and entry.expert is not None) == of_experts


def _buffers(
    plan: Plan, ranks: Sequence[FlatRank], stage: int, parts: Sequence[Sequence[RankEntry]]
) -> list[dict[Any, Any]]:
    """For each rank, the value of one optimizer."""
    # Megatron-Core stores the buckets of a buffer as one tensor since 0.6, and marks that by this key.
    values: list[dict[Any, Any]] = [{"buckets_coalesced": True} for _ in ranks]
    for number, part in enumerate(parts):
        layout = _layout(plan, ranks[0].ctx, stage, number, part)
        written = {stored: _write_state(plan, ranks, layout, state) for stored, state in FLAT_STATES.items()}
        for rank, value in enumerate(values):
            states = {stored: calls[rank] for stored, calls in written.items()}
            value[number] = {buffer_dtypes(plan): {**states, "numel_unpadded": layout.numel}}
    return values


def buffer_dtypes(plan: Plan) -> tuple[torch.dtype, torch.dtype]:
    """Dtypes of the parameters and of their gradients in the buffers."""
    dtype = plan.target.dtype
    # Megatron sets it for bf16 by default.
    accumulated = plan.args.get("accumulate_allreduce_grads_in_fp32", dtype == torch.bfloat16)
    return dtype, torch.float32 if accumulated else dtype


def _layout(plan: Plan, ctx: ParallelContext, stage: int, number: int, part: Sequence[RankEntry]) -> Layout:
    args, by_key = Arguments(plan.args, Path(OPTIMIZER_FILE)), {entry.stored: entry for entry in part}
    placed, begin = [], 0
    for bucket in buckets_of(flat_parameters(plan, ctx, part), bucketing(args, stage, number)):
        placed += [
            Placed(by_key[key], begin + first, _numel(plan, ctx, by_key[key])) for key, first in bucket.first.items()
        ]
        # Buckets follow one another without the padding at their ends, as Megatron stores them.
        begin += bucket.numel
    return Layout(placed, begin)


def flat_parameters(plan: Plan, ctx: ParallelContext, part: Sequence[RankEntry]) -> list[FlatParameter]:
    """What the rank at `ctx` has of these, under their stored names."""
    shared = shared_matrices(Arguments(plan.args, Path(OPTIMIZER_FILE)))
    return [FlatParameter(entry.stored, _numel(plan, ctx, entry), entry.name in shared) for entry in part]


def _numel(plan: Plan, ctx: ParallelContext, entry: RankEntry) -> int:
    shape = plan.layout_of(entry.name).local_shape(ctx)
    return torch.Size(shape if entry.expert is None else shape[1:]).numel()


def _write_state(plan: Plan, ranks: Sequence[FlatRank], layout: Layout, state: str) -> list[Call]:
    """Parameters as they are placed, with zeros between them."""
    # All ranks of the stage at the same time: each tensor is read once and cut for all of them.
    buffers = [rank.writer.begin_flat(torch.float32, layout.numel) for rank in ranks]
    recent, end = Recent(plan, state), 0
    for placed in layout.placed:
        # Alignment within the bucket; the gap before the first parameter of a bucket is empty.
        gap = torch.zeros(placed.first - end)
        whole = recent.read(placed.entry)
        for rank, buffer in zip(ranks, buffers, strict=True):
            buffer.write(gap)
            buffer.write(_own(plan, placed.entry, whole, rank.ctx))
        end = placed.first + placed.numel
    return [buffer.finish() for buffer in buffers]


def _own(plan: Plan, entry: RankEntry, whole: Tensor, ctx: ParallelContext) -> Tensor:
    local = plan.layout_of(entry.name).to_local(whole, ctx)
    return local if entry.expert is None else local[entry.expert]


class Recent:
    """Whole tensors that were read last: one, or the two matrices of a layer's experts, which come expert by expert.

    What is held is given up before another tensor is read.
    """

    def __init__(self, plan: Plan, state: str) -> None:
        self._plan, self._state = plan, state
        self._held: dict[str, Tensor] = {}

    def read(self, entry: RankEntry) -> Tensor:
        if entry.name not in self._held:
            # Sequential experts alternate between two matrices; anything else is read once.
            if len(self._held) >= (1 if entry.expert is None else 2):
                self._held.clear()
            self._held[entry.name] = self._plan.read(self._plan.source_of(entry.name), self._state)
        return self._held[entry.name]
