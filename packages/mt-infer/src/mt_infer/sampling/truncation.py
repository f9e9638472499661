"""Which tokens can be drawn: the likeliest ones, by several measures.

Each function takes logits [B, vocab] and a limit for each row [B, 1], and returns the logits with -inf for the other
tokens. A limit that keeps all tokens returns the row's logits bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mt_infer.sampling.rows import SamplingRow

NEVER = float("-inf")


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
