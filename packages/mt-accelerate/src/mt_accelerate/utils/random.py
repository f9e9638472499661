"""Random numbers of a program's processes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import torch

from mt_accelerate.operations import from_first_rank, is_first_rank
from mt_core.errors import ConfigError


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seeds Python's, NumPy's and torch's random numbers; the seed of training, too. device_specific: another one on
    each rank. deterministic: torch uses deterministic algorithms only."""
    if device_specific:
        import torch.distributed as dist

        seed += dist.get_rank() if dist.is_initialized() else 0
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def _from_first(state: Callable[[], torch.Tensor]) -> torch.Tensor:
    first_state = from_first_rank(state() if is_first_rank() else None)
    assert first_state is not None  # the first rank has one
    return first_state


def synchronize_rng_state(rng_type: str | None = None, generator: torch.Generator | None = None) -> None:
    """The first rank's state of torch, cuda or a generator, on every rank. Collective."""
    if rng_type == "generator":
        if generator is None:
            raise ConfigError("synchronize_rng_state('generator') needs generator=")
        generator.set_state(_from_first(generator.get_state))
    elif rng_type == "cuda":
        torch.cuda.set_rng_state(_from_first(torch.cuda.get_rng_state))
    elif rng_type == "torch":
        torch.set_rng_state(_from_first(torch.get_rng_state))
    else:
        raise ConfigError(f"synchronize_rng_state({rng_type!r}): it can be torch, cuda or generator")


def synchronize_rng_states(rng_types: Sequence[str], generator: torch.Generator | None = None) -> None:
    """The first rank's states of the generators that are named (torch, cuda, generator), on every rank. Collective."""
    for rng_type in rng_types:
        synchronize_rng_state(str(rng_type), generator)
