"""What is done to logits before the temperature: biases, penalties, tokens that are ruled out or forced.

Each function takes logits [B, vocab] that it may change, and the row of each; it works on the rows whose parameters set
it, all at once, and no row depends on another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from mt_infer.sampling.rows import SamplingRow

NEVER = float("-inf")


def adjust(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Applies all of them in the order of transformers."""
    if not any(row.sampling.adjusts_logits for row in rows):
        return
    add_bias(logits, rows)
    penalize(logits, rows)
    rule_out(logits, rows)
    force(logits, rows)
    constrain(logits, rows)


def add_bias(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    entries = [
        (number, token, bias) for number, row in enumerate(rows) for token, bias in row.sampling.logit_bias.items()
    ]
    if entries:
        numbers, tokens, biases = zip(*entries, strict=True)
        # Each (row, token) once, since logit_bias is a mapping: += with repeated indices would add one of them only.
        logits[list(numbers), list(tokens)] += _tensor(biases, logits)


def penalize(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Repetition (Keskar et al., 2019, as in transformers: the prompt counts), then frequency and presence (OpenAI: of
    generated tokens)."""
    asking = [number for number, row in enumerate(rows) if row.sampling.penalizes]
    if not asking:
        return
    # For each row with penalties: token -> how often it was generated, 0 for tokens of the prompt alone.
    seen = [times_generated(rows[number], logits.shape[-1]) for number in asking]
    # Flattened to pairs of (row, token), so that one gather and one scatter serve all rows.
    numbers = [number for number, counts in zip(asking, seen, strict=True) for _ in counts]
    tokens = [token for counts in seen for token in counts]
    counts = torch.tensor([count for row_counts in seen for count in row_counts.values()], device=logits.device)
    of_row = torch.tensor([place for place, row_counts in enumerate(seen) for _ in row_counts], device=logits.device)
    repetition, frequency, presence = (
        _tensor([getattr(rows[number].sampling, name) for number in asking], logits)[of_row]
        for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")
    )
    values = logits[numbers, tokens]
    # Away from the token in both cases: a negative logit divided by the penalty would become likelier.
    repeated = torch.where(values < 0, values * repetition, values / repetition)
    # OpenAI's formula: logit - count * frequency_penalty - (count > 0) * presence_penalty.
    logits[numbers, tokens] = repeated - frequency * counts - presence * (counts > 0)


def times_generated(row: SamplingRow, vocab: int) -> dict[int, int]:
    """How often each token of the prompt and the text was generated. A prompt may have ids behind the vocabulary,
    which stand for images: these are left out."""
    generated = Counter(row.generated)
    # dict.fromkeys: each token once, in the order of the text.
    return {token: generated[token] for token in dict.fromkeys(row.tokens) if token < vocab}


def rule_out(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Banned tokens, the last tokens of bad words, and ends that come too early."""
    _set(logits, rows, lambda row: row.sampling.banned_token_ids, NEVER)
    _set(logits, rows, lambda row: ends_of_bad_words(row.sampling.bad_words_ids, row.tokens), NEVER)
    _set(logits, rows, lambda row: row.sequence.stop_ids if row.index < row.sampling.min_tokens else (), NEVER)


def ends_of_bad_words(words: Iterable[tuple[int, ...]], tokens: Sequence[int]) -> list[int]:
    """The last tokens of the words whose other tokens stand at the end of the text."""
    # A word of one token has nothing before it, and is always ruled out.
    return [word[-1] for word in words if tuple(tokens[len(tokens) - len(word) + 1 :]) == word[:-1]]


def force(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    forced = [number for number, row in enumerate(rows) if row.index < len(row.sampling.forced_tokens)]
    if forced:
        # Whatever was ruled out before: a forced token is chosen even if it is banned.
        logits[forced] = NEVER
        logits[forced, [rows[number].sampling.forced_tokens[rows[number].index] for number in forced]] = 0.0


def constrain(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Rules out tokens with which the text would not match the request's constraint."""
    for number, row in enumerate(rows):
        # After forced tokens; SamplingParameters refuses both in one request.
        if row.sequence.matcher is not None:
            matcher, stop_ids = row.sequence.matcher, row.sequence.stop_ids
            logits[number].masked_fill_(~matcher.allowed(row.drafted, logits.shape[-1], stop_ids), NEVER)


def _set(
    logits: Tensor, rows: Sequence[SamplingRow], tokens_of: Callable[[SamplingRow], Iterable[int]], value: float
) -> None:
    entries = [(number, token) for number, row in enumerate(rows) for token in tokens_of(row)]
    if entries:
        numbers, tokens = zip(*entries, strict=True)
        logits[list(numbers), list(tokens)] = value


def _tensor(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)


# Which tokens can be drawn: the likeliest ones, by several measures.
#
# Each function takes logits [B, vocab] and a limit for each row [B, 1], and returns the logits with -inf for the other
# tokens. A limit that keeps all tokens returns the row's logits bit for bit.


def truncate(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """In the order of transformers: each measure sees what the ones before left. Other rows stay as they are."""
    logits = _where(logits, [row.sampling.top_k for row in rows], 0, keep_top_k)
    logits = _where(logits, [row.sampling.top_p_at(row.index) for row in rows], 1.0, keep_top_p)
    logits = _where(logits, [row.sampling.min_p for row in rows], 0.0, keep_min_p)
    return _where(logits, [row.sampling.typical_p for row in rows], 1.0, keep_typical)


def keep_top_k(logits: Tensor, k: Tensor) -> Tensor:
    """The k largest of each row, and those equal to the last of them."""
    k = k.clamp(max=logits.shape[-1])
    largest = logits.topk(int(k.max())).values
    # largest [B, most k]; each row's own k-th as the limit.
    return logits.masked_fill(logits < largest.gather(-1, k - 1), NEVER)


def keep_top_p(logits: Tensor, p: Tensor) -> Tensor:
    """The smallest set of likeliest ids whose probabilities add up to p (Holtzman et al., 2020), and those equal to the
    last of them."""
    probabilities = logits.softmax(dim=-1)
    # Below this, all ids together have less than 1 - p: only the others are sorted.
    unlikely = (1 - p) / logits.shape[-1]
    # topk of the candidates of the row that has most, in place of a sort of the vocabulary.
    candidates = int((probabilities >= unlikely).sum(dim=-1).max())
    ordered = probabilities.topk(max(candidates, 1)).values
    before = ordered.cumsum(dim=-1) - ordered  # mass above each
    # [B, 1]; at least the likeliest.
    kept = (before < p).sum(dim=-1, keepdim=True).clamp(min=1)
    return logits.masked_fill(probabilities < ordered.gather(-1, kept - 1), NEVER)


def keep_min_p(logits: Tensor, p: Tensor) -> Tensor:
    """Ids with at least p times the probability of the likeliest (Nguyen et al., 2024)."""
    probabilities = logits.softmax(dim=-1)
    return logits.masked_fill(probabilities < p * probabilities.amax(dim=-1, keepdim=True), NEVER)


def keep_typical(logits: Tensor, p: Tensor) -> Tensor:
    """The ids whose information is closest to the entropy, up to the probability p (Meister et al., 2022)."""
    logs = logits.log_softmax(dim=-1)
    probabilities = logs.exp()
    # nansum: a token that was ruled out has -inf * 0.
    entropy = -(logs * probabilities).nansum(dim=-1, keepdim=True)
    distance = (-logs - entropy).abs()
    # [B, vocab], the most typical first.
    ordered, order = distance.sort(stable=True)
    before = (probabilities.gather(-1, order).cumsum(dim=-1) < p).sum(dim=-1, keepdim=True)
    farthest_kept = ordered.gather(-1, before.clamp(max=logits.shape[-1] - 1))
    return logits.masked_fill(distance > farthest_kept, NEVER)


def _where(logits: Tensor, limits: Sequence[float], none: float, keep: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """`keep` on the rows whose limit is not `none`."""
    # Rows of one batch have different parameters: each measure computes those that request it.
    asking = [number for number, limit in enumerate(limits) if limit != none]
    if not asking:
        return logits
    limit = torch.tensor([limits[number] for number in asking], device=logits.device)[:, None]
    if len(asking) == len(limits):
        return keep(logits, limit)
    logits[asking] = keep(logits[asking], limit)
    return logits
