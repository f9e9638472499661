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
from torch import nn

from mt_core.checkpoint_lookup import open_start
from mt_core.data.loader import RankBatch
from mt_core.errors import CheckpointError, ConfigError, TrainingError
from mt_core.parallel.first_rank import all_gather_objects, on_first_rank
from mt_core.train import build
from mt_core.train.batch_source import BatchSource, TrainingRun
from mt_core.train.checkpoint.partial_load import adapted
from mt_core.train.trained_model import load_model_weights
from mt_tune.preferences.config import PreferenceConfig
from mt_tune.preferences.lookahead import LookAhead
from mt_tune.preferences.samples import MATCHED, OTHER_PROMPT, REFERENCE_LOGPS
from mt_tune.preferences.scoring import RowSums, Scorer, at_first_positions

Sums = dict[str, list[float]]
"""Hash of a row's tokens -> the sum of log-probabilities of each answer in it."""
FIRST_STEP = 1e-2
"""Largest difference of an answer's log-probability to the reference's, relative to it, at the first step."""


class ReferenceSource(BatchSource):
    """The batches of the data set with the reference's log-probabilities.

    preference.reference="start": those of all samples are computed before the first step, by the weights that the run
    starts with, and kept in the run directory for its resumes. "model": each batch's are computed by a second model,
    "adapter_off": by the model of the run without its adapter.
    """

    prefixes: tuple[str, ...] = ("",)
    """Prefixes of the fields that together are rows to score: `tokens`, and with another prefix `<prefix>tokens`."""

    def __init__(self, run: TrainingRun) -> None:
        super().__init__(run)
        self.keys = run.config.section(PreferenceConfig)
        self.scorer = Scorer(
            run,
            _reference_model(run) if self.keys.reference == "model" else run.model,
            without_adapter=self.keys.reference == "adapter_off",
        )
        self.ahead = LookAhead(run)
        self.sums: Sums = {}
        self._starts = run.resumed_from is None

    def batches(self) -> Generator[RankBatch, None, None]:
        # Not before: adapters get their values after the source has been built.
        if self.keys.reference == "start" and self._starts and not self.sums:
            self._compute_all()
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
        references = self.reference_sums(batch)
        completed = with_field(batch, REFERENCE_LOGPS, references)
        for loss in MATCHED.keys() & self.keys.loss:
            completed = with_field(completed, MATCHED[loss], self.ahead.matched(loss, batch, references))
        return completed

    def reference_sums(self, batch: RankBatch) -> list[RowSums]:
        """For each micro-batch and row. batch: as `rows_with_prefix` gives it."""
        if self.keys.reference != "start":
            return self.scorer.sums_of(batch)
        return [[self._known(row) for row in rows_of(arrays)] for arrays in batch.micro_batches]

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
                for prefix in self.prefixes:
                    self._add(rows_with_prefix(batch, prefix))
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
                'takes more samples than it was started for; start a new run, or set preference.reference="model"'
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
                f"{largest:.3g} of it, where both are the same weights; the reference is another model "
                "(checkpoint.load, adapter.load), or the model has noise (dropout, router jitter)"
            )


def rows_with_prefix(batch: RankBatch, prefix: str) -> RankBatch:
    """The rows of the fields with a prefix, without it, and with the weights of the batch. "": the batch without the
    fields of other prefixes."""
    if not prefix:
        chosen = [{k: v for k, v in a.items() if not k.startswith(OTHER_PROMPT)} for a in batch.micro_batches]
    else:
        chosen = [
            {"loss_mask": a["loss_mask"], **{k.removeprefix(prefix): v for k, v in a.items() if k.startswith(prefix)}}
            for a in batch.micro_batches
        ]
    return replace(batch, micro_batches=chosen)


def with_field(batch: RankBatch, name: str, values: Sequence[Sequence[Sequence[float]]]) -> RankBatch:
    """With a field that has the value of each answer at its first predicted position."""
    placed = [at_first_positions(arrays, of_rows) for arrays, of_rows in zip(batch.micro_batches, values, strict=True)]
    return replace(
        batch,
        micro_batches=[{**arrays, name: field} for arrays, field in zip(batch.micro_batches, placed, strict=True)],
    )


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


def hash_of_sums(sums: Mapping[str, Sequence[float]]) -> str:
    text = json.dumps({row: [round(value, 4) for value in sums[row]] for row in sorted(sums)})
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _write(path: Path, sums: Sums) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if any(not math.isfinite(value) for of_answers in sums.values() for value in of_answers):
        raise TrainingError("the reference gives an answer a log-probability that is not finite: see checkpoint.load")
    path.write_text(json.dumps(sums), encoding="utf-8")
