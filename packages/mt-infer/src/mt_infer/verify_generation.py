"""Whether an engine's tokens and log-probabilities depend on how they are computed, and are those of training.

The same requests are served in several ways: one after another, together, in small chunks, with prefixes that others
have computed, with too little memory. Last, training's forward pass and loss score the tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from mt_core.config.schema import Config
from mt_core.errors import CheckpointError
from mt_core.nn.loss import build_cross_entropy
from mt_core.optim.master_weights import Fp32Weights
from mt_core.train.pipelining import build_forward_backward
from mt_core.train.step.batches import FIRST_SAMPLE
from mt_core.train.step.forward_backward import Batch
from mt_core.train.trained_model import TrainedModel
from mt_infer.cache.layout import CacheLimits, agree, cache_layout
from mt_infer.config import InferenceConfig
from mt_infer.engine import InferenceEngine
from mt_infer.lockstep import LockstepEngine
from mt_infer.requests import TokenEvent
from mt_infer.runner import PlacedStages, from_stage_rank
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.speculation.building import DraftModel

TOLERANCE = 1e-3
"""Largest difference of log-probabilities in fp32 without numerics.batch_invariant. In 16 bits: 0.25."""
TOLERANCE_16_BITS = 0.25


@dataclass(frozen=True)
class Outcome:
    """Result of a request: generated tokens, and the log-probability of each token of prompt and text but the first."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Difference:
    """Between a way and the first one. place: position in the sequence of the first that differs; None: none does.

    off: largest difference of log-probabilities, where tokens are the same.
    """

    way: str
    request: int | None = None
    place: int | None = None
    off: float = 0.0
    tokens_differ: bool = False

    def is_allowed(self, tolerance: float) -> bool:
        """tolerance: of log-probabilities; with 0 nothing differs."""
        return self.place is None if tolerance == 0.0 else self.off <= tolerance


Way = tuple[str, InferenceConfig, bool]
"""Its name, the engine's options, and whether requests come one by one."""


def ways(options: InferenceConfig, memory_gb: float) -> list[Way]:
    """memory_gb: holds one sequence, and not all."""
    # The reference has no sharing, no speculation, and one sequence in a batch.
    alone = options.model_copy(update={"prefix_caching": False, "speculative_method": None})
    return [
        ("one by one", alone, True),
        ("together", alone, False),
        # Blocks and tiles are no multiples of 7, so that chunks end within them.
        ("in chunks of 7", alone.model_copy(update={"max_tokens_per_step": 7}), False),
        ("with prefixes of others", options.model_copy(update={"prefix_caching": True}), False),
        ("with preemption", alone.model_copy(update={"cache_memory_gb": memory_gb}), False),
    ]


def compare_ways(
    trained: TrainedModel,
    placed: PlacedStages | None,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    seed: int,
    draft_model: DraftModel | None = None,
) -> list[Difference]:
    """Each way against the first, and training against it. Collective: every rank calls it; rank 0 has the results.

    trained: with the weights that are served (mt_infer.text.prepare_weights). draft_model: of the way that speculates.
    Raises CheckpointError for log-probabilities that are not finite.
    """
    sampling = SamplingParameters(temperature=1.0, max_tokens=max_tokens, seed=seed, logprobs=0, prompt_logprobs=0)
    max_model_len = max(map(len, prompts)) + max_tokens
    differences: list[Difference] = []
    first: list[Outcome] = []
    # An engine for each way: its options decide the cache and the batches. The model and its weights are the same.
    for name, options, one_by_one in ways(
        trained.config.section(InferenceConfig), _memory_of_one(trained, max_model_len)
    ):
        engine = InferenceEngine(
            trained.model,
            None,
            trained.ctx,
            options,
            longest=max_model_len,
            placed=placed,
            draft_model=draft_model,
            batch_invariant=trained.config.numerics.batch_invariant,
        )
        outcomes = _serve(LockstepEngine(engine), prompts, sampling, one_by_one=one_by_one)
        require_finite(name, outcomes)
        first = first or outcomes
        differences.append(compare(name, outcomes, first, prompts))
    # Every rank takes part in the forward pass, and rank 0 alone has the tokens.
    sampled = _shared(first)
    name, scored = "training's forward pass", _trained(trained, placed, prompts, sampled)
    require_finite(name, scored)
    differences.append(compare(name, scored, sampled, prompts))
    return differences[1:]


def compare(
    way: str, outcomes: Sequence[Outcome], expected: Sequence[Outcome], prompts: Sequence[Sequence[int]]
) -> Difference:
    result = Difference(way)
    for number, (outcome, other) in enumerate(zip(outcomes, expected, strict=True)):
        # Behind the first token that differs, the contexts differ, and probabilities cannot be compared.
        same = _common(outcome.tokens, other.tokens)
        # Log-probabilities start with the prompt's second token.
        count = len(prompts[number]) - 1 + same
        pairs = list(zip(outcome.logprobs[:count], other.logprobs[:count], strict=True))
        off = max((abs(mine - theirs) for mine, theirs in pairs), default=0.0)
        differs = outcome.tokens != other.tokens
        # Exactly: batch invariance promises the same bits.
        place = next((place for place, (mine, theirs) in enumerate(pairs, 1) if mine != theirs), None)
        if place is None and differs:
            place = count + 1
        if result.place is None and place is not None:
            result = replace(result, request=number, place=place)
        result = replace(result, off=max(result.off, off), tokens_differ=result.tokens_differ or differs)
    return result


def require_finite(way: str, outcomes: Sequence[Outcome]) -> None:
    """Raises CheckpointError for a log-probability that is nan or infinite: it equals nothing."""
    for request, outcome in enumerate(outcomes):
        for place, value in enumerate(outcome.logprobs, start=1):
            if not math.isfinite(value):
                raise CheckpointError(
                    f"{way}: the log-probability at position {place} of request {request} is {value}; the model's "
                    "weights are damaged or have diverged, and nothing can be compared; take another checkpoint"
                )


def _serve(
    engine: LockstepEngine, prompts: Sequence[Sequence[int]], sampling: SamplingParameters, *, one_by_one: bool
) -> list[Outcome]:
    """On rank 0; the others take part and have nothing."""
    if dist.is_initialized() and dist.get_rank():
        # Until rank 0 closes this way's engine; then the next way begins on all ranks.
        engine.follow()
        return []
    batches = [[prompt] for prompt in prompts] if one_by_one else [prompts]
    try:
        return [outcome for batch in batches for outcome in _run(engine, batch, sampling)]
    finally:
        engine.close()


def _run(engine: LockstepEngine, prompts: Sequence[Sequence[int]], sampling: SamplingParameters) -> Iterator[Outcome]:
    numbers = [engine.add(prompt, sampling) for prompt in prompts]
    events: dict[int, list[TokenEvent]] = {number: [] for number in numbers}
    while not engine.is_idle:
        for event in engine.step():
            events[event.request].append(event)
    for number in numbers:
        if (error := events[number][-1].error) is not None:
            raise CheckpointError(error)
        prompt = next(event.prompt_logprobs for event in events[number] if event.prompt_logprobs is not None)
        logprobs = [event.logprobs.token for event in events[number] if event.logprobs is not None]
        tokens = tuple(event.token for event in events[number] if event.token is not None)
        yield Outcome(tokens, (*(entry.token for entry in prompt if entry is not None), *logprobs))


def _trained(
    trained: TrainedModel, placed: PlacedStages | None, prompts: Sequence[Sequence[int]], outcomes: Sequence[Outcome]
) -> list[Outcome]:
    """What the trainer's forward pass, through its pipeline stages, and its loss give for the same tokens."""
    config, ctx, model = trained.config, trained.ctx, trained.model
    loss = build_cross_entropy(config, ctx)
    passes = build_forward_backward(config, ctx, model, Fp32Weights(model), trained.stages, loss, None, None)
    last = 0 if placed is None else placed.ranks[-1]
    computed = []
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        tokens = torch.tensor([[*prompt, *outcome.tokens]], device=ctx.device)
        losses: list[list[float]] = []

        def keep(of_tokens: Tensor, batch: Batch, losses: list[list[float]] = losses) -> Tensor:
            losses.append(of_tokens[0].tolist())
            return of_tokens.sum()

        batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], FIRST_SAMPLE: torch.tensor(0)}
        passes.forward([batch], keep)
        # [S - 1]: the negative log-probability of each token but the first. Ranks before the last stage have none.
        (negative,) = from_stage_rank(losses, last, ctx)
        computed.append(Outcome(outcome.tokens, tuple(-value for value in negative)))
    return computed


def _shared(outcomes: list[Outcome]) -> list[Outcome]:
    """Rank 0's, on every rank."""
    if not dist.is_initialized():
        return outcomes
    box = [outcomes]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _common(tokens: Sequence[int], other: Sequence[int]) -> int:
    """Number of leading tokens that are the same."""
    return next(
        (n for n, (a, b) in enumerate(zip(tokens, other, strict=False)) if a != b), min(len(tokens), len(other))
    )


def _memory_of_one(trained: TrainedModel, max_model_len: int) -> float:
    """GiB of a cache that holds one sequence of this length and little more."""
    options = trained.config.section(InferenceConfig)
    # Memory 0: only sizes of a position are read from the agreed layout, which are those of the rank that keeps most.
    limits = CacheLimits(0, options.cache_block_size, options.max_requests, max_model_len, options.max_tokens_per_step)
    layout, _ = agree(cache_layout(trained.model), limits, trained.ctx.axis("model"))
    # Two blocks more than one sequence: a second one can be admitted, and is preempted as the first grows.
    positions = max_model_len + 2 * options.cache_block_size
    size = sum(group.bytes_per_position for group in layout.groups) * positions
    return (size + (options.max_requests + 1) * layout.bytes_per_sequence) / 2**30


def tolerance_of(config: Config) -> float:
    if config.numerics.batch_invariant:
        return 0.0
    return TOLERANCE if config.precision.dtype == "fp32" else TOLERANCE_16_BITS
