"""The engine: requests in, tokens out. Continuous batching over a paged cache, in the layout of its model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import count

import torch
from torch import Tensor, nn

from mt_core.config.schema import InferenceConfig
from mt_core.errors import ConfigError
from mt_core.nn.attention_backends.batch_invariant import KEYS
from mt_core.nn.batch_invariance import batch_invariant
from mt_core.nn.cache import Conditioning
from mt_core.nn.model import as_generator
from mt_core.parallel.context import ParallelContext
from mt_core.specs import Tokenizer
from mt_core.train.cuda_graphs.capture import CudaRecorder
from mt_infer.beams import advance_beams, beam_candidates
from mt_infer.cache.agreement import agree
from mt_infer.cache.batch import Chunk
from mt_infer.cache.layout import CacheLimits, cache_layout
from mt_infer.cache.manager import CacheManager
from mt_infer.decoding.graphs import DecodeGraphs
from mt_infer.decoding.objections import uses_graphs
from mt_infer.detokenizer import Detokenizer
from mt_infer.memory import cache_bytes
from mt_infer.requests import BeamGroup, FinishReason, LogProbs, Request, RunningSequence, TokenEvent
from mt_infer.runner import ModelRunner, PlacedStages
from mt_infer.sampling.beam_search import BeamSearch, Candidate
from mt_infer.sampling.constraints import Constraints
from mt_infer.sampling.noise import new_seed, sequence_seed
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.sampling.sampler import Sampled, log_probabilities
from mt_infer.scheduler import Scheduler
from mt_infer.speculation.building import DraftModel, build_drafter
from mt_infer.speculation.verification import SpeculationStatistics, verify
from mt_infer.statistics import EngineStatistics


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
        draft_model: DraftModel | None = None,
    ) -> None:
        self.model, self.tokenizer, self.ctx, self.options = model, tokenizer, ctx, options
        self.longest = longest
        refuse_context_parallel(ctx)
        refuse_invariant_quantization(options)
        self.runner = ModelRunner(model, ctx, placed)
        own_limits = CacheLimits(
            cache_bytes(options, ctx.device),
            options.cache_block_size,
            options.max_requests,
            longest,
            options.max_tokens_per_step,
            unread=KEYS if options.batch_invariant else 0,
        )
        layout, limits = agree(cache_layout(model, options.cache_dtype), own_limits, ctx.axis("model"))
        self.manager = CacheManager(layout, limits, ctx.device, share_prefixes=options.prefix_caching)
        self.scheduler = Scheduler(self.manager)
        self.constraints = Constraints(tokenizer)
        self.drafter = build_drafter(options, self.manager, self.runner, draft_model)
        self.graphs: DecodeGraphs | None = None
        if uses_graphs(model, options, ctx):
            self.graphs = DecodeGraphs(self.runner, self.manager, CudaRecorder())
        self.speculation = SpeculationStatistics()
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
        count = 1 if request.sampling.num_beams > 1 else request.sampling.sequences
        self.scheduler.add([self._sequence(request, index, seed, conditioning) for index in range(count)])

    def cancel(self, request: int) -> list[TokenEvent]:
        """Ends a request and frees its memory."""
        cancelled = [sequence for sequence in self.scheduler.sequences() if sequence.request.id == request]
        for sequence in cancelled:
            self.scheduler.remove(sequence)
        indices = dict.fromkeys(one.index for one in cancelled)
        return [TokenEvent(request, index, None, finish=FinishReason.CANCELLED) for index in indices]

    def finish(self, request: int, index: int) -> None:
        """Ends one sequence of a request: its text has come to a stop text."""
        for sequence in self.scheduler.sequences():
            if (sequence.request.id, sequence.index) == (request, index):
                self.scheduler.remove(sequence)
                return

    @property
    def is_idle(self) -> bool:
        return self.scheduler.is_idle

    @property
    def statistics(self) -> EngineStatistics:
        return EngineStatistics(
            len(self.scheduler.running),
            len(self.scheduler.waiting),
            self.scheduler.preemptions,
            self.manager.used_blocks,
            sum(pool.count for pool in self.manager.pools),
        )

    @torch.inference_mode()
    def step(self, *, fill: bool = False) -> list[TokenEvent]:
        """One forward pass over the sequences that are next. fill: also without any, for the experts of other ranks."""
        with self._evaluating():
            if self.drafter is not None:
                self.drafter.propose(self.scheduler.running)
            chunks = self.scheduler.schedule()
            if not chunks and not fill:
                return []
            snapshots = [self.manager.snapshot(chunk.sequence) if chunk.drafts else None for chunk in chunks]
            found = self._sample(chunks)
        return [*self._advance_all(chunks, found, snapshots), *self._advance_beams(chunks)]

    def weights_changed(self) -> None:
        """After an update of the model's weights: no prefix may be reused. Raises ConfigError while requests run."""
        if not self.is_idle:
            raise ConfigError("weights cannot change while requests run; finish or cancel them first")
        self.manager.forget_prefixes()
        if self.graphs is not None:
            self.graphs.weights_changed()

    # -- parts of a step --------------------------------------------------------------------------

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """The model may be one that is being trained: without dropout, and in its mode again afterwards."""
        with evaluating(self.model), batch_invariant(self.options.batch_invariant):
            yield

    def _sample(self, chunks: Sequence[Chunk]) -> list[_Found]:
        """What each chunk has come to, on every rank of the model."""
        if self.graphs is not None and self.graphs.serves(chunks):
            return self._from_logits(chunks, self.graphs.logits(chunks))
        batch = self.runner.batch(chunks, self.manager, is_batch_invariant=self.options.batch_invariant)
        logits = self.runner.logits(batch)
        found = [_Found() for _ in chunks] if logits is None else self._from_logits(chunks, logits)
        if self.drafter is not None and logits is not None:
            drafts = self.drafter.continued(batch, [one.sampled for one in found])
            for one, guesses in zip(found, drafts, strict=True):
                one.drafts = guesses
        return self.runner.from_last_stage(found)

    def _from_logits(self, chunks: Sequence[Chunk], logits: Tensor) -> list[_Found]:
        rows = logits.split([chunk.logits for chunk in chunks])
        found = [_Found(prompt=self._prompt_logprobs(chunk, own)) for chunk, own in zip(chunks, rows, strict=True)]
        ending = [number for number, chunk in enumerate(chunks) if chunk.is_last]
        beams = [number for number in ending if chunks[number].sequence.beams is not None]
        if beams:
            last = torch.cat([rows[number][-1:] for number in beams])
            candidates = beam_candidates(last, [chunks[number].sequence for number in beams])
            for number, own in zip(beams, candidates, strict=True):
                found[number].candidates = own
        others = [number for number in ending if chunks[number].sequence.beams is None]
        if others:
            last = torch.cat([rows[number][-1 - len(chunks[number].drafts) :] for number in others])
            verified = verify(last, [chunks[number] for number in others], self._shares)
            for number, sampled in zip(others, verified, strict=True):
                found[number].sampled = sampled
        return found

    @property
    def _shares(self) -> Sequence[int]:
        """Parts of the vocabulary that training's loss sums by, where its bits are wanted."""
        return self.runner.vocab_shares if self.options.batch_invariant else ()

    def _prompt_logprobs(self, chunk: Chunk, logits: Tensor) -> list[LogProbs | None]:
        """Of the prompt's tokens that follow the positions of the chunk's logits."""
        sequence, wanted = chunk.sequence, chunk.sequence.request.sampling.prompt_logprobs
        if wanted is None or chunk.start >= sequence.prompt_length:
            return []
        following = sequence.tokens[chunk.first_logits + 1 : min(chunk.end + 1, sequence.prompt_length)]
        tokens = torch.tensor(following, dtype=torch.int64, device=logits.device)
        # An image token behind the vocabulary has no probability.
        vocab = logits.shape[-1]
        asked = [wanted if token < vocab else None for token in following]
        return log_probabilities(logits[: len(following)], tokens.clamp(max=vocab - 1), asked, self._shares)

    def _advance_all(
        self, chunks: Sequence[Chunk], found: Sequence[_Found], snapshots: Sequence[list[Tensor] | None]
    ) -> list[TokenEvent]:
        events = []
        for chunk, own, snapshot in zip(chunks, found, snapshots, strict=True):
            if chunk.drafts:
                self.speculation.count(len(chunk.drafts), len(own.sampled) - 1)
            events += self._advance(chunk, own, snapshot)
        return events

    def _advance(self, chunk: Chunk, found: _Found, snapshot: list[Tensor] | None) -> list[TokenEvent]:
        sequence, accepted = chunk.sequence, len(found.sampled) - 1
        if found.prompt:
            sequence.keep_prompt_logprobs(chunk.first_logits, found.prompt)
        if snapshot is None or accepted == len(chunk.drafts):
            self.manager.computed(sequence, chunk.end)
        if sequence.beams is not None and found.candidates:
            sequence.beams.candidates[sequence] = found.candidates
        events = []
        for sampled in found.sampled:
            events.append(self._event(sequence, sampled))
            if events[-1].finish is not None:
                self.scheduler.remove(sequence)
                return events
        if snapshot is not None and accepted < len(chunk.drafts):
            # Recurrent states have drafts in them: what was accepted is computed again.
            self.manager.roll_back(sequence, chunk.start, snapshot)
        elif accepted > 0:
            self.manager.computed(sequence, chunk.end + accepted)
        sequence.drafts = found.drafts
        return events

    def _advance_beams(self, chunks: Sequence[Chunk]) -> list[TokenEvent]:
        groups = dict.fromkeys(chunk.sequence.beams for chunk in chunks)
        ready = [beams for beams in groups if beams is not None and beams.is_ready]
        return [event for beams in ready for event in advance_beams(beams, self.scheduler)]

    def _event(self, sequence: RunningSequence, sampled: Sampled) -> TokenEvent:
        """Adds a sampled token to its sequence."""
        event = self._event_of(sequence, sampled)
        if event.token is None:
            return event
        sequence.tokens.append(event.token)
        if sequence.matcher is not None:
            sequence.matcher.advance(event.token)
            if sequence.matcher.is_complete:
                return replace(event, finish=FinishReason.STOP)
        return event

    def _event_of(self, sequence: RunningSequence, sampled: Sampled) -> TokenEvent:
        sampling, done = sequence.request.sampling, len(sequence.tokens) - sequence.prompt_length + 1
        finish: FinishReason | None = None
        token: int | None = sampled.token
        if sampling.max_tokens == 0:
            token, finish = None, FinishReason.LENGTH
        elif sampled.token in sequence.stop_ids:
            token, finish = None, FinishReason.STOP
        elif done == sampling.max_tokens or sequence.prompt_length + done >= self.longest:
            finish = FinishReason.LENGTH
        prompt = None
        if sampling.prompt_logprobs is not None and done == 1:
            prompt = (None, *sequence.prompt_logprobs)
        return TokenEvent(
            sequence.request.id, sequence.index, token, sampled.logprobs if token is not None else None, finish, prompt
        )

    def _stop_ids(self, sampling: SamplingParameters) -> frozenset[int]:
        eod = None if self.tokenizer is None or sampling.ignore_eod else self.tokenizer.special.eod
        return frozenset(sampling.stop_token_ids) | (frozenset() if eod is None else {eod})

    # -- new sequences ----------------------------------------------------------------------------

    def _sequence(self, request: Request, index: int, seed: int, conditioning: Conditioning) -> RunningSequence:
        capacity = min(len(request.tokens) + request.sampling.max_tokens, self.longest)
        sequence = RunningSequence(
            request,
            index,
            sequence_seed(seed, index),
            capacity,
            self.manager.new_tables(),
            self.manager.new_keys(_content(request.inputs)),
            list(request.tokens),
            prompt_logprobs=[None] * (len(request.tokens) - 1),
            conditioning=conditioning,
            stop_ids=self._stop_ids(request.sampling),
            matcher=self.constraints.matcher(request.sampling),
        )
        if request.sampling.num_beams > 1:
            search = BeamSearch(
                request.sampling, sequence.stop_ids, capacity - len(request.tokens), self._stop_text(request.sampling)
            )
            sequence.beams = BeamGroup(search, [sequence])
        return sequence

    def _stop_text(self, sampling: SamplingParameters) -> Detokenizer | None:
        """What finds the stop texts of beams. Those of other sequences are found where their tokens become text."""
        if not sampling.stop:
            return None
        if self.tokenizer is None:
            raise ConfigError("stop: beams that end with a text need a tokenizer; use stop_token_ids")
        return Detokenizer(self.tokenizer, sampling.stop)

    @torch.inference_mode()
    def _condition(self, request: Request) -> Conditioning:
        inputs = {name: tensor.to(self._device) for name, tensor in request.inputs.items()}
        with self._evaluating():
            return self.runner.condition(inputs) if inputs else {}

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
        self._check_beams(request)
        self.constraints.matcher(request.sampling)
        # A token that nothing follows takes no position.
        asked = len(request.tokens) + (1 if request.sampling.max_tokens > 1 else 0)
        if asked > self.longest:
            raise ConfigError(
                f"the prompt has {len(request.tokens)} tokens, and sequences have at most {self.longest} with what is "
                "generated (inference.max_sequence_length, the model's positions); shorten the prompt"
            )

    def _check_beams(self, request: Request) -> None:
        """That all beams fit into the cache at once, in the worst case with nothing in common."""
        beams, limits = request.sampling.num_beams, self.manager.limits
        if beams == 1:
            return
        self._stop_text(request.sampling)
        if beams > limits.max_requests:
            raise ConfigError(
                f"num_beams={beams} is above inference.max_requests={limits.max_requests}, the sequences that are "
                "computed at a time; raise that, or search with fewer beams"
            )
        length = min(len(request.tokens) + request.sampling.max_tokens, self.longest)
        if not self.manager.holds(beams, length):
            raise ConfigError(
                f"the cache does not hold num_beams={beams} sequences of {length} positions; raise "
                "inference.cache_memory_gb, or lower num_beams or max_tokens"
            )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """In evaluation mode, and then as it was. A model that is in it already is left alone: there are many modules."""
    if not model.training:
        yield
        return
    model.eval()
    try:
        yield
    finally:
        model.train()


def refuse_context_parallel(ctx: ParallelContext) -> None:
    if ctx.cp.size > 1:
        raise ConfigError(
            f"parallel.context_parallel_size={ctx.cp.size} divides sequences, and the cache keeps whole ones; set it "
            "to 1 to generate"
        )


def refuse_invariant_quantization(options: InferenceConfig) -> None:
    if options.batch_invariant and (options.quantize_weights is not None or options.cache_dtype != "auto"):
        raise ConfigError(
            "inference.batch_invariant=true gives the log-probabilities of training, which quantized numbers cannot; "
            "leave inference.quantize_weights and inference.cache_dtype out"
        )


@dataclass
class _Found:
    """What a forward pass gave for a chunk."""

    sampled: list[Sampled] = field(default_factory=list)
    """The next token, and those behind it whose drafts were right."""
    candidates: list[Candidate] = field(default_factory=list)
    """Of a beam."""
    drafts: tuple[int, ...] = ()
    """Guesses of the tokens to come."""
    prompt: list[LogProbs | None] = field(default_factory=list)


def _content(inputs: Mapping[str, Tensor]) -> bytes:
    """A hash of the tensors that a sequence is conditioned by."""
    digest = blake2b(digest_size=16)
    for name, tensor in sorted(inputs.items()):
        digest.update(f"{name}{list(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.digest() if inputs else b""
