"""Process groups that send nothing: they record the collectives that the runtime calls, by axis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

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
