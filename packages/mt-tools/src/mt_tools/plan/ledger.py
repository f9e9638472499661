"""Process groups that record collectives by axis and send nothing, and parallel contexts of simulated ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mt_core.config.schema import Config
from mt_core.optim.finalize_grads import TiedWeights
from mt_core.parallel.context import Axis, AxisName, AxisSizes, ParallelContext
from mt_core.train.build import DTYPES, axis_sizes

Call = tuple[str, str]
"""Axis, operation."""

# all_reduce = reduce_scatter, then all_gather.
SENT_SHARES = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
"""Factor of a ring algorithm over n ranks: a rank sends this times (n - 1) / n of the largest tensor of the call."""


@dataclass(frozen=True)
class Flow:
    """Compute and messages of one rank. bytes: of the largest tensor of each call. flops: of matrix products."""

    flops: float = 0.0
    bytes: Mapping[Call, float] = field(default_factory=dict)
    calls: Mapping[Call, float] = field(default_factory=dict)

    def __add__(self, other: Flow) -> Flow:
        return self.plus(other, 1.0)

    def __mul__(self, factor: float) -> Flow:
        return Flow().plus(self, factor)

    def plus(self, other: Flow, factor: float) -> Flow:
        """self + factor x other"""
        return Flow(
            self.flops + factor * other.flops,
            _sum(self.bytes, other.bytes, factor),
            _sum(self.calls, other.calls, factor),
        )

    def with_bytes_times(self, factor: float) -> Flow:
        """The same calls and products for `samples` times the samples."""
        return Flow(self.flops * factor, {call: count * factor for call, count in self.bytes.items()}, self.calls)


def _sum(first: Mapping[Call, float], second: Mapping[Call, float], factor: float) -> dict[Call, float]:
    sums = {key: first.get(key, 0) + factor * second.get(key, 0) for key in dict.fromkeys([*first, *second])}
    # Differences of layers (StageCosts) leave zeros.
    return {key: value for key, value in sums.items() if value}


def sent_bytes(operation: str, payload: float, size: int) -> float:
    """Bytes that one rank of an axis of `size` sends for a call, with ring algorithms; P2P messages are sent once."""
    if operation == "send":
        return payload
    return SENT_SHARES[operation] * payload * (size - 1) / size


@dataclass
class Ledger:
    """Records until `take`."""

    flops: float = 0.0
    bytes: Counter[Call] = field(default_factory=Counter)
    calls: Counter[Call] = field(default_factory=Counter)

    def sent(self, axis: str, operation: str, count: float) -> None:
        self.bytes[axis, operation] += count  # type: ignore[assignment]
        self.calls[axis, operation] += 1

    def take(self) -> Flow:
        """Returns what was recorded, and resets."""
        flow = Flow(self.flops, dict(self.bytes), dict(self.calls))
        self.flops, self.bytes, self.calls = 0.0, Counter(), Counter()
        return flow


class Done(dist.Work):
    """A completed work handle."""

    def wait(self, timeout: Any = None) -> bool:
        return True


class RecordingGroup(dist.ProcessGroup):
    """A group of `size` ranks of an axis of which only this one, number `rank`, exists. Nothing is sent. Tensors with
    values (on the CPU) get the result that they would have if all ranks had equal inputs.

    The methods are those that `torch.distributed` calls for its collectives, under the names of torch 2.11 and of 2.15.
    """

    def __init__(self, axis: str, size: int, ledger: Ledger, rank: int = 0) -> None:
        super().__init__(rank, size)
        self.axis, self.ledger = axis, ledger

    def _note(self, operation: str, tensor: Tensor) -> Done:
        self.ledger.sent(self.axis, operation, tensor.numel() * tensor.element_size())
        return Done()

    def allreduce(self, tensors: list[Tensor], *options: Any) -> Done:  # type: ignore[override]
        # Routing computes with counts on the CPU: n equal ranks sum to n times the value.
        if has_values(tensors[0]):
            tensors[0].mul_(self.size())
        return self._note("all_reduce", tensors[0])

    def all_gather_single(self, output: Tensor, tensor: Tensor, *options: Any) -> Done:
        if has_values(output):
            output.view(self.size(), -1).copy_(tensor.reshape(1, -1).expand(self.size(), -1))
        return self._note("all_gather", output)  # the largest tensor of the call

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, *options: Any) -> Done:
        if has_values(output):
            output.view(-1).copy_(tensor.reshape(self.size(), -1)[self.rank()] * self.size())
        return self._note("reduce_scatter", tensor)

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, receive: Sequence[int] = (), send: Sequence[int] = (), *options: Any
    ) -> Done:
        if has_values(output):
            first = sum(send[: self.rank()]) if send else len(tensor) // self.size() * self.rank()
            sizes = receive or [len(output) // self.size()] * self.size()
            output.copy_(torch.cat([tensor[first : first + size] for size in sizes]))
        return self._note("all_to_all", tensor)

    _allgather_base = all_gather_single  # type: ignore[assignment]  # the names of torch 2.11
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]


def has_values(tensor: Tensor) -> bool:
    return tensor.device.type != "meta"


# -- parallel contexts of simulated ranks ------------------------------------------------------------

SHOWN_AS: dict[AxisName, str] = {
    "shard": "dp",
    "replicate": "dp",
    "dp_cp": "dp",
    "expert_shard": "edp",
    "expert_replicate": "edp",
    "cp_inner": "cp",
    "cp_outer": "cp",
}
"""Axes that reports show under another name. `dp` stands for all ranks that reduce gradients, cp included."""


def all_axis_sizes(sizes: AxisSizes, world: int) -> dict[AxisName, int]:
    """The size of every axis. Raises ConfigError if they do not fit the world size."""
    dp, edp = sizes.dp(world), sizes.edp(world)
    return {
        "tp": sizes.tp,
        "cp": sizes.cp,
        "dp": dp,
        "pp": sizes.pp,
        "etp": sizes.expert_tp,
        "ep": sizes.ep,
        "edp": edp,
        "dp_cp": dp * sizes.cp,
        "model": sizes.tp * sizes.pp,
        "shard": dp * sizes.cp // sizes.replicate,
        "replicate": sizes.replicate,
        "expert_shard": edp // sizes.replicate,
        "expert_replicate": sizes.replicate,
        "world": world,
    }


def fake_context(config: Config, world: int, pp_rank: int, ledger: Ledger) -> ParallelContext:
    """The context of pipeline rank `pp_rank`, first on every other axis; its groups record into the ledger."""
    sizes = axis_sizes(config)
    lengths = all_axis_sizes(sizes, world)
    if config.parallel.hierarchical_context_parallel_sizes:
        lengths["cp_inner"], lengths["cp_outer"] = config.parallel.hierarchical_context_parallel_sizes
    return ParallelContext(
        torch.device("meta"),
        DTYPES[config.precision.dtype],
        config.parallel.sequence_parallel and sizes.tp > 1,
        {name: fake_axis(name, size, pp_rank if name == "pp" else 0, ledger) for name, size in lengths.items()},
    )


def fake_axis(name: AxisName, size: int, rank: int, ledger: Ledger) -> Axis:
    """A fake axis of `size` ranks under the name that reports show."""
    # An axis of one rank has no group: the runtime then calls no collective.
    group = RecordingGroup(SHOWN_AS.get(name, name), size, ledger, rank) if size > 1 else None
    return Axis(size, rank, group, tuple(range(size)) if size > 1 else (0,))


def fake_tied_weights(names: Sequence[set[str]], rank: int, ledger: Ledger) -> TiedWeights:
    """Weights that several pipeline ranks hold (tied weights), given those of each rank outside of its layers."""
    axes: dict[str, Axis] = {}
    for name in sorted(names[rank]):
        # The word embeddings of the first stage and the tied LM head of the last, for instance.
        holders = [place for place, of_rank in enumerate(names) if name in of_rank]
        if len(holders) > 1:
            axes[name] = fake_axis("stage_copies", len(holders), holders.index(rank), ledger)  # type: ignore[arg-type]
    return TiedWeights(axes)
