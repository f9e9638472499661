"""What a request asks of sampling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mt_core.errors import ConfigError


@dataclass(frozen=True)
class SamplingParameters:
    """How tokens are chosen, and when a sequence ends. The defaults sample from the model's own distribution.

    temperature: divides the logits; 0 takes the likeliest token. top_k: keep so many tokens; 0 keeps all. top_p: keep
    the likeliest tokens up to this probability. max_tokens: generated at most. stop: texts before which the text ends.
    stop_token_ids: tokens before which it ends, beside the tokenizer's end of document (unless ignore_eod). seed: the
    same seed gives the same tokens, whatever else runs; None: another each time. n: number of sequences. logprobs: how
    many likeliest tokens to report beside each sampled one; None: no log-probabilities. prompt_logprobs: the same of
    the prompt's tokens.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_tokens: int = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eod: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks = (
            ("temperature", self.temperature >= 0, "0 (greedy) or more"),
            ("top_k", self.top_k >= 0, "0 (all tokens) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("max_tokens", self.max_tokens >= 0, "0 or more"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, f"from 0 to max_tokens={self.max_tokens}"),
            ("n", self.n >= 1, "1 or more"),
            ("logprobs", (self.logprobs or 0) >= 0, "0 or more"),
            ("prompt_logprobs", (self.prompt_logprobs or 0) >= 0, "0 or more"),
        )
        for name, holds, allowed in checks:
            if not holds:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be {allowed}")
