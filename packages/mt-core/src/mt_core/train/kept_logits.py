"""The model's logits in a step of training or evaluation, for callers that look at them beside the loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_core.nn.embedding import gather_logits
from mt_core.nn.loss import Loss
from mt_core.nn.model import contract
from mt_core.parallel.context import ParallelContext


class KeptLogits:
    """A loss that keeps the logits of the micro-batches that it is given, from `begin` until they are taken.

    Raises ConfigError under context parallelism, where no process has the logits of a whole sequence, and for steps
    that are replayed from a graph.
    """

    def __init__(self, loss: Loss, config: Config, ctx: ParallelContext, model: nn.Module) -> None:
        if ctx.cp.size > 1:
            raise ConfigError(
                f"parallel.context_parallel_size={ctx.cp.size}: no process has the logits of a whole sequence; set it "
                "to 1, or build the engine without return_logits"
            )
        if config.train.cuda_graphs == "step":
            raise ConfigError(
                "train.cuda_graphs=step replays the whole step, and no Python that could keep logits; set it to blocks "
                "or none, or build the engine without return_logits"
            )
        self.loss, self.config, self.ctx = loss, config, ctx
        self._over_vocabulary = contract(model).predicts_tokens
        self._logits: list[Tensor] | None = None

    def __call__(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        # None outside of begin() ... take(): evaluation of a whole data set keeps nothing.
        if self._logits is not None:
            self._logits.append(logits_of(output).detach())
        return self.loss(output, batch)

    def begin(self) -> None:
        self._logits = []

    def take(self) -> Tensor | None:
        """[rows, S, vocabulary] (of classes or choices: [rows, C]); None on ranks without the last pipeline stage.
        Collective over tensor-parallel ranks."""
        kept, self._logits = self._logits, None
        if not kept:
            return None
        logits = torch.cat(kept)
        return whole_vocabulary(logits, self.config, self.ctx) if self._over_vocabulary else logits


def logits_of(output: Any) -> Tensor:
    """Of a model's output. Raises ConfigError for one that has none."""
    logits = output.logits if hasattr(output, "logits") else output
    if not isinstance(logits, Tensor):
        raise ConfigError(f"{type(output).__name__} has no logits")
    return logits


def whole_vocabulary(logits: Tensor, config: Config, ctx: ParallelContext) -> Tensor:
    """[..., ids of this rank] -> [..., vocab_size]"""
    assert config.model.vocab_size is not None
    return gather_logits(logits, config.model.vocab_size, config.model.make_vocab_size_divisible_by, ctx)
