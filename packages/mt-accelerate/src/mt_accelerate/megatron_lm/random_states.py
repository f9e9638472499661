"""torch's random numbers of the engine, beside those of the program.

Both draw from torch's default generator: the engine for dropout, whose numbers follow from the configuration's seed,
the program for new modules and the order of samples, as without mt. The generator has the program's state, and within
calls of the engine the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from mt_accelerate.operations import on_first_rank

FILE = "program_random.pt"
P = ParamSpec("P")
R = TypeVar("R")


class EngineRandom:
    """The engine's state while the program runs. program: the program's, before the engine was built."""

    def __init__(self, program: torch.Tensor) -> None:
        self._engine, self._active = torch.get_rng_state(), False
        torch.set_rng_state(program)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within it the generator has the engine's state. May be entered again within itself."""
        if self._active:
            yield
            return
        program = torch.get_rng_state()
        torch.set_rng_state(self._engine)
        self._active = True
        try:
            yield
        finally:
            self._active = False
            self._engine = torch.get_rng_state()
            torch.set_rng_state(program)


def with_engine_random(method: Callable[P, R]) -> Callable[P, R]:
    """A method that runs with the engine's random numbers: `random` of its object, None until it is prepared."""

    @wraps(method)
    def call(*arguments: P.args, **options: P.kwargs) -> R:
        owner: Any = arguments[0]
        if owner.random is None:
            return method(*arguments, **options)
        with owner.random.active():
            return method(*arguments, **options)

    return call


def save_program_state(folder: str) -> None:
    """The first rank's, which draws the order of samples. Collective."""
    on_first_rank(lambda: torch.save(torch.get_rng_state(), Path(folder) / FILE))


def load_program_state(folder: str) -> None:
    """States of `mt train` have none."""
    path = Path(folder) / FILE
    if path.is_file():
        torch.set_rng_state(torch.load(path, weights_only=True))
