"""A rank that trains two steps for real and counts what it holds and sends: the other side of what `mt plan` says."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from fake import host
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from mt_core.config.loading import LoadedConfig, config_from_dict
from mt_core.optim.param_and_grad_buffer import ParamAndGradBuffer
from mt_core.train import Trainer

SMALLEST = 64
"""Bytes: counts, losses and norms are summed beside what a plan counts."""


@dataclass
class Counted:
    pp_rank: int
    parameters: int
    weights: int
    gradients: int
    main_weights: int
    optimizer_state: int
    activations: int
    sent: dict[tuple[str, str], int]
    same_ranks: dict[str, str]
    """Axis -> the one with the same ranks, under whose name its messages are counted."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.main_weights + self.optimizer_state + self.activations


class LiveStorages:
    """The most bytes that autograd keeps at once, each storage counted once; parameters are not counted."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.left_out = {local(parameter).untyped_storage().data_ptr() for parameter in parameters}
        self.users: Counter[int] = Counter()
        self.bytes = self.peak = 0

    def pack(self, tensor: Tensor) -> Held:
        return Held(tensor, self)


class Held:
    """A saved tensor for as long as autograd keeps it."""

    def __init__(self, tensor: Tensor, live: LiveStorages) -> None:
        # Detached: a result that its own function saves would keep that function, which keeps it.
        self.tensor, self.live = tensor.detach(), live
        storage = tensor.untyped_storage()
        self.key, self.size = storage.data_ptr(), storage.nbytes()
        if self.key in live.left_out:
            self.size = 0
        live.users[self.key] += 1
        if live.users[self.key] == 1:
            live.bytes += self.size
            live.peak = max(live.peak, live.bytes)

    def __del__(self) -> None:
        self.live.users[self.key] -= 1
        if self.live.users[self.key] == 0:
            self.live.bytes -= self.size


def count(rank: int, world: int, tree: str) -> Counted:
    """Everything in the second step: the optimizer has its state, stages have one another's shapes. tree: JSON."""
    plugins = host()
    trainer = Trainer(LoadedConfig(config_from_dict(json.loads(tree), plugins), {}, None), host=plugins)
    trainer.model.train()
    batches = trainer.engine.read_batches(trainer.train_data, trainer.engine.remaining_steps())
    trainer.engine.launch_step(next(batches))
    rank_batch = next(batches)
    live = LiveStorages(trainer.model.parameters())
    sent: Counter[tuple[str, str]] = Counter()
    messages = recording(trainer.ctx.axes, trainer.engine.copies.axes, sent)
    with messages, saved_tensors_hooks(live.pack, lambda held: held.tensor):
        trainer.engine.launch_step(rank_batch)
    batches.close()
    weights, model = trainer.engine.weights, trainer.model
    named = dict(weights.named_parameters())
    buckets = weights.buckets if isinstance(weights, ParamAndGradBuffer) else []
    own = storages(local(parameter) for parameter in model.parameters())
    state = [
        value for one in trainer.engine.optimizer.state.values() for value in one.values() if isinstance(value, Tensor)
    ]
    return Counted(
        trainer.ctx.pp.rank,
        sum(parameter.numel() for parameter in model.parameters()),
        sum(own.values()),
        sum(storages([one.grad for one in named.values()] + [bucket.gradients for bucket in buckets]).values()),
        sum(size for key, size in storages(named.values()).items() if key not in own),
        sum(storages(state).values()),
        live.peak,
        {call: size for call, size in sent.items() if size > SMALLEST},
        names_of_groups(trainer.ctx.axes)[1],
    )


def local(parameter: nn.Parameter) -> Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def storages(tensors: Iterable[Tensor | None]) -> dict[int, int]:
    held = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return {storage.data_ptr(): storage.nbytes() for storage in held}


@contextmanager
def recording(axes: Mapping[str, Any], copies: Mapping[str, Any], sent: Counter[tuple[str, str]]) -> Iterator[None]:
    """Adds up the bytes of torch.distributed calls by (ranks of the group, operation)."""
    groups, _ = names_of_groups(axes)
    groups.update({id(axis.group): "stage_copies" for axis in copies.values()})

    def note(group: Any, operation: str, tensor: Tensor) -> None:
        # Statistics for the log travel in fp64.
        if tensor.numel() * tensor.element_size() > SMALLEST and tensor.dtype != torch.float64:
            sent[groups.get(id(group), "dp"), operation] += tensor.numel() * tensor.element_size()

    def wrapped(name: str, operation: str, place: int) -> Any:
        real: Callable[..., Any] = getattr(dist, name)

        def call(*tensors: Any, **options: Any) -> Any:
            note(options.get("group"), operation, tensors[place])
            return real(*tensors, **options)

        return patch.object(dist, name, call)

    real_batch = dist.batch_isend_irecv

    def batch(operations: list[Any]) -> Any:
        for one in operations:
            if one.op is dist.isend:
                note(one.group, "send", one.tensor)
        return real_batch(operations)

    with ExitStack() as stack:
        stack.enter_context(wrapped("all_reduce", "all_reduce", 0))
        stack.enter_context(wrapped("all_gather_into_tensor", "all_gather", 0))
        stack.enter_context(wrapped("reduce_scatter_tensor", "reduce_scatter", 1))
        stack.enter_context(wrapped("all_to_all_single", "all_to_all", 1))
        stack.enter_context(patch.object(dist, "batch_isend_irecv", batch))
        yield


SHOWN = ("tp", "cp", "pp", "ep", "etp", "edp")
"""Axes whose messages are told apart; all others are "dp"."""


def names_of_groups(axes: Mapping[str, Any]) -> tuple[dict[int, str], dict[str, str]]:
    """(id of a group -> its axis, axis -> an earlier one that has the same group)"""
    names: dict[int, str] = {}
    same: dict[str, str] = {}
    for name in SHOWN:
        group = axes[name].group if name in axes else None
        if group is not None and names.setdefault(id(group), name) != name:
            same[name] = names[id(group)]
    # Gradients of dense weights, which a plan calls "dp".
    dense = axes["shard"].group if "shard" in axes else None
    if dense is not None and id(dense) in names:
        same["dp"] = names[id(dense)]
    return names, same
