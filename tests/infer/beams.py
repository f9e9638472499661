"""Searches, and their sequences. Ranks import this module: it imports nothing slow."""

from __future__ import annotations

from collections.abc import Sequence

from tests.infer.engines import tokens_of

from mt_infer.requests import TokenEvent
from mt_infer.sampling.parameters import SamplingParameters

BEAMS = [
    SamplingParameters(num_beams=3, n=3, max_tokens=8, logprobs=9),
    SamplingParameters(num_beams=4, n=2, max_tokens=8, length_penalty=2.0, stop_token_ids=tuple(range(0, 101, 4))),
    SamplingParameters(num_beams=2, n=1, max_tokens=8, early_stopping=True, stop_token_ids=tuple(range(0, 101, 3))),
    SamplingParameters(num_beams=3, n=3, max_tokens=9, early_stopping="never", stop_token_ids=(1, 7, 9, 30, 60)),
    SamplingParameters(num_beams=3, n=2, max_tokens=8, length_penalty=-1.0, stop_token_ids=tuple(range(0, 101, 4))),
    SamplingParameters(num_beams=3, n=2, max_tokens=8, early_stopping="never", length_penalty=0.0,
                       stop_token_ids=tuple(range(0, 101, 4)), min_tokens=3, repetition_penalty=1.4, logprobs=1,
                       prompt_logprobs=0),
]  # fmt: skip
Beams = list[tuple[list[int], float]]


def beams_of(events: Sequence[TokenEvent], sampling: SamplingParameters) -> Beams:
    """Tokens and score of each."""
    own = [[event for event in events if event.index == index] for index in range(sampling.n)]
    return [(tokens_of(each), float(each[-1].score or 0.0)) for each in own]
