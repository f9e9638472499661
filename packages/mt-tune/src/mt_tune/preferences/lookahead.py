"""What losses need of the whole global batch before the first of its micro-batches is differentiated: the policy's
log-probabilities, by a pass without gradients. So losses do not depend on micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mt_core.data.loader import RankBatch
from mt_core.parallel.first_rank import all_gather_objects
from mt_core.train.batch_source import TrainingRun
from mt_tune.preferences.samples import MATCHED
from mt_tune.preferences.scoring import RowSums, Scorer

OfAnswers = list[RowSums]
"""A value for each micro-batch, row and answer."""


class LookAhead:
    """Log-ratios of the policy to the reference, of this rank's answers and of those of all data-parallel ranks.

    Rows that do not count in the loss have no answers here.
    """

    def __init__(self, run: TrainingRun) -> None:
        self.run, self.policy = run, Scorer(run, run.model)

    def ratios(self, batch: RankBatch, references: Sequence[RowSums]) -> OfAnswers:
        """log pi - log pi_ref of each answer. Collective over the ranks that share the model."""
        policy = of_counted(batch, self.policy.sums_of(batch))
        return [
            [[p - r for p, r in zip(*of_row, strict=True)] for of_row in zip(*of_rows, strict=True)]
            for of_rows in zip(policy, of_counted(batch, references), strict=True)
        ]

    def gathered(self, values: Sequence[float]) -> tuple[np.ndarray, int]:
        """(float64 values of all data-parallel ranks, place of this rank's first one). Collective."""
        of_ranks = all_gather_objects(list(values), self.run.ctx.dp)
        first = sum(len(of_rank) for of_rank in of_ranks[: self.run.ctx.dp.rank])
        return np.array([value for of_rank in of_ranks for value in of_rank], np.float64), first

    def matched(self, loss: str, batch: RankBatch, references: Sequence[RowSums]) -> OfAnswers:
        """The values of the field MATCHED[loss], in the order of answers."""
        assert loss in MATCHED
        if loss == "aot":
            policy = _margins(of_counted(batch, self.policy.sums_of(batch)))
            matches = self._of_equal_rank(policy, _margins(of_counted(batch, references)))
            return _in_turns(matches, np.zeros_like(matches), policy)
        ratios = self.ratios(batch, references)
        chosen, rejected = ([[row[side::2] for row in rows] for rows in ratios] for side in (0, 1))
        return _in_turns(self._of_equal_rank(chosen, rejected), self._of_equal_rank(rejected, chosen), chosen)

    def _of_equal_rank(self, values: OfAnswers, others: OfAnswers) -> np.ndarray:
        """For each of this rank's values the one among the others of all ranks that has the same place in order."""
        everywhere, first = self.gathered(flat(values))
        places = np.empty(len(everywhere), np.int64)
        places[np.argsort(everywhere, kind="stable")] = np.arange(len(everywhere))
        return np.sort(self.gathered(flat(others))[0])[places[first : first + len(flat(values))]]


def of_counted(batch: RankBatch, sums: Sequence[RowSums]) -> OfAnswers:
    """Without the answers of rows that have no weight in the loss."""
    return [
        [row if weights.any() else [] for row, weights in zip(rows, arrays["loss_mask"], strict=True)]
        for rows, arrays in zip(sums, batch.micro_batches, strict=True)
    ]


def flat(values: OfAnswers) -> list[float]:
    return [value for rows in values for row in rows for value in row]


def _margins(sums: OfAnswers) -> OfAnswers:
    return [[[c - r for c, r in zip(row[0::2], row[1::2], strict=True)] for row in rows] for rows in sums]


def _in_turns(chosen: np.ndarray, rejected: np.ndarray, like: OfAnswers) -> OfAnswers:
    """Values of chosen and rejected answers in turns, in the rows that `like` has pairs in."""
    pairs = iter(zip(chosen.tolist(), rejected.tolist(), strict=True))
    return [[[value for _ in row for value in next(pairs)] for row in rows] for rows in like]
