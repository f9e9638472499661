"""Errors of one request among several that are computed together: they end that request and no other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

log = logging.getLogger(__name__)

RANKS_OWN_ERRORS = (MemoryError, torch.OutOfMemoryError)
"""Exceptions that ranks which compute the same need not have in common."""


def run_isolated(part: Callable[[Sequence[int]], None], numbers: Sequence[int], *, alone: bool, what: str) -> list[int]:
    """Calls `part` with all numbers, or, where that raises, with one after the other. Returns those that raise alone.

    alone: whether no other rank computes the same; else RANKS_OWN_ERRORS are raised, since other ranks would continue
    with the request. what: for the log.
    """
    if not numbers:
        return []
    try:
        part(numbers)
    except Exception as error:
        if not alone and isinstance(error, RANKS_OWN_ERRORS):
            raise
        if len(numbers) == 1:
            log.exception("a request failed as %s", what)
            return list(numbers)
        return [failed for number in numbers for failed in run_isolated(part, [number], alone=alone, what=what)]
    return []
