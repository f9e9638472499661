"""Log-probabilities of tokens, for many texts at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import tee

from torch import Tensor

from mt_core.errors import ConfigError
from mt_infer.completions import Completion
from mt_infer.in_order import complete
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.sampling.sampler import LogProbs
from mt_infer.text import TextGenerator


@dataclass(frozen=True)
class Continuation:
    """tokens: a text, at most one token longer than the model's sequences. first: number of the first token of which
    the log-probability is requested; at least 1, since token 0 follows nothing. inputs: what the model takes beside
    them."""

    tokens: Sequence[int]
    first: int
    inputs: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 1 <= self.first < len(self.tokens):
            raise ValueError(f"first={self.first} is no token behind another one of {len(self.tokens)} tokens")


@dataclass(frozen=True)
class Scored:
    """Natural logarithms of the probabilities of the requested tokens, and whether each is the likeliest one."""

    logprobs: list[float]
    is_greedy: list[bool]


def score(generator: TextGenerator, continuations: Iterable[Continuation]) -> Iterator[Scored]:
    """Scores of each continuation, in order. As many are computed at a time as the engine takes, and as many wait.

    What precedes `first` may come from the engine's prefix cache. Raises ConfigError for a model with an encoder, and
    for continuations that are too long or have tokens that the model lacks.
    """
    require_decoder(generator)
    # The requests are consumed ahead of the answers, by as many as the engine takes.
    first, second = tee(continuations)
    requests = ((continuation.tokens[:-1], _scoring(continuation), continuation.inputs) for continuation in first)
    for done, continuation in zip(complete(generator, requests), second, strict=True):
        yield _scored(continuation, done)


def cut_to(length: int, continuation: Continuation) -> tuple[Continuation, bool]:
    """The last tokens, of which a model with so many positions takes all but the last; and whether there were more."""
    # length + 1: the last token is a target only.
    surplus = len(continuation.tokens) - (length + 1)
    if surplus <= 0:
        return continuation, False
    return Continuation(continuation.tokens[surplus:], continuation.first - surplus), True


def require_decoder(generator: TextGenerator) -> None:
    """Raises ConfigError for a model with an encoder, whose text is no continuation of the prompt."""
    if generator.prompts.has_encoder:
        raise ConfigError(
            f"model.family={generator.config.model.family} has an encoder; log-probabilities of texts are those of "
            "decoders (gpt, llama, ...)"
        )


def _scoring(continuation: Continuation) -> SamplingParameters:
    """The last token is not given to the model but forced, so that a full sequence has as many targets as positions."""
    return SamplingParameters(
        temperature=0.0,
        max_tokens=1,
        forced_tokens=(continuation.tokens[-1],),
        ignore_eod=True,
        logprobs=1,
        prompt_logprobs=1,
        prompt_logprobs_start=continuation.first,
        seed=0,
    )


def _scored(continuation: Continuation, done: Completion) -> Scored:
    # Of the prompt, then of the forced last token.
    rows: list[LogProbs | None] = [*(done.prompt_logprobs or ())[continuation.first :], *done.logprobs]
    wanted = continuation.tokens[continuation.first :]
    logprobs = [row for row in rows if row is not None]
    assert len(logprobs) == len(wanted), "the engine reports each token once"
    return Scored(
        [row.token for row in logprobs],
        # logprobs=1: the likeliest token of each position is listed first.
        [row.top[0][0] == token for row, token in zip(logprobs, wanted, strict=True)],
    )
