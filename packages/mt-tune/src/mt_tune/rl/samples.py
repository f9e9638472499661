"""The arrays of a sample of prompts, and the fields that batches of completions have."""

from __future__ import annotations

from mt_core.interfaces import CAUSAL_LM_SAMPLE, SampleField

PROMPT = "prompt"
PROMPT_SAMPLE = (
    *(field for field in CAUSAL_LM_SAMPLE if field.name in ("tokens", "labels", "loss_mask")),
    SampleField(PROMPT, "int64", "[2]", "the prompt's file (a hash of its path) and line"),
)
"""tokens: the prompt, filled up with 0."""

SAMPLED = "sampled_mask"
"""Field [B, S]: 1 where a token that the policy drew is predicted, else 0 (prompts, tokens of tools, padding)."""
ADVANTAGES, OLD_LOGPS, REFERENCE_LOGPS, DRAWN_LOGPS = "advantages", "old_logps", "ref_logps", "drawn_logps"
"""Fields [B, S] at predicted positions. Log-probabilities: by the policy before the updates on these completions, by
the reference, and as generation reported them."""
OLD_VALUES, RETURNS = "old_values", "returns"
"""Fields [B, S] at predicted positions, of a value model: its values before the updates, and what it learns."""
ROUTED_EXPERTS = "routed_experts"
"""Field [B, S, routers x k]: experts that generation chose for each token, -1 where there are none."""
EVALUATED_REWARD = "evaluated_reward"
"""Field [B, S] of validation: the completion's reward at its first predicted position, else 0."""
