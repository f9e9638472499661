"""The arrays of a sample of pairs."""

from __future__ import annotations

from mt_core.interfaces import CAUSAL_LM_SAMPLE, SampleField

ANSWER, MARGIN = "answer_mask", "margins"
PAIR_SAMPLE = (
    *CAUSAL_LM_SAMPLE,
    SampleField(ANSWER, "float32", "[sequence_length]", "1 where a token of an answer is predicted, else 0"),
    SampleField(MARGIN, "float32", "[sequence_length]", "at the first such position of a chosen answer: its margin"),
)
"""segment_ids: 2 k for the chosen answer of the row's pair k, 2 k + 1 for the rejected one. loss_mask is 1 at one
position of each pair, so that pairs are counted and not tokens."""
