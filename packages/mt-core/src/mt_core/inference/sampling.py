"""Choosing the next id from logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mt_core.errors import ConfigError


@dataclass(frozen=True)
class SamplingOptions:
    """temperature 0 takes the likeliest id. top_k 0 and top_p 1 leave all ids in."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ConfigError(f"temperature is {self.temperature}; it must be 0 (greedy) or more")
        if self.top_k < 0:
            raise ConfigError(f"top_k is {self.top_k}; it must be 0 (all ids) or more")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; it must be above 0 and at most 1")


def sample(logits: Tensor, options: SamplingOptions, generator: torch.Generator | None) -> Tensor:
    """[B, vocab] -> [B] ids."""
    if options.temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits.float() / options.temperature
    if options.top_k:
        logits = keep_top_k(logits, options.top_k)
    if options.top_p < 1:
        logits = keep_top_p(logits, options.top_p)
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator).squeeze(-1)


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
