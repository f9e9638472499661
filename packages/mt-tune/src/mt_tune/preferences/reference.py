"""Log-probabilities of answers by a reference, as a field of the batches (train.batch_source="reference")."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mt_core.checkpoint_lookup import open_start
from mt_core.data.loader import Arrays, RankBatch
from mt_core.errors import CheckpointError, ConfigError, TrainingError
from mt_core.nn.loss import build_cross_entropy
from mt_core.parallel.first_rank import all_gather_objects, on_first_rank
from mt_core.parallel.reductions import all_reduce_
from mt_core.train import build
from mt_core.train.batch_source import BatchSource, TrainingRun
from mt_core.train.checkpoint.partial_load import adapted
from mt_core.train.pipelining import build_forward_backward
from mt_core.train.step.forward_backward import Batch, ForwardBackward
from mt_core.train.trained_model import load_model_weights
from mt_tune.preferences.config import PreferenceConfig
from mt_tune.preferences.objective import REFERENCE_LOGPS, segment_sums
from mt_tune.preferences.samples import ANSWER

Sums = dict[str, list[float]]
"""Hash of a row's tokens -> the sum of log-probabilities of each answer in it."""
FIRST_STEP = 1e-2
"""Largest difference of an answer's log-probability to the reference's, relative to it, at the first step."""


class ReferenceSource(BatchSource):
    """The batches of the data set with the reference's log-probabilities.

    preference.reference="start": those of all samples are computed before the first step, by the weights that the run
    starts with, and kept in the run directory for its resumes. "model": each batch's are computed by a second model.
    """

    def __init__(self, run: TrainingRun) -> None:
        super().__init__(run)
        self.keys = run.config.section(PreferenceConfig)
        self.scorer = _Scorer(run, _reference_model(run) if self.keys.reference == "model" else run.model)
        self.sums: Sums = {}
        self._starts = run.resumed_from is None
        if self.keys.reference == "start" and self._starts:
            self._compute_all()

    def batches(self) -> Generator[RankBatch, None, None]:
        first = self._starts
        batches = super().batches()
        try:
            for batch in batches:
                yield batch
                if first:
                    self._require_equal_start()
                first = False
        finally:
            batches.close()

    def complete(self, batch: RankBatch) -> RankBatch:
        if self.keys.reference == "model":
            of_micro_batches = self.scorer.sums_of(batch)
        else:
            of_micro_batches = [[self._known(row) for row in rows_of(arrays)] for arrays in batch.micro_batches]
        completed = [
            {**arrays, REFERENCE_LOGPS: placed(arrays, sums)}
            for arrays, sums in zip(batch.micro_batches, of_micro_batches, strict=True)
        ]
        return replace(batch, micro_batches=completed)

    def state_dict(self) -> Mapping[str, Any]:
        return {"samples": len(self.sums), "hash": hash_of_sums(self.sums)} if self.keys.reference == "start" else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises CheckpointError where the file of the run directory is missing or another one."""
        if self.keys.reference != "start":
            return
        path = self._path()
        try:
            self.sums = json.loads(path.read_text(encoding="utf-8")) if path is not None else {}
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: the reference's log-probabilities cannot be read: {error}") from error
        if hash_of_sums(self.sums) != state["hash"]:
            raise CheckpointError(
                f"{path} has other log-probabilities of the reference than when the checkpoint was written; put that "
                "file back, or start a new run"
            )

    # -- the reference that the run starts with -------------------------------------------------------

    def _compute_all(self) -> None:
        engine = self.run.engine
        size, count = engine.batch_size.full, min(engine.total_samples, len(self.run.train_data))
        sets = [(self.run.train_data, count)]
        sets += [(dataset, engine.evaluated_samples(dataset)) for dataset in self.run.valid_data.values()]
        for dataset, samples in sets:
            steps = [(first, min(size, samples - first)) for first in range(0, samples, size)]
            for batch in engine.read_batches(dataset, steps):
                self._add(batch)
        # Each data-parallel rank has computed its own rows, and the split of a later batch may be another.
        for of_rank in all_gather_objects(self.sums, self.run.ctx.world):
            self.sums.update(of_rank)
        path = self._path()
        if path is not None:
            on_first_rank(lambda: _write(path, self.sums), self.run.ctx.world)
        self.run.message(f"log-probabilities of the reference: {len(self.sums)} samples by the weights of the start")

    def _add(self, batch: RankBatch) -> None:
        known = all(row in self.sums for arrays in batch.micro_batches for row in rows_of(arrays))
        # Collective: a batch is left out only where all ranks know it, as in later epochs.
        if all(all_gather_objects(known, self.run.ctx.world)):
            return
        for arrays, sums in zip(batch.micro_batches, self.scorer.sums_of(batch), strict=True):
            self.sums.update(zip(rows_of(arrays), sums, strict=True))

    def _known(self, row: str) -> list[float]:
        try:
            return self.sums[row]
        except KeyError:
            raise TrainingError(
                "a sample has no log-probabilities of the reference: the data have changed since the run began, or it "
                "takes "
                'more samples than it was started for; start a new run, or set preference.reference="model"'
            ) from None

    def _path(self) -> Path | None:
        directory = self.run.directory
        return None if directory is None else directory.path / "reference.json"

    def _require_equal_start(self) -> None:
        """At the first step the policy is the reference: what differs then is no preference."""
        loss: Any = self.run.engine.loss
        largest = getattr(loss, "first_difference", None)
        if largest is not None and not largest <= FIRST_STEP:
            raise TrainingError(
                f"at the first step the policy's log-probability of an answer differs from the reference's by "
                f"{largest:.3g} "
                "of it, where both are the same weights; the reference is another model (checkpoint.load), or the "
                "model has noise (dropout, router jitter)"
            )


class _Scorer:
    """Sums of log-probabilities of answers by a model, in the layout of the run. Collective."""

    def __init__(self, run: TrainingRun, model: nn.Module) -> None:
        self.run, self.model = run, model
        engine, config = run.engine, run.config
        own = build_cross_entropy(config, run.ctx)
        self.runner: ForwardBackward = build_forward_backward(
            config, run.ctx, model, engine.weights, engine.stages, own, None, None, engine.time
        )

    @torch.no_grad()
    def sums_of(self, batch: RankBatch) -> list[list[list[float]]]:
        """For each micro-batch and row the sum of each answer, on all ranks that share the model."""
        ctx, engine = self.run.ctx, self.run.engine
        engine.weights.finish_gather()
        training = self.model.training
        self.model.eval()
        found: list[Tensor] = []

        def share(losses: Tensor, micro_batch: Batch) -> Tensor:
            found.append(segment_sums(-losses * micro_batch[ANSWER], micro_batch, ctx.cp).double())
            return losses.sum() * 0.0

        batches = engine.device_batches.take(batch)
        try:
            self.runner.forward(batches, share)
        finally:
            self.model.train(training)
        return [self._rows(number, arrays, found, batches[number]) for number, arrays in enumerate(batch.micro_batches)]

    def _rows(self, number: int, arrays: Arrays, found: Sequence[Tensor], batch: Batch) -> list[list[float]]:
        ctx = self.run.ctx
        # A stage before the last one has found nothing.
        nothing = segment_sums(torch.zeros_like(batch[ANSWER]), batch, ctx.cp).double()
        table = found[number] if found else nothing
        if ctx.pp.size > 1:
            table = table.contiguous()
            all_reduce_(table, ctx.pp)
        counts = 2 * (arrays["loss_mask"] > 0).sum(1)
        # A micro-batch that does not count has no pairs by its weights, but answers all the same.
        counts = np.maximum(counts, arrays["segment_ids"].max(1))
        return [row[:count].tolist() for row, count in zip(table.cpu(), counts.tolist(), strict=True)]


def _reference_model(run: TrainingRun) -> nn.Module:
    """A second model with the weights of checkpoint.load. Raises ConfigError where there is none."""
    start = run.config.checkpoint.start
    if start is None:
        raise ConfigError('preference.reference="model" needs checkpoint.load, whose weights are the reference')
    stages = run.engine.stages
    config = run.config
    model = build.build_model(config, run.ctx, run.host, None if stages is None else stages.own)
    load_model_weights(model, adapted(open_start(start, run.host), config, run.host), run.ctx)
    return model.requires_grad_(False)


def rows_of(arrays: Mapping[str, np.ndarray]) -> list[str]:
    """A hash of each row's tokens and segments."""
    parts = np.concatenate([arrays["tokens"], arrays["segment_ids"].astype(np.int64)], 1)
    return [hashlib.blake2b(np.ascontiguousarray(row).tobytes(), digest_size=12).hexdigest() for row in parts]


def placed(arrays: Mapping[str, np.ndarray], sums: Sequence[Sequence[float]]) -> np.ndarray:
    """[B, S] float32: the sum of each answer at its first predicted position."""
    values = np.zeros(arrays[ANSWER].shape, np.float32)
    for row, of_answers in enumerate(sums):
        predicted, segments = arrays[ANSWER][row] > 0, arrays["segment_ids"][row]
        for answer, value in enumerate(of_answers):
            here = np.flatnonzero(predicted & (segments == answer))
            if len(here):
                values[row, here[0]] = value
    return values


def hash_of_sums(sums: Mapping[str, Sequence[float]]) -> str:
    text = json.dumps({row: [round(value, 4) for value in sums[row]] for row in sorted(sums)})
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _write(path: Path, sums: Sums) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if any(not math.isfinite(value) for of_answers in sums.values() for value in of_answers):
        raise TrainingError("the reference gives an answer a log-probability that is not finite: see checkpoint.load")
    path.write_text(json.dumps(sums), encoding="utf-8")
