"""`mt compare --deep` of two models: k steps of both, until a tensor differs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mt_core.errors import ConfigError
from mt_core.plugins import load_plugins
from mt_ops.deep.differences import TensorDifference, differences, first_of_each_part
from mt_ops.deep.models import open_model
from mt_ops.deep.recording import Recording, record, update
from mt_ops.deep.tolerance import TWINS

BATCH, LENGTH = 2, 32
RATE = 0.05
"""Rate of the gradient descent between steps."""


Other = Callable[[Path, Sequence[Tensor], int, float], Iterable[Recording]]
"""(path, tokens of each step, vocabulary, rate of the gradient descent) -> recordings of B, computed elsewhere."""


@dataclass(frozen=True)
class DeepComparison:
    """step: the first with a tensor that differs, or the last. first: of each part of it. compared: all of it."""

    step: int
    compared: Sequence[TensorDifference]
    first: Sequence[TensorDifference]


def compare_models(
    a: Path, b: Path, steps: int = 1, length: int = LENGTH, other: Other | None = None
) -> DeepComparison:
    """Both compute on the same random tokens in fp32 on the CPU. Raises ConfigError for other vocabularies."""
    host = load_plugins()
    mine, vocabulary = open_model(a, host)
    generator = torch.Generator().manual_seed(1234)
    batches = [torch.randint(0, vocabulary, (BATCH, length), generator=generator) for _ in range(steps)]
    theirs = _recordings_here(b, batches, vocabulary) if other is None else other(b, batches, vocabulary, RATE)
    for step, (tokens, second) in enumerate(zip(batches, theirs, strict=True), start=1):
        twins = [record(mine, tokens, twin=number) for number in range(TWINS)]
        compared = differences(record(mine, tokens), second, twins)
        if not compared:
            raise ConfigError(f"{a} and {b} have no tensor of one name and shape; deep comparison knows decoders")
        first_differences = first_of_each_part(compared)
        if first_differences or step == steps:
            break
        update(mine.model, RATE)
    return DeepComparison(step, compared, first_differences)


def _recordings_here(path: Path, batches: Sequence[Tensor], vocabulary: int) -> Iterator[Recording]:
    """Recordings of one step after another, as far as they are asked for."""
    model, vocab_size = open_model(path, load_plugins())
    if vocab_size != vocabulary:
        raise ConfigError(f"A has a vocabulary of {vocabulary}, {path} of {vocab_size}; they must have the same")
    for tokens in batches:
        yield record(model, tokens)
        update(model.model, RATE)


def lines(comparison: DeepComparison) -> Iterator[str]:
    """For a reader: what differs first in each part, or the tensor that is closest to differing."""
    yield f"{len(comparison.compared)} tensors compared, {comparison.step} of the steps"
    if comparison.first:
        yield "the first that differ:"
        yield from (f"  {difference}" for difference in comparison.first)
        return
    closest = max(comparison.compared, key=lambda difference: difference.relative / difference.allowed)
    yield f"the same up to rounding; closest to its limit: {closest}"
