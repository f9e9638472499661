"""A few token ids for any model whose only inputs are token ids."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn

NUM_TOKENS = 8
CHOOSING_HEAD = "multichoice_head"
"""Canonical name of the head that gives a score to each of several texts."""


def token_inputs(model: nn.Module, vocab_size: int) -> dict[str, Tensor] | None:
    """The same few ids for every input that must be given; None if something else must be given.

    int64 [1, NUM_TOKENS], or [1, 2, NUM_TOKENS] for a model that chooses one of several texts.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    # Inputs without a default; a mask or positions may be left out.
    needed = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    if not needed or not all(name.endswith("tokens") for name in needed):
        return None
    # Seeded: both models of a comparison get the same ids.
    generator = torch.Generator().manual_seed(0)
    shape = (1, 2, NUM_TOKENS) if hasattr(model, CHOOSING_HEAD) else (1, NUM_TOKENS)
    return {name: torch.randint(0, vocab_size, shape, generator=generator) for name in needed}
