"""Numbers of tokens by a model, without gradients: log-probabilities of drawn tokens, values of a value model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mt_core.data.loader import RankBatch
from mt_core.nn.context_parallel.zigzag import unshard_sequence
from mt_core.nn.linear import SEQUENCE_DIM
from mt_core.nn.loss import Loss, build_cross_entropy
from mt_core.parallel.reductions import all_reduce_
from mt_core.train.engine import Engine
from mt_core.train.pipelining import build_forward_backward
from mt_core.train.step.forward_backward import Batch
from mt_tune.rl.drawn_logps import TokenLogps, project_drawn_alone


class Scorer:
    """Computes with a model of the engine's layout. Collective over the ranks that share it.

    numbers: (output, batch) -> [B, S].
    """

    def __init__(self, engine: Engine, model: nn.Module, numbers: Loss) -> None:
        self.engine, self.model, self.numbers = engine, model, numbers
        self.runner = build_forward_backward(
            engine.config, engine.ctx, model, engine.weights, engine.stages, numbers, None, None, engine.time
        )

    @torch.no_grad()
    def of_tokens(self, batch: RankBatch) -> list[NDArray[np.float32]]:
        """[rows, width] of each micro-batch, on all ranks that share the model."""
        engine = self.engine
        engine.weights.finish_gather()
        training, collected = self.model.training, list[Tensor]()
        self.model.eval()

        def share(numbers: Tensor, micro_batch: Batch) -> Tensor:
            collected.append(numbers.float())
            return numbers.sum() * 0.0

        batches = engine.device_batches.take(batch)
        try:
            self.runner.forward(batches, share)
        finally:
            self.model.train(training)
        return self._on_all_ranks(batches, collected)

    def _on_all_ranks(self, batches: Sequence[Batch], collected: Sequence[Tensor]) -> list[NDArray[np.float32]]:
        ctx = self.engine.ctx
        whole = []
        for number, batch in enumerate(batches):
            # A stage before the last one has found nothing.
            values = collected[number] if collected else torch.zeros(batch["labels"].shape, device=ctx.device)
            values = values.contiguous()
            if ctx.pp.size > 1:
                all_reduce_(values, ctx.pp)
            whole.append(unshard_sequence(values, SEQUENCE_DIM, ctx.cp).cpu().numpy())
        return whole


def policy_scorer(engine: Engine, model: nn.Module, temperature: float) -> Scorer:
    """Log-probabilities by the policy or by a reference of its layout."""
    logps = TokenLogps(build_cross_entropy(engine.config, engine.ctx), temperature)
    project_drawn_alone(logps, model, engine.config)
    return Scorer(engine, model, logps)
