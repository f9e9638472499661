"""The engine: requests in, tokens out. Continuous batching over a paged cache, in the layout of its model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mt_core.config.schema import InferenceConfig
from mt_core.errors import ConfigError
from mt_core.nn.attention_backends.batch_invariant import KEYS
from mt_core.nn.batch_invariance import batch_invariant
from mt_core.nn.cache import Conditioning
from mt_core.nn.model import as_generator
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.pipeline.stage import Stage
from mt_core.specs import Tokenizer
from mt_infer.cache.batch import CachedBatch, Chunk
from mt_infer.cache.layout import CacheLimits, cache_layout
from mt_infer.cache.manager import CacheManager
from mt_infer.memory import cache_bytes
from mt_infer.requests import FinishReason, LogProbs, Request, RunningSequence, TokenEvent
from mt_infer.runner import ModelRunner
from mt_infer.sampling.noise import new_seed, sequence_seed
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.sampling.sampler import Sampled, log_probabilities, sample
from mt_infer.scheduler import Scheduler


@dataclass(frozen=True)
class PlacedStages:
    """All pipeline stages of a model, in order, and the rank along pp that holds each."""

    stages: tuple[Stage, ...]
    ranks: tuple[int, ...]


class InferenceEngine:
    """Generates with one model. `add` takes requests, `step` runs one forward pass and returns what came of it.

    In a layout of several ranks each has an engine, and all make the same calls in the same order (see
    `mt_infer.lockstep`); tokens are sampled by the ranks of the last stage and sent to the others.

    longest: positions of a sequence, prompt included. Raises ConfigError for a model that does not generate, or a cache
    that does not hold one sequence.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer | None,
        ctx: ParallelContext,
        options: InferenceConfig,
        *,
        longest: int,
        placed: PlacedStages | None = None,
    ) -> None:
        self.model, self.tokenizer, self.ctx, self.options = model, tokenizer, ctx, options
        self.longest = longest
        placed = placed or PlacedStages((), (0,))
        refuse_divided_sequences(ctx)
        refuse_divided_encoder(model, placed, ctx)
        self.runner = ModelRunner(model, ctx, placed.stages, placed.ranks)
        limits = CacheLimits(
            cache_bytes(options, ctx.device),
            options.cache_block_size,
            options.max_requests,
            longest,
            options.max_tokens_per_step,
            unread=KEYS if options.batch_invariant else 0,
        )
        self.manager = CacheManager(
            cache_layout(model),
            limits,
            ctx.device,
            share_prefixes=options.prefix_caching,
        )
        self.scheduler = Scheduler(self.manager)
        self._ids = count()
        self._device = ctx.device

    # -- requests ---------------------------------------------------------------------------------

    def add(
        self,
        tokens: Sequence[int],
        sampling: SamplingParameters | None = None,
        inputs: Mapping[str, Tensor] | None = None,
    ) -> int:
        """The number of the new request. Raises ConfigError for one that the engine cannot serve."""
        sampling = sampling or SamplingParameters()
        if sampling.seed is None:
            sampling = replace(sampling, seed=new_seed())
        request = Request(next(self._ids), tuple(tokens), sampling, inputs or {})
        self.check(request)
        self.add_request(request)
        return request.id

    def add_request(self, request: Request) -> None:
        """A request with a seed and a number of its own, the same on all ranks of the model."""
        assert request.sampling.seed is not None
        conditioning, seed = self._condition(request), request.sampling.seed
        self.scheduler.add(self._sequence(request, index, seed, conditioning) for index in range(request.sampling.n))

    def cancel(self, request: int) -> list[TokenEvent]:
        """Ends a request and frees its memory."""
        cancelled = [sequence for sequence in self.scheduler.sequences() if sequence.request.id == request]
        for sequence in cancelled:
            self.scheduler.remove(sequence)
        return [TokenEvent(request, one.index, None, finish=FinishReason.CANCELLED) for one in cancelled]

    def finish(self, request: int, index: int) -> None:
        """Ends one sequence of a request: its text has come to a stop text."""
        for sequence in self.scheduler.sequences():
            if (sequence.request.id, sequence.index) == (request, index):
                self.scheduler.remove(sequence)
                return

    @property
    def is_idle(self) -> bool:
        return self.scheduler.is_idle

    @torch.inference_mode()
    def step(self, *, fill: bool = False) -> list[TokenEvent]:
        """One forward pass over the sequences that are next. fill: also without any, for the experts of other ranks."""
        chunks = self.scheduler.schedule()
        if not chunks and not fill:
            return []
        training = self.model.training
        self.model.eval()
        try:
            with batch_invariant(self.options.batch_invariant):
                sampled = self._sample(chunks, self.runner.logits(self._batch(chunks)))
        finally:
            self.model.train(training)
        return [event for chunk, found in zip(chunks, sampled, strict=True) for event in self._advance(chunk, found)]

    def weights_changed(self) -> None:
        """After an update of the model's weights: no prefix may be reused. Raises ConfigError while requests run."""
        if not self.is_idle:
            raise ConfigError("weights cannot change while requests run; finish or cancel them first")
        self.manager.forget_prefixes()

    # -- parts of a step --------------------------------------------------------------------------

    def _batch(self, chunks: Sequence[Chunk]) -> CachedBatch:
        return CachedBatch(
            chunks,
            self.manager,
            self._device,
            is_batch_invariant=self.options.batch_invariant,
            multiple=self.ctx.tp.size if self.ctx.sequence_parallel else 1,
        )

    def _sample(self, chunks: Sequence[Chunk], logits: Tensor | None) -> list[_Found]:
        """What each chunk has come to, on every rank of the model."""
        found = [_Found() for _ in chunks] if logits is None else self._from_logits(chunks, logits)
        if self.ctx.pp.size == 1:
            return found
        assert self.ctx.pp.group is not None
        everyone: list[list[_Found] | None] = [found]
        source = dist.get_global_rank(self.ctx.pp.group, self.runner.rank_of_stage[-1])
        dist.broadcast_object_list(everyone, src=source, group=self.ctx.pp.group, device=self._device)
        assert everyone[0] is not None
        return everyone[0]

    def _from_logits(self, chunks: Sequence[Chunk], logits: Tensor) -> list[_Found]:
        rows = list(logits.split([chunk.logits for chunk in chunks]))
        found = [_Found(prompt=self._prompt_logprobs(chunk, own)) for chunk, own in zip(chunks, rows, strict=True)]
        ending = [
            number for number, chunk in enumerate(chunks) if chunk.start + chunk.count == len(chunk.sequence.tokens)
        ]
        if ending:
            last = torch.cat([rows[number][-1:] for number in ending])
            for number, sampled in zip(ending, sample(last, [chunks[n].sequence for n in ending]), strict=True):
                found[number].sampled = sampled
        return found

    def _prompt_logprobs(self, chunk: Chunk, logits: Tensor) -> list[LogProbs | None]:
        """Of the prompt's tokens that follow the chunk's positions."""
        sequence, wanted = chunk.sequence, chunk.sequence.request.sampling.prompt_logprobs
        if wanted is None or chunk.start >= sequence.prompt_length:
            return []
        following = sequence.tokens[chunk.start + 1 : min(chunk.start + chunk.count + 1, sequence.prompt_length)]
        tokens = torch.tensor(following, dtype=torch.int64, device=logits.device)
        # An image token behind the vocabulary has no probability.
        vocab = logits.shape[-1]
        asked = [wanted if token < vocab else None for token in following]
        return log_probabilities(logits[: len(following)], tokens.clamp(max=vocab - 1), asked)

    def _advance(self, chunk: Chunk, found: _Found) -> list[TokenEvent]:
        sequence = chunk.sequence
        if found.prompt:
            # From the chunk's start on: after a preemption the prompt is computed again.
            sequence.prompt_logprobs[chunk.start :] = found.prompt
        self.manager.computed(sequence, chunk.start + chunk.count)
        if found.sampled is None:
            return []
        event = self._event(sequence, found.sampled)
        if event.token is not None:
            sequence.tokens.append(event.token)
        if event.finish is not None:
            self.scheduler.remove(sequence)
        return [event]

    def _event(self, sequence: RunningSequence, sampled: Sampled) -> TokenEvent:
        sampling, done = sequence.request.sampling, len(sequence.generated) + 1
        finish: FinishReason | None = None
        token: int | None = sampled.token
        if sampling.max_tokens == 0:
            token, finish = None, FinishReason.LENGTH
        elif self._stops(sequence, sampled.token):
            token, finish = None, FinishReason.STOP
        elif done == sampling.max_tokens or sequence.prompt_length + done >= self.longest:
            finish = FinishReason.LENGTH
        prompt = None
        if sampling.prompt_logprobs is not None and not sequence.generated:
            prompt = (None, *sequence.prompt_logprobs)
        return TokenEvent(
            sequence.request.id, sequence.index, token, sampled.logprobs if token is not None else None, finish, prompt
        )

    def _stops(self, sequence: RunningSequence, token: int) -> bool:
        sampling = sequence.request.sampling
        if len(sequence.generated) < sampling.min_tokens:
            return False
        eod = None if self.tokenizer is None or sampling.ignore_eod else self.tokenizer.special.eod
        return token == eod or token in sampling.stop_token_ids

    # -- new sequences ----------------------------------------------------------------------------

    def _sequence(self, request: Request, index: int, seed: int, conditioning: Conditioning) -> RunningSequence:
        capacity = min(len(request.tokens) + request.sampling.max_tokens, self.longest)
        return RunningSequence(
            request,
            index,
            sequence_seed(seed, index),
            capacity,
            self.manager.new_tables(),
            self.manager.new_keys(_content(request.inputs)),
            list(request.tokens),
            conditioning=conditioning,
        )

    @torch.inference_mode()
    def _condition(self, request: Request) -> Conditioning:
        inputs = {name: tensor.to(self._device) for name, tensor in request.inputs.items()}
        with batch_invariant(self.options.batch_invariant):
            return as_generator(self.model).condition(inputs) if inputs else {}

    def check(self, request: Request) -> None:
        """Raises ConfigError for a request that the engine cannot serve."""
        known = as_generator(self.model).conditioned_by
        unknown = [name for name in request.inputs if name not in known]
        if unknown:
            raise ConfigError(
                f"the model takes no {' or '.join(unknown)} beside tokens; "
                f"it takes {' and '.join(known) if known else 'tokens only'}"
            )
        as_generator(self.model).check_request(torch.tensor(request.tokens), request.inputs)
        if not request.tokens:
            raise ConfigError("the prompt is empty, and the tokenizer has no id that starts a document")
        asked = len(request.tokens) + (1 if request.sampling.max_tokens else 0)
        if asked > self.longest:
            raise ConfigError(
                f"the prompt has {len(request.tokens)} tokens, and sequences have at most {self.longest} with what is "
                "generated (inference.max_sequence_length, the model's positions); shorten the prompt"
            )


def refuse_divided_sequences(ctx: ParallelContext) -> None:
    if ctx.cp.size > 1:
        raise ConfigError(
            f"parallel.context_parallel_size={ctx.cp.size} divides sequences, and the cache keeps whole ones; set it "
            "to 1 to generate"
        )


def refuse_divided_encoder(model: nn.Module, placed: PlacedStages, ctx: ParallelContext) -> None:
    divided, decoded = sum(len(stage.layers) for stage in placed.stages), as_generator(model).decoded_layers
    if placed.stages and divided != decoded:
        raise ConfigError(
            f"parallel.pipeline_model_parallel_size={ctx.pp.size} divides {divided} layers, of which {decoded} are the "
            "decoder's, and a request's encoder runs on one rank; set it to 1 to generate"
        )


@dataclass
class _Found:
    """What a forward pass gave for a chunk."""

    sampled: Sampled | None = None
    prompt: list[LogProbs | None] = field(default_factory=list)


def _content(inputs: Mapping[str, Tensor]) -> bytes:
    """A hash of the tensors that a sequence is conditioned by."""
    digest = blake2b(digest_size=16)
    for name, tensor in sorted(inputs.items()):
        digest.update(f"{name}{list(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.digest() if inputs else b""
