"""The arrays of samples of reward models."""

from __future__ import annotations

from mt_core.interfaces import TOKEN_MASK, SampleField
from mt_tune.preferences.samples import MARGIN

TOKENS = (
    SampleField("tokens", "int64", "[sequence_length]", "input ids"),
    SampleField("position_ids", "int64", "[sequence_length]", "positions; they restart at each text"),
    SampleField("segment_ids", "int32", "[sequence_length]", "number of the text within the row"),
    SampleField("loss_mask", "float32", "[sequence_length]", "1 where a loss counts: at scored tokens"),
    SampleField(TOKEN_MASK, "float32", "[sequence_length]", "1 at tokens of texts, 0 at padding"),
)
SCORED = "scored"
REWARD_SAMPLE = (
    *TOKENS,
    SampleField(SCORED, "float32", "[sequence_length]", "1 at the token where a text is scored, else 0"),
    SampleField(MARGIN, "float32", "[sequence_length]", "there, of a chosen text: the margin of its pair"),
)
"""segment_ids: 2 k for the chosen text of the row's pair k, 2 k + 1 for the rejected one. loss_mask is 1 where the
chosen text is scored, so that pairs are counted."""
PROCESS_SAMPLE = (
    *TOKENS,
    SampleField("labels", "int64", "[sequence_length]", "at the end of a step 1 if it is right, else 0"),
)
"""loss_mask is 1 at the ends of steps."""
