"""Requests, the sequences that answer them, and the events that report each token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from torch import Tensor

from mt_core.nn.cache import Conditioning
from mt_infer.blocks import BlockTable, PrefixKeys
from mt_infer.sampling.beam_search import BeamSearch, Candidate
from mt_infer.sampling.constraints import Matcher
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.sampling.sampler import LogProbs, Sampled


class FinishReason(StrEnum):
    """Why a sequence has ended."""

    STOP = "stop"
    """A stop token, a stop text, or the end of the document."""
    LENGTH = "length"
    """max_tokens, or the longest sequence of the engine."""
    CANCELLED = "cancelled"
    ERROR = "error"
    """The text cannot be continued: TokenEvent.error says why."""


DIVERGED = (
    "the model's logits are not numbers: its weights are damaged, or its training has diverged; use another checkpoint"
)
"""An error of TokenEvent."""
SAMPLING_FAILED = "the request failed as its next token was chosen, by a defect of mt or of a package; the log says why"
"""An error of TokenEvent."""
DRAFT_FAILED = "the request failed as tokens were drafted for it; the log says why"
"""An error of TokenEvent."""
INPUTS_FAILED = "the request failed as the model encoded its inputs beside tokens; the log says why"
"""An error of TokenEvent."""
TEXT_FAILED = "the request failed as its tokens were decoded into text; the log says why"
"""An error of TextEvent."""


@dataclass(frozen=True)
class Request:
    """tokens: of the prompt, at least one. inputs: images or the like, as the model's `conditioned_by` names them.
    adapter: the name of that which the model computes with; None: the base alone."""

    id: int
    tokens: tuple[int, ...]
    sampling: SamplingParameters
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    adapter: str | None = None


@dataclass(frozen=True)
class TokenEvent:
    """A sampled token of a sequence, or its end. token: None for an end without one."""

    request: int
    index: int
    token: int | None
    logprobs: LogProbs | None = None
    finish: FinishReason | None = None
    prompt_logprobs: tuple[LogProbs | None, ...] | None = None
    """With the first event, if requested: of each token of the prompt; None for the first, which has none."""
    score: float | None = None
    """With the last event of a beam: its log-probability, divided by its length ** length_penalty."""
    error: str | None = None
    """With FinishReason.ERROR."""


# States: waiting (no blocks, computed = 0), running with computed < len(tokens) - 1 (its prompt, or after a preemption
# also what was generated, is computed in chunks), running with one position to compute (decoding). `tokens` survives a
# preemption; everything in the cache does not.
@dataclass(eq=False)
class RunningSequence:
    """One of the n sequences of a request.

    tokens: prompt and generated ones. computed: number of leading positions that are in the cache.
    """

    request: Request
    index: int
    seed: int
    capacity: int
    tables: list[BlockTable]
    keys: PrefixKeys
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    slot: int | None = None
    conditioning: Conditioning | None = None
    """What the model made of the request's inputs; None while the sequence waits."""
    memory: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    """Layer -> its MemoryState."""
    prompt_logprobs: list[LogProbs | None] = field(default_factory=list)
    """Those of each token of the prompt but the first."""
    cached: int = 0
    """Positions of the prompt that another sequence had computed."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens before which the sequence ends."""
    matcher: Matcher | None = None
    """Where the generated text is in the request's constraint; kept up to date on the ranks that sample."""
    beams: BeamGroup | None = None
    """The beams that this one is among."""
    drafts: tuple[int, ...] = ()
    """Guesses of the next tokens, which the next forward pass verifies."""

    @property
    def priority(self) -> int:
        return self.request.sampling.priority

    @property
    def prompt_length(self) -> int:
        return len(self.request.tokens)

    @property
    def first_logits(self) -> int | None:
        """The first position of the prompt of which logits are requested; None: of none but the last."""
        sampling = self.request.sampling
        return None if sampling.prompt_logprobs is None else max(0, sampling.prompt_logprobs_start - 1)

    @property
    def generated(self) -> Sequence[int]:
        return self.tokens[self.prompt_length :]

    def keep_prompt_logprobs(self, position: int, logprobs: Sequence[LogProbs | None]) -> None:
        """Stores those of the tokens that follow this position and the next ones. After a preemption they are computed
        again."""
        self.prompt_logprobs[position : position + len(logprobs)] = logprobs

    @property
    def num_uncomputed_tokens(self) -> int:
        """Positions that are to be computed before the next token can be sampled; 1 while the sequence decodes."""
        return len(self.tokens) - self.computed


@dataclass(eq=False)
class BeamGroup:
    """The beams of one request, which go on together. One at first, for the prompt."""

    search: BeamSearch
    members: list[RunningSequence] = field(default_factory=list)
    candidates: dict[RunningSequence, list[Candidate]] = field(default_factory=dict)
    """Candidates of the members whose logits are known."""
    error: str | None = None
    """Why the search cannot go on."""

    @property
    def missing(self) -> int:
        """Beams that are still to come."""
        return self.search.sampling.num_beams - len(self.members)

    @property
    def is_ready(self) -> bool:
        return len(self.candidates) == len(self.members)


def append_sampled(sequence: RunningSequence, sampled: Sampled, max_model_len: int) -> TokenEvent:
    """Adds a sampled token to its sequence. max_model_len: positions of a sequence."""
    event = _event_of(sequence, sampled, max_model_len)
    if event.token is None:
        return event
    sequence.tokens.append(event.token)
    return replace(event, finish=FinishReason.STOP) if sampled.is_end else event


FAILED = (SAMPLING_FAILED, DRAFT_FAILED, INPUTS_FAILED, TEXT_FAILED)
"""Errors by a defect, of which the log says more."""


def failed(request: int, index: int, error: str) -> TokenEvent:
    """The end of a sequence that cannot be continued."""
    return TokenEvent(request, index, None, finish=FinishReason.ERROR, error=error)


def _event_of(sequence: RunningSequence, sampled: Sampled, max_model_len: int) -> TokenEvent:
    sampling, done = sequence.request.sampling, len(sequence.tokens) - sequence.prompt_length + 1
    finish: FinishReason | None = None
    token: int | None = sampled.token
    # The prompt was scored; a token was sampled with its last logits, and is dropped.
    if sampling.max_tokens == 0:
        token, finish = None, FinishReason.LENGTH
    elif sampled.token in sequence.stop_ids:
        token, finish = None, FinishReason.STOP
    # The token is reported with the end.
    elif done == sampling.max_tokens or sequence.prompt_length + done >= max_model_len:
        finish = FinishReason.LENGTH
    prompt = None
    if sampling.prompt_logprobs is not None and done == 1:
        prompt = (None, *sequence.prompt_logprobs)
    logprobs = sampled.logprobs if token is not None else None
    return TokenEvent(sequence.request.id, sequence.index, token, logprobs, finish, prompt)


@dataclass(frozen=True)
class EngineStatistics:
    """running, waiting: sequences. preemptions: so far. used_blocks: of the `blocks` of the cache. Tokens so far:
    queried of sequences that began, and cached ones among them; drafted, and accepted ones among them."""

    running: int = 0
    waiting: int = 0
    preemptions: int = 0
    used_blocks: int = 0
    blocks: int = 0
    queried_tokens: int = 0
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
