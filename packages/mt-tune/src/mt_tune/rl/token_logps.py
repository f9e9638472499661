"""Log-probabilities of drawn tokens by a model, in the layout of the run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mt_core.data.loader import RankBatch
from mt_core.nn.context_parallel.zigzag import unshard_sequence
from mt_core.nn.linear import SEQUENCE_DIM
from mt_core.nn.loss import build_cross_entropy
from mt_core.parallel.reductions import all_reduce_
from mt_core.train.batch_source import TrainingRun
from mt_core.train.pipelining import build_forward_backward
from mt_core.train.step.forward_backward import Batch
from mt_tune.rl.objective import TokenLogps


class Scorer:
    """Computes with a model of the run's layout. Collective over the ranks that share it."""

    def __init__(self, run: TrainingRun, model: nn.Module, temperature: float) -> None:
        self.run, self.model = run, model
        engine, config = run.engine, run.config
        logps = TokenLogps(build_cross_entropy(config, run.ctx), temperature)
        self.runner = build_forward_backward(
            config, run.ctx, model, engine.weights, engine.stages, logps, None, None, engine.time
        )

    @torch.no_grad()
    def logps_of(self, batch: RankBatch) -> list[NDArray[np.float32]]:
        """[rows, width] of each micro-batch, on all ranks that share the model."""
        engine = self.run.engine
        engine.weights.finish_gather()
        training, found = self.model.training, list[Tensor]()
        self.model.eval()

        def share(logps: Tensor, micro_batch: Batch) -> Tensor:
            found.append(logps.float())
            return logps.sum() * 0.0

        batches = engine.device_batches.take(batch)
        try:
            self.runner.forward(batches, share)
        finally:
            self.model.train(training)
        return self._on_all_ranks(batches, found)

    def _on_all_ranks(self, batches: Sequence[Batch], found: Sequence[Tensor]) -> list[NDArray[np.float32]]:
        ctx = self.run.ctx
        whole = []
        for number, batch in enumerate(batches):
            # A stage before the last one has found nothing.
            values = found[number] if found else torch.zeros(batch["labels"].shape, device=ctx.device)
            values = values.contiguous()
            if ctx.pp.size > 1:
                all_reduce_(values, ctx.pp)
            whole.append(unshard_sequence(values, SEQUENCE_DIM, ctx.cp).cpu().numpy())
        return whole
