"""Tokens and log-probabilities from logits, row by row: what shares a batch changes no row.

A token is drawn by the inverse of the cumulative distribution, in the order of ids, from one uniform number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mt_infer.requests import LogProbs, RunningSequence
from mt_infer.sampling.noise import uniform


@dataclass(frozen=True)
class Sampled:
    token: int
    logprobs: LogProbs | None


def sample(logits: Tensor, sequences: Sequence[RunningSequence]) -> list[Sampled]:
    """logits [B, vocab] in fp32, a row for each sequence -> its next token."""
    tokens = choose(logits, sequences)
    wanted = [sequence.request.sampling.logprobs for sequence in sequences]
    reported = log_probabilities(logits, tokens, wanted)
    return [Sampled(token, found) for token, found in zip(tokens.tolist(), reported, strict=True)]


def choose(logits: Tensor, sequences: Sequence[RunningSequence]) -> Tensor:
    """[B] ids"""
    rows = processed(logits, sequences)
    greedy = rows.argmax(dim=-1)
    warm = [number for number, sequence in enumerate(sequences) if sequence.request.sampling.temperature > 0]
    if warm:
        noise = [uniform(sequences[number].seed, len(sequences[number].generated)) for number in warm]
        greedy[warm] = draw(rows[warm].softmax(dim=-1), torch.tensor(noise, dtype=torch.float64, device=rows.device))
    return greedy


def draw(probabilities: Tensor, noise: Tensor) -> Tensor:
    """[B, vocab], [B] in [0, 1) -> [B] ids: the first id whose cumulative probability is above the noise."""
    cumulative = probabilities.double().cumsum(dim=-1)
    # Times the sum, which rounding leaves beside 1: an id of probability 0 is never drawn.
    wanted = noise[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, wanted, right=True).squeeze(1).clamp(max=probabilities.shape[-1] - 1)


def processed(logits: Tensor, sequences: Sequence[RunningSequence]) -> Tensor:
    """Logits with everything applied that the requests ask for; -inf for ids that cannot be chosen."""
    logits = logits.clone()
    for number, sequence in enumerate(sequences):
        sampling = sequence.request.sampling
        for token, bias in sampling.logit_bias.items():
            logits[number, token] += bias
        if sampling.temperature > 0:
            logits[number] /= sampling.temperature
            logits[number : number + 1] = keep_likely(logits[number : number + 1], sampling.top_k, sampling.top_p)
    return logits


def keep_likely(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    if top_k:
        logits = keep_top_k(logits, top_k)
    return keep_top_p(logits, top_p) if top_p < 1 else logits


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """-inf for all but the k largest of each row."""
    smallest_kept = logits.topk(min(k, logits.shape[-1])).values[:, -1:]
    return logits.masked_fill(logits < smallest_kept, float("-inf"))


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """-inf for all but the smallest set of likeliest ids whose probabilities add up to p (Holtzman et al., 2020)."""
    ordered, order = logits.sort(descending=True)
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    ordered = ordered.masked_fill(before >= p, float("-inf"))
    return torch.empty_like(logits).scatter_(-1, order, ordered)


def log_probabilities(logits: Tensor, tokens: Tensor, wanted: Sequence[int | None]) -> list[LogProbs | None]:
    """Of tokens [B] under logits [B, vocab], with the likeliest ids that each row wants; None: not wanted."""
    rows = [number for number, count in enumerate(wanted) if count is not None]
    found: list[LogProbs | None] = [None] * len(wanted)
    if not rows:
        return found
    logs = logits[rows].log_softmax(dim=-1)
    own = logs.gather(1, tokens[rows][:, None]).squeeze(1).tolist()
    most = max(count or 0 for count in wanted)
    top = logs.topk(min(most, logs.shape[-1])) if most else None
    for place, number in enumerate(rows):
        count = wanted[number] or 0
        likeliest: tuple[tuple[int, float], ...] = ()
        if top is not None:
            ids, values = top.indices[place, :count].tolist(), top.values[place, :count].tolist()
            likeliest = tuple(zip(ids, values, strict=True))
        found[number] = LogProbs(own[place], likeliest)
    return found
