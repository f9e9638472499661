"""The random numbers of a program beside those of the engine, which seeds torch's for dropout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from mt_accelerate.data_parallel import on_first_rank

FILE = "program_random.pt"


class ProgramRandom:
    """torch's random state as the program left it: the order of its samples follows from its seed, as without mt."""

    def __init__(self) -> None:
        self._state = torch.get_rng_state()

    @contextmanager
    def active(self) -> Iterator[None]:
        engine = torch.get_rng_state()
        torch.set_rng_state(self._state)
        try:
            yield
        finally:
            self._state = torch.get_rng_state()
            torch.set_rng_state(engine)

    def save(self, folder: str) -> None:
        """The first rank's, which draws the order of samples. Collective."""
        on_first_rank(lambda: torch.save(self._state, Path(folder) / FILE))

    def load(self, folder: str) -> None:
        """States of `mt train` have none."""
        path = Path(folder) / FILE
        if path.is_file():
            self._state = torch.load(path, weights_only=True)
