"""Which part of a model a pipeline stage holds, and what a model offers so that it can be cut into stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn


@dataclass(frozen=True)
class Stage:
    """A run of consecutive layers, by their numbers in the whole model (from 0); maybe none.

    first: with what comes before the layers (embedding). last: with what comes after (final norm, output).
    """

    layers: range
    first: bool = True
    last: bool = True


def whole(num_layers: int) -> Stage:
    """The only stage of a model that is not cut."""
    return Stage(range(num_layers))


@runtime_checkable
class Pipelined(Protocol):
    """A model that can run a stage at a time. Built with some stages, it has the parameters of those alone,
    under the names that they have in the whole model."""

    def run_stage(self, stage: Stage, hidden: Any, **inputs: Tensor) -> Any:
        """The states that the stage before gave (None for the first) -> those for the next, or the output.

        inputs: the fields of the micro-batch that the model's `inputs` names; every stage gets all of them.
        """
        ...

    def stage_modules(self, stage: Stage) -> Iterable[nn.Module]:
        """The modules whose parameters the stage uses."""
        ...


class NumberedLayers(nn.Module):
    """Layers under their numbers in the whole model, of which this process may hold a few."""

    def __init__(self, layers: Iterable[tuple[int, nn.Module]]) -> None:
        super().__init__()
        for number, layer in layers:
            self.add_module(str(number), layer)

    def __getitem__(self, number: int) -> nn.Module:
        return self._modules[str(number)]  # type: ignore[return-value]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.children())

    def __len__(self) -> int:
        return len(self._modules)

    def numbers(self) -> list[int]:
        return [int(name) for name in self._modules]
