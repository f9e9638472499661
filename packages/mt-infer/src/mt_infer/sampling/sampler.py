"""Tokens and log-probabilities from logits, row by row: what shares a batch changes no row.

A token is drawn by the inverse of the cumulative distribution, in the order of ids, from one uniform number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mt_core.nn.kernels.request import KernelRequest, supports_triton
from mt_infer.sampling.logits_processors import adjust, truncate
from mt_infer.sampling.rows import SamplingRow

NOT_FINITE = -1
"""In place of a token where the row has no distribution: a logit is nan or inf, or all are -inf."""


@dataclass(frozen=True)
class LogProbs:
    """Log-probability of one token under the model (before temperature and the like), and those of the likeliest. For a
    token of a beam, as the search adds it: after penalties and the like."""

    token: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Sampled:
    """token: maybe NOT_FINITE. is_end: whether the token completes the text of a constraint."""

    token: int
    logprobs: LogProbs | None
    is_end: bool = False


def sample(logits: Tensor, rows: Sequence[SamplingRow], shares: Sequence[int] = ()) -> list[Sampled]:
    """logits [B, vocab] in fp32, one for each row -> its token. shares: see log_probabilities."""
    tokens = choose(logits, rows)
    wanted = [row.sampling.logprobs for row in rows]
    reported = log_probabilities(drawn_logits(logits, rows), tokens, wanted, shares)
    # Marked on the device and read with the tokens, for which the host waits anyway.
    read = tokens.masked_fill(_is_not_finite(logits), NOT_FINITE).tolist()
    return [Sampled(token, logprobs) for token, logprobs in zip(read, reported, strict=True)]


def drawn_logits(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """[B, vocab] divided by the temperature in rows that request the log-probabilities of drawing."""
    temperatures = [row.sampling.temperature if row.sampling.drawn_logprobs else 1.0 for row in rows]
    if all(temperature in (0.0, 1.0) for temperature in temperatures):
        return logits
    divisors = [temperature or 1.0 for temperature in temperatures]
    return logits / torch.tensor(divisors, dtype=logits.dtype, device=logits.device)[:, None]


def _is_not_finite(logits: Tensor) -> Tensor:
    """[B, vocab] -> [B] bool"""
    # The largest is nan where any is; nan and infinities minus themselves are nan, which differs from 0.
    largest = logits.amax(dim=-1)
    return (largest - largest) != 0


def choose(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """[B] ids"""
    logits = adjusted(logits, rows)
    # Greedy rows too: the kernel takes temperature 0 as the likeliest token.
    if serves_fused(logits, rows):
        from mt_infer.sampling.triton_sampler import triton_sample

        return triton_sample(logits, rows)
    # [B]; rows with a temperature are overwritten below.
    chosen = logits.argmax(dim=-1)
    warm = [number for number, row in enumerate(rows) if row.sampling.temperature > 0]
    if warm:
        drawn = [rows[number] for number in warm]
        # fp64, as `draw` compares in it: fp32 has 24 bits, which are few beside a vocabulary of 2^18.
        noise = torch.tensor([row.noise for row in drawn], dtype=torch.float64, device=logits.device)
        chosen[warm] = draw(probabilities(logits[warm], drawn), noise)
    return chosen


def serves_fused(logits: Tensor, rows: Sequence[SamplingRow]) -> bool:
    """Whether the tokens are drawn by one Triton kernel, which takes no measure but top-k, top-p and min-p."""
    if not logits.is_cuda or any(row.sampling.typical_p < 1 for row in rows):
        return False
    return supports_triton(KernelRequest(device_type="cuda", dtype="float32")) is True


def adjusted(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """With biases, penalties and rules applied; the argument stays as it is."""
    if any(row.sampling.adjusts_logits for row in rows):
        logits = logits.clone()
        adjust(logits, rows)
    return logits


def probabilities(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """[B, vocab] adjusted logits -> the probabilities by which tokens are drawn, with temperature and truncation."""
    temperatures = [row.sampling.temperature for row in rows]
    # A new tensor: what truncation writes is not the caller's.
    logits = logits / torch.tensor(temperatures, dtype=logits.dtype, device=logits.device)[:, None]
    if any(row.sampling.truncates for row in rows):
        logits = truncate(logits, rows)
    return logits.softmax(dim=-1)


def draw(probabilities: Tensor, noise: Tensor) -> Tensor:
    """[B, vocab], [B] in [0, 1) -> [B] ids: the first id whose cumulative probability is above the noise."""
    # [B, vocab]. Example: probabilities 0.2 0.5 0.3 and noise 0.6 give id 1, the first with 0.7 > 0.6.
    cumulative = probabilities.double().cumsum(dim=-1)
    # Times the sum, which rounding leaves beside 1: an id of probability 0 is never drawn.
    wanted = noise[:, None] * cumulative[:, -1:]
    # right=True: an id whose cumulative value equals the number is passed over, so that ids of probability 0 are too.
    # clamp: rounding.
    return torch.searchsorted(cumulative, wanted, right=True).squeeze(1).clamp(max=probabilities.shape[-1] - 1)


def log_probabilities(
    logits: Tensor, tokens: Tensor, wanted: Sequence[int | None], shares: Sequence[int] = ()
) -> list[LogProbs | None]:
    """Log-probabilities of tokens [B] under logits [B, vocab], with the likeliest ids. wanted: how many for each row;
    None: no report.

    shares: sizes of the ranks' parts of the vocabulary; then sums are taken part by part, as training's loss does.
    """
    rows = [number for number, count in enumerate(wanted) if count is not None]
    reports: list[LogProbs | None] = [None] * len(wanted)
    if not rows:
        return reports
    # Of the model's own logits, without penalties and temperature.
    logs = sharded_log_softmax(logits[rows], shares) if shares else logits[rows].log_softmax(dim=-1)
    chosen = logs.gather(1, tokens[rows][:, None]).squeeze(1).tolist()  # [rows]
    most = max(count or 0 for count in wanted)
    # The most that a row requests; each takes its first ones.
    top = logs.topk(min(most, logs.shape[-1])) if most else None
    for place, number in enumerate(rows):
        count = wanted[number] or 0
        likeliest: tuple[tuple[int, float], ...] = ()
        if top is not None:
            ids, values = top.indices[place, :count].tolist(), top.values[place, :count].tolist()
            likeliest = tuple(zip(ids, values, strict=True))
        reports[number] = LogProbs(chosen[place], likeliest)
    return reports


def sharded_log_softmax(logits: Tensor, shares: Sequence[int]) -> Tensor:
    """log softmax of [B, vocab], in the order of operations of vocab_parallel_cross_entropy (mt_core.nn.loss)."""
    # The maximum is exact in any order; sums are not, so that they follow the order of the ranks.
    shifted = logits - logits.amax(-1, keepdim=True)
    sums = [part.contiguous().exp().sum(-1) for part in shifted.split(list(shares), dim=-1) if part.shape[-1]]
    total = sums[0]
    for part in sums[1:]:
        total = total + part
    return -(total.log()[:, None] - shifted)
