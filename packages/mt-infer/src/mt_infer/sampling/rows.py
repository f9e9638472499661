"""The positions at which tokens are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from mt_infer.sampling.constraints import Matcher
from mt_infer.sampling.noise import uniform
from mt_infer.sampling.parameters import SamplingParameters


class SampledRequest(Protocol):
    @property
    def sampling(self) -> SamplingParameters: ...


class SampledSequence(Protocol):
    """What sampling reads of a sequence (mt_infer.requests.RunningSequence, which documents each)."""

    tokens: list[int]
    stop_ids: frozenset[int]
    matcher: Matcher | None

    @property
    def request(self) -> SampledRequest: ...
    @property
    def seed(self) -> int: ...
    @property
    def prompt_length(self) -> int: ...


@dataclass(frozen=True)
class SamplingRow:
    """The position behind a sequence's tokens, or behind drafted ones that follow these."""

    sequence: SampledSequence
    drafted: tuple[int, ...] = ()

    @property
    def sampling(self) -> SamplingParameters:
        return self.sequence.request.sampling

    @property
    def index(self) -> int:
        """Number of the token that is chosen here, among the generated ones, from 0."""
        return len(self.sequence.tokens) - self.sequence.prompt_length + len(self.drafted)

    @property
    def noise(self) -> float:
        # By the index of the token, not by the step: drafted and repeated computations draw the same number.
        return uniform(self.sequence.seed, self.index)

    @cached_property
    def tokens(self) -> Sequence[int]:
        """Prompt and generated tokens."""
        return [*self.sequence.tokens, *self.drafted] if self.drafted else self.sequence.tokens

    @property
    def generated(self) -> Sequence[int]:
        return self.tokens[self.sequence.prompt_length :]
