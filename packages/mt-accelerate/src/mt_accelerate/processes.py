"""`Processes`: what a program asks of the ranks of its run, and what it lets single ones do."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mt_core.launch.environment import read_environment
from mt_core.parallel.context import wait_for_all

F = TypeVar("F", bound=Callable[..., Any])


class Processes(ABC):
    """The ranks of a run. The main process is the first rank, with Megatron-LM the last one."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Of this process."""

    @property
    @abstractmethod
    def main_process_index(self) -> int: ...

    @property
    def num_processes(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    @property
    def process_index(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def local_process_index(self) -> int:
        return read_environment().local_rank

    @property
    def is_main_process(self) -> bool:
        return self.process_index == self.main_process_index

    @property
    def is_last_process(self) -> bool:
        return self.process_index == self.num_processes - 1

    @property
    def is_local_main_process(self) -> bool:
        """The first rank of this node, or the last one if the main process is the last rank."""
        environment = read_environment()
        if environment.world_size == 1:
            return self.is_main_process
        last = self.main_process_index == self.num_processes - 1
        return environment.local_rank == (environment.local_world_size - 1 if last else 0)

    @property
    def use_distributed(self) -> bool:
        """Whether there are several processes."""
        return self.num_processes > 1

    @property
    def default_device(self) -> torch.device:
        return self.device

    def wait_for_everyone(self) -> None:
        wait_for_all()

    def main_process_first(self) -> Any:
        """The block runs on the main process before it runs on the others."""
        return _first(self.is_main_process)

    def local_main_process_first(self) -> Any:
        """The same on each node. Collective over all nodes."""
        return _first(self.is_local_main_process)

    def print(self, *values: Any, **options: Any) -> None:
        """On the main process of each node."""
        if self.is_local_main_process:
            print(*values, **options)

    def on_main_process(self, function: F) -> F:
        """Decorator: the function runs on the main process and gives None on the others."""
        return _only(lambda: self.is_main_process, function)

    def on_local_main_process(self, function: F) -> F:
        """Decorator: the function runs on the main process of each node."""
        return _only(lambda: self.is_local_main_process, function)

    def on_last_process(self, function: F) -> F:
        """Decorator: the function runs on the last rank."""
        return _only(lambda: self.is_last_process, function)

    def on_process(self, function: F | None = None, process_index: int | None = None) -> Any:
        """Decorator: the function runs on the rank process_index."""
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)
        return _only(lambda: self.process_index == process_index, function)

    def on_local_process(self, function: F | None = None, local_process_index: int | None = None) -> Any:
        """Decorator: the function runs on the rank local_process_index of each node."""
        if function is None:
            return functools.partial(self.on_local_process, local_process_index=local_process_index)
        return _only(lambda: self.local_process_index == local_process_index, function)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This rank's part of a list, tuple, tensor or data set, or of each value of a mapping; the first ranks have
        one more where the ranks do not divide it. apply_padding: repeats the last one, so that no part is shorter."""
        yield _part(inputs, self.process_index, self.num_processes, apply_padding)

    def destroy_process_group(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def _first(is_first: bool) -> Iterator[None]:
    # The others wait for the first one, which waits behind the block: one barrier for each rank.
    if not is_first:
        wait_for_all()
    yield
    if is_first:
        wait_for_all()


def _only(applies: Callable[[], bool], function: F) -> F:
    @functools.wraps(function)
    def wrapper(*arguments: Any, **options: Any) -> Any:
        return function(*arguments, **options) if applies() else None

    return wrapper  # type: ignore[return-value]


def _part(inputs: Any, rank: int, size: int, pad: bool) -> Any:
    if size == 1:
        return inputs
    if isinstance(inputs, Mapping):
        return {name: _part(value, rank, size, pad) for name, value in inputs.items()}
    each, more = divmod(len(inputs), size)
    start = rank * each + min(rank, more)
    end = start + each + (rank < more)
    # More ranks than inputs: those without one are given the last, as Accelerate does, if all parts have to be as long.
    part = inputs[start:end] if end > start or not pad else inputs[-1:]
    return _padded(part, each + bool(more)) if pad else part


def _padded(part: Any, length: int) -> Any:
    missing = length - len(part)
    if missing <= 0 or not len(part):
        return part
    if isinstance(part, Tensor):
        return torch.cat([part, part[-1:].expand(missing, *part.shape[1:])])
    if not isinstance(part, Sequence):
        return part
    kind: Any = type(part)
    return kind([*part, *[part[-1]] * missing])
