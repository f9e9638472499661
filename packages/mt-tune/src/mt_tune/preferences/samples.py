"""The arrays of samples of preferences."""

from __future__ import annotations

from mt_core.interfaces import CAUSAL_LM_SAMPLE, TOKEN_MASK, SampleField

ANSWER, MARGIN = TOKEN_MASK, "margins"
PAIR_SAMPLE = (
    *CAUSAL_LM_SAMPLE,
    SampleField(ANSWER, "float32", "[sequence_length]", "1 where a token of an answer is predicted, else 0"),
    SampleField(MARGIN, "float32", "[sequence_length]", "at the first such position of a chosen answer: its margin"),
)
"""segment_ids: 2 k for the chosen answer of the row's pair k, 2 k + 1 for the rejected one. loss_mask is 1 at one
position of each pair, so that pairs are counted and not tokens."""

DESIRABLE, OTHER_PROMPT = "desirable", "other_prompt_"
SCORED = ("tokens", "labels", "position_ids", "segment_ids", ANSWER)
"""Fields of a row that is scored, beside its weights."""
UNPAIRED_SAMPLE = (
    *CAUSAL_LM_SAMPLE,
    SampleField(ANSWER, "float32", "[sequence_length]", "1 where a token of an answer is predicted, else 0"),
    SampleField(DESIRABLE, "float32", "[sequence_length]", "at the first such position of an answer: 1, or -1"),
    *(
        SampleField(f"{OTHER_PROMPT}{name}", dtype, "[sequence_length]", f"{name} of answers to other prompts")
        for name, dtype in zip(SCORED, ("int64", "int64", "int64", "int32", "float32"), strict=True)
    ),
)
"""segment_ids: k for the row's answer k. loss_mask is 1 at the first predicted position of each answer, so that answers
are counted and not tokens. other_prompt_*: a second row, which has the answers of the records before to the prompts of
this row, for an estimate of the divergence from the reference."""

# -- fields that sources of batches add -------------------------------------------------------------------

REFERENCE_LOGPS = "reference_logps"
"""[B, S]: at the first predicted position of each answer the sum of its log-probabilities by the reference, else 0."""
BASELINE = "baseline"
"""[B, S]: at each position what implicit rewards of unpaired answers are compared with; KTO's z_0, BCO's delta."""
CLASS_SHARE = "class_share"
"""[B, S]: at the first predicted position of each answer N / (answers of its label), negative for undesirable ones;
N answers in the global batch. A mean over all answers with these factors is a difference of the two means."""
MATCHED = {"aot": "matched_aot", "aot_unpaired": "matched_aot_unpaired"}
"""Loss -> field [B, S]: at the first predicted position of an answer the log-ratio that it is compared with."""
