"""The part of a model in a pipeline stage, and the interface of models that can be split into stages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn


@dataclass(frozen=True)
class Stage:
    """A range of consecutive layers, by their indices in the whole model (from 0); may be empty.

    first: includes the modules before the layers (embedding). last: includes those after them (final norm, LM head).
    """

    layers: range
    first: bool = True
    last: bool = True


def whole(num_layers: int) -> Stage:
    """The only stage of a model without pipeline parallelism."""
    return Stage(range(num_layers))


@runtime_checkable
class Pipelined(Protocol):
    """A model that can run one stage at a time. Built with some stages, it has the parameters of those only,
    under the names that they have in the whole model."""

    def run_stage(self, stage: Stage, hidden: Any, **inputs: Tensor) -> Any:
        """The activations of the previous stage (None for the first) -> those for the next, or the output.

        inputs: the fields of the micro-batch that the model's `inputs` names; every stage gets all of them.
        """
        ...

    def stage_modules(self, stage: Stage) -> Iterable[nn.Module]:
        """The modules whose parameters the stage uses."""
        ...
